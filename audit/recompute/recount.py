"""Recount: the definition of coverage (design, section 5) applied to a history, one custody after the other.

R1 `due_at = max(last release, min(ceiling, end of the last hold, erasure))`; custody that ended early ended its holds.
R2 Covered: every shard has a good receipt for the very block and generation that began after the last use and ended
within `scrub_within` of `due_at` or, if later, of the fence's retirement; and the recorded due time is the recomputed.
R3 A period takes a custody by its recomputed due time; by the recorded one where a use of it never ended.
R4 A hold lasts no longer than a narrowing act says that its process wrote after its release; one that such an act does
not list was over by then.
R5 What an erasure's effect lists was due when the erasure was asked for, where its end says so: never later than its
holds give.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvcustody.audit.recompute.figures import Judged, Recount
from kvcustody.audit.recompute.history import (
    DEVICE_TIER,
    LEVELS,
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
from kvcustody.audit.recompute.spans import Segment, Span, segments
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


class _Claim(NamedTuple):
    """One use of one block with its times resolved: until when it was used, until when it was held."""

    tenant: str
    residency: int
    written: bool
    released: int
    hold_end: int
    unasked_end: int  # had nobody asked for an erasure


class _Verdict(NamedTuple):
    name: str
    due: int
    lag: int | None
    level: str
    bytes: int
    disputed: bool


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
        self._now = now
        self._erased = _erased(life, erasures)
        self._narrowed = _narrowed(life)
        self._asked: dict[str, int] = {}
        for erasure in erasures:
            self._asked.setdefault(erasure.erasure, erasure.at_us - life.offset_us)

    def run(self) -> Iterator[Judged]:
        for segment in segments(self._life.spans):
            if _agree(segment):
                yield from self._look(segment)
            else:  # the spans disagree about which block it is: one generation after the other
                for generation in range(segment.first, segment.end):
                    here = [span for span in segment.spans if span.first <= generation < span.end]
                    yield from self._look(Segment(segment.pool, generation, generation + 1, here))

    def _look(self, segment: Segment) -> Iterator[Judged]:
        """The verdict on custodies that are alike in everything."""
        ends = [span for span in segment.spans if isinstance(span.fact, End)]
        mine = [span for span in ends if self._selects(span.fact.tenant, span.fact.classification)]
        if mine:
            found = self._ended(min(mine, key=lambda span: span.fact.order), segment)
        else:
            found = None if ends else self._unended(segment)
        if found is not None:
            yield found

    def _ended(self, ended: Span, segment: Segment) -> Judged | None:
        end: End = ended.fact
        block = ended.at(segment.first)
        claims = self._claims(segment, block)
        asked = [
            self._asked[span.fact.erasure]
            for span in segment.spans
            if isinstance(span.fact, Covered)
            and span.fact.erasure in self._asked
            and span.at(segment.first) == block
        ]
        proofs = _proofs(segment)
        verdict = _verdict(end, claims, proofs, block, segment.first, self._life.shards, asked)
        if self._chosen.model not in (None, _model(self._life, claims)) or not self._is_in_period(
            verdict.due if verdict.due < OPEN else end.due
        ):
            return None
        return Judged(
            self._life.uuid,
            segment.pool,
            segment.first,
            ended.part(segment.first, segment.end),
            self._life.shards or 1,
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
        writers = [span for span in segment.spans if isinstance(span.fact, Use) and span.fact.written]
        if not writers:
            return None
        writer = min(writers, key=lambda span: span.fact.residency)
        claims = self._claims(segment, writer.at(segment.first))
        due = max(claim.hold_end for claim in claims)
        person = self._life.people.get(writer.fact.residency)
        tenant, classification = (person.tenant, person.classification) if person else ("unknown", "unknown")
        if not (
            due < self._now
            and self._selects(tenant, classification)
            and self._is_in_period(due)
            and self._chosen.model in (None, _model(self._life, claims))
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

    def _claims(self, segment: Segment, block: int) -> list[_Claim]:
        """Every use of this block and generation."""
        gone = [span for span in segment.spans if isinstance(span.fact, LetGo)]
        return [
            self._claim(span.fact, [item.fact for item in gone])
            for span in segment.spans
            if isinstance(span.fact, Use) and span.at(segment.first) == block
        ]

    def _claim(self, use: Use, gone: Iterable[LetGo]) -> _Claim:
        if use.released is not None:
            released, hold = use.released, use.hold
        else:
            released, hold = self._life.released.get(use.residency, (OPEN, 0))
        left = [item for item in gone if item.residency == use.residency and item.at >= use.begun]
        if left:
            released, hold = max(item.at for item in left), max(item.hold for item in left)
        hold = min(hold, self._narrowed.get(use.residency, OPEN))
        erased = min(hold, self._erased.get(use.residency, OPEN))
        tenant = self._life.people.get(use.residency, _NOBODY).tenant
        return _Claim(
            tenant, use.residency, use.written, released, max(released, erased), max(released, hold)
        )

    def _selects(self, tenant: str, classification: str) -> bool:
        return self._chosen.tenant in (None, tenant) and self._chosen.classification in (None, classification)

    def _is_in_period(self, due: int) -> bool:
        at_us, since, until = due + self._life.offset_us, self._chosen.since_us, self._chosen.until_us
        return (since is None or at_us >= since) and (until is None or at_us < until)


def _verdict(
    end: End,
    claims: Sequence[_Claim],
    proofs: Sequence[Span],
    block: int,
    generation: int,
    shards: int,
    asked: Sequence[int],
) -> _Verdict:
    last = max((claim.released for claim in claims), default=0)
    written = any(claim.written for claim in claims)
    due = _due(end, claims, last, asked) if written else end.due
    disputed = written and end.due not in (due, *_unheard(end, claims, last, asked))
    begun_after = max(last, end.retired)
    best: list[tuple[int, int, int]] = []  # of each shard the first receipt that counts: end, level, bytes
    has_any, has_none = False, False
    for shard in range(max(1, shards)):
        about = [span for span in proofs if span.fact.shard == shard]
        good = [
            (span.fact.ended, LEVELS.index(span.fact.level), span.fact.bytes_each)
            for span in about
            if span.fact.good
            and span.at(generation) == block
            and begun_after <= span.fact.started <= span.fact.ended
        ]
        if good:
            best.append(min(good))
        has_any |= bool(about) and not good
        has_none |= not about
    if end.dead or not written or not shards:
        return _Verdict("unproven", due, None, "", 0, disputed)
    if has_any or has_none:
        return _Verdict("failed" if has_any else "missing", due, None, "", 0, disputed)
    destroyed, since = max(item[0] for item in best), max(due, end.retired)
    return _Verdict(
        "late" if destroyed > since + end.within else "in_time",
        due,
        max(0, destroyed - since),
        LEVELS[min(item[1] for item in best)],
        sum(item[2] for item in best),
        disputed,
    )


def _due(end: End, claims: Sequence[_Claim], last: int, asked: Sequence[int]) -> int:
    """By its owner's own holds; by another rule where that is what is recorded.

    By every reader's holds, for a segment's readers hold, too; by the request of an erasure that covers it (R5).
    """
    own = max((claim.hold_end for claim in claims if claim.tenant == end.tenant), default=0)
    every = max((claim.hold_end for claim in claims), default=0)
    by_own, by_every = (max(last, min(end.ceiling, hold, end.ended)) for hold in (own, every))
    others = [by_every, *(max(last, min(end.ceiling, own, end.ended, at)) for at in asked)]
    return end.due if end.due in others else by_own


def _unheard(end: End, claims: Sequence[_Claim], last: int, asked: Sequence[int]) -> list[int]:
    """What a process may record that has not heard of an erasure yet: it is late by the erasure, and not false (R5)."""
    own = max((claim.unasked_end for claim in claims if claim.tenant == end.tenant), default=0)
    every = max((claim.unasked_end for claim in claims), default=0)
    ends = [own, every, *(min(own, at) for at in asked)]
    return [max(last, min(end.ceiling, end.ended, hold)) for hold in ends]


def _proofs(segment: Segment) -> list[Span]:
    return [span for span in segment.spans if isinstance(span.fact, Proof)]


def _model(life: Life, claims: Sequence[_Claim]) -> str:
    """The model of the residency that the block was handed to; "unknown" where no leaf says so."""
    writers = [claim.residency for claim in claims if claim.written]
    person = life.people.get(min(writers)) if writers else None
    return person.model if person and person.model else "unknown"


def _agree(segment: Segment) -> bool:
    """Whether all spans name the same blocks throughout."""
    first = segment.spans[0].part(segment.first, segment.end)
    if all(isinstance(span.blocks, range) for span in segment.spans):
        return all(span.part(segment.first, segment.end) == first for span in segment.spans)
    return all(list(span.part(segment.first, segment.end)) == list(first) for span in segment.spans)


def _erased(life: Life, erasures: Sequence[Erasure]) -> dict[int, int]:
    """For each residency that an erasure selects, when its hold ended at the latest."""
    made: dict[int, int] = {}
    for erasure in erasures:
        at = erasure.at_us - life.offset_us
        for residency, person in life.people.items():
            if person.opened < at and _covers(erasure, person):
                made.setdefault(residency, at)
    return made


def _narrowed(life: Life) -> dict[int, int]:
    """For each residency that was released before a narrowing of its tenant's holds, when its hold ended at the latest.

    One walk over releases and acts in the order of their process; a hold leaves it with the first act that misses it.
    """
    made: dict[int, int] = {}
    standing: dict[str, list[int]] = {}
    moments: list[tuple[int, int, str]] = [
        (place, residency, tenant) for residency, (place, tenant) in life.left.items()
    ]
    moments += [(place, -1, act.tenant) for place, act in life.narrowings.items()]
    for place, residency, tenant in sorted(moments):
        here = standing.setdefault(tenant, [])
        if residency >= 0:
            here.append(residency)
            continue
        act = life.narrowings[place]
        for one in here:
            made[one] = min(made.get(one, OPEN), act.standing.get(one, act.at))
        here[:] = [one for one in here if one in act.standing]
    return made


def _covers(erasure: Erasure, person: Person) -> bool:
    if erasure.tenant not in (None, person.tenant):
        return False
    if erasure.selector == "tenant":
        return True
    if erasure.selector == "subject":
        return person.subject == erasure.subject
    if erasure.selector == "session":
        return person.session == erasure.session
    return False  # a domain or model is not in a residency's leaf; the end carries the cause
