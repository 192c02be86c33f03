"""Compare two decision tables by their answers: which cells, obligations and settings change.

1. Both tables are asked. Only tenants, levels and instants that at least one table distinguishes are asked about;
   `~unlisted-1` stands for every unlisted tenant.
2. A level is compared by its name: a policy without that level denies it.
3. A source that opens more than before is an opening, even if another source had opened the same cell. So is a source
   that crosses another label, and one that previously had nothing to open.
4. A tenant that only one policy lists is compared with the other's entry for unlisted tenants (`tenants.default`).
   Where one policy refuses the tenant, its cells show the change.
5. Routes are represented by one example for each set of patterns that a route can match. Claims and hints raise a
   classification in the same way in both policies.
6. A tenant whose requests routers place together has a placement channel inside it: the worker that a prompt reaches
   may reveal that another person of the tenant sent the same prompt. A tenant that is not admitted has no such channel.
7. An additional group of workers that may serve a request is wider, a group that no longer may is narrower;
   `(any other)` stands for every group that neither policy names.
8. Fewer requests with a route receipt is looser: the record covers fewer requests. Receipts that appear or disappear
   with a grant or a segment are no separate change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import chain, pairwise, product
from typing import NamedTuple

from kvcustody.policies.document.model import (
    Action,
    Affinity,
    Grant,
    Labels,
    OnRunning,
    Policy,
    Profile,
    Scope,
    SegmentRule,
    TenantPolicy,
    Tier,
    Via,
)
from kvcustody.policies.document.offload_defaults import default_within_us
from kvcustody.policies.reading.sections import percent
from kvcustody.policies.table.crossing import Barriers
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.model import (
    ALWAYS_US,
    DEFAULT_DENY,
    NEVER_US,
    UNLISTED,
    AccessRequest,
    source_edges,
)
from kvcustody.policies.table.obligations import Obligations
from kvcustody.policies.table.receipts import share_text, shares_of
from kvcustody.policies.workbench.diff.model import (
    CellChange,
    CellEffect,
    DutyChange,
    PolicyDiff,
    SettingChange,
    WidenedAccess,
)
from kvcustody.policies.workbench.prove.obligation_checks import looser_fields
from kvcustody.policies.workbench.prove.route_examples import RouteExamples
from kvcustody.policies.workbench.request import DOMAIN_ACTIONS, FRESH, SHARED
from kvcustody.times import span

_ABSENT = CellEffect(False, (DEFAULT_DENY,))
_Cell = tuple[Action, str, Scope, Via]


PLACEMENT_CHANNEL = "placement channel inside the tenant"
_OTHERS = "(any other)"
_IMPLIED = ("tier_absolute_us", "tier_within_us", "tier_running_us")
_APART = (Profile.SHARED, Profile.STRICT, Profile.DEDICATED)


class _Side(NamedTuple):
    """One of the two tables, with its levels by name and its grants and segments by id."""

    table: DecisionTable
    levels: dict[str, int]
    rules: dict[str, Grant | SegmentRule]
    barriers: Barriers

    def answer(self, cell: _Cell, reader: str, owner: str, now_us: int, source: str | None = None) -> CellEffect:
        """What this table says of one cell."""
        action, name, scope, via = cell
        level = self.levels.get(name)
        if level is None:
            return _ABSENT
        decision = self.table.decide(AccessRequest(action, reader, owner, level, scope, via, source), now_us)
        return CellEffect(decision.permitted, decision.reasons)

    def permits(self, cell: _Cell, reader: str, owner: str, now_us: int, source: str | None = None) -> bool:
        """Return whether `answer` permits; cheaper than `answer` itself."""
        action, name, scope, via = cell
        level = self.levels.get(name)
        return (
            level is not None
            and self.table.decide(AccessRequest(action, reader, owner, level, scope, via, source), now_us).permitted
        )

    def may_open(self, cell: _Cell, reader: str, owner: str) -> bool:
        """Return whether this table may permit a cell across tenants at any instant, by any source."""
        action, name, scope, via = cell
        level = self.levels.get(name)
        asked = None if level is None else AccessRequest(action, reader, owner, level, scope, via)
        return asked is not None and bool(self.table.timeline(asked))

    def content(self, source: str) -> str:
        """What a segment shares; a grant shares whatever its owner has."""
        segment = self.rules.get(source)
        if not isinstance(segment, SegmentRule):
            return ""
        return f"hmac:{segment.digest} {segment.tokens} {segment.model or 'any model'}"

    def crosses(self, source: str) -> tuple[str, ...]:
        """Return the labels that a grant or segment crosses."""
        rule = self.rules.get(source)
        return () if rule is None else rule.crosses

    def without_effect(self, source: str, reader: str) -> str:
        """Why a grant or segment opens nothing to this reader; empty where it may."""
        rule = self.rules.get(source)
        return "" if rule is None else "; ".join(self.barriers.of(rule, reader))


def diff(old: DecisionTable, new: DecisionTable) -> PolicyDiff:
    """Return everything that changes from `old` to `new`, sorted; equal tables give an empty difference."""
    before, after = _side(old), _side(new)
    names = {tenant.id for table in (old, new) for tenant in table.policy.tenants}
    tenants = (*sorted(names), FRESH[0])
    levels = tuple(dict.fromkeys((*old.policy.classifications, *new.policy.classifications)))
    cells: list[CellChange] = []
    openings: list[WidenedAccess] = []
    closings: list[WidenedAccess] = []
    for tenant in tenants:
        cells += _own_cells(before, after, tenant, levels)
    possible = tuple(_cells(levels))
    for reader, owner in sorted(_pairs(old, new, tenants)):
        edges = _edges(old, new, reader, owner)
        asked = [cell for cell in possible if any(s.may_open(cell, reader, owner) for s in (before, after))]
        cells += _cross_cells(before, after, reader, owner, asked, edges)
        openings += _openings(before, after, reader, owner, asked, edges)
        closings += _openings(after, before, reader, owner, asked, edges)
    return PolicyDiff(
        old.digest,
        new.digest,
        tuple(cells),
        tuple(openings),
        tuple(closings),
        tuple(duty_changes(old, new, tenants)),
        tuple(setting_changes(old.policy, new.policy)),
    )


def _side(table: DecisionTable) -> _Side:
    levels = {name: level for level, name in enumerate(table.policy.classifications)}
    policy = table.policy
    return _Side(table, levels, {rule.id: rule for rule in policy.openings()}, Barriers(policy))


def _pairs(old: DecisionTable, new: DecisionTable, tenants: tuple[str, ...]) -> set[tuple[str, str]]:
    """Return the pairs across tenants (and a tenant with itself, through its segments) for which a table has an
    entry.
    """
    entries = old.entries() | new.entries()
    everyone = {owner for reader, owner in entries if reader is UNLISTED}
    named = {(reader, owner) for reader, owner in entries if isinstance(reader, str)}
    return named | set(product(tenants, everyone))


def _edges(old: DecisionTable, new: DecisionTable, reader: str, owner: str) -> dict[str, set[int]]:
    """By source: where either table may change its answer for the pair."""
    return source_edges((*old.timelines(reader, owner), *new.timelines(reader, owner)))


def _pieces(edges: Iterable[int]) -> list[tuple[int, int]]:
    """Time, cut at some edges."""
    return list(pairwise(sorted({ALWAYS_US, NEVER_US, *edges})))


def _own_cells(before: _Side, after: _Side, tenant: str, levels: tuple[str, ...]) -> Iterator[CellChange]:
    for action, name, scope in product(Action, levels, Scope):
        cell = (action, name, scope, Via.OWN)
        if before.permits(cell, tenant, tenant, 0) != after.permits(cell, tenant, tenant, 0):
            one, two = before.answer(cell, tenant, tenant, 0), after.answer(cell, tenant, tenant, 0)
            yield CellChange(action, tenant, tenant, name, scope, Via.OWN, ALWAYS_US, NEVER_US, one, two)


def _cells(levels: tuple[str, ...]) -> Iterator[_Cell]:
    """Everything that a grant or a segment can open; whatever else is asked across tenants is denied."""
    for name, scope in product(levels, SHARED):
        yield Action.REUSE, name, scope, Via.GRANT
        for action in DOMAIN_ACTIONS:
            yield action, name, scope, Via.SEGMENT


def _cross_cells(
    before: _Side,
    after: _Side,
    reader: str,
    owner: str,
    asked: list[_Cell],
    edges: Mapping[str, set[int]],
) -> Iterator[CellChange]:
    pieces = _pieces(chain(*edges.values()))
    for cell in asked:
        open_cell: CellChange | None = None
        for start, end in pieces:
            old_effect = before.answer(cell, reader, owner, start)
            new_effect = after.answer(cell, reader, owner, start)
            if open_cell is not None and (
                old_effect.permitted == new_effect.permitted
                or (old_effect, new_effect) != (open_cell.before, open_cell.after)
            ):
                yield open_cell
                open_cell = None
            if old_effect.permitted != new_effect.permitted:
                action, name, scope, via = cell
                begun = start if open_cell is None else open_cell.start_us
                open_cell = CellChange(action, reader, owner, name, scope, via, begun, end, old_effect, new_effect)
        if open_cell is not None:
            yield open_cell


def _openings(
    before: _Side,
    after: _Side,
    reader: str,
    owner: str,
    possible_cells: list[_Cell],
    edges: Mapping[str, set[int]],
) -> Iterator[WidenedAccess]:
    """Yield the sources through which the reader may do more in `after` than through the same source in `before`."""
    ids = {
        source
        for timeline in after.table.timelines(reader, owner)
        for interval in timeline
        for source in interval.sources
    }
    for source in sorted(ids):
        pieces = _pieces(edges[source])
        why = after.without_effect(source, reader)
        renewed = (
            before.content(source) != after.content(source)
            or not set(after.crosses(source)) <= set(before.crosses(source))
            or (not why and bool(before.without_effect(source, reader)))
        )
        opened = [
            (start, end, cell)
            for cell in possible_cells
            for start, end in pieces
            if after.permits(cell, reader, owner, start, source)
            and (renewed or not before.permits(cell, reader, owner, start, source))
        ]
        if opened:
            yield WidenedAccess(
                source,
                opened[0][2][3],
                owner,
                reader,
                tuple(dict.fromkeys(cell[1] for _, _, cell in opened)),
                min(start for start, _, _ in opened),
                max(end for _, end, _ in opened),
                after.content(source),
                after.crosses(source),
                why,
            )


# -- obligations, classifications and labels ---------------------------------------------------------------------------


def setting_changes(old: Policy, new: Policy) -> Iterator[SettingChange]:
    """Yield every changed setting, policy-wide ones first."""
    for field in ("name", "description", "issuers", "classifications", "eviction"):
        one, two = _plain(getattr(old, field)), _plain(getattr(new, field))
        if one != two:
            yield SettingChange("policy", field, one, two)
    yield from _tenants(old, new)
    for section in ("rules", "grants", "segments", "groups"):
        before = {entry.id: entry for entry in getattr(old, section)}
        after = {entry.id: entry for entry in getattr(new, section)}
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                yield SettingChange(
                    section, name, _presence(before.get(name)), _presence(after.get(name), before.get(name))
                )


def _presence(entry: object, before: object = None) -> str:
    return "absent" if entry is None else "present" if before is None else "edited"


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in value)
    return str(value)


def _tenants(old: Policy, new: Policy) -> Iterator[SettingChange]:
    one = {tenant.id: tenant for tenant in (*old.tenants, *((old.default,) if old.default else ()))}
    two = {tenant.id: tenant for tenant in (*new.tenants, *((new.default,) if new.default else ()))}
    for name in sorted(one.keys() | two.keys()):
        before, after = _settings(one.get(name, old.default)), _settings(two.get(name, new.default))
        for field in before:
            if before[field] != after[field]:
                yield SettingChange(f"tenant {name}", field, before[field], after[field])


def _settings(tenant: TenantPolicy | None) -> dict[str, str]:
    if tenant is None:
        return dict.fromkeys(("guaranteed", "cap", "borrow", "group", "residencies", "tenants_max"), "refused")
    return {
        "guaranteed": percent(tenant.guaranteed),
        "cap": percent(tenant.cap),
        "borrow": str(tenant.borrow).lower(),
        "group": tenant.group or "none",
        "residencies": str(tenant.residencies or "the deployment's"),
        "tenants_max": str(tenant.tenants_max or "any"),
    }


# -- settings: shares of the pool, eviction, names and texts -----------------------------------------------------------


def duty_changes(old: DecisionTable, new: DecisionTable, tenants: tuple[str, ...]) -> Iterator[DutyChange]:
    """Yield every changed duty: the profile first, then by tenant."""
    if old.policy.profile is not new.policy.profile:
        one, two = old.policy.profile, new.policy.profile
        yield DutyChange("every tenant", "policy", "profile", one, two, _APART.index(two) < _APART.index(one))
    yield from _erasure(old.policy, new.policy)
    yield from _deaths(old.policy, new.policy)
    for tenant in tenants:
        if old.tenant(tenant) is not None and new.tenant(tenant) is not None:
            yield from _obligations(old, new, tenant)
        yield from _affinity(old, new, tenant)
    examples = RouteExamples((old.policy, new.policy))
    for tenant in _distinct_tenants(old.policy, new.policy, tenants):
        for route in examples.of(tenant):
            yield from _levels(old, new, tenant, route)
            yield from _labels(old, new, tenant, route)
    yield from _placement(old, new, tenants, examples)
    yield from _receipts(old, new, tenants)


def _deaths(old: Policy, new: Policy) -> Iterator[DutyChange]:
    for level, name in enumerate(new.classifications):
        if name in old.classifications:
            one, two = old.after_death(old.classifications.index(name)), new.after_death(level)
            if one is not two:
                said = one.name.lower(), two.name.lower()
                yield DutyChange("every tenant", name, "on_worker_death", *said, two < one)


def _placement(
    old: DecisionTable, new: DecisionTable, tenants: tuple[str, ...], examples: RouteExamples
) -> Iterator[DutyChange]:
    """Rule 7. Classifications are asked by hints: those that both have."""
    if old.policy.placement == new.policy.placement == ():
        return
    groups = (*sorted({*old.placement.groups(), *new.placement.groups()}), _OTHERS)
    names = [None, *(name for name in new.policy.classifications if name in old.policy.classifications)]
    for tenant in tenants:
        routes_and_hints = [*product(examples.of(tenant), names)]
        changes: dict[tuple[tuple[str, ...], ...], list[str]] = {}
        for route, hint in routes_and_hints:
            change = tuple(
                tuple(table.placement.demand(tenant, route, None, hint).among(groups)) for table in (old, new)
            )
            if change[0] != change[1]:
                said = ", ".join(filter(None, (route or "any route", hint)))
                changes.setdefault(change, []).append(said)
        for (one, two), requests in changes.items():
            loosens = None if set(one) - set(two) and set(two) - set(one) else set(two) > set(one)
            about = "every request" if len(requests) == len(routes_and_hints) else "; ".join(requests)
            yield DutyChange(tenant, about, "placement", ", ".join(one) or "none", ", ".join(two) or "none", loosens)


def _receipts(old: DecisionTable, new: DecisionTable, tenants: tuple[str, ...]) -> Iterator[DutyChange]:
    """Rule 8; what changes for every tenant alike is one change."""
    changes: dict[tuple[str, Fraction, Fraction], list[str]] = {}
    for tenant in tenants:
        before, after = (shares_of(table.policy, table.tenant(tenant)) for table in (old, new))
        for level, name in enumerate(new.policy.classifications):
            if name in old.policy.classifications:
                change = name, before[old.level(name)], after[level]
                changes.setdefault(change, []).append(tenant)
    for (name, one, two), changed in changes.items():
        for who in ["every tenant"] if len(changed) == len(tenants) else changed:
            if one != two:
                yield DutyChange(who, name, "route_receipts", share_text(one), share_text(two), two < one)


def _erasure(old: Policy, new: Policy) -> Iterator[DutyChange]:
    before, after = old.erasure, new.erasure
    if before.within_us != after.within_us:
        said = span(before.within_us), span(after.within_us)
        yield DutyChange("every tenant", "erasure", "within", *said, after.within_us > before.within_us)
    if before.running is not after.running:
        yield DutyChange(
            "every tenant", "erasure", "running", before.running, after.running, after.running is OnRunning.FINISH
        )


def _obligations(old: DecisionTable, new: DecisionTable, tenant: str) -> Iterator[DutyChange]:
    both = (name for name in new.policy.classifications if name in old.policy.classifications)
    for name in both:
        one, two = old.obligations(tenant, old.level(name)), new.obligations(tenant, new.level(name))
        for field in Obligations._fields if one != two else ():
            before, after = getattr(one, field), getattr(two, field)
            if before != after and not (field in _IMPLIED and _is_by_default(one) and _is_by_default(two)):
                loosens: bool | None = field in looser_fields(two, one)
                if loosens and field in looser_fields(one, two):
                    loosens = None
                yield DutyChange(tenant, name, field, _said(field, before), _said(field, after), loosens)


def _affinity(old: DecisionTable, new: DecisionTable, tenant: str) -> Iterator[DutyChange]:
    """Rule 6."""
    one, two = (
        Affinity.PRIVATE if entry is None else entry.affinity for entry in (old.tenant(tenant), new.tenant(tenant))
    )
    if one is not two:
        yield DutyChange(tenant, PLACEMENT_CHANNEL, "affinity", one, two, two is Affinity.SEGMENT)


def _is_by_default(owed: Obligations) -> bool:
    """Return whether the tier limits only repeat what tiers and retention imply."""
    running_us = min(owed.active_max_us, owed.absolute_us or owed.active_max_us)
    own = (owed.absolute_us, default_within_us(owed.absolute_us), running_us)
    limits = zip(owed.tier_absolute_us, owed.tier_within_us, owed.tier_running_us, strict=True)
    return all(limit == (own if tier in owed.tiers else (0, 0, 0)) for tier, limit in zip(Tier, limits, strict=True))


def _said(field: str, value: object) -> str:
    if field in _IMPLIED and isinstance(value, tuple):
        named = [f"{tier} {span(each)}" for tier, each in zip(Tier, value, strict=True) if each]
        return ", ".join(named) or "never"
    if isinstance(value, tuple):
        return ", ".join(value) or ("none" if field == "match" else "never")
    return span(value) if field.endswith("_us") and isinstance(value, int) else str(value)


def _distinct_tenants(one: Policy, other: Policy, tenants: tuple[str, ...]) -> list[str]:
    """Return the tenants whose classification or labels may differ from others', and one tenant to represent the
    rest.
    """
    named = {rule.tenant for policy in (one, other) for rule in policy.classify}
    named |= {tenant.id for policy in (one, other) for tenant in policy.tenants if tenant.labels}
    rest = [tenant for tenant in tenants if tenant not in named]
    return [*(tenant for tenant in tenants if tenant in named), *rest[:1]]


def _levels(old: DecisionTable, new: DecisionTable, tenant: str, route: str | None) -> Iterator[DutyChange]:
    before = old.policy.classifications[old.classify(tenant, route, None, None)]
    after = new.policy.classifications[new.classify(tenant, route, None, None)]
    if before == after:
        return
    common = [name for name in old.policy.classifications if name in new.policy.classifications]
    same_order = common == [name for name in new.policy.classifications if name in common]
    loosens = None
    if same_order and before in common and after in common:
        loosens = common.index(after) < common.index(before)
    yield DutyChange(tenant, route or "any route", "classification", before, after, loosens)


def _labels(old: DecisionTable, new: DecisionTable, tenant: str, route: str | None) -> Iterator[DutyChange]:
    before, after = old.labels(tenant, route), new.labels(tenant, route)
    if before != after:
        fewer, more = set(after) < set(before), set(after) > set(before)
        loosens = True if fewer else False if more else None
        yield DutyChange(tenant, route or "any route", "labels", _labels_text(before), _labels_text(after), loosens)


def _labels_text(labels: Labels) -> str:
    return ", ".join(f"{name}={value}" for name, value in labels) or "none"
