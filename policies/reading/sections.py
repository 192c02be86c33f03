"""The policy document's declaration: its sections, their fields, and the checks within one section.

1. What loads and what an editor checks are both made of these declarations (`load_policy`, `workbench.json_schema`).
2. References between sections are held against what the document declares by the modules that build the `Policy`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Annotated, Any

from pydantic import ConfigDict

from kvcustody.policies.document import model
from kvcustody.policies.document.model import (
    EVERY_TENANT,
    Action,
    EvictionKind,
    EvictionSignal,
    LearnedFrom,
    OnOutage,
    Relation,
    RuleEffect,
    Tier,
)
from kvcustody.policies.document.problems import quote
from kvcustody.policies.document.yaml_nodes import Scalar
from kvcustody.policies.reading import fields
from kvcustody.policies.reading.fields import (
    WHAT,
    DocumentPart,
    Reads,
    Wrong,
    by_name,
    choice,
    either,
    listed,
    names_at,
    told,
)

TOKENS_MAX = 10_000_000
PRIORITY_DEFAULT = 35
HITS_DEFAULT = 2
PERMITTED = (Action.REUSE, Action.EXPORT, Action.ADMINISTER)
FLOOR = {"decisions": OnOutage.DENY, "lifecycle": OnOutage.SPILL, "own_hits": OnOutage.AGGREGATE}
WILDCARDS = (EVERY_TENANT, "default", "all", "any")
_BY_PRIORITY = ("priority", "ranges", "kinds")
_PARAMETERS = {
    EvictionKind.PRIORITY: _BY_PRIORITY,
    EvictionKind.COST: _BY_PRIORITY,
    EvictionKind.SLRU: ("protected", "hits"),
    EvictionKind.VALUE: (*_BY_PRIORITY, "signals", "learned"),
}
_SIGNALS = {each.value: each for each in EvictionSignal}
_SCOPES = (model.Scope.SUBJECT, model.Scope.SESSION, model.Scope.TENANT)
_WORDS = listed(distinct=True, single=True)
_TENANT = fields.TENANT.naming("tenants", but="default")
_LEVEL = names_at("classifications")
_LEVEL_OR_DEFAULT = {"anyOf": [_LEVEL, {"const": "default"}, {}]}  # holds of any name: it is for editors


def _party(role: str) -> Reads:
    """Return an owner or a reader of a grant: one tenant, never every tenant."""
    tenant = _TENANT.called(role)

    def read(text: str) -> str | Wrong:
        if text not in WILDCARDS:
            return tenant.read(text)  # type: ignore[no-any-return]
        return Wrong("KVP404", f"{WHAT} is a wildcard", what=f"{role} `{text}` of grant {{id}}")

    return replace(tenant, read=read)


def _tenant_or_all() -> Reads:
    """Return a tenant, or a wildcard."""
    shown = {"anyOf": [{"const": EVERY_TENANT}, _TENANT.schema]}
    read = _TENANT.read
    return replace(_TENANT, read=lambda text: text if text == EVERY_TENANT else read(text), schema=shown)


def _outage(kind: str) -> Reads:
    """What happens to one kind of act, not weaker than its floor."""
    words, floor = choice(reversed(OnOutage)), FLOOR[kind]

    def read(text: str) -> Any:
        action = words.read(text)
        if isinstance(action, Wrong) or action >= floor:
            return action
        return Wrong("KVP507", f"{WHAT} is `{text}` in an outage, weaker than `{floor.name.lower()}`")

    return replace(words, read=read, placeholder=floor)


def _ends(start: int | None, end: int | None, who: str, what: str = "") -> Iterator[Wrong]:
    """Check that the exclusive end comes later than the start."""
    if start is not None and end is not None and end <= start:
        yield Wrong("KVP406", f"{who} ends before it starts", at=("until",), what=what)


_RELATIONS = {relation.value: relation for relation in Relation}
_PRIORITY = fields.integer(0, 100)
Level = Annotated[Scalar, fields.NAMED.naming("classifications")]
Tenant = Annotated[Scalar, _TENANT]
Way = Annotated[model.Via, choice(model.Via)]
LabelValue = Annotated[Scalar, fields.IDENTIFIER.called("label value")]
Classification = Annotated[Scalar, fields.IDENTIFIER.called("classification")]
Issuer = Annotated[Scalar, fields.ISSUER]
Owner = Annotated[Scalar, _TENANT.called("owner")]
Reader = Annotated[Scalar, _TENANT.called("reader")]
PrivateScope = Annotated[model.Scope | None, choice(_SCOPES)]
Affinity = Annotated[model.Affinity | None, choice(model.Affinity)]
Labels = Annotated[
    dict[str, Annotated[Scalar, fields.NAMED.naming("labels/*").called("label {0}")]],
    by_name(names=names_at("labels")),
]


class RetentionTerms(DocumentPart):
    """How long blocks may exist."""

    called = "{tenant}`retention` for {0}"
    idle: fields.Duration = told("Since a block's last use; 0s: blocks never outlive their request")
    absolute: fields.Duration = told("Since a block's birth, however busy it is")
    active_max: fields.Positive = told("For one running request")

    def _wrongs(self) -> Iterator[Wrong]:
        if self.idle > self.absolute:
            yield Wrong("KVP505", f"{WHAT} has `idle` longer than `absolute`", at=("idle",), what=self.called)


class ScrubTerms(DocumentPart):
    """How a block ends."""

    called = "{tenant}`scrub` for {0}"
    within: fields.Positive = told("Memory is overwritten within this time of a block's end")
    verify: Annotated[Fraction, fields.SHARE] = told("The share of it that is read back")


class IntegrityTerms(DocumentPart):
    """What is compared with its checksum before it is reused."""

    called = "{tenant}`integrity` for {0}"
    verify: Annotated[Fraction, fields.SHARE] = told("The share of it that is compared")


class TierLimitTerms(DocumentPart):
    """Limits of one tier, in place of those beside `tiers`."""

    called = "tier {0}"
    absolute: fields.Positive | None = told("How long a copy may be there", None)
    within: fields.Positive | None = told("Its bytes are gone within this time after its due time", None)


class TierTable(DocumentPart):
    """Tiers with limits of their own."""

    called = "`tiers`"
    host: TierLimitTerms | None = told("Memory of the host", None)
    nvme: TierLimitTerms | None = told("Files of the host", None)
    remote: TierLimitTerms | None = told("A store on another machine", None)

    def _wrongs(self) -> Iterator[Wrong]:
        if not self.model_fields_set:
            yield Wrong("KVP305", "`tiers` is empty")


_TIERS = Annotated[tuple[Annotated[Tier, choice(Tier).called("tier")], ...], _WORDS]
_MATCH = Annotated[tuple[Annotated[Scalar, fields.NAMED.naming("labels").called("label")], ...], _WORDS]
_CROSSES = "Labels that may differ between owner and reader; blocks of other labels are not shared"


class OffloadTerms(DocumentPart):
    """Tiers, whether they hold ciphertext, and for how long."""

    called = "{tenant}`offload` for {0}"
    tiers: Annotated[tuple[Tier, ...] | TierTable, either(_TIERS, TierTable)] = told(
        "host, nvme, remote: a list, or a mapping with limits for each"
    )
    encrypt: Annotated[bool, choice({"required": True, "none": False})] = told("none is for host alone")
    absolute: fields.Positive | None = told("How long a copy may be in a tier; the retention's if left out", None)
    within: fields.Positive | None = told(
        "A copy's bytes are gone within this time after its due time; a sixteenth of `absolute` if left out", None
    )
    match: Annotated[tuple[Scalar, ...] | None, either(_MATCH, choice({"none": ()}), "none")] = told(
        "Labels in which a remote store must match a domain; every declared one if left out", None
    )

    @property
    def named(self) -> dict[Tier, TierLimitTerms | None]:
        """Every tier that blocks may go to, with its own limits."""
        if isinstance(self.tiers, tuple):
            return {tier: None for tier in Tier if tier in self.tiers}
        return {tier: terms for tier in Tier if (terms := getattr(self.tiers, tier)) is not None}

    def _wrongs(self) -> Iterator[Wrong]:
        media = [tier.value for tier in self.named if tier.must_encrypt]
        if not self.encrypt and media:
            yield Wrong("KVP509", f"tier `{media[0]}` is not encrypted", at=("encrypt",))
        if self.match is not None and Tier.REMOTE not in self.named:
            message = "`match` does not apply without tier `remote`"
            yield Wrong("KVP306", message, at=("match",))


_NEVER = choice({"never": None}).called(OffloadTerms.called)
Retentions = Annotated[dict[str, RetentionTerms], by_name(names=_LEVEL)]
Scrubs = Annotated[dict[str, ScrubTerms], by_name(names=_LEVEL_OR_DEFAULT)]
Integrities = Annotated[dict[str, IntegrityTerms], by_name(names=_LEVEL_OR_DEFAULT)]
ReceiptShares = Annotated[
    dict[str, Annotated[Fraction, fields.SHARE.called("{tenant}`route_receipts` for {0}")]],
    by_name(names=_LEVEL_OR_DEFAULT),
]
Offloads = Annotated[dict[str, Annotated[OffloadTerms | None, either(OffloadTerms, _NEVER)]], by_name(names=_LEVEL)]


class OutageTerms(DocumentPart):
    """What happens while the ledger cannot record."""

    called = "`audit.by_classification` for {0}"
    decisions: Annotated[OnOutage | None, _outage("decisions")] = told("Widening acts (class A)", None)
    lifecycle: Annotated[OnOutage | None, _outage("lifecycle")] = told(
        "Residencies, releases, receipts (class B)", None
    )
    own_hits: Annotated[OnOutage | None, _outage("own_hits")] = told("Counters of own-scope hits (class C)", None)


class OutageFloor(DocumentPart):
    """What happens while the ledger cannot record, under every classification."""

    called = "`audit.on_outage`"
    decisions: Annotated[OnOutage, _outage("decisions")] = told("Widening acts (class A)")
    lifecycle: Annotated[OnOutage, _outage("lifecycle")] = told("Residencies, releases, receipts (class B)")
    own_hits: Annotated[OnOutage, _outage("own_hits")] = told("Counters of own-scope hits (class C)")


class AuditSection(DocumentPart):
    """Behaviour during a ledger outage."""

    called = "`audit`"
    on_outage: OutageFloor = told("The floor for every classification")
    by_classification: Annotated[dict[str, OutageTerms], by_name(names=_LEVEL)] = told(
        "Stricter behaviour for some", {}
    )


class ErasureSection(DocumentPart):
    """By when an erasure is done, and what becomes of running requests."""

    called = "`erasure`"
    within: fields.Positive | None = told("The deadline of an erasure", None)
    running: Annotated[model.OnRunning | None, choice(model.OnRunning)] = told(
        "Abort running requests, or let them finish", None
    )


class RangeEntry(DocumentPart):
    """A span of a prompt, and its priority."""

    called = "token range"
    start: Annotated[int, fields.integer(0, TOKENS_MAX)] = told("First token", alias="from")
    until: Annotated[int | None, fields.integer(1, TOKENS_MAX + 1)] = told("Last token, exclusive", None, alias="to")
    priority: Annotated[int, _PRIORITY] = told("0 leaves first")
    for_us: fields.Positive | None = told("For how long", None, alias="for")

    def _wrongs(self) -> Iterator[Wrong]:
        if self.until is not None and self.until <= self.start:
            message = f"`to` `{self.until}` is not in {self.start + 1}..{TOKENS_MAX + 1}"
            yield Wrong("KVP214", message, at=("to",))


class EvictionSection(DocumentPart):
    """Eviction under pressure; it never extends a deadline."""

    called = "`eviction`"
    policy: Annotated[EvictionKind, choice(EvictionKind)] = told("Which cached block is evicted first")
    priority: Annotated[int | None, _PRIORITY] = told(
        "The priority of tokens outside every range (priority, cost, value)", None
    )
    kinds: Annotated[dict[str, Annotated[int, _PRIORITY]], by_name(most=64)] = told(
        "Priorities of kinds of content, which segments and requests name (priority, cost, value)", {}
    )
    ranges: Annotated[tuple[RangeEntry, ...], listed(64)] = told("Priorities for spans of a prompt", ())
    protected: fields.Percentage | None = told("The protected share (slru)", None)
    hits: Annotated[int | None, fields.integer(1, 1_000)] = told("Uses before a block is protected (slru)", None)
    signals: Annotated[tuple[Annotated[EvictionSignal, choice(_SIGNALS)], ...], listed(distinct=True)] = told(
        "The signals in a block's value, besides its priority; all if none is named (value)", ()
    )
    learned: Annotated[LearnedFrom | None, choice({each.value: each for each in LearnedFrom})] = told(
        "Whose think times predict a block's next use (value)", None
    )

    def _wrongs(self) -> Iterator[Wrong]:
        for field in sorted(self.model_fields_set - {"policy", *_PARAMETERS.get(self.policy, ())}):
            message = f"`{field}` does not apply to eviction {quote(self.policy.value)}"
            yield Wrong("KVP306", message, at=(field,))


class ClassifyEntry(DocumentPart):
    """A tenant's default, or a route that raises."""

    called = "classify rule"
    tenant: Annotated[Scalar, _tenant_or_all()] = told("A tenant, or * for all")
    route: Annotated[str | None, fields.ROUTE] = told("A path; * is one segment, at the end any", None)
    level: Level | None = told("The classification", None, alias="as")
    labels: Labels = told("Labels of the domains", {})

    def _wrongs(self) -> Iterator[Wrong]:
        if not self.model_fields_set & {"level", "labels"}:
            yield Wrong("KVP302", f"{WHAT} has neither `as` nor `labels`", what=self.called)


class QuotaTerms(DocumentPart):
    """Shares of the pool."""

    called = "`quota` of tenant {1}"
    guaranteed: fields.Percentage = told("Always there for the tenant")
    cap: fields.Percentage = told("Never more than this")
    borrow: fields.Truth = told("Use others' idle guarantees", False)

    def _wrongs(self) -> Iterator[Wrong]:
        if self.guaranteed > self.cap:
            shares = f"guaranteed `{percent(self.guaranteed)}` is over its cap `{percent(self.cap)}`"
            yield Wrong("KVP602", f"{WHAT}: {shares}", what="tenant {1}")


class TenantEntry(DocumentPart):
    """What the policy says of a tenant."""

    called = "tenant {0}"
    quota: QuotaTerms | None = None
    group: Annotated[Scalar | None, fields.IDENTIFIER.naming("groups").called("group")] = told(
        "The tenant's family", None
    )
    scope: PrivateScope = told("The tenant's private scope", None)
    affinity: Affinity = told("Whether routers place all of the tenant's requests together", None)
    labels: Labels = told("Labels of the tenant's domains", {})
    residencies: Annotated[int | None, fields.integer(1, 10_000_000)] = told("The most residencies alive at once", None)
    tenants_max: Annotated[int | None, fields.integer(1, 100_000)] = told(
        "On `default`: how many unlisted tenants hold blocks at once", None
    )
    retention: Retentions = told("By classification: stricter than the policy's", {})
    scrub: Scrubs = told("By classification: stricter than the policy's", {})
    offload: Offloads = told("By classification: stricter than the policy's", {})
    integrity: Integrities = told("By classification: stricter than the policy's", {})
    route_receipts: ReceiptShares = told("By classification, or `default`: in place of the policy's", {})


class GroupEntry(DocumentPart):
    """A family of tenants."""

    called = "group {0}"
    share: fields.Truth = told("Whether it stands for a grant between each ordered pair")
    at_most: Level | None = told("Up to this classification", None)
    start_us: fields.Date = told("From this day", None, alias="from")
    until_us: fields.Date = told("Until this day, exclusive", None, alias="until")
    crosses: _MATCH = told(_CROSSES, ())
    reason: fields.Text = told("Why they are one family", "")

    def _wrongs(self) -> Iterator[Wrong]:
        if self.share and self.at_most is None:
            yield Wrong("KVP302", f"{WHAT} has no field `at_most`", at=("at_most",), what=self.called)
        unused: dict[str, object] = {"at_most": self.at_most, "from": self.start_us, "until": self.until_us}
        unused["crosses"] = self.crosses or None
        for field in (name for name, value in unused.items() if value is not None and not self.share):
            message = f"`{field}` does not apply to {WHAT}, which does not share"
            yield Wrong("KVP306", message, at=(field,), what=self.called)
        yield from _ends(self.start_us, self.until_us, WHAT, self.called)


_LIST = listed(distinct=True, kind=f'a list, or `"{EVERY_TENANT}"` for all')
_EVERYONE = either(Annotated[tuple[Tenant, ...], _LIST], choice({EVERY_TENANT: None}), EVERY_TENANT)


class SegmentEntry(DocumentPart):
    """A declared prompt prefix."""

    called = "segment"
    id: Annotated[Scalar, fields.IDENTIFIER.called("segment")] = told("The segment's name")
    owner: Owner = told("Whose blocks they are")
    tenants: Annotated[tuple[Tenant, ...] | None, _EVERYONE] = told("Who may match it; * is every admitted tenant")
    digest: Annotated[str, fields.hex_digest("hmac:")] = told("As printed when the segment was declared")
    tokens: Annotated[int, fields.integer(1, TOKENS_MAX)] = told("The length that the digest covers, in tokens")
    classification: Level = told("The segment's own classification")
    model: Annotated[str | None, fields.hex_digest("sha256:")] = told("Only under this model identity", None)
    expires: fields.Date = told("Until this day, exclusive", None)
    kind: Annotated[Scalar | None, fields.IDENTIFIER.naming("eviction/kinds").called("kind of content")] = told(
        "The kind of content that it is, of `eviction.kinds`", None
    )
    crosses: _MATCH = told(_CROSSES, ())


class GrantEntry(DocumentPart):
    """One tenant's leave to read another's blocks."""

    called = "grant"
    id: Annotated[Scalar, fields.IDENTIFIER.called("grant")] = told(
        "The grant's name, unique for ever: revoked names stay revoked"
    )
    owner: Annotated[Scalar, _party("owner")] = told("Whose blocks are read")
    reader: Annotated[Scalar, _party("reader")] = told("Who reads them")
    at_most: Level = told("Up to this classification")
    start_us: fields.Date = told("From this day; at once if left out", None, alias="from")
    until_us: fields.Date = told("Until this day, exclusive", alias="until")
    crosses: _MATCH = told(_CROSSES, ())
    reason: fields.Text = told("Why the owner allows it")

    def _wrongs(self) -> Iterator[Wrong]:
        yield from _ends(self.start_us, self.until_us, f"grant {quote(self.id.text)}")


class LevelRange(DocumentPart):
    """A range of classifications."""

    called = "`classification`"
    at_most: Level | None = told("This and lower", None)
    at_least: Level | None = told("This and higher", None)

    def _wrongs(self) -> Iterator[Wrong]:
        if not self.model_fields_set:
            yield Wrong("KVP305", "`classification` is empty")


_READERS = Annotated[tuple[Reader, ...], _WORDS]
_READER = either(_READERS, choice(_RELATIONS), *_RELATIONS)
_LEVELS = either(Annotated[tuple[Level, ...], _WORDS], LevelRange)


class WhenTerms(DocumentPart):
    """All terms must match; one left out matches everything."""

    called = "`when` of rule {id}"
    reader: Annotated[tuple[Scalar, ...] | Relation | None, _READER] = told(
        "owner (itself), same-group, or tenants", None
    )
    owner: Annotated[tuple[Owner, ...] | None, _WORDS] = told("Whose blocks", None)
    classification: Annotated[LevelRange | tuple[Level, ...] | None, _LEVELS] = told("Which levels", None)
    via: Annotated[tuple[Way, ...] | None, _WORDS] = told("By which way", None)


_PERMITS = choice(PERMITTED).schema


class RuleEntry(DocumentPart):
    """A permit or a forbid."""

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"effect": {"const": "permit"}}, "required": ["effect"]},
            "then": {"properties": {"action": {"anyOf": [_PERMITS, {"type": "array", "items": _PERMITS}]}}},
        }
    )
    called = "rule"
    id: Annotated[Scalar, fields.IDENTIFIER.called("rule")] = told("The rule's name, as decisions give it")
    effect: Annotated[RuleEffect, replace(choice(RuleEffect), placeholder=RuleEffect.FORBID)] = told(
        "permit or forbid; a forbid overrides every permit"
    )
    action: Annotated[tuple[Annotated[Action, choice(Action)], ...], _WORDS] = told("What is decided")
    when: WhenTerms | None = None
    reason: fields.Text = told("A line for people", "")


_GROUP = Annotated[Scalar, fields.IDENTIFIER.called("placement group")]


class PlacementEntry(DocumentPart):
    """Which groups of workers alone serve the requests that match. What is left out matches every request."""

    called = "placement rule"
    id: Annotated[Scalar, fields.IDENTIFIER.called("placement rule")] = told("The rule's name, as refusals give it")
    groups: Annotated[tuple[_GROUP, ...], _WORDS] = told("The only groups of workers that serve them")
    tenants: Annotated[tuple[Tenant, ...] | None, _EVERYONE] = told(
        "The tenants whose requests match; * matches all", None
    )
    labels: Labels = told("Requests whose domains have these labels", {})
    classification: Annotated[LevelRange | tuple[Level, ...] | None, _LEVELS] = told(
        "Requests of these classifications", None
    )
    dedicated: fields.Truth = told("The groups serve only the tenants of this rule", False)
    reason: fields.Text = told("A line for people", "")

    def _wrongs(self) -> Iterator[Wrong]:
        if self.dedicated and self.tenants is None:
            message = f"{WHAT} is dedicated and lists no tenants"
            yield Wrong("KVP302", message, at=("dedicated",), what="placement rule {id}")


_DEATH = choice(model.OnWorkerDeath)
_LABEL = Annotated[tuple[LabelValue, ...], listed(distinct=True, single=True, what="label {0}")]


class PolicyDocument(DocumentPart):
    """A kvcustody policy: who may reuse whose cached blocks, and for how long."""

    called = "the policy"
    form: Annotated[str, fields.constant(model.SCHEMA)] = told("The language and its version", alias="schema")
    name: Annotated[Scalar, fields.IDENTIFIER] = told("The policy's name")
    description: fields.Text = told("The policy's purpose", "")
    issuers: Annotated[tuple[Issuer, ...], listed(64, distinct=True, single=True)] = told(
        "Whose tenants are admitted, where there are several; the bare ids of a ledger are the first one's",
        (),
    )
    profile: Annotated[model.Profile, choice(model.Profile)] = told(
        "shared: grants and segments may cross; strict: nothing does; dedicated: own pools"
    )
    scope: PrivateScope = told("The private scope of tenants that set none", None)
    affinity: Affinity = told("The affinity of tenants that set none", None)
    classifications: Annotated[tuple[Classification, ...], listed(16, distinct=True)] = told("Low to high")
    labels: Annotated[dict[str, _LABEL], by_name(most=8)] = told("Label names with their values", {})
    classify: Annotated[tuple[ClassifyEntry, ...], listed()] = told(
        "Default classifications of tenants, and routes that raise them", ()
    )
    tenants: Annotated[dict[str, TenantEntry], by_name(least=1, names={"anyOf": [{"const": "default"}, {}]})] = told(
        "Who is admitted; `default` is every unlisted tenant"
    )
    groups: Annotated[dict[str, GroupEntry], by_name()] = told("Families of tenants", {})
    segments: Annotated[tuple[SegmentEntry, ...], listed()] = told("Prompt prefixes declared wider than private", ())
    grants: Annotated[tuple[GrantEntry, ...], listed()] = told("The only other way across a tenant boundary", ())
    rules: Annotated[tuple[RuleEntry, ...], listed()] = told("Permits within a tenant, and forbids of any kind", ())
    retention: Retentions = told("By classification: how long blocks may exist")
    scrub: Scrubs = told("By classification, or `default`: how a block ends")
    offload: Offloads = told("By classification: where blocks may go: never, or to tiers")
    integrity: Integrities | None = told(
        "By classification, or `default`: the share of blocks compared with their checksums before reuse", None
    )
    placement: Annotated[tuple[PlacementEntry, ...], listed()] = told(
        "The only workers that may serve these requests", ()
    )
    on_worker_death: Annotated[dict[str, Annotated[model.OnWorkerDeath, _DEATH]], by_name(names=_LEVEL_OR_DEFAULT)] = (
        told("By classification, or `default`: what happens to a dead worker's copies; restore if left out", {})
    )
    route_receipts: ReceiptShares = told(
        "By classification, or `default`: the share of requests with a route receipt; 1/10 if left out", {}
    )
    audit: AuditSection
    eviction: EvictionSection | None = None
    erasure: ErasureSection | None = None


def percent(share: Fraction) -> str:
    """Return a share as an exact percentage."""
    value = share * 100
    return f"{value.numerator}%" if value.denominator == 1 else f"{float(value):g}%"
