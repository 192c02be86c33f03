"""The typed form of a policy: frozen, complete, and marked with where each part was written.

1. A `Policy` exists only when its document had no problem; nothing in it is unresolved or defaulted later.
2. Classifications are levels (0 = lowest); durations and instants are whole microseconds; shares are exact fractions.
3. Marks never take part in comparison, in the digest or in a decision.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum, StrEnum
from fractions import Fraction
from typing import Final

from kvcustody.policies.document.problems import SourceMark
from kvcustody.tenants import issuers_of

SCHEMA = "kvcustody/policy@1"
EVERY_TENANT = "*"
DEFAULT_TENANT = "default"
NAME_PATTERN: Final = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""What rules, labels and classifications are called, and placement groups wherever they are named."""
NO_MARK = SourceMark(0, 0)

Labels = tuple[tuple[str, str], ...]
"""Domain labels as sorted (name, value) pairs."""


class Profile(StrEnum):
    """How strictly tenants are separated."""

    SHARED = "shared"
    STRICT = "strict"
    DEDICATED = "dedicated"

    @property
    def isolating(self) -> bool:
        """True when nothing may cross a tenant boundary, by grant, segment, group or borrowing."""
        return self is not Profile.SHARED


class Scope(IntEnum):
    """Who may reuse, narrow to wide."""

    SESSION = 0
    SUBJECT = 1
    TENANT = 2
    GROUP = 3
    PUBLIC = 4


class Affinity(StrEnum):
    """The requests that a router places together: those of one private scope, or all requests of a tenant."""

    PRIVATE = "private"
    SEGMENT = "segment"


class Action(IntEnum):
    """The action that a decision is about."""

    ADMIT = 0
    REUSE = 1
    PUBLISH = 2
    RETAIN = 3
    OFFLOAD = 4
    EXPORT = 5
    ADMINISTER = 6


class Via(IntEnum):
    """The way by which a reader reaches a domain."""

    OWN = 0
    GRANT = 1
    SEGMENT = 2


class RuleEffect(StrEnum):
    """What a rule does when it matches."""

    PERMIT = "permit"
    FORBID = "forbid"


class Relation(StrEnum):
    """The relations to the owner by which a rule may describe its reader without naming one."""

    OWNER = "owner"
    SAME_GROUP = "same-group"


class Tier(StrEnum):
    """Where a block may be offloaded to."""

    HOST = "host"
    NVME = "nvme"
    REMOTE = "remote"

    @property
    def must_encrypt(self) -> bool:
        """Whether copies in this tier outlive the process or belong to somebody else, so that only a key's end
        ends them.
        """
        return self is not Tier.HOST


class OnOutage(IntEnum):
    """What happens to an act whose event cannot reach the ledger; higher is stricter (classes C, B, A)."""

    AGGREGATE = 0
    SPILL = 1
    DENY = 2


class EvictionKind(StrEnum):
    """Which CACHED block leaves first under pressure."""

    LRU = "lru"
    FIFO = "fifo"
    LFU = "lfu"
    SLRU = "slru"
    PRIORITY = "priority"
    COST = "cost"
    VALUE = "value"


class EvictionSignal(StrEnum):
    """The signals that eviction by value weighs, besides the kinds of content."""

    NEXT_TURN = "next-turn"
    SCOPE = "scope"
    FRESHNESS = "freshness"
    PRESSURE = "pressure"
    REUSE = "reuse"
    POSITION = "position"


class LearnedFrom(StrEnum):
    """Whose pauses predict when a tenant's blocks are needed again."""

    TENANT = "tenant"
    POOL = "pool"


class OnWorkerDeath(IntEnum):
    """What happens to a dead worker's copies and to the requests that it served; higher is stricter.

    RESTORE: an heir takes over its sealed copies. RECOMPUTE: they end, and their blocks are computed again. FAIL: they
    end, and no door lets a request be presented again.
    """

    RESTORE = 0
    RECOMPUTE = 1
    FAIL = 2


UNSAID_DEATH: Final = OnWorkerDeath.RESTORE
UNSAID_RECEIPTS: Final = Fraction(1, 10)  # of requests have a route receipt where a policy does not say


class OnRunning(StrEnum):
    """What an erasure does to requests that are running when it arrives."""

    ABORT = "abort"
    FINISH = "finish"


class Effect(Enum):
    """The outcome of a decision (a plain Enum: neither member is falsy)."""

    PERMIT = "permit"
    DENY = "deny"


@dataclass(frozen=True, slots=True)
class Retention:
    """How long blocks may exist: since last use, since birth, and as part of a running request."""

    idle_us: int
    absolute_us: int
    active_max_us: int
    mark: SourceMark = field(default=NO_MARK, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ScrubPolicy:
    """How soon memory is overwritten, and the share of it that is read back (1 = all)."""

    within_us: int
    verify: Fraction
    mark: SourceMark = field(default=NO_MARK, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class IntegrityPolicy:
    """The share of reused blocks that is compared with its checksum first (0 = none, 1 = all)."""

    verify: Fraction = Fraction(0)
    mark: SourceMark = field(default=NO_MARK, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class TierLimit:
    """How long a copy may stay in a tier, and how long after its due time its bytes may still exist."""

    tier: Tier
    absolute_us: int
    within_us: int


@dataclass(frozen=True, slots=True)
class Offload:
    """The tiers that a block may go to, with a limit for each; an empty set means never.

    `match`: the labels in which a remote store has to agree with a domain that has them.
    """

    tiers: tuple[Tier, ...]
    encrypt: bool
    limits: tuple[TierLimit, ...] = ()
    match: tuple[str, ...] = ()
    mark: SourceMark = field(default=NO_MARK, compare=False, repr=False)

    def limit(self, tier: Tier) -> TierLimit | None:
        """Return the limit of one tier, or None if a block may not go there."""
        return next((limit for limit in self.limits if limit.tier is tier), None)


@dataclass(frozen=True, slots=True)
class OutagePolicy:
    """What happens to decisions, lifecycle events and own-scope hits while the ledger is away."""

    decisions: OnOutage
    lifecycle: OnOutage
    own_hits: OnOutage
    mark: SourceMark = field(default=NO_MARK, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ErasureDuty:
    """The deadline of an erasure. With `finish`, running requests may continue until then, but nobody can attach to
    them.
    """

    within_us: int = 3_600_000_000
    running: OnRunning = OnRunning.ABORT
    mark: SourceMark = field(default=NO_MARK, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class TokenRange:
    """A priority for a span of a prompt; `until` None means to its end, `for_us` None means until it ends."""

    start: int
    until: int | None
    priority: int
    for_us: int | None
    mark: SourceMark = field(default=NO_MARK, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ContentKind:
    """A kind of content that the policy declares, and the priority of blocks that hold it."""

    id: str
    priority: int
    mark: SourceMark = field(default=NO_MARK, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Eviction:
    """The eviction policy and its parameters (None if they do not apply or are not given)."""

    kind: EvictionKind
    priority: int | None = None
    ranges: tuple[TokenRange, ...] = ()
    protected: Fraction | None = None
    hits: int | None = None
    kinds: tuple[ContentKind, ...] = ()
    signals: tuple[EvictionSignal, ...] = ()
    learned: LearnedFrom | None = None
    mark: SourceMark = field(default=NO_MARK, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ClassifyRule:
    """A tenant's default level (no route), or the level to which a route raises requests; and labels for the
    domains.
    """

    tenant: str
    route: str | None
    level: int | None
    labels: Labels
    mark: SourceMark = field(default=NO_MARK, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """The policy's entry for one tenant, or for every unlisted one (`id` is then `default`)."""

    id: str
    group: str | None
    guaranteed: Fraction
    cap: Fraction
    borrow: bool
    scope: Scope
    affinity: Affinity = Affinity.PRIVATE
    labels: Labels = ()
    residencies: int | None = None
    tenants_max: int | None = None
    retention: tuple[tuple[int, Retention], ...] = ()
    scrub: tuple[tuple[int, ScrubPolicy], ...] = ()
    offload: tuple[tuple[int, Offload], ...] = ()
    integrity: tuple[tuple[int, IntegrityPolicy], ...] = ()
    route_receipts: tuple[tuple[int, Fraction], ...] = ()  # levels with another share than the policy's
    mark: SourceMark = field(default=NO_MARK, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class TenantGroup:
    """A family of tenants; with `at_most`, each member may read each other's domains up to that level."""

    id: str
    at_most: int | None
    from_us: int | None
    until_us: int | None
    reason: str
    crosses: tuple[str, ...] = ()
    mark: SourceMark = field(default=NO_MARK, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class SegmentRule:
    """A declared prompt prefix that is wider than private; `tenants` None means every admitted tenant."""

    id: str
    owner: str
    tenants: tuple[str, ...] | None
    digest: str
    tokens: int
    level: int
    model: str | None
    expires_us: int | None
    content: str | None = None  # the kind of content that it is
    crosses: tuple[str, ...] = ()  # labels that may differ between its owner and a reader
    mark: SourceMark = field(default=NO_MARK, compare=False, repr=False)

    @property
    def scope(self) -> Scope:
        """The scope of the segment's domain: its owner, the listed tenants, or all."""
        if self.tenants is None:
            return Scope.PUBLIC
        return Scope.TENANT if self.tenants == (self.owner,) else Scope.GROUP


@dataclass(frozen=True, slots=True)
class Grant:
    """One tenant's permission to read another's tenant-level and wider domains up to a level; never transitive."""

    id: str
    owner: str
    reader: str
    at_most: int
    from_us: int | None
    until_us: int | None
    reason: str
    group: str | None = None
    crosses: tuple[str, ...] = ()  # labels that may differ between its owner and its reader
    mark: SourceMark = field(default=NO_MARK, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Rule:
    """A permit or a forbid; a None term matches everything, and all terms must match."""

    id: str
    effect: RuleEffect
    actions: tuple[Action, ...]
    readers: tuple[str, ...] | None
    relation: Relation | None
    owners: tuple[str, ...] | None
    levels: tuple[int, ...] | None
    via: tuple[Via, ...] | None
    reason: str
    mark: SourceMark = field(default=NO_MARK, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class PlacementRule:
    """The only groups of workers that may serve the matching requests; None, or no label, matches every request.

    `dedicated`: these groups serve the tenants of this rule alone.
    """

    id: str
    groups: tuple[str, ...]
    tenants: tuple[str, ...] | None = None
    labels: Labels = ()
    levels: tuple[int, ...] | None = None
    dedicated: bool = False
    reason: str = ""
    mark: SourceMark = field(default=NO_MARK, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Policy:
    """A whole policy. Obligation tuples have one entry per classification, in order."""

    name: str
    description: str
    profile: Profile
    classifications: tuple[str, ...]
    scope: Scope
    labels: tuple[tuple[str, tuple[str, ...]], ...]
    classify: tuple[ClassifyRule, ...]
    tenants: tuple[TenantPolicy, ...]
    default: TenantPolicy | None
    groups: tuple[TenantGroup, ...]
    segments: tuple[SegmentRule, ...]
    grants: tuple[Grant, ...]
    rules: tuple[Rule, ...]
    retention: tuple[Retention, ...]
    scrub: tuple[ScrubPolicy, ...]
    offload: tuple[Offload, ...]
    outage: tuple[OutagePolicy, ...]
    eviction: Eviction
    erasure: ErasureDuty = ErasureDuty()
    integrity: tuple[IntegrityPolicy, ...] = ()  # none: the policy does not speak of it, and nothing is compared
    placement: tuple[PlacementRule, ...] = ()
    on_worker_death: tuple[OnWorkerDeath, ...] = ()  # none: `UNSAID_DEATH` everywhere
    route_receipts: tuple[Fraction, ...] = ()  # none: `UNSAID_RECEIPTS` everywhere
    issuers: tuple[str, ...] = ()  # first the one whose tenants go by their bare ids; none: there is one, unnamed
    file: str = field(default="", compare=False)
    source: str = field(default="", compare=False, repr=False)  # its document; empty: it is of none
    mark: SourceMark = field(default=NO_MARK, compare=False, repr=False)

    def after_death(self, level: int) -> OnWorkerDeath:
        """Return what happens to a dead worker's copies of a classification."""
        return self.on_worker_death[level] if self.on_worker_death else UNSAID_DEATH

    @property
    def checks_integrity(self) -> bool:
        """Whether any block must be compared with its checksum before it is reused."""
        own = (one for tenant in (*self.tenants, self.default) if tenant for _, one in tenant.integrity)
        return any(one.verify for one in (*self.integrity, *own))

    @property
    def ceiling_us(self) -> int:
        """The longest time that a block of any tenant and classification may exist."""
        own = (one for tenant in (*self.tenants, self.default) if tenant for _, one in tenant.retention)
        return max((one.absolute_us for one in (*self.retention, *own)), default=0)

    @property
    def shortest_ceiling_us(self) -> int:
        """The shortest of the limits on how long blocks of any tenant and classification may exist."""
        own = (one for tenant in (*self.tenants, self.default) if tenant for _, one in tenant.retention)
        return min((one.absolute_us for one in (*self.retention, *own)), default=0)

    def named(self, said: str) -> str:
        """Return the tenant name that the given name stands for; raises `ConfigError` if it is ambiguous."""
        known = {tenant.id for tenant in self.tenants}
        return issuers_of(self.issuers).resolve(said, known)

    def openings(self) -> tuple[Grant | SegmentRule, ...]:
        """Return every grant, including those that groups stand for, and every segment."""
        return (*self.grants, *self.group_grants(), *self.segments)

    def opened_tenants(self) -> frozenset[str] | None:
        """Return the tenants that a grant or a segment opens to others, and those others. None means every admitted
        tenant.
        """
        opened = set[str]()
        for opening in self.openings():
            if isinstance(opening, Grant):
                opened |= {opening.owner, opening.reader}
            elif opening.tenants is None:
                return None
            elif {*opening.tenants} - {opening.owner}:
                opened |= {opening.owner, *opening.tenants}
        return frozenset(opened)

    def group_grants(self) -> tuple[Grant, ...]:
        """Return the grants that sharing groups stand for: one per ordered pair of members.

        They are named `group~owner~reader`; no identifier holds a `~`, so no declared grant has such a name.
        """
        members: dict[str, list[str]] = {}
        for tenant in self.tenants:
            if tenant.group is not None:
                members.setdefault(tenant.group, []).append(tenant.id)
        return tuple(
            Grant(
                id=f"{group.id}~{owner}~{reader}",
                owner=owner,
                reader=reader,
                at_most=group.at_most,
                from_us=group.from_us,
                until_us=group.until_us,
                reason=group.reason,
                group=group.id,
                crosses=group.crosses,
                mark=group.mark,
            )
            for group in self.groups
            if group.at_most is not None
            for owner in members.get(group.id, ())
            for reader in members.get(group.id, ())
            if owner != reader
        )
