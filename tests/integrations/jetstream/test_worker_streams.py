"""What a reader makes of messages that are lost, late, repeated and forged: each hole is seen, a snapshot closes it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvcustody.governance.edge.erase_epochs import EpochScope
from kvcustody.integrations.events.block_event import cleared
from kvcustody.integrations.jetstream import publisher, reader
from kvcustody.integrations.jetstream.publisher import Message, StreamLimits, ToldStream
from kvcustody.integrations.jetstream.reader import WorkerStreams
from kvcustody.integrations.jetstream.subjects import EventSubject, ask_subject
from standins.integrations.jetstream.told_world import (
    ACME,
    ANN,
    BOB,
    EVE,
    GLOBEX,
    ISSUER,
    NAMES,
    LlmdIndex,
    epochs,
    key,
    remove,
    store,
    told_stream,
)

WORKER = "gpu-1"
PROMPT = list(range(40))


class Line:
    """A worker's stream, a reader, and the way between them: whoever tests decides what arrives."""

    def __init__(self, told: ToldStream | None = None) -> None:
        self.told, self.index, self.now = told or told_stream(), LlmdIndex(), 100.0
        self.streams = WorkerStreams(self.index, lambda: self.now)
        self.known = epochs()

    def tell(self, *events: Any) -> list[Message]:
        return self.told.messages(events, self.known, 1.0)

    def arrive(self, *messages: Message) -> None:
        for one in messages:
            self.streams.take_message(one.subject, one.headers, one.payload)

    def beat(self) -> None:
        for one in self.told.beats():
            self.streams.beat(one.subject, one.headers)

    def heal(self) -> int:
        """Ask for the snapshots that are due and let them arrive; how many were asked for."""
        asked = self.streams.due()
        for one in asked:
            self.now += 2.0
            subject = ask_subject("all", "router", one.worker)
            for part in self.told.answer(subject, f"{one.text} {one.tenant}".encode(), self.now, 1.0):
                self.streams.snapshot(part.subject, part.headers, part.payload)
        return len(asked)

    def usable(self, tenant: str = ACME) -> bool:
        return self.streams.is_usable(WORKER, tenant)

    def found(self, tenant: str = ACME) -> set[bytes]:
        return set(self.index.blocks.get((WORKER, tenant), {}))

    def name(self, whose: Any = ANN) -> str:
        return NAMES.of(*whose, known=self.known)


def test_an_index_of_another_program_is_fed() -> None:
    """The reader's own code knows vLLM's form alone, and finds prompts under the name that a door writes."""
    line = Line()
    line.arrive(*line.tell(store(ANN, 0, 3), store(EVE, 0, 2)), *line.tell(store(ANN, 3)))
    assert line.usable() and line.usable(GLOBEX)
    assert line.index.matched(WORKER, ACME, line.name(), PROMPT) == 16
    assert line.index.matched(WORKER, GLOBEX, line.name(EVE), PROMPT) == 8
    assert line.index.matched(WORKER, ACME, line.name(BOB), PROMPT) == 0, "a foreign name"
    line.arrive(*line.tell(remove(ANN, 3)))
    assert line.index.matched(WORKER, ACME, line.name(), PROMPT) == 12


def test_each_name_has_a_subject_and_numbers_are_of_a_tenant() -> None:
    line = Line()
    made = line.tell(store(ANN, 0), store(EVE, 0), store(BOB, 0), store(ANN, 1))
    where = [EventSubject.parse(one.subject) for one in made]
    assert all(where) and len({one.subject for one in made}) == 3
    assert [one.tenant for one in where if one] == [ACME, GLOBEX, ACME, ACME]
    assert [one.headers["Kvc-Number"] for one in made] == ["0", "0", "1", "2"], "nothing of others' rhythm"
    assert all(b"ann" not in one.subject.encode() for one in made)


def test_a_lost_message_makes_locations_unusable_until_a_snapshot() -> None:
    line = Line()
    first, lost, third = (line.tell(store(ANN, at))[0] for at in range(3))
    line.arrive(first)
    assert line.usable()
    line.arrive(third)
    assert not line.usable() and line.streams.counts["gaps"] == 1
    assert line.index.matched(WORKER, ACME, line.name(), PROMPT) == 4, "what came after the hole is not told yet"
    assert line.heal() == 1 and line.usable()
    assert line.index.matched(WORKER, ACME, line.name(), PROMPT) == 12
    line.arrive(lost)  # late
    assert line.index.matched(WORKER, ACME, line.name(), PROMPT) == 12
    assert line.streams.counts["repeated"] == 1 and line.usable()


def test_the_loss_of_the_last_message_is_seen_by_a_beat() -> None:
    line = Line()
    line.arrive(*line.tell(store(ANN, 0, 2)))
    line.tell(remove(ANN, 0, 1))  # lost
    assert line.usable()
    line.beat()
    assert line.usable(), "it may be under way"
    line.now += reader.GRACE_SECONDS + 0.1
    assert not line.usable()
    assert line.heal() == 1 and line.found() == set() and line.usable()


def test_a_worker_that_is_silent_is_not_used() -> None:
    line = Line()
    line.arrive(*line.tell(store(ANN, 0)))
    line.now += reader.SILENT_SECONDS + 1
    assert not line.usable() and line.streams.due() == [], "nobody is there to ask"
    line.beat()
    assert line.usable()


def test_who_comes_late_asks_and_who_was_there_from_the_beginning_does_not() -> None:
    line = Line()
    line.tell(store(ANN, 0, 4))
    line.beat()
    assert not line.usable() and line.heal() == 1
    assert line.found() == {key(ANN, at) for at in range(4)} and line.usable()
    early = Line()
    early.beat()
    early.arrive(*early.tell(store(ANN, 0)))
    assert early.usable() and early.streams.due() == []


def test_a_new_life_forgets_the_earlier_one_and_an_earlier_one_never_comes_back() -> None:
    line = Line()
    old = line.tell(store(ANN, 0, 2))
    line.arrive(*old)
    late = line.tell(store(ANN, 2))
    line.told.begin()
    line.arrive(*line.tell(store(BOB, 0)))
    assert line.found() == {key(BOB, 0)} and line.index.forgotten == 1 and line.usable()
    line.arrive(*late, *old)
    assert line.found() == {key(BOB, 0)} and line.usable()


def test_a_clear_reaches_every_tenant_that_was_told_of() -> None:
    line = Line()
    line.arrive(*line.tell(store(ANN, 0), store(EVE, 0)))
    line.arrive(*line.tell(cleared(1, "reset")))
    assert line.found() == line.found(GLOBEX) == set() and line.usable() and line.usable(GLOBEX)


def test_an_erasure_removes_at_once_and_the_name_has_another_subject() -> None:
    line = Line()
    [before] = line.tell(store(ANN, 0, 2))
    line.arrive(before, *line.tell(store(BOB, 0)))
    old_name = line.name()
    line.known = epochs(EpochScope(ISSUER, "acme", "ann"))
    made = line.tell()
    line.arrive(*made)
    assert line.found() == {key(BOB, 0)} and line.usable()
    where, was = EventSubject.parse(made[0].subject), EventSubject.parse(before.subject)
    assert where is not None and was is not None
    assert (where.scope, where.epoch, was.epoch) == (was.scope, 1, 0)
    assert was.is_ended(line.known) and not where.is_ended(line.known)
    assert line.name() != old_name and line.index.matched(WORKER, ACME, old_name, PROMPT) == 0


@pytest.mark.parametrize(
    ("raised", "ends_ann", "ends_bob", "ends_eve"),
    [
        (EpochScope(ISSUER, "acme", "ann"), True, False, False),
        (EpochScope(ISSUER, "acme"), True, True, False),
        (EpochScope(), True, True, True),
        (EpochScope(ISSUER, "globex"), False, False, True),
    ],
)
def test_what_an_erasure_ends_is_seen_by_subjects_alone(
    raised: EpochScope, ends_ann: bool, ends_bob: bool, ends_eve: bool
) -> None:
    before, after = epochs(), epochs(raised)
    ended = [EventSubject.of(one, before, "w").is_ended(after) for one in (ANN, BOB, EVE)]
    assert ended == [ends_ann, ends_bob, ends_eve]
    assert not any(EventSubject.of(one, after, "w").is_ended(after) for one in (ANN, BOB, EVE))


def test_nothing_leaves_before_epochs_are_known_and_what_was_missed_is_in_the_snapshot() -> None:
    line = Line()
    assert line.told.messages([store(ANN, 0)], None, 1.0) == [] and line.told.counts["early"] == 1
    line.arrive(*line.tell(store(ANN, 1)))
    assert not line.usable(), "its number says that something was before"
    line.heal()
    assert line.index.matched(WORKER, ACME, line.name(), PROMPT) == 8 and line.usable()


@pytest.mark.parametrize(
    ("subject", "headers"),
    [
        ("kv.a.b", {"Kvc-Life": "0" * 24 + ".1", "Kvc-Number": "0"}),
        (f"kv.{ACME}.{ACME}.x.gpu-1", {"Kvc-Life": "0" * 24 + ".1", "Kvc-Number": "0"}),
        (f"kv.{ACME}.{ACME}.0.gpu-1", None),
        (f"kv.{ACME}.{ACME}.0.gpu-1", {"Kvc-Life": "0" * 24, "Kvc-Number": "0"}),
        (f"kv.{ACME}.{ACME}.0.gpu-1", {"Kvc-Life": "0" * 24 + ".1", "Kvc-Number": "-1"}),
        (f"kv.{ACME}.{ACME}.0.gpu-1", {"Kvc-Life": "0" * 24 + ".1", "Kvc-Number": "9" * 40}),
    ],
)
def test_malformed_messages_change_nothing(subject: str, headers: dict[str, str] | None) -> None:
    line = Line()
    line.arrive(*line.tell(store(ANN, 0)))
    before = line.found()
    line.streams.take_message(subject, headers, b"\xff")
    line.streams.beat("beat.x", headers)
    line.streams.snapshot("snap.router.gpu-1", headers, b"\xff")
    assert line.found() == before and line.usable()


def test_what_one_worker_says_wrongly_makes_its_own_locations_unusable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With its right number. What another says is taken still."""
    line = Line()
    line.arrive(*line.tell(store(ANN, 0)))
    (said,) = line.tell(store(ANN, 1))
    line.streams.take_message(said.subject, said.headers, b"\xff")
    assert not line.usable() and line.found() == set() and line.streams.counts["malformed"] == 1
    good = Line()
    good.arrive(*good.tell(store(ANN, 0)), *good.tell(store(ANN, 1)))
    assert good.usable() and good.found() == {key(ANN, 0), key(ANN, 1)}, "the control"


def test_a_snapshot_that_nobody_asked_for_changes_nothing() -> None:
    line = Line()
    line.arrive(*line.tell(store(ANN, 0)))
    other = Line(told_stream())
    other.tell(store(BOB, 0, 8))
    for part in other.told.answer(f"ask.all.router.{WORKER}", f"forged {ACME}".encode(), 1.0, 1.0):
        line.streams.snapshot(part.subject, part.headers, part.payload)
    assert line.found() == {key(ANN, 0)} and line.usable()


def test_a_tenants_reader_is_given_its_tenants_snapshot_and_one_a_second() -> None:
    stream = told_stream()
    stream.messages([store(ANN, 0), store(EVE, 0)], epochs(), 1.0)
    [part] = stream.answer(f"ask.{GLOBEX}.r1.gpu-1", f"q {ACME}".encode(), 1.0, 1.0)
    assert part.headers["Kvc-Tenant"] == GLOBEX and b"ann" not in part.payload, "what it says is not looked at"
    assert stream.answer(f"ask.{GLOBEX}.r1.gpu-1", b"q", 1.5, 1.0) == []
    assert len(stream.answer(f"ask.{GLOBEX}.r1.gpu-1", b"q", 2.1, 1.0)) == 1
    assert stream.answer("ask.ff.r1.gpu-1", b"q", 9.0, 1.0) == stream.answer("ask", b"q", 9.0, 1.0) == []


def test_a_snapshot_of_a_bounded_book_lacks_the_oldest_alone() -> None:
    told = told_stream(limits=told_stream()._limits._replace(live_blocks=4))
    told.messages([store(ANN, at) for at in range(10)], epochs(), 1.0)
    index = LlmdIndex()
    for part in told.answer(f"ask.{ACME}.r1.gpu-1", b"q", 1.0, 1.0):
        index.apply(WORKER, ACME, part.payload)
    assert set(index.blocks[WORKER, ACME]) == {key(ANN, at) for at in range(6, 10)} and told.live.let_go == 6


@pytest.mark.parametrize("seed", range(20))
def test_lost_late_and_repeated_messages_end_with_what_the_worker_has(seed: int) -> None:
    """Where a reader says that it is usable and no message is under way, it has what the worker has."""
    rng, line = random.Random(seed), Line()
    under_way: list[Message] = []
    held: dict[Any, set[int]] = {ANN: set(), BOB: set()}
    raises: list[EpochScope] = []
    lost = 0
    for _ in range(150):
        whose, number = rng.choice((ANN, BOB)), rng.randrange(12)
        if rng.random() < 0.05:
            raises.append(EpochScope(ISSUER, "acme", whose.subject))
            line.known = epochs(*raises)
            sent, held[whose] = line.tell(), set()
        elif rng.random() < 0.02:
            line.told.begin()
            held = {ANN: set(), BOB: set()}
            sent = []
        elif number in held[whose]:
            held[whose].discard(number)
            sent = line.tell(remove(whose, number))
        else:
            held[whose].add(number)
            sent = line.tell(store(whose, number))
        for one in sent:
            if rng.random() < 0.15:
                lost += 1
            else:
                under_way += [one] * rng.choice((1, 1, 1, 2))
        rng.shuffle(under_way) if rng.random() < 0.1 else None
        while under_way and rng.random() < 0.7:
            line.arrive(under_way.pop(0))
        if rng.random() < 0.1:
            line.heal()
            line.now += 1.0
    line.arrive(*under_way)
    line.arrive(*line.tell(store(ANN, 99)))
    held[ANN].add(99)
    for _ in range(4):
        line.now += 3.5
        line.beat()
        line.heal()
    assert lost and line.usable() and line.streams.counts["snapshots"]
    assert line.found() == {key(whose, at) for whose, numbers in held.items() for at in numbers}


def test_a_process_that_another_has_followed_never_comes_back_whatever_its_clock_said() -> None:
    line = Line()
    before = line.told
    old = line.tell(store(ANN, 0))
    line.arrive(*old)
    line.told = told_stream()
    line.arrive(*line.tell(store(BOB, 0)))
    assert line.found() == {key(BOB, 0)} and line.usable()
    before.begin()  # its second life, which is later than its first one
    line.arrive(*old, *before.messages([store(ANN, 1)], line.known, 9e9))
    for one in before.beats():
        line.streams.beat(one.subject, one.headers)
    assert line.found() == {key(BOB, 0)} and line.usable()
    lives = {made.life.partition(".")[0] for made in (before, line.told)}
    assert len(lives) == 2 and before.life.endswith(".2")


def test_messages_kept_while_a_snapshot_is_waited_for_are_bounded_in_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = Line()
    for tenant in (ANN, EVE):
        line.tell(store(tenant, 0))  # lost
    said = [line.tell(store(tenant, at))[0] for at in range(1, 40) for tenant in (ANN, EVE)]
    size = max(len(one.payload) for one in said)
    alone, together = 50 * size, 60 * size  # a snapshot of 40 blocks has room
    monkeypatch.setattr(reader, "KEPT_BYTES_MAX", alone)
    monkeypatch.setattr(reader, "ALL_KEPT_BYTES_MAX", together)
    for one in said:
        line.arrive(one)
        kept = [sum(map(len, stream.kept.values())) for stream in line.streams._streams.values()]
        assert max(kept) <= alone and sum(kept) == line.streams._kept_bytes <= together
    assert line.streams.counts["let_go"] > 0
    for _ in range(3):
        line.heal()
        line.now += reader.ASKED_AGAIN_SECONDS
        line.beat()
    assert line.usable() and line.usable(GLOBEX) and line.streams._kept_bytes == 0
    assert line.found() == {key(ANN, at) for at in range(40)}


def test_a_tenant_without_blocks_is_let_go_and_comes_back_by_a_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher, "IDLE_BEATS", 3)
    line = Line()
    line.arrive(*line.tell(store(ANN, 0), store(EVE, 0)), *line.tell(remove(ANN, 0)))
    for _ in range(4):
        line.beat()
    assert {one.subject.split(".")[1] for one in line.told.beats()} == {GLOBEX}, "eve's block is told of still"
    line.now += 1.0
    line.arrive(*line.tell(store(ANN, 1)))
    assert not line.usable() and line.usable(GLOBEX), "it may have missed something"
    assert line.heal() == 1 and line.usable() and line.found() == {key(ANN, 1)}


def test_a_tenants_snapshot_has_its_own_blocks_in_their_order_and_no_others() -> None:
    line = Line(told_stream(limits=StreamLimits(live_blocks=5)))
    blocks = line.told.live
    line.tell(store(ANN, 0, 2), store(EVE, 0), store(BOB, 0), remove(ANN, 0), store(ANN, 2))
    acme, globex = ANN.whole_tenant, EVE.whole_tenant
    assert [one.keys for one in blocks.of(acme)] == [key(ANN, 1), key(BOB, 0), key(ANN, 2)]
    line.tell(store(EVE, 1, 2))
    assert [one.keys for one in blocks.of(acme)] == [key(BOB, 0), key(ANN, 2)] and blocks.let_go == 1
    line.tell(remove(EVE, 0, 1, 2))
    assert not blocks.has(globex) and blocks.has(acme) and len(blocks) == 2
    line.tell(cleared(1, "reset"))
    assert blocks.of(acme) == [] and len(blocks) == 0
