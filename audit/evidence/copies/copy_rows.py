"""Copies off the device as rows count them: stored, ended and destroyed in each tier of a process.

1. A row is of one leaf and says how many copies it lists. How many different copies were destroyed is read from the
   leaves of those rows, as one copy may have several pieces of evidence.
2. What a process found of one before it (number 0) is no copy of its own, and counts nowhere here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import compress
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, func, select

from kvcustody.audit.kinds import CopiesEnded, log_of
from kvcustody.audit.store.database.snapshot import AsOf, is_in
from kvcustody.audit.store.schema.all_tables import has_leaf, is_leaf_of
from kvcustody.audit.store.schema.leaf_tables import copy_steps, transfer_decisions
from kvcustody.audit.store.schema.ledger import events, incarnations, logs

STORED, ENDED, DESTROYED = "copies-stored", "copies-ended", "copies-destroyed"
_OPEN_LEAVES = 50  # about two thousand copies


class CopyTotals(NamedTuple):
    """Totals of a tier from one incarnation's leaves. Ends that others recorded for it count."""

    stored: int = 0
    ended: int = 0
    destroyed: int = 0
    evidence: int = 0
    stored_bytes: int = 0
    ended_bytes: int = 0
    destroyed_bytes: int = 0


class OpenCopies(NamedTuple):
    """Copies of one leaf whose end nobody recorded."""

    tier: str
    tenant: str
    classification: str
    names: tuple[str, ...]
    numbers: tuple[int, ...]
    blocks_each: tuple[int, ...]
    bytes_each: tuple[int, ...]
    due_us: tuple[int, ...]

    def end(self, at_us: int, cause: str, ended_us: int, within_us: int, incarnation: str = "") -> CopiesEnded:
        """Return their end, recorded at `at_us` by whoever found them; `incarnation` is the process that stored
        them.
        """
        return CopiesEnded(
            at_us,
            self.tier,
            self.tenant,
            self.classification,
            cause,
            self.names,
            self.numbers,
            self.blocks_each,
            self.bytes_each,
            self.due_us,
            (ended_us,) * len(self.numbers),
            within_us,
            incarnation=incarnation,
        )

    def kept(self, fits: Callable[[tuple[int, str]], bool]) -> OpenCopies:
        """Return the copies whose number and name fit."""
        fitting = [fits(key) for key in zip(self.numbers, self.names, strict=True)]
        return self._replace(
            names=tuple(compress(self.names, fitting)),
            numbers=tuple(compress(self.numbers, fitting)),
            blocks_each=tuple(compress(self.blocks_each, fitting)),
            bytes_each=tuple(compress(self.bytes_each, fitting)),
            due_us=tuple(compress(self.due_us, fitting)),
        )


class HeldCopies(NamedTuple):
    """The copies that one tier of a process has by its own books: the number and name of every findable copy."""

    tier: str
    living: frozenset[tuple[int, str]]


class CopyDifferences(NamedTuple):
    """Copies open on record that the tier lacks, and copies that the tier has without a leaf."""

    lost: tuple[OpenCopies, ...]
    unrecorded: tuple[tuple[int, str], ...]


class DecidedTransfer(NamedTuple):
    """One decision whether to move copies, with predicted and measured times.

    `part_blocks`: how many came, where the outcome is partial. `latency_class` is the request's.
    """

    tenant: str
    action: str
    tier: str
    residency: int
    blocks: int
    bytes: int
    transfer_us: int
    recompute_us: int
    choice: str
    outcome: str
    actual_us: int
    reason: str
    part_blocks: int
    latency_class: str
    at_us: int


def copy_totals(connection: Connection, life: int, as_of: AsOf | None = None) -> dict[str, CopyTotals]:
    """Return the totals by tier; `life` is the incarnation's row."""
    column = copy_steps.c
    here = (column.incarnation == life, is_in(as_of, copy_steps), column.high > 0)
    sums = select(column.tier, column.step, func.sum(column.copies), func.sum(column.bytes))
    sums = sums.where(*here, has_leaf(copy_steps))
    totals: defaultdict[str, CopyTotals] = defaultdict(CopyTotals)
    for tier, step, copies, size in connection.execute(sums.group_by(column.tier, column.step)):
        fields = {
            STORED: {"stored": int(copies), "stored_bytes": int(size)},
            ENDED: {"ended": int(copies), "ended_bytes": int(size)},
        }
        totals[tier] = totals[tier]._replace(**fields.get(step, {"evidence": int(copies)}))
    gone: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for body in _bodies(connection, *here, column.step == DESTROYED):
        gone[body["tier"]].update(zip(body["numbers"], body["bytes_each"], strict=True))
    for tier, sizes in gone.items():
        totals[tier] = totals[tier]._replace(destroyed=len(sizes), destroyed_bytes=sum(sizes.values()))
    return dict(totals)


def open_copies(
    connection: Connection, life: int, after: tuple[str, int]
) -> tuple[list[OpenCopies], tuple[str, int] | None]:
    """Return copies without an end, from the next leaves behind `after` (tier, lowest number), and the last of these
    leaves.

    None: there are no more.
    """
    column = copy_steps.c
    tier, low = after
    mine = (column.incarnation == life, column.step == STORED)
    behind = (column.tier > tier) | ((column.tier == tier) & (column.low > low))
    query = (
        select(column.tier, column.low, column.high, events.c.leaf)
        .select_from(copy_steps.join(events, is_leaf_of(copy_steps)))
        .where(*mine, behind)
        .order_by(column.tier, column.low)
        .limit(_OPEN_LEAVES)
    )
    rows = connection.execute(query).all()
    open_lists = []
    for one in dict.fromkeys(row.tier for row in rows):
        some = [row for row in rows if row.tier == one]
        gone = _ended(connection, life, one, some[0].low, max(row.high for row in some))
        bodies = (orjson.loads(row.leaf) for row in some)
        open_lists += [copies for body in bodies if (copies := _without(body, gone)).numbers]
    following = (rows[-1].tier, rows[-1].low) if len(rows) == _OPEN_LEAVES else None
    return open_lists, following


def differing_copies(connection: Connection, life: int, held: HeldCopies) -> CopyDifferences:
    """Return the differences between a tier's books and its leaves. Leaves are only read if sums differ."""
    column = copy_steps.c
    mine = (column.incarnation == life, column.tier == held.tier)
    sums = select(column.step, func.sum(column.copies), func.sum(column.numbers))
    sums = sums.where(*mine, has_leaf(copy_steps))
    said = {row[0]: (int(row[1]), int(row[2])) for row in connection.execute(sums.group_by(column.step))}
    stored, ended = said.get(STORED, (0, 0)), said.get(ENDED, (0, 0))
    living = (len(held.living), sum(number for number, _ in held.living))
    if (stored[0] - ended[0], stored[1] - ended[1]) == living:
        return CopyDifferences((), ())
    every: list[OpenCopies] = []
    after: tuple[str, int] | None = (held.tier, 0)
    while after is not None and after[0] == held.tier:
        some, after = open_copies(connection, life, after)
        every += (one for one in some if one.tier == held.tier)
    on_record = {key for one in every for key in zip(one.numbers, one.names, strict=True)}
    lost = (one.kept(lambda key: key not in held.living) for one in every)
    return CopyDifferences(tuple(one for one in lost if one.numbers), tuple(sorted(held.living - on_record)))


def was_stored(connection: Connection, life: int, tier: str, number: int) -> bool:
    """Return whether a leaf says that a copy was stored."""
    column = copy_steps.c
    near = (column.incarnation == life, column.tier == tier, column.step == STORED)
    found = _bodies(connection, *near, column.low <= number, column.high >= number)
    return any(number in body["numbers"] for body in found)


def transfers_of(
    connection: Connection, incarnation: str, residency: int, *, tenant: str | None = None
) -> tuple[DecidedTransfer, ...]:
    """Return the decisions for one request, in order; 0 stands for stores, which belong to no request."""
    column = transfer_decisions.c
    life = select(incarnations.c.id).where(incarnations.c.uuid == incarnation).scalar_subquery()
    names = [column[name] for name in DecidedTransfer._fields]
    query = select(*names).where(
        column.incarnation == life, column.residency == residency, has_leaf(transfer_decisions)
    )
    if tenant is not None:
        log = select(logs.c.id).where(logs.c.name == log_of(tenant)).scalar_subquery()
        query = query.where(column.log == log)
    rows = connection.execute(query.order_by(column.at_us, column.log, column.idx))
    return tuple(DecidedTransfer(*row) for row in rows)


def _bodies(connection: Connection, *where: Any) -> Iterator[dict[str, Any]]:
    query = select(events.c.leaf).select_from(copy_steps.join(events, is_leaf_of(copy_steps))).where(*where)
    return map(orjson.loads, connection.scalars(query))


def _ended(connection: Connection, life: int, tier: str, low: int, high: int) -> set[int]:
    column = copy_steps.c
    near = (column.incarnation == life, column.tier == tier, column.step == ENDED)
    found = _bodies(connection, *near, column.high >= low, column.low <= high)
    return {number for body in found for number in body["numbers"]}


def _without(body: dict[str, Any], gone: set[int]) -> OpenCopies:
    whole = OpenCopies(
        body["tier"],
        body["tenant"],
        body["classification"],
        tuple(body["names"]),
        tuple(body["numbers"]),
        tuple(body["blocks_each"]),
        tuple(body["bytes_each"]),
        tuple(body["due_boot_us"]),
    )
    return whole.kept(lambda key: key[0] not in gone)
