"""Verdicts on custodies: what their uses give as due, and what their receipts prove by then. One row a custody.

1. `due_at = max(last release, min(ceiling, end of the last hold, erasure))`; custody that ended early ended its
   holds.
2. Covered: every shard has a good receipt for the very block and generation that began after the last use and ended
   within `scrub_within` of `due_at` or, if later, of the fence's retirement.
3. What an erasure's effect lists was due when the erasure was asked for, where its end says so: never later than its
   holds give.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from recompute.columns import Flags, Groups, Numbers, distinct
from recompute.facts import LEVELS, OPEN

VERDICTS = ("in_time", "late", "failed", "missing", "unproven", "overdue")
IN_TIME, LATE, FAILED, MISSING, UNPROVEN, OVERDUE = range(len(VERDICTS))


class Ends(NamedTuple):
    """The end of each custody, as its leaf states it; `dead`: nothing is proved, as its process died."""

    due: Numbers
    ended: Numbers
    retired: Numbers
    ceiling: Numbers
    within: Numbers
    dead: Flags


class UseTotals(NamedTuple):
    """What all uses of each custody add up to, for the tenant that owned it."""

    last: Numbers  # release
    own: Numbers  # end of the owner's own holds
    every: Numbers  # of every reader's
    unasked_own: Numbers  # the same had nobody asked for an erasure
    unasked_every: Numbers
    writer: Numbers  # the residency it was handed to; OPEN: no leaf says that it was

    @property
    def written(self) -> Flags:
        """Whether a leaf says that the block was handed out."""
        found: Flags = self.writer < OPEN
        return found


class ErasedCustodies(NamedTuple):
    """Erasures that list a custody (its row), and when each was asked for."""

    row: Numbers
    at: Numbers


class Receipts(NamedTuple):
    """Receipts about custodies (their rows); `is_this`: of the very block."""

    row: Numbers
    is_this: Flags
    shard: Numbers
    started: Numbers
    ended: Numbers
    level: Numbers
    good: Flags
    size: Numbers


class Verdicts(NamedTuple):
    """`name` is a place in `VERDICTS`, `level` in `LEVELS`; lag and level are -1 where nothing proves destruction."""

    name: Numbers
    due: Numbers
    lag: Numbers
    level: Numbers
    size: Numbers
    disputed: Flags


def verdicts_on(
    ends: Ends, uses: UseTotals, asked: ErasedCustodies, receipts: Receipts, shards: int
) -> Verdicts:
    """A verdict for each custody; `shards` is 0 where no leaf says how many there are."""
    written = uses.written
    due = np.where(written, _due(ends, uses, asked), ends.due)
    disputed = written & (ends.due != due) & ~_unheard(ends, uses, asked)
    named, proved = _proved(receipts, np.maximum(uses.last, ends.retired), max(1, shards))
    destroyed = proved.shards == max(1, shards)
    destroyed &= written & ~ends.dead & (shards > 0)
    since = np.maximum(due, ends.retired)
    name = np.where(proved.ended > since + ends.within, LATE, IN_TIME)
    name[~destroyed] = np.where(named > proved.shards, FAILED, MISSING)[~destroyed]
    name[ends.dead | ~written | (shards == 0)] = UNPROVEN
    return Verdicts(
        name,
        due,
        np.where(destroyed, np.maximum(0, proved.ended - since), -1),
        np.where(destroyed, proved.level, -1),
        np.where(destroyed, proved.size, 0),
        disputed,
    )


class _Proved(NamedTuple):
    """Of each custody: how many shards have a receipt that counts, when the last ended, the weakest, all bytes."""

    shards: Numbers
    ended: Numbers
    level: Numbers
    size: Numbers


def _proved(receipts: Receipts, begun_after: Numbers, shards: int) -> tuple[Numbers, _Proved]:
    """How many shards of each custody have receipts, and what those that count prove: of each the first."""
    rows = len(begun_after)
    of_shard = (receipts.shard >= 0) & (receipts.shard < shards)
    cell = receipts.row * shards + np.where(of_shard, receipts.shard, 0)
    named = np.bincount(distinct(cell[of_shard]) // shards, minlength=rows)
    counts = of_shard & receipts.good & receipts.is_this
    counts &= (begun_after[receipts.row] <= receipts.started) & (receipts.started <= receipts.ended)
    which = np.flatnonzero(counts)
    if len(distinct(cell[which])) < len(which):  # of several of one shard the first, of equals the weakest
        order = np.lexsort((receipts.size[which], receipts.level[which], receipts.ended[which], cell[which]))
        which = which[order]
        which = which[np.diff(cell[which], prepend=-1) > 0]
    groups = Groups(receipts.row[which], rows)
    return named, _Proved(
        np.bincount(receipts.row[which], minlength=rows),
        groups.most(receipts.ended[which]),
        groups.least(receipts.level[which], len(LEVELS)),
        groups.total(receipts.size[which]),
    )


def _due(ends: Ends, uses: UseTotals, asked: ErasedCustodies) -> Numbers:
    """By its owner's own holds; by another rule where that is what is recorded.

    By every reader's holds, for a segment's readers hold, too; by the request of an erasure that covers it (rule 3).
    """
    bound = np.minimum(ends.ceiling, ends.ended)
    by_own = np.maximum(uses.last, np.minimum(bound, uses.own))
    other = ends.due == np.maximum(uses.last, np.minimum(bound, uses.every))
    row = asked.row
    by_request = np.maximum(uses.last[row], np.minimum(np.minimum(bound, uses.own)[row], asked.at))
    other[row[ends.due[row] == by_request]] = True
    return np.where(other, ends.due, by_own)


def _unheard(ends: Ends, uses: UseTotals, asked: ErasedCustodies) -> Flags:
    """Where a process may not have heard of an erasure yet: what it records is late by the erasure, not false."""
    bound = np.minimum(ends.ceiling, ends.ended)
    unheard: Flags = ends.due == np.maximum(uses.last, np.minimum(bound, uses.unasked_own))
    unheard |= ends.due == np.maximum(uses.last, np.minimum(bound, uses.unasked_every))
    row = asked.row
    by_request = np.maximum(uses.last[row], np.minimum(np.minimum(bound, uses.unasked_own)[row], asked.at))
    unheard[row[ends.due[row] == by_request]] = True
    return unheard
