"""Verdicts: for every custody that ended, whether its destruction is proved, and in time. Arrays in, arrays
out.

1. This module reads no database and no clock; it is the arithmetic of coverage (rule 1 of `summary`-C3) and nothing
   else.
2. Of two ends of one custody the first counts: an incarnation's own before its successor's, then by sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvcustody.audit.coverage.block_uses import LEVELS, NEVER, BlockUses, Flags, ReceiptCells, unit_keys_of
from kvcustody.audit.coverage.erasure_due_times import ErasureDueTimes
from kvcustody.audit.events.block_runs import Int64s
from kvcustody.audit.query.evidence_columns import Evidence

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
        """The units for which `which` is true."""
        columns: list[Any] = [column[which] for column in self]
        return JudgedUnits(*columns)


class Matched(NamedTuple):
    """Per custody, over its shards: what is wrong with the receipts, and what those that count prove."""

    missing: Flags  # a shard has no receipt at all
    failed: Flags  # a shard has receipts, none of which counts
    ended: Int64s  # the last of the first good receipts
    level: Int64s  # the weakest
    bytes: Int64s


def assess(
    ends: Evidence, uses: BlockUses, cells: ReceiptCells, shards: int, asked: ErasureDueTimes
) -> JudgedUnits:
    """A verdict for every custody that ended (rule 1 of `summary`–rule 3 of `summary`): arrays in, arrays out."""
    in_order = _in_order(ends)
    keys, first = np.unique(unit_keys_of(ends)[in_order], return_index=True)
    first = in_order[first]
    blocks, row = ends.pairs.blocks[first], ends.owner[first]
    size = len(keys)
    ended, retired = ends.column("ended_boot_us")[row], ends.column("retired_boot_us")[row]
    ceiling, claimed = ends.column("ceiling_boot_us")[row], ends.column("due_boot_us")[row]
    within = ends.column("scrub_within_us")[row]
    ceiling = np.where(ceiling == 0, NEVER, ceiling)

    place, known = _place(keys, uses.keys)
    known &= uses.blocks == blocks[place] if size else known
    last_release, own_end = np.zeros(size, np.int64), np.zeros(size, np.int64)
    np.maximum.at(last_release, place[known], uses.released[known])
    foreign = known & _foreign(ends, uses, row[place]) if size else known
    own = known & ~foreign
    np.maximum.at(own_end, place[own], uses.hold_end[own])
    any_end = own_end.copy()
    np.maximum.at(any_end, place[foreign], uses.hold_end[foreign])
    wrote = known & uses.written
    writer = np.full(size, NEVER)
    np.minimum.at(writer, place[wrote], uses.residency[wrote])
    written = writer < NEVER

    # Custody that ended early (eviction, erasure) ended its holds; ending late moves nothing.
    own_due = np.minimum(np.minimum(ceiling, own_end), ended)
    due = np.maximum(last_release, own_due)
    # A reader of another tenant holds a segment's blocks and only refers to a grant's: the later end counts where it
    # is claimed, and never without such a reader's own leaf.
    later = np.maximum(last_release, np.minimum(np.minimum(ceiling, any_end), ended))
    due = np.where(claimed == later, later, due)
    # What an erasure covers was due at its request where that is claimed: never later than by its holds.
    unasked, any_unasked = np.zeros(size, np.int64), np.zeros(size, np.int64)
    np.maximum.at(unasked, place[own], uses.unasked_end[own])
    np.maximum.at(any_unasked, place[known], uses.unasked_end[known])
    place_asked, covered = _place(keys, asked.keys)
    covered &= asked.blocks == blocks[place_asked] if size else covered
    at, asked_at = place_asked[covered], asked.at[covered]
    sooner = np.maximum(last_release[at], np.minimum(own_due[at], asked_at))
    due[at[sooner == claimed[at]]] = sooner[sooner == claimed[at]]
    # A process that has not heard of an erasure yet records the due time of its holds: late by the erasure, not false.
    bound = np.minimum(ceiling, ended)
    honest = claimed == np.maximum(last_release, np.minimum(bound, unasked))
    honest |= claimed == np.maximum(last_release, np.minimum(bound, any_unasked))
    heard = np.maximum(last_release[at], np.minimum(np.minimum(bound, unasked)[at], asked_at))
    honest[at[heard == claimed[at]]] = True
    due = np.where(written, due, claimed)
    last_use = np.maximum(last_release, retired)

    found = _matched(keys, blocks, last_use, cells, shards)
    late = found.ended > np.maximum(due, retired) + within
    cause, causes = ends.codes("cause")
    dead = np.array([name.startswith(_UNPROVEN) for (name,) in causes], np.bool_)[cause]
    unproven = dead[row] | ~written | (shards == 0)
    verdict = np.select([unproven, found.failed, found.missing, late], [4, 2, 3, 1], 0)
    destroyed = ~(unproven | found.failed | found.missing)
    lag = np.where(destroyed, np.maximum(0, found.ended - np.maximum(due, retired)), -1)
    return JudgedUnits(
        keys=keys,
        blocks=blocks,
        row=row,
        due=due,
        verdict=verdict,
        level=np.where(destroyed, found.level, -1),
        bytes=found.bytes,
        lag=lag,
        disputed=written & (due != claimed) & ~honest,
        writer=writer,
    )


def _in_order(ends: Evidence) -> Int64s:
    """The flat entries in the order of rule 2."""
    columns = [ends.column(name) for name in ("part", "sequence", "by_successor")]
    rank = np.empty(ends.size, np.int64)
    rank[np.lexsort(columns)] = np.arange(ends.size)
    return np.argsort(rank[ends.owner], kind="stable")


def _foreign(ends: Evidence, uses: BlockUses, row: Int64s) -> Flags:
    """Which uses are by another tenant than the owner of the custody that they are about."""
    owner, names = ends.codes("tenant")
    numbers = {name: number for number, (name,) in enumerate(names)}
    ids, where = np.unique(uses.residency, return_inverse=True)
    users = [uses.tenants.get(item, ("", ""))[0] for item in ids.tolist()]
    user = np.array([numbers.setdefault(name, len(numbers)) for name in users], np.int64)
    different: Flags = user[where] != owner[row]
    return different


def _matched(keys: Int64s, blocks: Int64s, last_use: Int64s, cells: ReceiptCells, shards: int) -> Matched:
    """Of each shard's receipts the first that counts: right block, good, begun after the last use."""
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
