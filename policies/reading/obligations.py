"""Build `retention`, `scrub`, `offload`, `integrity`, `audit` and more: the obligations for every classification.

1. Every classification has every obligation; an omission is a problem at the section, never a default. Without a
   section `integrity` nothing is compared with its checksum; a section covers every classification.
2. A tenant's own obligations may only be stricter than the policy's; what it leaves out of an entry is the policy's.
3. No copy is kept longer than a block may exist, and none in plain memory where the profile isolates.
4. An outage action may only be stricter than the floor: decisions deny, lifecycle spill, own hits aggregate.
5. A tenant's own shares of route receipts hold in place of the policy's, smaller or larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any, Generic, NamedTuple, TypeVar

from kvcustody.policies.document.model import (
    UNSAID_DEATH,
    UNSAID_RECEIPTS,
    IntegrityPolicy,
    Offload,
    OnOutage,
    OnWorkerDeath,
    OutagePolicy,
    Retention,
    ScrubPolicy,
    Tier,
    TierLimit,
)
from kvcustody.policies.document.offload_defaults import default_limit, default_match
from kvcustody.policies.document.problems import SourceMark, quote
from kvcustody.policies.document.yaml_nodes import MappingNode, Scalar
from kvcustody.policies.reading.fields import DocumentPart, sound
from kvcustody.policies.reading.names import DeclaredNames
from kvcustody.policies.reading.sections import (
    FLOOR,
    OffloadTerms,
    OutageTerms,
    PolicyDocument,
    TenantEntry,
)
from kvcustody.times import span

T = TypeVar("T", Retention, ScrubPolicy, Offload, IntegrityPolicy)


class Bounds(NamedTuple):
    """The limits for reading an entry: how long a block may exist, the declared labels, and the policy's own entry."""

    absolute_us: int
    labels: tuple[str, ...] = ()
    isolating: str | None = None  # the profile, where it is
    policy: Offload | None = None


_UNKNOWN_US = 1 << 62  # of a retention that could not be read
_Found = tuple[SourceMark, str, str]


def _none(terms: Any, bounds: Bounds) -> Iterator[_Found]:
    return iter(())


class Duty(NamedTuple, Generic[T]):
    """One kind of obligation: its section, the code of an omission, its value type, and how to compare strictness.

    `wrongs` are those of an entry that only show beside the rest of the document.
    """

    section: str
    code: str
    build: Callable[[Any, SourceMark, Bounds], T]
    stricter: Callable[[T, T], bool]
    also: tuple[str, ...] = ()
    wrongs: Callable[[Any, Bounds], Iterator[_Found]] = _none


def _offload(terms: OffloadTerms | None, mark: SourceMark, bounds: Bounds) -> Offload:
    if terms is None:
        return Offload((), True, mark=mark)
    tiers = tuple(terms.named)
    bind = default_match(tiers, bounds.labels, bounds.policy)
    if terms.match is not None:
        bind = tuple(sorted(word.text for word in terms.match))
    return Offload(tiers, terms.encrypt, tuple(_limit(terms, tier, bounds) for tier in tiers), bind, mark)


def _limit(terms: OffloadTerms, tier: Tier, bounds: Bounds) -> TierLimit:
    own = terms.named[tier]
    absolute_us = (own and own.absolute) or terms.absolute or bounds.absolute_us
    within_us = (own and own.within) or terms.within
    said = terms.absolute is not None or (own is not None and own.absolute is not None)
    limit = default_limit(tier, absolute_us, bounds.policy)
    return TierLimit(tier, absolute_us if said else limit.absolute_us, within_us or limit.within_us)


def _offload_wrongs(terms: OffloadTerms | None, bounds: Bounds) -> Iterator[_Found]:
    if terms is None:
        return
    said = [(terms, terms.absolute, "`offload`")]
    said += [(own, own.absolute, f"tier `{tier}`") for tier, own in terms.named.items() if own]  # type: ignore[misc]
    for section, absolute, what in said:
        if absolute is not None and absolute > bounds.absolute_us:
            kept = f"its retention's `{span(bounds.absolute_us)}`"
            yield (
                section.at("absolute"),
                "KVP510",
                f"{what} keeps copies `{span(absolute)}`, longer than {kept}",
            )
    for word in terms.match or ():
        if word.text not in bounds.labels:
            yield word.mark, "KVP403", f"label {quote(word.text)} is not in `labels`"
    if not terms.encrypt and bounds.isolating is not None and sound(terms.node):
        message = f"tier `host` is not encrypted in profile `{bounds.isolating}`"
        yield terms.at("encrypt"), "KVP609", message


def _is_stricter(own: Offload, policy: Offload) -> bool:
    pairs = [(limit, policy.limit(limit.tier)) for limit in own.limits]
    return (
        own.encrypt >= policy.encrypt
        and all(
            wide is not None and limit.absolute_us <= wide.absolute_us and limit.within_us <= wide.within_us
            for limit, wide in pairs
        )
        and (Tier.REMOTE not in own.tiers or set(own.match) >= set(policy.match))
    )


RETENTION: Duty[Retention] = Duty(
    "retention",
    "KVP501",
    lambda terms, mark, _: Retention(terms.idle, terms.absolute, terms.active_max, mark),
    lambda own, policy: (
        own.idle_us <= policy.idle_us
        and own.absolute_us <= policy.absolute_us
        and own.active_max_us <= policy.active_max_us
    ),
)
SCRUB: Duty[ScrubPolicy] = Duty(
    "scrub",
    "KVP502",
    lambda terms, mark, _: ScrubPolicy(terms.within, terms.verify, mark),
    lambda own, policy: own.within_us <= policy.within_us and own.verify >= policy.verify,
    ("default",),  # serves the classifications without an entry
)
OFFLOAD: Duty[Offload] = Duty(
    "offload",
    "KVP503",
    _offload,
    _is_stricter,
    wrongs=_offload_wrongs,
)


INTEGRITY: Duty[IntegrityPolicy] = Duty(
    "integrity",
    "KVP504",
    lambda terms, mark, _: IntegrityPolicy(terms.verify, mark),
    lambda own, policy: own.verify >= policy.verify,
    ("default",),
)


def policy_wide(
    names: DeclaredNames, document: PolicyDocument, duty: Duty[T], retention: tuple[Retention, ...] = ()
) -> tuple[T, ...]:
    """Return one obligation for each classification; an empty tuple if one is missing or could not be read.

    `retention` is the policy's, for what is bounded by it.
    """
    entries: Mapping[str, Any] = getattr(document, duty.section) or {}
    found = names.by_level(document.keys_of(duty.section), entries, f"`{duty.section}`", duty.also)
    values = {}
    for name, (_, terms) in found.items():
        bounds = _bounds(names, document, retention, names.levels.get(name, 0))
        _complain(names, duty, terms, bounds)
        values[name] = duty.build(terms, document.at(duty.section, name), bounds)
    missing = [name for name in names.levels if name not in values and "default" not in values]
    for name in missing if isinstance(document.node.get(duty.section), MappingNode) else ():
        message = f"`{duty.section}` has no entry for classification {quote(name)}"
        names.problems.add(document.at(duty.section), duty.code, message)
    return () if missing else tuple(values[name if name in values else "default"] for name in names.levels)


def tenants_own(
    names: DeclaredNames,
    document: PolicyDocument,
    tenant: TenantEntry,
    duty: Duty[T],
    policy: tuple[T, ...],
    retention: tuple[Retention, ...] = (),
) -> tuple[tuple[int, T], ...]:
    """Return a tenant's own obligations by level; each must be at least as strict as the policy's.

    `retention` is what is owed for the tenant's blocks, for what is bounded by it.
    """
    entries: Mapping[str, Any] = getattr(tenant, duty.section)
    if not entries:
        return ()
    overrides = []
    found = names.by_level(tenant.keys_of(duty.section), entries, f"tenant `{duty.section}`")
    for name, (key, terms) in found.items():
        level = names.levels[name]
        bounds = _bounds(names, document, retention, level)
        wide = policy[level] if policy else None
        if isinstance(wide, Offload):
            bounds = bounds._replace(policy=wide)
        _complain(names, duty, terms, bounds)
        own = duty.build(terms, tenant.at(duty.section, name), bounds)
        looser = wide is not None and not duty.stricter(own, wide)
        if looser and sound(tenant.node.get(duty.section)) and sound(document.node.get(duty.section)):
            message = f"tenant `{duty.section}` for {quote(name)} is looser than the policy's"
            names.problems.add(key.mark, "KVP508", message)
        overrides.append((level, own))
    return tuple(sorted(overrides, key=lambda pair: pair[0]))


def tenants_retention(policy: tuple[Retention, ...], own: tuple[tuple[int, Retention], ...]) -> tuple[Retention, ...]:
    """Return the retention of a tenant's blocks by level: its own where it has some, else the policy's."""
    return tuple(dict(own).get(level, wide) for level, wide in enumerate(policy)) if own else policy


def _bounds(names: DeclaredNames, document: PolicyDocument, retention: tuple[Retention, ...], level: int) -> Bounds:
    known = level < len(retention) and sound(document.node.get("retention"))
    isolating = document.profile.value if document.profile.isolating else None
    return Bounds(retention[level].absolute_us if known else _UNKNOWN_US, tuple(sorted(names.labels)), isolating)


def _complain(names: DeclaredNames, duty: Duty[T], terms: Any, bounds: Bounds) -> None:
    for mark, code, message in duty.wrongs(terms, bounds):
        names.problems.add(mark, code, message)


def outages(names: DeclaredNames, document: PolicyDocument) -> tuple[OutagePolicy, ...]:
    """Return one `OutagePolicy` for each classification: the policy's, tightened by `by_classification`."""
    audit = document.audit
    what = "`audit.by_classification`"
    own = names.by_level(audit.keys_of("by_classification"), audit.by_classification, what)
    floor = {kind: getattr(audit.on_outage, kind) for kind in FLOOR}
    return tuple(
        OutagePolicy(**{kind: _stricter(owed, own.get(name), kind) for kind, owed in floor.items()}, mark=audit.mark)
        for name in names.levels
    )


def after_deaths(names: DeclaredNames, document: PolicyDocument) -> tuple[OnWorkerDeath, ...]:
    """Return one `OnWorkerDeath` for each classification; an empty tuple if the policy declares none."""
    keys = document.keys_of("on_worker_death")
    said = names.by_level(keys, document.on_worker_death, "`on_worker_death`", ("default",))
    if not said:
        return ()
    default = said["default"][1] if "default" in said else UNSAID_DEATH
    return tuple(said[name][1] if name in said else default for name in names.levels)


def receipt_shares(names: DeclaredNames, document: PolicyDocument) -> tuple[Fraction, ...]:
    """Return the share of requests with a route receipt by classification; an empty tuple if all are
    `UNSAID_RECEIPTS`.
    """
    said = _shares(names, document, document.route_receipts)
    shares = tuple(said.get(level, UNSAID_RECEIPTS) for level in range(len(names.levels)))
    return () if set(shares) <= {UNSAID_RECEIPTS} else shares


def tenants_receipt_shares(
    names: DeclaredNames, entry: TenantEntry, policy: tuple[Fraction, ...]
) -> tuple[tuple[int, Fraction], ...]:
    """Return the levels for which a tenant's share differs from the policy's, with that share."""
    said = _shares(names, entry, entry.route_receipts)
    wide = policy or (UNSAID_RECEIPTS,) * len(names.levels)
    return tuple((level, share) for level, share in sorted(said.items()) if share != wide[level])


def _shares(names: DeclaredNames, section: DocumentPart, written: Mapping[str, Fraction]) -> dict[int, Fraction]:
    """Return the shares that a section names, by level; `default` covers the levels that it does not name."""
    said = names.by_level(section.keys_of("route_receipts"), written, "`route_receipts`", ("default",))
    default = said.pop("default", None)
    shares = {} if default is None else dict.fromkeys(range(len(names.levels)), default[1])
    return shares | {names.levels[name]: share for name, (_, share) in said.items()}


def _stricter(owed: OnOutage, own: tuple[Scalar, OutageTerms] | None, kind: str) -> OnOutage:
    said: OnOutage | None = getattr(own[1], kind) if own else None
    return owed if said is None else max(owed, said)
