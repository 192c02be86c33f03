"""Spans: the run lists of leaves, read from their JSON form, and which of them meet at a generation.

D1 A run `[generation, deltas, counts, pool]` gives its i-th block the generation `generation + i`; one at generation 0
is memory that never was in custody and is left out.
D2 `segments` cuts the generations of a pool where any span begins or ends: between two cuts the same spans are there
throughout, so that one look is enough for every custody in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, repeat
from operator import attrgetter
from typing import Any, NamedTuple

from kvcustody.errors import LedgerError


class Span(NamedTuple):
    """Blocks at the generations from `first` up to and without `end`, and the leaf that says something about them."""

    pool: int
    first: int
    end: int
    blocks: Sequence[int]
    fact: Any

    def at(self, generation: int) -> int:
        """The block that has this generation here."""
        return self.blocks[generation - self.first]

    def part(self, first: int, end: int) -> Sequence[int]:
        """The blocks of the generations from `first` up to and without `end`."""
        return self.blocks[first - self.first : end - self.first]


_new = tuple.__new__  # what `Span(...)` calls, without the call: there are millions


class Segment:
    """Generations from `first` up to and without `end`, and the spans that cover all of them, by what they say."""

    __slots__ = ("end", "first", "kinds", "pool", "spans")

    def __init__(self, pool: int, first: int, end: int, spans: Sequence[Span]) -> None:
        self.pool = pool
        self.first = first
        self.end = end
        self.spans = spans
        self.kinds: dict[type, list[Span]] = {}
        for span in spans:
            kind = type(span.fact)
            if kind in self.kinds:
                self.kinds[kind].append(span)
            else:
                self.kinds[kind] = [span]

    def of(self, kind: type) -> Sequence[Span]:
        """Its spans of leaves that say this kind of thing."""
        return self.kinds.get(kind, ())

    @property
    def agrees(self) -> bool:
        """Whether all spans name the same blocks throughout."""
        lead = self.spans[0]
        for span in self.spans:
            if span.first != lead.first or span.blocks != lead.blocks:
                break
        else:
            return True  # the rule: leaves about one custody list it alike
        first = lead.part(self.first, self.end)
        if all(isinstance(span.blocks, range) for span in self.spans):
            return all(span.part(self.first, self.end) == first for span in self.spans)
        return all(list(span.part(self.first, self.end)) == list(first) for span in self.spans)


def spans_of(items: Sequence[Sequence[Any]], fact: Any) -> list[Span]:
    """The spans of one run list of a leaf; raises `LedgerError` where it is malformed."""
    made: list[Span] = []
    try:
        for item in items:
            head, deltas, counts = item if len(item) == 3 else item[:3]
            first = int(head)
            if first == 0:
                continue
            pool = int(item[3]) if len(item) > 3 else 0
            blocks: Sequence[int]
            if not counts:
                blocks = tuple(accumulate(deltas))
                lowest = min(blocks)
            else:
                blocks = _repeated(deltas, counts)
                lowest = blocks[0] if type(blocks) is range else min(blocks)
            if first < 0 or pool < 0 or lowest < 0:
                raise ValueError("a negative number")
            made.append(_new(Span, (pool, first, first + len(blocks), blocks, fact)))
    except (ValueError, TypeError, IndexError) as problem:
        raise LedgerError(f"a run in a leaf is malformed: {problem}") from None
    return made


def _repeated(deltas: Sequence[int], counts: Sequence[int]) -> Sequence[int]:
    """The blocks behind deltas of which some occur more than once."""
    if len(deltas) == 2 and deltas[1] == 1 and counts[0] == 1:  # the rule: blocks in a row
        return range(deltas[0], deltas[0] + 1 + counts[1])
    if len(deltas) == 1 and deltas[0] == 1:
        return range(1, 1 + counts[0])
    if len(counts) != len(deltas):
        raise ValueError("counts do not match deltas")
    return tuple(accumulate(chain.from_iterable(map(repeat, deltas, counts))))


def segments(spans: Sequence[Span]) -> Iterator[Segment]:
    """Every segment that at least one span covers, by pool and generation."""
    begin = sorted(spans, key=attrgetter("first"))
    begin.sort(key=attrgetter("pool"))
    count, end_of = len(begin), attrgetter("end")
    here: list[Span] = []
    at, reached, pool = 0, 0, -1
    while at < count or here:
        if not here:
            pool, reached = begin[at].pool, begin[at].first
        while at < count and begin[at].first == reached and begin[at].pool == pool:
            here.append(begin[at])
            at += 1
        ends = list(map(end_of, here))
        upto = min(ends)
        if at < count and begin[at].pool == pool and begin[at].first < upto:
            upto = begin[at].first
        yield Segment(pool, reached, upto, here)
        here = [span for span in here if span.end > upto] if max(ends) > upto else []
        reached = upto
