"""Spans: the run lists of leaves, read from their JSON form, and which of them meet at a generation.

D1 A run `[generation, deltas, counts, pool]` gives its i-th block the generation `generation + i`; one at generation 0
is memory that never was in custody and is left out.
D2 `segments` cuts the generations of a pool where any span begins or ends: between two cuts the same spans are there
throughout, so that one look is enough for every custody in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from kvcustody.errors import LedgerError


class Span(NamedTuple):
    """Blocks at consecutive generations from `first` on, and the leaf that says something about them."""

    pool: int
    first: int
    blocks: Sequence[int]
    fact: Any

    @property
    def end(self) -> int:
        """The generation after the last."""
        return self.first + len(self.blocks)

    def at(self, generation: int) -> int:
        """The block that has this generation here."""
        return self.blocks[generation - self.first]

    def part(self, first: int, end: int) -> Sequence[int]:
        """The blocks of the generations from `first` up to and without `end`."""
        return self.blocks[first - self.first : end - self.first]


class Segment(NamedTuple):
    """Generations from `first` up to and without `end`, and the spans that cover all of them."""

    pool: int
    first: int
    end: int
    spans: Sequence[Span]


def spans_of(items: Sequence[Sequence[Any]], fact: Any) -> Iterator[Span]:
    """The spans of one run list of a leaf; raises `LedgerError` where it is malformed."""
    try:
        for item in items:
            first = int(item[0])
            if first == 0:
                continue
            pool = int(item[3]) if len(item) > 3 else 0
            blocks = _blocks(item[1], item[2])
            if first < 0 or pool < 0 or not blocks or min(blocks) < 0:
                raise ValueError("a negative number, or no block")
            yield Span(pool, first, blocks, fact)
    except (ValueError, TypeError, IndexError) as problem:
        raise LedgerError(f"a run in a leaf is malformed: {problem}") from None


def _blocks(deltas: Sequence[int], counts: Sequence[int]) -> Sequence[int]:
    if len(deltas) == 2 and counts and deltas[1] == 1 and counts[0] == 1:  # the rule: blocks in a row
        return range(deltas[0], deltas[0] + 1 + counts[1])
    if len(deltas) == 1 and counts and deltas[0] == 1:
        return range(1, 1 + counts[0])
    if counts and len(counts) != len(deltas):
        raise ValueError("counts do not match deltas")
    blocks: list[int] = []
    here = 0
    for place, delta in enumerate(deltas):
        for _ in range(counts[place] if counts else 1):
            here += delta
            blocks.append(here)
    return blocks


def segments(spans: Sequence[Span]) -> Iterator[Segment]:
    """Every segment that at least one span covers, by pool and generation."""
    begin = sorted(spans, key=attrgetter("pool", "first"))
    here: list[Span] = []
    at, reached, pool = 0, 0, -1
    while at < len(begin) or here:
        if not here:
            pool, reached = begin[at].pool, begin[at].first
        while at < len(begin) and begin[at].pool == pool and begin[at].first == reached:
            here.append(begin[at])
            at += 1
        upto = min(span.first + len(span.blocks) for span in here)
        if at < len(begin) and begin[at].pool == pool:
            upto = min(upto, begin[at].first)
        yield Segment(pool, reached, upto, here)
        here = [span for span in here if span.first + len(span.blocks) > upto]
        reached = upto
