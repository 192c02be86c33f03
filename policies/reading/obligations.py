"""Reading `retention`, `scrub`, `offload`, `audit` and `erasure`: what is owed for every classification.

1. Every classification has every obligation; an omission is a problem at the section, never a default.
2. A tenant's own obligations may only be stricter than the policy's.
3. An outage action may only be stricter than the floor: decisions deny, lifecycle spill, own hits aggregate.
4. Whatever `erasure` says, nothing that an erasure covers is attached from the moment it takes effect.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import TypeVar

from kvcustody.policies.document.model import (
    ErasureDuty,
    Offload,
    OnOutage,
    OnRunning,
    OutagePolicy,
    Retention,
    ScrubPolicy,
    Tier,
)
from kvcustody.policies.document.problems import quote
from kvcustody.policies.document.yaml_nodes import MappingNode, Node, Scalar
from kvcustody.policies.reading.fields import FieldReader
from kvcustody.policies.reading.names import DeclaredNames, by_classification

T = TypeVar("T")

_FLOOR = {"decisions": OnOutage.DENY, "lifecycle": OnOutage.SPILL, "own_hits": OnOutage.AGGREGATE}
_ON_OUTAGE = {action.name.lower(): action for action in reversed(OnOutage)}
_TIERS = {tier.value: tier for tier in Tier}


def read_retention(names: DeclaredNames, node: Node) -> tuple[Retention, ...]:
    """One `Retention` a classification."""
    return _complete(names, node, "`retention`", "KVP501", _retention)


def read_scrub(names: DeclaredNames, node: Node) -> tuple[ScrubPolicy, ...]:
    """One `ScrubPolicy` a classification; `default` serves those without an entry."""
    return _complete(names, node, "`scrub`", "KVP502", _scrub, default=True)


def read_offload(names: DeclaredNames, node: Node) -> tuple[Offload, ...]:
    """One `Offload` a classification."""
    return _complete(names, node, "`offload`", "KVP503", _offload)


def read_audit(names: DeclaredNames, node: Node) -> tuple[OutagePolicy, ...]:
    """One `OutagePolicy` a classification: the policy's, made stricter where `by_classification` says so."""
    found = names.fields.mapping(node, "`audit`", ("on_outage",), ("by_classification",))
    base = dict(_FLOOR)
    if "on_outage" in found:
        base = _outage(names.fields, found["on_outage"], "`audit.on_outage`", tuple(_FLOOR), base)
    own: dict[str, dict[str, OnOutage]] = {}
    if "by_classification" in found:
        what = "`audit.by_classification`"
        for name, (_, value) in by_classification(names, found["by_classification"], what).items():
            own[name] = _outage(names.fields, value, f"`audit.by_classification.{name}`", (), base)
    return tuple(
        OutagePolicy(
            **{field: max(base[field], own.get(name, base)[field]) for field in _FLOOR}, mark=node.mark
        )
        for name in names.levels
    )


def read_overrides(
    names: DeclaredNames,
    node: Node,
    what: str,
    *,
    read: Callable[[FieldReader, Node, str], T],
    stricter: Callable[[T, T], bool],
    policy: tuple[T, ...],
) -> tuple[tuple[int, T], ...]:
    """A tenant's own obligations by level; each must be at least as strict as the policy's."""
    overrides = []
    for name, (key, value) in by_classification(names, node, what).items():
        before = names.fields.problems.count
        own = read(names.fields, value, f"{what} for {quote(name)}")
        level = names.levels[name]
        if names.fields.problems.count == before and level < len(policy) and not stricter(own, policy[level]):
            names.fields.problems.add(
                key.mark, "KVP508", f"{what} for {quote(name)} is looser than the policy's"
            )
        overrides.append((level, own))
    return tuple(sorted(overrides, key=lambda pair: pair[0]))


def read_tenant_retention(
    names: DeclaredNames, node: Node, policy: tuple[Retention, ...]
) -> tuple[tuple[int, Retention], ...]:
    """A tenant's shorter retention."""
    return read_overrides(
        names, node, "tenant `retention`", read=_retention, stricter=_shorter, policy=policy
    )


def read_tenant_scrub(
    names: DeclaredNames, node: Node, policy: tuple[ScrubPolicy, ...]
) -> tuple[tuple[int, ScrubPolicy], ...]:
    """A tenant's stricter scrub."""
    return read_overrides(names, node, "tenant `scrub`", read=_scrub, stricter=_sooner, policy=policy)


def read_tenant_offload(
    names: DeclaredNames, node: Node, policy: tuple[Offload, ...]
) -> tuple[tuple[int, Offload], ...]:
    """A tenant's fewer tiers."""
    return read_overrides(names, node, "tenant `offload`", read=_offload, stricter=_fewer, policy=policy)


def _shorter(own: Retention, policy: Retention) -> bool:
    return (
        own.idle_us <= policy.idle_us
        and own.absolute_us <= policy.absolute_us
        and own.active_max_us <= policy.active_max_us
    )


def _sooner(own: ScrubPolicy, policy: ScrubPolicy) -> bool:
    return own.within_us <= policy.within_us and own.verify >= policy.verify


def _fewer(own: Offload, policy: Offload) -> bool:
    return set(own.tiers) <= set(policy.tiers) and own.encrypt >= policy.encrypt


def _complete(
    names: DeclaredNames,
    node: Node,
    what: str,
    code: str,
    read: Callable[[FieldReader, Node, str], T],
    *,
    default: bool = False,
) -> tuple[T, ...]:
    found = by_classification(names, node, what, ("default",) if default else ())
    read_values = {
        name: read(names.fields, value, f"{what} for {quote(name)}") for name, (_, value) in found.items()
    }
    fallback = read_values.get("default")
    missing = [name for name in names.levels if name not in read_values and fallback is None]
    for name in missing if isinstance(node, MappingNode) else ():
        names.fields.problems.add(node.mark, code, f"{what} has no entry for classification {quote(name)}")
    values = [read_values.get(name, fallback) for name in names.levels]
    return tuple(value for value in values if value is not None)


def _retention(fields: FieldReader, node: Node, what: str) -> Retention:
    before = fields.problems.count
    found = fields.mapping(node, what, ("idle", "absolute", "active_max"))
    times = {
        name: fields.duration_us(value, f"`{name}`", positive=name == "active_max")
        for name, value in found.items()
    }
    retention = Retention(
        times.get("idle", 0), times.get("absolute", 0), times.get("active_max", 1), node.mark
    )
    if fields.problems.count == before and retention.idle_us > retention.absolute_us:
        fields.problems.add(found["idle"].mark, "KVP505", f"{what} has `idle` longer than `absolute`")
    return retention


def _scrub(fields: FieldReader, node: Node, what: str) -> ScrubPolicy:
    found = fields.mapping(node, what, ("within", "verify"))
    within = fields.duration_us(found["within"], "`within`", positive=True) if "within" in found else 1
    verify = fields.share(found["verify"], "`verify`") if "verify" in found else Fraction(0)
    return ScrubPolicy(within, verify, node.mark)


def _offload(fields: FieldReader, node: Node, what: str) -> Offload:
    if isinstance(node, Scalar):
        fields.choice(node, what, {"never": None})
        return Offload((), True, node.mark)
    found = fields.mapping(node, what, ("tiers", "encrypt"))
    tiers: tuple[Tier, ...] = ()
    if "tiers" in found:
        tiers = fields.words(found["tiers"], "`tiers`", lambda item: fields.choice(item, "tier", _TIERS))
    encrypt = True
    if "encrypt" in found:
        encrypt = fields.choice(found["encrypt"], "`encrypt`", {"required": True, "none": False})
        media = [tier.value for tier in tiers if tier is not Tier.HOST]
        if not encrypt and media:
            fields.problems.add(found["encrypt"].mark, "KVP509", f"tier `{media[0]}` is not encrypted")
    return Offload(tuple(tier for tier in Tier if tier in tiers), encrypt, node.mark)


def _outage(
    fields: FieldReader, node: Node, what: str, required: tuple[str, ...], base: dict[str, OnOutage]
) -> dict[str, OnOutage]:
    found = fields.mapping(node, what, required, () if required else tuple(_FLOOR))
    result = dict(base)
    for name, value in found.items():
        before = fields.problems.count
        action = fields.choice(value, f"`{name}`", _ON_OUTAGE)
        if fields.problems.count == before and action < _FLOOR[name]:
            floor = _FLOOR[name].name.lower()
            message = f"`{name}` is `{action.name.lower()}` in an outage, weaker than `{floor}`"
            fields.problems.add(value.mark, "KVP507", message)
        result[name] = max(action, _FLOOR[name])
    return result


_RUNNING = {running.value: running for running in OnRunning}


def read_erasure(fields: FieldReader, node: Node) -> ErasureDuty:
    """The deadline and what happens to running requests; each has its default."""
    found = fields.mapping(node, "`erasure`", (), ("within", "running"))
    duty = ErasureDuty()
    within_us = (
        fields.duration_us(found["within"], "`within`", positive=True)
        if "within" in found
        else duty.within_us
    )
    running = fields.choice(found["running"], "`running`", _RUNNING) if "running" in found else duty.running
    return ErasureDuty(within_us, running, node.mark)
