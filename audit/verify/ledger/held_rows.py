"""Check who holds what: every block's custody, from hand-out to end, against the displayed figures.

1. A block's owner is the tenant that was handed it, or the one that a `blocks-assigned` leaf names. Its end names the
   same tenant.
2. By the figures (`read_figures.tenant_totals`), a tenant holds exactly its blocks without an end.
3. A process holds no more blocks than it has.
4. Single blocks are not compared for an ended process whose leaves retention dropped in part, or that recorded lost
   leaves itself. Its hand-outs and ends lie in different leaves. It holds nothing.
5. While a process that lost leaves runs, its holdings are unknown (`unknown_holdings`).
6. For a long process, blocks are compared some generations at a time, so that memory is bounded however long it ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import ColumnElement, Connection, Table, and_, false, func, or_, select

from kvcustody.audit.evidence.counters.read_figures import tenant_totals, uneven_lives
from kvcustody.audit.evidence.coverage.block_uses import unit_keys_of
from kvcustody.audit.evidence.processes.sequence_gaps import dropped_spans, recorded_losses
from kvcustody.audit.evidence.query.evidence_columns import (
    GENERATION_MASK,
    Assignments,
    Evidence,
    is_among,
    read,
    read_assignments,
    read_opened,
)
from kvcustody.audit.kinds.block_runs import Int64s
from kvcustody.audit.project import ASSIGNMENT
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import custody_ends, releases, residencies
from kvcustody.audit.store.schema.ledger import events, incarnations
from kvcustody.plurals import several

_LEAVES_AT_ONCE = 1_024
_RESIDENCIES_OF_PAGE, _RANGES_AT_MOST = 256, 50
_LIVES_AT_ONCE = 500


def unknown_holdings(connection: Connection) -> list[str]:
    """Return why it is unknown who holds what; empty if it is known."""
    return [
        f"who holds what: process `{life.uuid}` runs and lost leaves, as a gap on record says"
        for life in uneven_lives(connection)
        if life.is_running and life.has_losses
    ]


def wrong_holdings(connection: Connection, *, is_purged: bool) -> Iterator[str]:
    """Yield blocks that ended as another tenant's, and tenants whose holdings differ from the figures."""
    held: Counter[str] = Counter()
    for lives in _groups(connection, is_purged):
        yield from _of_lives(connection, lives, held)
    figures = {row.tenant: row.held_blocks for row in tenant_totals(connection)}
    for tenant in sorted(held.keys() | figures.keys()):
        blocks = figures.get(tenant, 0)
        if blocks is not None and held[tenant] != blocks:
            yield f"`counters` say that `{tenant}` holds {blocks} blocks, and the leaves {held[tenant]}"


class _Life(NamedTuple):
    """A process whose single blocks are compared: its row, and whether others' requests were assigned blocks."""

    id: int
    uuid: str
    blocks: int | None
    has_assignments: bool
    leaves: int


def _groups(connection: Connection, is_purged: bool) -> Iterator[list[_Life]]:
    """Yield the processes outside rule 4: long ones separately, short ones together, so that each query reads
    enough.
    """
    column, losing = incarnations.c, recorded_losses(connection)
    assigned = set(
        connection.scalars(select(events.c.incarnation).where(events.c.kind == ASSIGNMENT, has_leaf(events)).distinct())
    )
    count = select(events.c.incarnation, func.count()).group_by(events.c.incarnation)
    leaves = {row[0]: int(row[1]) for row in connection.execute(count)}
    group, size = list[_Life](), 0
    query = select(column.id, column.uuid, column.blocks, column.end).order_by(column.id)
    for life, uuid, blocks, end in connection.execute(query).all():
        is_cut = is_purged and end is not None and bool(dropped_spans(connection, life))
        if uuid in losing or is_cut:
            continue
        if group and (size + leaves.get(life, 0) > _LEAVES_AT_ONCE or len(group) == _LIVES_AT_ONCE):
            yield group
            group, size = [], 0
        group.append(_Life(life, uuid, blocks, life in assigned, leaves.get(life, 0)))
        size += leaves.get(life, 0)
    if group:
        yield group


_PLACE = (
    "log",
    "idx",
    "item",
)  # of a row's leaf: the order of blocks, made here, as a database sorts leaves on disk


class _Blocks(NamedTuple):
    """Blocks of some processes, in the order of processes and leaves: each one's key, and its tenant's number."""

    keys: Int64s
    tenants: Int64s
    bounds: Int64s

    @classmethod
    def of(cls, rows: Evidence, lives: Int64s, names: dict[str, int], generations: _Slice | None) -> _Blocks:
        """Return the blocks of these generations that these rows list."""
        codes = np.array([names.setdefault(name, len(names)) for name in rows.texts("tenant")], np.int64)
        keys, owner = unit_keys_of(rows), rows.owner
        if generations is not None:
            number = keys & GENERATION_MASK
            is_here = (number >= generations.first) & (number < generations.below)
            keys, owner = keys[is_here], owner[is_here]
        life, *place = (rows.column(name)[owner] for name in ("incarnation", *_PLACE) if name in rows.columns)
        order = np.lexsort((*reversed(place), life))
        bounds = np.searchsorted(life[order], np.append(lives, lives[-1:] + 1))
        return cls(keys[order], codes[owner][order], bounds)

    def of_life(self, place: int) -> tuple[Int64s, Int64s]:
        """Keys and tenants of one process."""
        part = slice(self.bounds[place], self.bounds[place + 1])
        return self.keys[part], self.tenants[part]


def _columns(of: Any) -> list[Any]:
    return [of.tenant, of.incarnation, *(of[name] for name in _PLACE if name in of)]


class _Found:
    """What was found of one process so far: blocks that ended as another's, and the living ones of each tenant."""

    def __init__(self) -> None:
        self.ended = Counter[tuple[str, str]]()
        self.living = Counter[str]()


def _of_lives(connection: Connection, lives: Sequence[_Life], held: Counter[str]) -> Iterator[str]:
    found = [_Found() for _ in lives]
    assigned = {life.id: read_assignments(connection, life.id) for life in lives if life.has_assignments}
    for generations in _slices(connection, lives):
        _compare(connection, lives, assigned, generations, found)
    for life, each in zip(lives, found, strict=True):
        for (of, by), blocks in sorted(each.ended.items()):
            yield f"{several(blocks, 'block')} of `{of}` ended as `{by}`'s in process `{life.uuid}`"
        living = each.living.total()
        if life.blocks is not None and living > life.blocks:
            yield f"process `{life.uuid}` holds {living} blocks, and has {life.blocks}"
        held.update(each.living)


class _Slice(NamedTuple):
    """Generations from `first` on and below `below`, and where their rows are.

    No row of an end has more than `span` generations. `residencies`: by table, those whose rows may list one of them.
    """

    first: int
    below: int
    span: int
    residencies: Mapping[Table, Sequence[range]]

    def rows(self, table: Table) -> ColumnElement[bool]:
        """Return the rows that may list one of these generations."""
        column = table.c
        in_reach = column.high >= self.first, column.low < self.below
        if table not in self.residencies:
            return and_(*in_reach, column.high < self.below + self.span)
        ranges = self.residencies[table]
        return and_(*in_reach, or_(false(), *(column.residency.between(each[0], each[-1]) for each in ranges)))


def _slices(connection: Connection, lives: Sequence[_Life]) -> list[_Slice | None]:
    """What is compared at once (rule 6); None is every generation. More than one is of one process alone."""
    parts = -(-sum(life.leaves for life in lives) // _LEAVES_AT_ONCE)
    if parts < 2:
        return [None]
    (life,) = lives
    pages = {
        table: _pages(connection, table, life.id, is_there)
        for table, is_there in ((residencies, has_leaf(residencies)), (releases, has_leaf(releases)))
    }
    column = custody_ends.c
    widest = select(func.max(column.high), func.max(column.high - column.low))
    high, span = connection.execute(widest.where(column.incarnation == life.id, has_leaf(custody_ends))).one()
    highest = max([int(high or 0), *(page.high for every in pages.values() for page in every)])
    step = highest // parts + 1
    bounds = [(step * part, step * (part + 1)) for part in range(parts)]
    return [
        _Slice(
            first,
            below,
            int(span or 0) + 1,
            {
                table: _ranges(page for page in every if page.high >= first and page.low < below)
                for table, every in pages.items()
            },
        )
        for first, below in bounds
    ]


class _Page(NamedTuple):
    """Some residencies of a process, one after the other, and the generations that their rows may list."""

    number: int
    low: int
    high: int


def _pages(connection: Connection, table: Table, life: int, is_there: ColumnElement[bool]) -> list[_Page]:
    column = table.c
    number = (column.residency // _RESIDENCIES_OF_PAGE).label("number")
    query = select(number, func.min(column.low), func.max(column.high))
    here = column.incarnation == life, column.high >= 0, is_there
    rows = connection.execute(query.where(*here).group_by(number).order_by(number))
    return [_Page(*map(int, row)) for row in rows]


def _ranges(pages: Iterable[_Page]) -> list[range]:
    """Return the residencies of these pages; neighbours as one range, and all as one if there are too many."""
    found: list[range] = []
    for page in pages:
        first = page.number * _RESIDENCIES_OF_PAGE
        begins = found.pop()[0] if found and found[-1].stop == first else first
        found.append(range(begins, first + _RESIDENCIES_OF_PAGE))
    return found if len(found) <= _RANGES_AT_MOST else [range(found[0][0], found[-1].stop)]


def _compare(
    connection: Connection,
    lives: Sequence[_Life],
    assigned: Mapping[int, Assignments],
    generations: _Slice | None,
    holdings: Sequence[_Found],
) -> None:
    opened, released, ended = residencies.c, releases.c, custody_ends.c
    ids = [life.id for life in lives]

    def of(table: Table) -> ColumnElement[bool]:
        here = table.c.incarnation.in_(ids)
        return and_(here) if generations is None else and_(here, generations.rows(table))

    _, handed = read_opened(connection, _columns(opened), of(residencies), ordered=False)
    written = of(releases) & released.written
    grown = read(connection, releases, _columns(released), written, ordered=False)
    ends = read(connection, custody_ends, _columns(ended), of(custody_ends), ordered=False)
    names: dict[str, int] = {}
    numbers = np.array(ids, np.int64)
    begun, more, gone = (_Blocks.of(rows, numbers, names, generations) for rows in (handed, grown, ends))
    labels = list(names)
    for place, life in enumerate(lives):
        keys, owner = map(np.concatenate, zip(begun.of_life(place), more.of_life(place), strict=True))
        if life.id in assigned:
            of_life = assigned[life.id]
            parties = np.array([names.setdefault(name, len(names)) for name, _ in of_life.parties], np.int64)
            at = of_life.of(keys)
            owner = np.where(at >= 0, parties[at], owner) if len(parties) else owner
            labels = list(names)
        _compare_life(keys, owner, gone.of_life(place), labels, holdings[place])


def _compare_life(keys: Int64s, owner: Int64s, ends: tuple[Int64s, Int64s], names: list[str], holdings: _Found) -> None:
    end_keys, end_owner = ends
    order = np.argsort(keys, kind="stable")
    keys, owner = keys[order], owner[order]
    if len(keys) and len(end_keys):
        at = np.minimum(np.searchsorted(keys, end_keys), len(keys) - 1)
        other = (keys[at] == end_keys) & (owner[at] != end_owner)
        pairs = Counter(zip(owner[at][other].tolist(), end_owner[other].tolist(), strict=True))
        for (of, by), blocks in pairs.items():
            holdings.ended[names[of], names[by]] += blocks
    living = owner[~is_among(keys, np.sort(end_keys))]
    for number, blocks in zip(*np.unique(living, return_counts=True), strict=True):
        holdings.living[names[int(number)]] += int(blocks)
