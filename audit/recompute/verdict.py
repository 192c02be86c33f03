"""The verdict on one custody: what its uses give as due, and what its receipts prove by then.

D1  `due_at = max(last release, min(ceiling, end of the last hold, erasure))`; custody that ended early ended its holds.
D2  Covered: every shard has a good receipt for the very block and generation that began after the last use and ended
    within `scrub_within` of `due_at` or, if later, of the fence's retirement.
D3  What an erasure's effect lists was due when the erasure was asked for, where its end says so: never later than its
    holds give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcustody.audit.recompute.history import LEVELS, OPEN, End
from kvcustody.audit.recompute.spans import Span


class Verdict(NamedTuple):
    """In the words of `figures.Judged`."""

    name: str
    due: int
    lag: int | None
    level: str
    bytes: int
    disputed: bool


@dataclass(slots=True)
class Uses:
    """What all uses of one block and generation add up to, for the tenant that owned it."""

    last: int = 0  # release
    own: int = 0  # end of the owner's own holds
    every: int = 0  # of every reader's
    unasked_own: int = 0  # the same had nobody asked for an erasure
    unasked_every: int = 0
    writer: int = OPEN  # the residency it was handed to; OPEN: no leaf says that it was

    def add(
        self, residency: int, is_written: bool, is_own: bool, released: int, hold: int, erased: int
    ) -> None:
        """One use: when it was released, until when it held, and until when with erasures counted."""
        hold_end = erased if erased > released else released
        unasked_end = hold if hold > released else released
        if released > self.last:
            self.last = released
        if hold_end > self.every:
            self.every = hold_end
        if unasked_end > self.unasked_every:
            self.unasked_every = unasked_end
        if is_own:
            if hold_end > self.own:
                self.own = hold_end
            if unasked_end > self.unasked_own:
                self.unasked_own = unasked_end
        if is_written and residency < self.writer:
            self.writer = residency

    @property
    def written(self) -> bool:
        """A leaf says that the block was handed out."""
        return self.writer < OPEN


def verdict_on(
    end: End,
    uses: Uses,
    proofs: Sequence[Span],
    block: int,
    generation: int,
    shards: int,
    asked: Sequence[int],
) -> Verdict:
    """`proofs` are of this generation; `asked`, when erasures were asked for that list this custody."""
    due = _due(end, uses, asked) if uses.written else end.due
    disputed = uses.written and end.due != due and end.due not in _unheard(end, uses, asked)
    begun_after = max(uses.last, end.retired)
    best: dict[
        int, tuple[int, int, int]
    ] = {}  # of each shard the first receipt that counts: end, level, bytes
    about: set[int] = set()
    width = max(1, shards)
    for span in proofs:
        shard, started, ended, level, good, size = span.fact
        if not 0 <= shard < width:
            continue
        about.add(shard)
        if good and begun_after <= started <= ended and span.at(generation) == block:
            item = (ended, level, size)
            best[shard] = min(item, best[shard]) if shard in best else item
    if end.dead or not uses.written or not shards:
        return Verdict("unproven", due, None, "", 0, disputed)
    if len(best) < width:
        return Verdict("failed" if len(about) > len(best) else "missing", due, None, "", 0, disputed)
    ended, levels, sizes = zip(*best.values(), strict=True)
    destroyed, since = max(ended), max(due, end.retired)
    return Verdict(
        "late" if destroyed > since + end.within else "in_time",
        due,
        max(0, destroyed - since),
        LEVELS[min(levels)],
        sum(sizes),
        disputed,
    )


def _due(end: End, uses: Uses, asked: Sequence[int]) -> int:
    """By its owner's own holds; by another rule where that is what is recorded.

    By every reader's holds, for a segment's readers hold, too; by the request of an erasure that covers it (D3).
    """
    by_own = max(uses.last, min(end.ceiling, uses.own, end.ended))
    if end.due == by_own:
        return by_own
    others = [max(uses.last, min(end.ceiling, uses.every, end.ended))]
    others += [max(uses.last, min(end.ceiling, uses.own, end.ended, at)) for at in asked]
    return end.due if end.due in others else by_own


def _unheard(end: End, uses: Uses, asked: Sequence[int]) -> list[int]:
    """What a process may record that has not heard of an erasure yet: it is late by the erasure, and not false (D3)."""
    ends = [uses.unasked_own, uses.unasked_every, *(min(uses.unasked_own, at) for at in asked)]
    return [max(uses.last, min(end.ceiling, end.ended, hold)) for hold in ends]
