"""Who used which block until when, and which receipts name it: the flat evidence behind coverage.

1. A use is one residency with one block it wrote, or attached at its admission or later. It lasts until the residency's
   release, or until the residency let go of that block early.
2. Its hold ends at its deadline, at the earlier deadline that a narrowing act gave it, or at an erasure that selects
   the residency. A residency without a hold ends its claim when it is released.
3. The leaf of an erasure's effect, one for each process, records what it covers. The leaf of its request records when
   it was requested. No leaf of a residency is needed. So erasures by domain or model count, and so do those of people
   with several pseudonyms.
4. If a residency has two releases, the process's own counts, not its successor's. A process that was wrongly taken for
   dead reports itself when a request left.
5. A use whose release was never recorded never ends. If a residency let go of a block and used it again later, the use
   lasts until it let go again or was released.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Connection, Table, and_, case, func, select

from kvcustody.audit.evidence.query.evidence_columns import (
    Assignments,
    Evidence,
    assignments_of,
    read,
    read_assignments,
    read_opened,
    unit_keys,
)
from kvcustody.audit.evidence.query.narrowed_holds import read_narrowed
from kvcustody.audit.kinds.block_runs import Int64s, name_blocks
from kvcustody.audit.store.database.snapshot import AsOf, is_in
from kvcustody.audit.store.schema.all_tables import has_leaf, is_leaf_of
from kvcustody.audit.store.schema.leaf_tables import (
    attachments,
    erasure_effects,
    erasures,
    receipts,
    releases,
    residencies,
)
from kvcustody.audit.store.schema.ledger import events

Flags = NDArray[np.bool_]

LEVELS = ("launched", "retired", "sampled", "full")
UNKNOWN = "unknown"
NEVER = np.int64(1) << 62


class LeafPlaces(NamedTuple):
    """The places of leaves that name blocks: flat keys and blocks, each with the log id and idx of its leaf."""

    keys: Int64s
    blocks: Int64s
    owner: Int64s
    logs: Int64s
    idx: Int64s


class BlockUses(NamedTuple):
    """Every use of every block: one flat entry for each (residency, block), written or attached."""

    keys: Int64s
    blocks: Int64s
    written: Flags
    released: Int64s  # NEVER while the residency is open
    hold_end: Int64s
    unasked_end: Int64s  # the same without erasures: all that a process knew before it heard of one
    residency: Int64s
    tenants: dict[int, tuple[str, str]]  # residency → tenant, classification
    places: tuple[LeafPlaces, ...]
    openings: Evidence  # the rows of openings, without their runs
    assigned: Assignments  # blocks whose custody is not their writer's

    def owners(self, keys: Int64s, writers: Int64s) -> tuple[Int64s, list[tuple[str, str]]]:
        """Return the owner of each key's custody as a place in a list of tenants and classifications; else its
        writer's.
        """
        parties, unknown = self.assigned.parties, (UNKNOWN, UNKNOWN)
        numbers: dict[tuple[str, str], int] = {}
        owner = np.empty(len(keys), np.int64)
        places = zip(self.assigned.of(keys).tolist(), writers.tolist(), strict=True)
        for at, (place, writer) in enumerate(places):
            who = self.tenants.get(writer, unknown) if place < 0 else parties[place]
            owner[at] = numbers.setdefault(who, len(numbers))
        return owner, [*numbers]


class ReceiptCells(NamedTuple):
    """Receipts laid flat: one entry for each (receipt, block)."""

    keys: Int64s
    blocks: Int64s
    shard: Int64s
    started: Int64s
    ended: Int64s
    level: Int64s
    good: Flags
    bytes: Int64s
    places: LeafPlaces


class ErasureDueTimes(NamedTuple):
    """Flat entries for each (erasure, block) in one process: the unit, and the boot time at which its end was
    requested.
    """

    keys: Int64s
    blocks: Int64s
    at: Int64s


def places_of(found: Evidence) -> LeafPlaces:
    """Return the places of evidence whose rows have the columns `log` and `idx`."""
    return LeafPlaces(unit_keys_of(found), found.pairs.blocks, found.owner, found.column("log"), found.column("idx"))


class ErasureAsked(NamedTuple):
    """A request to erase: the selection, and the time in UTC."""

    erasure: str
    at_us: int
    selector: str
    tenant: str | None
    subject: str | None
    session: str | None


class UseRows(NamedTuple):
    """The leaves' statements about one incarnation's residencies by kind; `offset_us` turns its boot time into UTC.

    `narrowed` by residency: when an act ended its hold at the latest, in boot time. `erasures` in their order.
    """

    offset_us: int
    wrote: Evidence
    opened: Evidence
    handed: Evidence
    joined: Evidence
    narrowed: dict[int, int]
    erasures: Sequence[ErasureAsked]
    assigned: Assignments


def read_uses(
    connection: Connection,
    life: Any,
    as_of: AsOf | None = None,
    *,
    with_rules: bool = False,
    among: Collection[int] | None = None,
) -> BlockUses:
    """Return who used which block until when, from the rows of residencies and releases and the runs in their
    leaves.

    `among`: only the uses of these residencies, at most a few thousand, without what is assigned to others.
    """

    def of_life(table: Table) -> ColumnElement[bool]:
        here = and_(table.c.incarnation == life.id, is_in(as_of, table))
        return here if among is None else and_(here, table.c.residency.in_(among))

    column = releases.c
    wrote = read(
        connection,
        releases,
        (
            *(column.log, column.idx, column.residency, column.released_us),
            *(column.hold_boot_us, column.final, column.written, column.part),
            case((events.c.incarnation == column.incarnation, 0), else_=1).label("by_successor"),
        ),
        of_life(releases),
        ordered=False,
    )
    column_in = residencies.c
    opened, handed = read_opened(
        connection,
        (
            *(column_in.log, column_in.idx, column_in.residency, column_in.part, column_in.opened_boot_us),
            *(column_in.tenant, column_in.classification, column_in.subject, column_in.session),
            *((column_in.absolute_boot_us, column_in.attached_blocks, events.c.at_us) if with_rules else ()),
        ),
        of_life(residencies),
        ordered=False,
        with_rules=with_rules,
    )
    joined = read(
        connection,
        attachments,
        (attachments.c.log, attachments.c.idx, attachments.c.residency, attachments.c.attached_boot_us),
        of_life(attachments),
        ordered=False,
    )
    narrowed = read_narrowed(connection, life.id, as_of, among=among)
    return uses_of(
        UseRows(
            *(life.offset_us, wrote, opened, handed, joined, narrowed, _read_erasures(connection, as_of)),
            assignments_of(*Evidence.no_lists(), [])
            if among is not None
            else read_assignments(connection, life.id, as_of),
        )
    )


def uses_of(rows: UseRows) -> BlockUses:
    """Return who used which block until when, by the rules of this module."""
    wrote, opened, handed, joined = rows.wrote, rows.opened, rows.handed, rows.joined
    erased = _erased(rows)
    first_parts = (opened.column("part") == 1).tolist()
    people = zip(opened.texts("tenant"), opened.texts("classification"), strict=True)
    numbered = zip(opened.column("residency").tolist(), people, strict=True)
    tenants = dict(compress(numbered, first_parts))

    wrote_residency = wrote.column("residency")
    # A successor's release of what a dead process left open is on another boot clock: UTC is common to both.
    wrote_released = wrote.column("released_us") - rows.offset_us
    wrote_hold = wrote.column("hold_boot_us")
    wrote_flag = wrote.column("written").astype(np.bool_)
    # Openings first, then what was attached later: both last until the release of their residency.
    opened_residency = np.concatenate((opened.column("residency"), joined.column("residency")))
    last = wrote.column("final").astype(np.bool_) & (wrote.column("part") == 1)
    last = _own_first(last, wrote.column("by_successor") > 0, wrote_residency)
    opened_released, opened_hold = _left(
        opened_residency, wrote_residency[last], wrote_released[last], wrote_hold[last]
    )

    parts = (wrote, opened, handed, joined)
    # Attached and handed out are two lists of the same openings.
    begun = np.concatenate((opened.owner, handed.owner, joined.owner + opened.size))
    keys = np.concatenate([unit_keys_of(part) for part in parts])
    residency = np.concatenate((wrote_residency[wrote.owner], opened_residency[begun]))
    released = np.concatenate((wrote_released[wrote.owner], opened_released[begun]))
    hold = np.concatenate((wrote_hold[wrote.owner], opened_hold[begun]))
    if not wrote_flag.all():
        starts = np.concatenate((opened.column("opened_boot_us"), joined.column("attached_boot_us")))
        since = np.concatenate((np.zeros(len(wrote.owner), np.int64), starts[begun]))
        gone = _ReleasedRuns(wrote, ~wrote_flag, wrote_released, wrote_hold)
        released, hold = _dropped(gone, keys=keys, residency=residency, since=since, released=released, hold=hold)
    hold = np.minimum(hold, _limits(residency, rows.narrowed))
    unasked_end = np.maximum(released, hold)
    hold_end = np.maximum(released, np.minimum(hold, _limits(residency, erased)))
    given = [np.full(len(part.owner), part is handed) for part in (opened, handed, joined)]
    written = np.concatenate((wrote_flag[wrote.owner], *given))
    blocks = np.concatenate([part.pairs.blocks for part in parts])
    blocks = name_blocks(keys, blocks, keys[written], blocks[written])
    places = tuple(map(places_of, parts))
    return BlockUses(
        *(keys, blocks, written, released, hold_end, unasked_end, residency, tenants, places, opened.bare()),
        rows.assigned,
    )


def _limits(residency: Int64s, latest: dict[int, int]) -> Int64s:
    """For each entry until when its residency's hold lasts at most; NEVER where nothing limits it."""
    if not latest:
        return np.full(len(residency), NEVER)
    ids, where = np.unique(residency, return_inverse=True)
    found: Int64s = np.array([latest.get(int(item), int(NEVER)) for item in ids], np.int64)[where]
    return found


def read_models(connection: Connection, incarnation: int, as_of: AsOf | None = None) -> dict[int, str]:
    """Return the model of every residency whose leaf names one."""
    column = residencies.c
    query = (
        select(column.residency, events.c.leaf)
        .select_from(residencies.join(events, is_leaf_of(residencies)))
        .where(column.incarnation == incarnation, column.part == 1, is_in(as_of, residencies))
    )
    found = {row.residency: orjson.loads(row.leaf).get("model", "") for row in connection.execute(query)}
    return {residency: model for residency, model in found.items() if model}


def _own_first(last: Flags, by_successor: Flags, residency: Int64s) -> Flags:
    """Which releases count (rule 4)."""
    theirs = last & by_successor
    if not theirs.any():
        return last
    kept: Flags = last & ~(theirs & np.isin(residency, residency[last & ~by_successor]))
    return kept


def _left(of: Int64s, residency: Int64s, at: Int64s, until: Int64s) -> tuple[Int64s, Int64s]:
    """When each residency `of` was released, and until when it holds: the latest of its releases' leaves."""
    ids, where = np.unique(residency, return_inverse=True)
    released, hold = np.zeros(len(ids), np.int64), np.zeros(len(ids), np.int64)
    np.maximum.at(released, where, at)
    np.maximum.at(hold, where, until)
    if not len(ids):
        return np.full(len(of), NEVER), np.zeros(len(of), np.int64)
    place = np.minimum(np.searchsorted(ids, of), len(ids) - 1)
    known = ids[place] == of
    return np.where(known, released[place], NEVER), np.where(known, hold[place], 0)


def read_receipts(connection: Connection, incarnation: int, ends: Evidence, as_of: AsOf | None = None) -> ReceiptCells:
    """Return the receipts that name any of these generations, without boot scrubs."""
    column = receipts.c
    evidence = read(
        connection,
        receipts,
        (
            column.log,
            column.idx,
            column.shard,
            column.started_boot_us,
            column.ended_boot_us,
            column.level,
            column.verified,
            column.result,
            column.bytes,
            column.blocks,
        ),
        and_(
            column.incarnation == incarnation,
            column.high > 0,
            _window(receipts, ends),
            is_in(as_of, receipts),
        ),
        ordered=False,
    )
    return cells_of(evidence)


def cells_of(evidence: Evidence) -> ReceiptCells:
    """Return receipts laid flat. One of level `sampled` that read no block counts as `retired`, which is all it
    shows.
    """
    rank = {name: number for number, name in enumerate(LEVELS)}
    code, labels = evidence.codes("level", "result")
    level = np.array([rank.get(name, 0) for name, _ in labels], np.int64)[code]
    unread = (level == LEVELS.index("sampled")) & (evidence.column("verified") == 0)
    level = np.where(unread, LEVELS.index("retired"), level)
    good = np.array([result == "ok" and name in rank for name, result in labels], np.bool_)[code]
    bytes_each = evidence.column("bytes") // np.maximum(1, evidence.column("blocks"))
    of = evidence.owner
    return ReceiptCells(
        unit_keys_of(evidence),
        evidence.pairs.blocks,
        evidence.column("shard")[of],
        evidence.column("started_boot_us")[of],
        evidence.column("ended_boot_us")[of],
        level[of],
        good[of],
        bytes_each[of],
        places_of(evidence),
    )


def read_erasure_due_times(connection: Connection, life: Any, as_of: AsOf | None = None) -> ErasureDueTimes:
    """Return what the erasures of one incarnation covered, without those whose request is not in the ledger."""
    column = erasure_effects.c
    asked_us = (
        select(func.min(erasures.c.at_us))
        .where(erasures.c.erasure == column.erasure, is_in(as_of, erasures), has_leaf(erasures))
        .scalar_subquery()
    )
    here = and_(column.incarnation == life.id, asked_us.is_not(None), is_in(as_of, erasure_effects))
    found = read(connection, erasure_effects, (asked_us.label("asked_us"),), here, ordered=False)
    return due_times_of(found, life.offset_us)


def due_times_of(found: Evidence, offset_us: int) -> ErasureDueTimes:
    """Return flat entries of effects whose rows state when each was requested (`asked_us`, UTC)."""
    at = found.column("asked_us") - offset_us
    return ErasureDueTimes(unit_keys_of(found), found.pairs.blocks, at[found.owner].astype(np.int64))


class _ReleasedRuns(NamedTuple):
    """Leaves of releases, which of them are of blocks let go of early, and by row: when, and held until when."""

    leaves: Evidence
    early: Flags
    at: Int64s
    hold: Int64s


def _dropped(
    gone: _ReleasedRuns, *, keys: Int64s, residency: Int64s, since: Int64s, released: Int64s, hold: Int64s
) -> tuple[Int64s, Int64s]:
    """Return the uses of blocks that a residency released early, which end then and not with the residency (rule 4)."""
    owner = gone.leaves.owner
    mine = gone.early[owner]
    theirs, whose = unit_keys_of(gone.leaves)[mine], gone.leaves.column("residency")
    early: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for key, number in zip(theirs.tolist(), owner[mine].tolist(), strict=True):
        times = (int(gone.at[number]), int(gone.hold[number]))
        early.setdefault((int(whose[number]), key), []).append(times)
    released, hold = released.copy(), hold.copy()
    for place in np.flatnonzero(np.isin(keys, theirs)).tolist():
        found = early.get((int(residency[place]), int(keys[place])), ())
        after = [times for times in found if times[0] >= since[place]]
        if after:
            released[place], hold[place] = (max(column) for column in zip(*after, strict=True))
    return released, hold


def _read_erasures(connection: Connection, as_of: AsOf | None) -> list[ErasureAsked]:
    column = erasures.c
    names = (column.erasure, column.at_us, column.selector, column.tenant, column.subject, column.session)
    query = select(*names).where(is_in(as_of, erasures), has_leaf(erasures)).order_by(column.at_us)
    return [ErasureAsked(*row) for row in connection.execute(query)]


def _erased(rows: UseRows) -> dict[int, int]:
    """For each residency that an erasure selects, when its hold ended at the latest."""
    hold_ends: dict[int, int] = {}
    if not rows.erasures:
        return hold_ends
    opened = rows.opened
    before, residency = opened.column("opened_boot_us"), opened.column("residency")
    whole = opened.column("part") == 1
    who = {name: np.array(opened.texts(name), object) for name in ("tenant", "subject", "session")}
    for erasure in rows.erasures:
        if erasure.selector not in who:
            continue  # domains and models are not in a residency's leaf; their ends carry the cause
        at_boot_us = erasure.at_us - rows.offset_us
        chosen = whole & (before < at_boot_us)
        if erasure.tenant is not None:
            chosen &= who["tenant"] == erasure.tenant
        if erasure.selector != "tenant":
            chosen &= who[erasure.selector] == getattr(erasure, erasure.selector)
        for item in residency[chosen].tolist():
            hold_ends.setdefault(item, at_boot_us)
    return hold_ends


def unit_keys_of(found: Evidence) -> Int64s:
    """Return the (pool, generation) key of every flat entry."""
    return unit_keys(found.pairs.pools, found.pairs.generations)


def _window(table: Any, ends: Evidence) -> ColumnElement[bool]:
    """Rows whose generations can meet those of the ends (others are not read)."""
    generations = ends.pairs.generations
    low, high = (int(generations.min()), int(generations.max())) if len(generations) else (0, -1)
    return and_(table.c.high >= low, table.c.low <= high)
