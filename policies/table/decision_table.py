"""The decision table: who may do what with whose blocks. A look-up's cost does not depend on the policy's size.

    table = compile_policy(load_policy(text, name="acme.yaml"), revision=1)
    table.decide(AccessRequest(Action.REUSE, "labs", "acme", 0, Scope.TENANT, Via.GRANT), now_utc_us)

1. Default deny; a forbid overrides every permit; an error while deciding is a deny.
2. `decide` is pure: equal arguments give equal decisions, and time is an argument.
3. A permit with reader != owner names a live grant, or a live segment that lists the reader.
4. A grant permits only reuse, only to its one reader, and only of tenant-level and wider domains up to its level.
5. Every decision names what determined it: rules, grants, segments or sections (`tenants:acme`, `retention:internal`,
   `offload:public`). It names `default-deny` when nothing did.

A tenant's own decisions are one flat tuple, whatever its rules are; `places` finds each cell. So the memory that a
decision touches does not grow with the number of rules. Rows of nested dicts, shared between tenants with the same
decisions, made decisions slower once rules named tenants.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import count
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from kvcustody.errors import PolicyError
from kvcustody.policies.document.model import (
    Action,
    Affinity,
    Effect,
    Grant,
    Labels,
    OnWorkerDeath,
    Policy,
    Scope,
    SegmentRule,
    TenantPolicy,
    Tier,
    Via,
)
from kvcustody.policies.table.batch_decide import BatchTable
from kvcustody.policies.table.classify import Classifier
from kvcustody.policies.table.crossing import has_domain, uncrossed
from kvcustody.policies.table.model import (
    DEFAULT_DENY,
    TENANT_LENGTH_MAX,
    UNLISTED,
    AccessColumns,
    AccessRequest,
    Decision,
    Tables,
    Timeline,
    Unlisted,
)
from kvcustody.policies.table.obligations import Obligations, TierDuty
from kvcustody.policies.table.placement import Demand, PlacementTable

Places = Mapping[int, Mapping[int, Mapping[int, int]]]
"""The index in a row, by action, level and scope."""


@cache
def places(levels: int) -> Places:
    """Return the position of each cell in the rows of a policy with this many classifications."""
    following = count()
    return {
        int(action): {level: {int(scope): next(following) for scope in Scope} for level in range(levels)}
        for action in Action
    }


_TIERS = frozenset(map(str, Tier))
_OWN, _GRANT, _SEGMENT = int(Via.OWN), int(Via.GRANT), int(Via.SEGMENT)
_REUSE = int(Action.REUSE)
_SCANNED_MAX = 16  # intervals that are looked through sooner than they are searched
_START = itemgetter(0)
SHARED_SCOPES = frozenset((Scope.TENANT, Scope.GROUP, Scope.PUBLIC))


class DecisionTable:
    """A compiled policy revision. Immutable; safe to share between threads."""

    __slots__ = (
        "_batch",
        "_classifier",
        "_deny",
        "_edges",
        "_failed",
        "_grants",
        "_own",
        "_places",
        "_segments",
        "_tables",
        "_tenants",
        "_unlisted",
        "digest",
        "placement",
        "policy",
        "revision",
        "revoked",
    )

    def __init__(self, policy: Policy, tables: Tables, *, revision: int, digest: str, revoked: frozenset[str]) -> None:
        self.policy = policy
        self.revision = revision
        self.digest = digest
        self.revoked = revoked
        self._tables = tables
        self._own = tables.own
        self._places = places(len(policy.classifications))
        self._unlisted = tables.unlisted
        self._grants = tables.grants
        self._segments = tables.segments
        self._edges = tables.edges
        self._tenants = {tenant.id: tenant for tenant in policy.tenants}
        self._classifier = Classifier(policy)
        self.placement = PlacementTable.of(policy)
        self._deny = Decision(Effect.DENY, (DEFAULT_DENY,), revision)
        self._failed = Decision(Effect.DENY, (DEFAULT_DENY,), revision, ("decide ran out of memory or depth",))
        self._batch: BatchTable | None = None

    def decide(self, request: AccessRequest, now_utc_us: int) -> Decision:
        """Return whether the reader may act on the owner's domain at this instant."""
        try:
            action, reader, owner, classification, scope, via, source = request
            if via == _OWN:
                if reader != owner:
                    return self._deny
                row = self._own.get(reader)
                if row is None:
                    row = self._unlisted
                    if row is None or not _well_formed(reader):
                        return self._deny
                return row[self._places[action][classification][scope]]
            if via == _GRANT:
                levels = self._grants.get((reader, owner))
                if levels is None or action != _REUSE or scope not in SHARED_SCOPES or classification < 0:
                    return self._deny
                timeline = levels[classification]
            elif via == _SEGMENT:
                timeline = self._segment_timeline(action, reader, owner, classification, scope, source)
            else:
                raise ValueError("no such way")
            if len(timeline) > _SCANNED_MAX:
                place = bisect_right(timeline, now_utc_us, key=_START)
                timeline = timeline[place - 1 : place]
            for start, end, decision, sources in timeline:
                if start <= now_utc_us < end:
                    return decision if source is None else sources.get(source, self._deny)
            return self._deny
        except (MemoryError, RecursionError):
            return self._failed
        except Exception as error:
            return Decision(Effect.DENY, (DEFAULT_DENY,), self.revision, (f"{type(error).__name__} in decide",))

    def _segment_timeline(
        self, action: Action, reader: str, owner: str, classification: int, scope: Scope, source: str | None
    ) -> Timeline:
        row = self._segments.get((reader, owner))
        if row is None:
            if reader in self._own or self._unlisted is None or not _well_formed(reader):
                return ()
            row = self._segments.get((UNLISTED, owner))
        return () if row is None else row.get((action, classification, scope, source), ())

    def decide_many(self, requests: AccessColumns[Sequence[str]], now_utc_us: int) -> NDArray[np.bool_]:
        """Return a mask of the permitted requests at one instant; `decide` gives the reasons for a single one."""
        readers, owners = self.batch().intern(requests.readers, requests.owners)
        actions, _, _, levels, scopes, vias = requests
        return self.batch().permits(AccessColumns(actions, readers, owners, levels, scopes, vias), now_utc_us)

    def batch(self) -> BatchTable:
        """Return the dense form for many requests at once, built on first use."""
        if self._batch is None:
            self._batch = BatchTable(self._tables, len(self.policy.classifications))
        return self._batch

    def demand(self, tenant: str, route: str | None, claim: str | None, hint: str | None) -> Demand:
        """Return which placement groups may serve a tenant's request."""
        return self.placement.demand(tenant, route, claim, hint)

    def may_serve(self, group: str, tenant: str, route: str | None, claim: str | None, hint: str | None) -> bool:
        """Return whether a placement group may serve a tenant's request; fast without placement rules."""
        return not self.policy.placement or self.demand(tenant, route, claim, hint).allows(group)

    def after_death(self, tenant: str, level: int) -> OnWorkerDeath:
        """Return what happens to a tenant's copies of a classification when their worker died."""
        return self.policy.after_death(level)

    def classify(self, tenant: str, route: str | None, claim: str | None, hint: str | None) -> int:
        """Return the effective level of a request: the highest of tenant or route default, claim and hint."""
        return self._classifier.classify(tenant, route, claim, hint)

    def labels(self, tenant: str, route: str | None) -> Labels:
        """Return the labels of a request's domains, sorted."""
        entry = self.tenant(tenant)
        return self._classifier.labels(tenant, route, () if entry is None else entry.labels)

    def uncrossed(self, rule: Grant | SegmentRule, reader: str, route: str | None) -> tuple[str, ...]:
        """Return the labels in which a reader's request and the owner's blocks differ and that the rule does not
        name.
        """
        return uncrossed(rule, self.labels(reader, route), self.labels(rule.owner, None))

    def opens(self, rule: Grant | SegmentRule, reader: str, route: str | None) -> bool:
        """Return whether this rule could let any request reuse anything (`crossing`)."""
        return not self.uncrossed(rule, reader, route) and has_domain(rule, self.tenant(rule.owner))

    def obligations(self, tenant: str, classification: int) -> Obligations:
        """Return the obligations for a tenant's blocks, or for their end if it is not admitted. Raises
        `PolicyError`.
        """
        levels = self._tables.obligations.get(tenant) or self._tables.obligations.get(UNLISTED)
        if not 0 <= classification < len(self.policy.classifications):
            message = f"policy `{self.policy.name}` has no classification level `{classification}`"
            raise PolicyError(message, level=classification)
        return self._tables.ended if levels is None else levels[classification]

    def tier_duty(self, tenant: str, classification: int, tier: str) -> TierDuty:
        """Return the obligations for copies of a tenant's blocks in a tier. They depend on neither the instant nor the
        reader.

        Nothing may be in a tier of no known name, nor where `offload` is denied; of published blocks nothing where
        publishing or retaining is. Raises `PolicyError` for a level that does not exist.
        """
        owed = self.obligations(tenant, classification)
        if tier not in _TIERS:
            return TierDuty(0, 0, 0, True, (), (DEFAULT_DENY,))
        duty = owed.in_tier(Tier(tier))
        for action in (Action.OFFLOAD, Action.PUBLISH, Action.RETAIN):
            asked = AccessRequest(action, tenant, tenant, classification, Scope.SESSION, Via.OWN)
            decision = self.decide(asked, 0)
            if not decision.permitted:
                running_us = 0 if action is Action.OFFLOAD else duty.running_us
                return duty._replace(absolute_us=0, running_us=running_us, reasons=decision.reasons)
        return duty._replace(reasons=(f"offload:{self.policy.classifications[classification]}",))

    def grants_for(self, reader: str, classification: int, now_utc_us: int) -> tuple[Grant, ...]:
        """Return the grants that let `reader` reuse blocks of exactly this level now, ordered by id."""
        grants = self._tables.grants_by_reader.get(reader)
        if grants is None:
            return ()
        return tuple(
            grant
            for grant in grants
            if 0 <= classification <= grant.at_most
            and (grant.from_us is None or grant.from_us <= now_utc_us)
            and (grant.until_us is None or now_utc_us < grant.until_us)
        )

    def segments_for(self, reader: str, now_utc_us: int) -> tuple[SegmentRule, ...]:
        """Return the segments that `reader` may match now, ordered by id."""
        segments = self._tables.segments_by_reader.get(reader)
        if segments is None:
            if self.tenant(reader) is None:
                return ()
            segments = self._tables.segments_by_reader.get(UNLISTED, ())
        return tuple(s for s in segments if s.expires_us is None or now_utc_us < s.expires_us)

    def tenant(self, tenant: str) -> TenantPolicy | None:
        """Return the tenant's entry; `tenants.default` (id `default`) for an unlisted tenant; None if the tenant is
        refused.
        """
        entry = self._tenants.get(tenant)
        return self.policy.default if entry is None and _well_formed(tenant) else entry

    def names_by_tenant(self, tenant: str) -> bool:
        """Return whether routers use one name for all of the tenant's requests."""
        entry = self.tenant(tenant)
        return entry is not None and name_scope(entry) is Scope.TENANT

    def entries(self) -> frozenset[tuple[str | Unlisted, str]]:
        """Return every (reader, owner) with an entry across tenants; any other pair is denied."""
        return frozenset((*self._grants, *self._segments))

    def timeline(self, request: AccessRequest) -> Timeline:
        """Return when a source may permit a request across tenants; an empty timeline means always denied."""
        action, reader, owner, level, scope, via, source = request
        if via == _SEGMENT:
            return self._segment_timeline(action, reader, owner, level, scope, source)
        levels = self._grants.get((reader, owner), ()) if via == _GRANT else ()
        if action != _REUSE or scope not in SHARED_SCOPES or not 0 <= level < len(levels):
            return ()
        return levels[level]

    def timelines(self, reader: str, owner: str) -> tuple[Timeline, ...]:
        """Return every timeline that may decide for this pair across tenants. Between their edges nothing changes."""
        row = self._segments.get((reader, owner))
        if row is None and reader not in self._own:
            row = self._segments.get((UNLISTED, owner))
        return (*self._grants.get((reader, owner), ()), *(() if row is None else row.values()))

    def next_change_us(self, now_utc_us: int) -> int | None:
        """Return the next instant at which an answer may change: an edge of a grant or segment."""
        index = bisect_right(self._edges, now_utc_us)
        return self._edges[index] if index < len(self._edges) else None

    def level(self, name: str) -> int:
        """Return a classification's level by its name. Raises `PolicyError`."""
        try:
            return self.policy.classifications.index(name)
        except ValueError:
            message = f"policy `{self.policy.name}` has no classification `{name}`"
            raise PolicyError(message, classification=name) from None


def name_scope(entry: TenantPolicy) -> Scope:
    """Return the scope by which routers name a request: its private scope, or the tenant's if all are placed
    together.
    """
    return Scope.TENANT if entry.affinity is Affinity.SEGMENT else entry.scope


def _well_formed(tenant: object) -> bool:
    """Return whether this may be an unlisted tenant's id. Without a tenant there is no admission."""
    return type(tenant) is str and 0 < len(tenant) <= TENANT_LENGTH_MAX
