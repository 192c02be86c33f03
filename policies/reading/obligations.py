"""Building `retention`, `scrub`, `offload`, `integrity` and `audit`: what is owed for every classification.

1. Every classification has every obligation; an omission is a problem at the section, never a default. Without a
   section `integrity` nothing is compared with its checksum; a section covers every classification.
2. A tenant's own obligations may only be stricter than the policy's.
3. An outage action may only be stricter than the floor: decisions deny, lifecycle spill, own hits aggregate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from kvcustody.policies.document.model import (
    IntegrityPolicy,
    Offload,
    OnOutage,
    OutagePolicy,
    Retention,
    ScrubPolicy,
    Tier,
)
from kvcustody.policies.document.problems import SourceMark, quote
from kvcustody.policies.document.yaml_nodes import MappingNode, Scalar
from kvcustody.policies.reading.fields import sound
from kvcustody.policies.reading.names import DeclaredNames
from kvcustody.policies.reading.sections import (
    FLOOR,
    OffloadTerms,
    OutageTerms,
    PolicyDocument,
    TenantEntry,
)

T = TypeVar("T", Retention, ScrubPolicy, Offload, IntegrityPolicy)


class Duty(NamedTuple, Generic[T]):
    """One kind of obligation: its section, the code of an omission, its value, and when one is stricter."""

    section: str
    code: str
    build: Callable[[Any, SourceMark], T]
    stricter: Callable[[T, T], bool]
    also: tuple[str, ...] = ()


def _offload(terms: OffloadTerms | None, mark: SourceMark) -> Offload:
    if terms is None:
        return Offload((), True, mark)
    return Offload(tuple(tier for tier in Tier if tier in terms.tiers), terms.encrypt, mark)


RETENTION: Duty[Retention] = Duty(
    "retention",
    "KVP501",
    lambda terms, mark: Retention(terms.idle, terms.absolute, terms.active_max, mark),
    lambda own, policy: (
        own.idle_us <= policy.idle_us
        and own.absolute_us <= policy.absolute_us
        and own.active_max_us <= policy.active_max_us
    ),
)
SCRUB: Duty[ScrubPolicy] = Duty(
    "scrub",
    "KVP502",
    lambda terms, mark: ScrubPolicy(terms.within, terms.verify, mark),
    lambda own, policy: own.within_us <= policy.within_us and own.verify >= policy.verify,
    ("default",),  # serves the classifications without an entry
)
OFFLOAD: Duty[Offload] = Duty(
    "offload",
    "KVP503",
    _offload,
    lambda own, policy: set(own.tiers) <= set(policy.tiers) and own.encrypt >= policy.encrypt,
)


INTEGRITY: Duty[IntegrityPolicy] = Duty(
    "integrity",
    "KVP504",
    lambda terms, mark: IntegrityPolicy(terms.verify, mark),
    lambda own, policy: own.verify >= policy.verify,
    ("default",),
)


def policy_wide(names: DeclaredNames, document: PolicyDocument, duty: Duty[T]) -> tuple[T, ...]:
    """One obligation a classification; none where one is missing or could not be read."""
    entries: Mapping[str, Any] = getattr(document, duty.section) or {}
    found = names.by_level(document.keys_of(duty.section), entries, f"`{duty.section}`", duty.also)
    values = {name: duty.build(terms, document.at(duty.section, name)) for name, (_, terms) in found.items()}
    missing = [name for name in names.levels if name not in values and "default" not in values]
    for name in missing if isinstance(document.node.get(duty.section), MappingNode) else ():
        message = f"`{duty.section}` has no entry for classification {quote(name)}"
        names.problems.add(document.at(duty.section), duty.code, message)
    return () if missing else tuple(values[name if name in values else "default"] for name in names.levels)


def tenants_own(
    names: DeclaredNames, document: PolicyDocument, tenant: TenantEntry, duty: Duty[T], policy: tuple[T, ...]
) -> tuple[tuple[int, T], ...]:
    """A tenant's own obligations by level; each must be at least as strict as the policy's."""
    entries: Mapping[str, Any] = getattr(tenant, duty.section)
    if not entries:
        return ()
    overrides = []
    found = names.by_level(tenant.keys_of(duty.section), entries, f"tenant `{duty.section}`")
    for name, (key, terms) in found.items():
        own, level = duty.build(terms, tenant.at(duty.section, name)), names.levels[name]
        looser = policy and not duty.stricter(own, policy[level])
        if looser and sound(tenant.node.get(duty.section)) and sound(document.node.get(duty.section)):
            message = f"tenant `{duty.section}` for {quote(name)} is looser than the policy's"
            names.problems.add(key.mark, "KVP508", message)
        overrides.append((level, own))
    return tuple(sorted(overrides, key=lambda pair: pair[0]))


def outages(names: DeclaredNames, document: PolicyDocument) -> tuple[OutagePolicy, ...]:
    """One `OutagePolicy` a classification: the policy's, made stricter where `by_classification` says so."""
    audit = document.audit
    what = "`audit.by_classification`"
    own = names.by_level(audit.keys_of("by_classification"), audit.by_classification, what)
    floor = {kind: getattr(audit.on_outage, kind) for kind in FLOOR}
    return tuple(
        OutagePolicy(
            **{kind: _stricter(owed, own.get(name), kind) for kind, owed in floor.items()}, mark=audit.mark
        )
        for name in names.levels
    )


def _stricter(owed: OnOutage, own: tuple[Scalar, OutageTerms] | None, kind: str) -> OnOutage:
    said: OnOutage | None = getattr(own[1], kind) if own else None
    return owed if said is None else max(owed, said)
