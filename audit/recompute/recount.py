"""Recount: the definition of coverage (design, section 5) applied to a history, one custody after the other.

R1 A verdict is `verdict.verdict_on`'s; the recorded due time covers only where it is the recomputed.
R2 A hold lasts no longer than an erasure, or than a narrowing act says that its process wrote after its release; one
that such an act does not list was over by then (`holds`).
R3 A period takes a custody by its recomputed due time; by the recorded one where a use of it never ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvcustody.audit.recompute.figures import Judged, Recount
from kvcustody.audit.recompute.history import (
    DEVICE_TIER,
    OPEN,
    Covered,
    End,
    Erasure,
    History,
    LetGo,
    Life,
    Person,
    Proof,
    Use,
)
from kvcustody.audit.recompute.holds import ended_by_erasures, ended_by_narrowing
from kvcustody.audit.recompute.spans import Segment, Span
from kvcustody.audit.recompute.verdict import Uses, verdict_on
from kvcustody.errors import LedgerError


class Chosen(NamedTuple):
    """What is counted: custody due in [since, until) UTC microseconds, of one tenant, classification, model, tier."""

    since_us: int | None = None
    until_us: int | None = None
    tenant: str | None = None
    classification: str | None = None
    model: str | None = None
    tier: str | None = None


EVERYTHING = Chosen()


_NEVER = OPEN, 0
_NOBODY = Person("", "", None, None, "", 0)


def recount(history: History, chosen: Chosen = EVERYTHING, *, as_of_us: int | None = None) -> Recount:
    """Every figure of coverage, from a history alone; raises `LedgerError` for a tier that no leaf records."""
    found = count_up(judge(history, chosen, as_of_us=as_of_us))
    found.leaves, found.as_of_us = history.leaves, history.last_us if as_of_us is None else as_of_us
    return found


def count_up(every: Iterable[Judged]) -> Recount:
    """The figures of verdicts."""
    found = Recount()
    for judged in every:
        found.row(judged.tenant, judged.classification).count(judged)
        if judged.lag is not None:
            found.lags[judged.lag] = found.lags.get(judged.lag, 0) + judged.custodies
    return found


def judge(history: History, chosen: Chosen = EVERYTHING, *, as_of_us: int | None = None) -> Iterator[Judged]:
    """Every chosen custody that ended or is overdue, with its verdict; raises as `recount` does."""
    if chosen.tier not in (None, DEVICE_TIER):
        raise LedgerError(f"tier `{chosen.tier}` holds no custody in this ledger, only `{DEVICE_TIER}` does")
    now_us = history.last_us if as_of_us is None else as_of_us
    erasures = sorted(history.erasures, key=lambda item: item.at_us)
    for uuid in sorted(history.lives):
        life = history.lives[uuid]
        yield from _Judge(life, erasures, chosen, now_us - life.offset_us).run()


class _Judge:
    """One pass over the segments of one incarnation."""

    def __init__(self, life: Life, erasures: Sequence[Erasure], chosen: Chosen, now: int) -> None:
        self._life = life
        self._chosen = chosen
        self._narrows = (chosen.tenant, chosen.classification) != (None, None)
        self._now = now
        self._erased = ended_by_erasures(life, erasures)
        self._narrowed = ended_by_narrowing(life)
        self._asked: dict[str, int] = {}
        for erasure in erasures:
            self._asked.setdefault(erasure.erasure, erasure.at_us - life.offset_us)

    def run(self) -> Iterator[Judged]:
        for segment in self._life.segments:
            if segment.agrees:
                yield from self._look(segment)
            else:  # the spans disagree about which block it is: one generation after the other
                for generation in range(segment.first, segment.end):
                    here = [span for span in segment.spans if span.first <= generation < span.end]
                    yield from self._look(Segment(segment.pool, generation, generation + 1, here))

    def _look(self, segment: Segment) -> Iterator[Judged]:
        """The verdict on custodies that are alike in everything."""
        ends = segment.of(End)
        mine = ends
        if self._narrows:
            mine = [span for span in ends if self._selects(span.fact.tenant, span.fact.classification)]
        if mine:
            first = mine[0] if len(mine) == 1 else min(mine, key=lambda span: span.fact.order)
            found = self._ended(first, segment)
        else:
            found = None if ends else self._unended(segment)
        if found is not None:
            yield found

    def _ended(self, ended: Span, segment: Segment) -> Judged | None:
        end: End = ended.fact
        first, shards = segment.first, self._life.shards
        block = ended.at(first)
        uses = self._uses(segment, block, end.tenant)
        asked = [
            self._asked[span.fact.erasure]
            for span in segment.of(Covered)
            if span.fact.erasure in self._asked and span.at(first) == block
        ]
        verdict = verdict_on(end, uses, segment.of(Proof), block, first, shards, asked)
        if not self._is_of_model(uses) or not self._is_in_period(
            verdict.due if verdict.due < OPEN else end.due
        ):
            return None
        return Judged(
            self._life.uuid,
            segment.pool,
            first,
            ended.part(first, segment.end),
            shards or 1,
            end.tenant,
            end.classification,
            verdict.name,
            verdict.name == "in_time" and not verdict.disputed,
            verdict.due,
            end.ended <= verdict.due + end.within,
            verdict.disputed,
            verdict.lag,
            verdict.level,
            verdict.bytes,
            max(0, end.retired - end.ended),
        )

    def _unended(self, segment: Segment) -> Judged | None:
        """Custody that was handed out and whose end nobody recorded: overdue once it is due."""
        writers = [span for span in segment.of(Use) if span.fact.written]
        if not writers:
            return None
        writer = min(writers, key=lambda span: span.fact.residency)
        person = self._life.people.get(writer.fact.residency)
        tenant, classification = (person.tenant, person.classification) if person else ("unknown", "unknown")
        uses = self._uses(segment, writer.at(segment.first), tenant)
        due = uses.every
        if not (
            due < self._now
            and self._selects(tenant, classification)
            and self._is_in_period(due)
            and self._is_of_model(uses)
        ):
            return None
        return Judged(
            self._life.uuid,
            segment.pool,
            segment.first,
            writer.part(segment.first, segment.end),
            self._life.shards or 1,
            tenant,
            classification,
            "overdue",
            False,
            due,
            False,
            False,
            None,
            "",
            0,
            0,
        )

    def _uses(self, segment: Segment, block: int, owner: str) -> Uses:
        """What every use of this block and generation adds up to."""
        found, life, first = Uses(), self._life, segment.first
        gone = segment.of(LetGo)
        for span in segment.of(Use):
            if span.blocks[first - span.first] != block:
                continue
            residency, begun, written, released, hold = span.fact
            if released is None:
                released, hold = life.released.get(residency, _NEVER)
            if gone:
                left = [item.fact for item in gone if item.fact.residency == residency]
                if left := [item for item in left if item.at >= begun]:
                    released, hold = max(item.at for item in left), max(item.hold for item in left)
            if residency in self._narrowed:
                hold = min(hold, self._narrowed[residency])
            erased = min(hold, self._erased[residency]) if residency in self._erased else hold
            tenant = life.people.get(residency, _NOBODY).tenant
            found.add(residency, written, tenant == owner, released, hold, erased)
        return found

    def _is_of_model(self, uses: Uses) -> bool:
        """Whether the residency that the block was handed to is of the chosen model; "unknown" where no leaf says."""
        if self._chosen.model is None:
            return True
        person = self._life.people.get(uses.writer)
        return self._chosen.model == (person.model if person and person.model else "unknown")

    def _selects(self, tenant: str, classification: str) -> bool:
        return self._chosen.tenant in (None, tenant) and self._chosen.classification in (None, classification)

    def _is_in_period(self, due: int) -> bool:
        at_us, since, until = due + self._life.offset_us, self._chosen.since_us, self._chosen.until_us
        return (since is None or at_us >= since) and (until is None or at_us < until)
