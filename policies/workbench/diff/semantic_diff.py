"""The semantic difference of two decision tables: which answers change, whatever the documents look like.

1. Both tables are asked; only tenants, levels and instants that either can tell apart are asked about, and
   `~unlisted-1` stands for every unlisted tenant.
2. A level is compared by its name: one that a policy does not have is denied there.
3. A source that opens more than before is an opening even where another source had opened the same cell. So is one that
   crosses another label, and one that had nothing to open.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, pairwise, product
from typing import NamedTuple

from kvcustody.policies.document.model import Action, Grant, Scope, SegmentRule, Via
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
from kvcustody.policies.workbench.diff.model import CellChange, CellEffect, PolicyDiff, WidenedAccess
from kvcustody.policies.workbench.diff.obligation_changes import duty_changes
from kvcustody.policies.workbench.diff.setting_changes import setting_changes
from kvcustody.policies.workbench.request import DOMAIN_ACTIONS, FRESH, SHARED

_ABSENT = CellEffect(False, (DEFAULT_DENY,))
_Cell = tuple[Action, str, Scope, Via]


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
        """The effect of `answer` alone."""
        action, name, scope, via = cell
        level = self.levels.get(name)
        return (
            level is not None
            and self.table.decide(AccessRequest(action, reader, owner, level, scope, via, source), now_us).permitted
        )

    def may_open(self, cell: _Cell, reader: str, owner: str) -> bool:
        """Whether there is an instant at which this table may permit a cell across tenants, by any source."""
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
        """The labels that a grant or segment crosses."""
        rule = self.rules.get(source)
        return () if rule is None else rule.crosses

    def without_effect(self, source: str, reader: str) -> str:
        """Why a grant or segment opens nothing to this reader; empty where it may."""
        rule = self.rules.get(source)
        return "" if rule is None else "; ".join(self.barriers.of(rule, reader))


def diff(old: DecisionTable, new: DecisionTable) -> PolicyDiff:
    """Everything that changes from `old` to `new`, sorted; equal tables give an empty difference."""
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
    """The pairs across (and a tenant with itself, through its segments) for which either table has an entry."""
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
            one = before.answer(cell, reader, owner, start)
            two = after.answer(cell, reader, owner, start)
            if open_cell is not None and (
                one.permitted == two.permitted or (one, two) != (open_cell.before, open_cell.after)
            ):
                yield open_cell
                open_cell = None
            if one.permitted != two.permitted:
                action, name, scope, via = cell
                begun = start if open_cell is None else open_cell.start_us
                open_cell = CellChange(action, reader, owner, name, scope, via, begun, end, one, two)
        if open_cell is not None:
            yield open_cell


def _openings(
    before: _Side,
    after: _Side,
    reader: str,
    owner: str,
    asked: list[_Cell],
    edges: Mapping[str, set[int]],
) -> Iterator[WidenedAccess]:
    """The sources through which the reader may do more in `after` than through the same source in `before`."""
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
            for cell in asked
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
