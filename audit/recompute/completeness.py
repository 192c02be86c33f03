"""Completeness: what leaves name that no other leaf accounts for. Nothing of this can be seen in one custody alone.

L1 A residency that was released was opened. L2 A pool's generations come from one counter, so that each below the
highest was handed out; growth of residencies that are still open is not listed yet and counts here. L3 What a receipt
names has ended.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcustody.audit.recompute.history import End, History, LetGo, Life, Proof, Use


class Unaccounted(NamedTuple):
    """Residencies without an opening; generations that nothing lists as handed out; wiped custody without an end."""

    residencies: int = 0
    generations: int = 0
    receipts: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether everything is accounted for."""
        return not any(self)


def unaccounted(history: History) -> Unaccounted:
    """Over all incarnations."""
    found = [_of(life) for life in history.lives.values()]
    return Unaccounted(*(sum(column) for column in zip(*found, strict=True))) if found else Unaccounted()


def _of(life: Life) -> Unaccounted:
    named = {span.fact.residency for span in life.spans if type(span.fact) in (Use, LetGo)}
    named |= set(life.released)
    generations = receipts = 0
    pool, reached = -1, life.generation
    for segment in life.segments:
        if segment.pool != pool:
            pool, reached = segment.pool, life.generation
        size = segment.end - segment.first
        if segment.first > reached + 1:
            generations += segment.first - reached - 1
        for span in segment.of(Use):
            if span.fact.written:
                break
        else:
            generations += size
        if segment.of(Proof) and not segment.of(End):
            receipts += size
        reached = max(reached, segment.end - 1)
    return Unaccounted(len(named - set(life.people)), generations, receipts)
