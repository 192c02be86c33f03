"""Verdicts: whether the destruction of each ended custody is proved, and in time. Arrays in, arrays out.

1. This module reads no database and no clock; it is the arithmetic of coverage (rule 1 of `summary`-C3) and nothing
   else.
2. Of two ends of one custody the first counts: an incarnation's own before its successor's, then by sequence.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvcustody.audit.evidence.coverage.block_uses import (
    LEVELS,
    NEVER,
    BlockUses,
    ErasureDueTimes,
    Flags,
    ReceiptCells,
    unit_keys_of,
)
from kvcustody.audit.evidence.query.evidence_columns import Evidence
from kvcustody.audit.kinds.block_runs import Int64s, name_blocks

VERDICTS = ("in_time", "late", "failed", "missing", "unproven")
_UNPROVEN = "unproven"


class JudgedUnits(NamedTuple):
    """The custodies of one incarnation, laid flat, each with its verdict."""

    keys: Int64s
    blocks: Int64s
    row: Int64s
    due: Int64s
    verdict: Int64s
    level: Int64s
    bytes: Int64s
    lag: Int64s
    disputed: Flags
    writer: Int64s  # the residency that the block was handed to; NEVER where no leaf says so

    def kept(self, which: Flags) -> JudgedUnits:
        """Return the units for which `which` is true."""
        columns: list[Any] = [column[which] for column in self]
        return JudgedUnits(*columns)


class Custodies(NamedTuple):
    """Custodies by key, in order, with the content of their first end; `row` is that end's. Times are boot time."""

    keys: Int64s
    blocks: Int64s
    row: Int64s
    ended: Int64s
    retired: Int64s
    ceiling: Int64s  # NEVER where there is none
    claimed: Int64s  # the due time that the allocator recorded
    within: Int64s

    @property
    def bound(self) -> Int64s:
        """The latest possible hold ends: custody that ended early (eviction, erasure) ended its holds."""
        return np.minimum(self.ceiling, self.ended)


class UseTotals(NamedTuple):
    """Sums over all uses of each custody's exact block; `own` covers its owner's tenant, `any` every reader."""

    last_release: Int64s
    own_end: Int64s
    any_end: Int64s
    own_unasked: Int64s  # the same without erasures
    any_unasked: Int64s
    writer: Int64s  # the residency that the block was handed to; NEVER where no leaf says so


class Requests(NamedTuple):
    """Erasures whose effect lists a custody: its number, and when each was requested."""

    at: Int64s
    asked: Int64s


class Matched(NamedTuple):
    """For each custody over its shards: faults of its receipts, and what the valid ones prove."""

    missing: Flags  # a shard has no receipt at all
    failed: Flags  # a shard has receipts, none of which counts
    ended: Int64s  # the last of the first good receipts
    level: Int64s  # the weakest
    bytes: Int64s


def assess(
    ends: Evidence,
    uses: BlockUses,
    cells: ReceiptCells,
    shards: int,
    erasure_times: ErasureDueTimes,
    chosen: Flags | None = None,
) -> JudgedUnits:
    """Return a verdict for every custody that ended (docs/concepts/deletion-coverage.md).

    `chosen`: only of these rows of ends.
    """
    custodies = _first_ends(ends, chosen)
    named = partial(name_blocks, known_keys=uses.keys, known_blocks=uses.blocks)
    custodies = custodies._replace(blocks=named(custodies.keys, custodies.blocks))
    cells = cells._replace(blocks=named(cells.keys, cells.blocks))
    totals, requests = _use_totals(ends, uses, custodies), _requests(erasure_times, custodies)
    written = totals.writer < NEVER
    due = np.where(written, due_at(custodies, totals, requests), custodies.claimed)
    disputed = written & (due != custodies.claimed) & ~is_honest(custodies, totals, requests)

    proofs = proved(custodies, totals, cells, shards)
    since = np.maximum(due, custodies.retired)
    cause, causes = ends.codes("cause")
    dead = np.array([name.startswith(_UNPROVEN) for (name,) in causes], np.bool_)[cause]
    unproven = dead[custodies.row] | ~written | (shards == 0)
    late = proofs.ended > since + custodies.within
    destroyed = ~(unproven | proofs.failed | proofs.missing)
    return JudgedUnits(
        keys=custodies.keys,
        blocks=custodies.blocks,
        row=custodies.row,
        due=due,
        verdict=np.select([unproven, proofs.failed, proofs.missing, late], [4, 2, 3, 1], 0),
        level=np.where(destroyed, proofs.level, -1),
        bytes=proofs.bytes,
        lag=np.where(destroyed, np.maximum(0, proofs.ended - since), -1),
        disputed=disputed,
        writer=totals.writer,
    )


def due_at(custodies: Custodies, totals: UseTotals, requests: Requests) -> Int64s:
    """Return `max(last release, min(ceiling, end of the last hold, erasure))`; holds end with the custody at the
    latest.
    """
    due = _until(totals, custodies.bound, totals.own_end)
    # A reader of another tenant holds a segment's blocks and only refers to a grant's: the later end counts where it
    # is claimed, and never without such a reader's own leaf.
    later = _until(totals, custodies.bound, totals.any_end)
    due = np.where(custodies.claimed == later, later, due)
    # What an erasure covers was due at its request where that is claimed: never later than by its holds.
    is_claimed, sooner = _by_request(custodies, totals, requests, totals.own_end)
    due[requests.at[is_claimed]] = sooner[is_claimed]
    return due


def is_honest(custodies: Custodies, totals: UseTotals, requests: Requests) -> Flags:
    """Return where a recorded due time only ignores an erasure that the process had not heard of: late, but not
    false.
    """
    honest: Flags = custodies.claimed == _until(totals, custodies.bound, totals.own_unasked)
    honest |= custodies.claimed == _until(totals, custodies.bound, totals.any_unasked)
    is_claimed, _ = _by_request(custodies, totals, requests, totals.own_unasked)
    honest[requests.at[is_claimed]] = True
    return honest


def proved(custodies: Custodies, totals: UseTotals, cells: ReceiptCells, shards: int) -> Matched:
    """Return for each shard the first valid receipt: of that block and generation, good, begun after the last use."""
    last_use = np.maximum(totals.last_release, custodies.retired)
    return _matched(custodies.keys, custodies.blocks, last_use, cells, shards)


def _until(totals: UseTotals, bound: Int64s, end: Int64s) -> Int64s:
    until: Int64s = np.maximum(totals.last_release, np.minimum(bound, end))
    return until


def _by_request(custodies: Custodies, totals: UseTotals, requests: Requests, end: Int64s) -> tuple[Flags, Int64s]:
    """Of each request: what its custody was due by it, and whether that is what its end claims."""
    by_holds = np.minimum(custodies.bound, end)[requests.at]
    due = np.maximum(totals.last_release[requests.at], np.minimum(by_holds, requests.asked))
    return due == custodies.claimed[requests.at], due


def _first_ends(ends: Evidence, chosen: Flags | None) -> Custodies:
    """Of two ends of one custody the first (rule 2)."""
    in_order = _in_order(ends)
    if chosen is not None:
        in_order = in_order[chosen[ends.owner[in_order]]]
    keys, first = np.unique(unit_keys_of(ends)[in_order], return_index=True)
    first = in_order[first]
    row = ends.owner[first]
    names = ("ended_boot_us", "retired_boot_us", "ceiling_boot_us", "due_boot_us", "scrub_within_us")
    ended, retired, ceiling, claimed, within = (ends.column(name)[row] for name in names)
    ceiling = np.where(ceiling == 0, NEVER, ceiling)
    return Custodies(keys, ends.pairs.blocks[first], row, ended, retired, ceiling, claimed, within)


def _use_totals(ends: Evidence, uses: BlockUses, custodies: Custodies) -> UseTotals:
    size = len(custodies.keys)
    place, known = _place(custodies.keys, uses.keys)
    if not size:
        return UseTotals(*(np.zeros(0, np.int64) for _ in UseTotals._fields))
    known &= uses.blocks == custodies.blocks[place]
    own = known & ~_foreign(ends, uses, custodies.row[place])
    writer = np.full(size, NEVER)
    wrote = known & uses.written
    np.minimum.at(writer, place[wrote], uses.residency[wrote])

    def last(values: Int64s, which: Flags) -> Int64s:
        made = np.zeros(size, np.int64)
        np.maximum.at(made, place[which], values[which])
        return made

    return UseTotals(
        last(uses.released, known),
        last(uses.hold_end, own),
        last(uses.hold_end, known),
        last(uses.unasked_end, own),
        last(uses.unasked_end, known),
        writer,
    )


def _requests(asked: ErasureDueTimes, custodies: Custodies) -> Requests:
    place, covered = _place(custodies.keys, asked.keys)
    if len(custodies.keys):
        covered &= asked.blocks == custodies.blocks[place]
    return Requests(place[covered], asked.at[covered])


def _in_order(ends: Evidence) -> Int64s:
    """Return the flat entries in the order of rule 2."""
    columns = [ends.column(name) for name in ("part", "sequence", "by_successor")]
    rank = np.empty(ends.size, np.int64)
    rank[np.lexsort(columns)] = np.arange(ends.size)
    return np.argsort(rank[ends.owner], kind="stable")


def _foreign(ends: Evidence, uses: BlockUses, row: Int64s) -> Flags:
    """Which uses are by another tenant than the owner of the custody that they are about."""
    owner, names = ends.codes("tenant")
    numbers = {name: number for number, (name,) in enumerate(names)}
    count = len(uses.tenants)
    ids = np.fromiter(uses.tenants, np.int64, count)
    users = (numbers.setdefault(name, len(numbers)) for name, _ in uses.tenants.values())
    user, order = np.fromiter(users, np.int64, count), np.argsort(ids)
    place, known = _place(ids[order], uses.residency)
    who = np.where(known, user[order][place], -1) if count else np.full(len(place), -1)
    different: Flags = who != owner[row]
    return different


def _matched(keys: Int64s, blocks: Int64s, last_use: Int64s, cells: ReceiptCells, shards: int) -> Matched:
    size, width = len(keys), max(1, shards)
    place, hit = _place(keys, cells.keys)
    hit &= (cells.shard >= 0) & (cells.shard < width)
    cell = place * width + cells.shard
    any_receipt = np.zeros(size * width, np.bool_)
    any_receipt[cell[hit]] = True
    counts = hit & cells.good
    if size:
        counts &= (cells.blocks == blocks[place]) & (cells.started >= last_use[place])
    counts &= cells.ended >= cells.started
    chosen = np.flatnonzero(counts)
    by = (
        cells.bytes,
        cells.level,
        cells.ended,
        cell,
    )  # the last is the first key; of equals the weakest counts
    chosen = chosen[np.lexsort([column[chosen] for column in by])]
    taken, first = np.unique(cell[chosen], return_index=True)
    chosen = chosen[first]
    good = np.zeros(size * width, np.bool_)
    good[taken] = True
    ended = np.zeros(size * width, np.int64)
    ended[taken] = cells.ended[chosen]
    level = np.zeros(size * width, np.int64)
    level[taken] = cells.level[chosen]
    bytes_each = np.zeros(size * width, np.int64)
    bytes_each[taken] = cells.bytes[chosen]
    shape = (size, width)
    missing: Flags = np.any(~any_receipt.reshape(shape), axis=1)
    failed: Flags = np.any((any_receipt & ~good).reshape(shape), axis=1)
    return Matched(
        missing,
        failed,
        ended.reshape(shape).max(axis=1, initial=0),
        level.reshape(shape).min(axis=1, initial=len(LEVELS)),
        bytes_each.reshape(shape).sum(axis=1),
    )


def _place(keys: Int64s, wanted: Int64s) -> tuple[Int64s, Flags]:
    """Where each wanted key is among the sorted keys, and whether it is there at all."""
    if not len(keys):
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), np.bool_)
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return place, keys[place] == wanted
