"""Continuity of a stream: every batch once and in order or missed, restarts recognised."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcustody.integrations.events.sequence_gaps import (
    Arrival,
    Continuity,
    Delivered,
    Missed,
    ReplayedBatches,
    Restarted,
)


class Source:
    """A publisher: its lives, its replay buffer, and a wire that drops."""

    def __init__(self, buffer: int = 10_000) -> None:
        self.buffer = buffer
        self.life = 0
        self.batches: list[bytes] = []
        self.deaf = False
        self.drop: set[int] = set()

    def make(self) -> tuple[int, bytes]:
        number = len(self.batches)
        self.batches.append(b"%d/%d" % (self.life, number))
        return number, self.batches[-1]

    def restart(self) -> None:
        self.life += 1
        self.batches = []

    def replay(self, first: int) -> ReplayedBatches | None:
        if self.deaf:
            return None
        start = max(first, len(self.batches) - self.buffer)
        return ReplayedBatches([(n, self.batches[n]) for n in range(start, len(self.batches)) if n not in self.drop])


def numbers(arrivals: list[Arrival]) -> list[object]:
    return [item.sequence if isinstance(item, Delivered) else item for item in arrivals]


def test_a_gap_is_filled_by_replay() -> None:
    source = Source()
    stream = Continuity(source.replay)
    first = source.make()
    assert numbers(stream.live(*first)) == [0]
    for _ in range(4):
        source.make()
    assert numbers(stream.live(*source.make())) == [1, 2, 3, 4, 5]


def test_what_a_replay_brought_is_not_delivered_again() -> None:
    source = Source()
    stream = Continuity(source.replay)
    made = [source.make() for _ in range(5)]
    assert numbers(stream.live(*made[0])) == [0]
    assert numbers(stream.live(*made[2])) == [1, 2, 3, 4]
    assert stream.live(*made[3]) == [] and stream.live(*made[4]) == [] and stream.duplicates == 2


def test_what_no_replay_has_is_missed() -> None:
    source = Source(buffer=2)
    stream = Continuity(source.replay)
    stream.live(*source.make())
    for _ in range(5):
        source.make()
    assert numbers(stream.live(*source.make())) == [Missed(1, 4, "not to be replayed"), 5, 6]
    deaf = Continuity(None)
    assert numbers(deaf.live(3, b"x")) == [Missed(0, 2, "before observation began"), 3]
    assert numbers(deaf.live(5, b"x")) == [Missed(4, 4, "not to be replayed"), 5]


def test_holes_that_the_publisher_itself_has_are_missed_one_by_one() -> None:
    source = Source()
    stream = Continuity(source.replay)
    for _ in range(10):
        source.make()
    source.drop = {2, 3, 7}
    found = numbers(stream.check())
    assert found[2] == Missed(2, 3, "not to be replayed") and found[6] == Missed(7, 7, "not to be replayed")
    assert [item for item in found if isinstance(item, int)] == [0, 1, 4, 5, 6, 8, 9]


def test_answers_that_lack_batches_are_asked_for_again() -> None:
    source = Source()
    lost = iter([{1, 2, 5}, {5, 7}, set(), set()])
    whole = source.replay

    def lossy(first: int) -> ReplayedBatches | None:
        source.drop = next(lost)
        return whole(first)

    stream = Continuity(lossy)
    for _ in range(9):
        source.make()
    assert numbers(stream.check()) == list(range(9))


def test_a_number_that_went_back_is_a_restart() -> None:
    source = Source()
    stream = Continuity(source.replay)
    for _ in range(3):
        stream.live(*source.make())
    source.restart()
    assert numbers(stream.live(*source.make())) == [Restarted(3), 0]


def test_another_batch_under_a_number_that_was_had_is_a_restart() -> None:
    source = Source()
    stream = Continuity(source.replay)
    stream.live(*source.make())
    for _ in range(9):
        source.make()
    stream.check()  # ten by replay, one live
    source.restart()
    for _ in range(5):
        source.make()
    assert numbers(stream.live(*source.make())) == [Restarted(10), 0, 1, 2, 3, 4, 5]


def test_a_restart_hidden_behind_a_gap_is_seen_in_the_overlap() -> None:
    source = Source()
    stream = Continuity(source.replay)
    for _ in range(3):
        stream.live(*source.make())
    source.restart()
    for _ in range(6):
        source.make()
    assert numbers(stream.live(*source.make())) == [Restarted(3), *range(7)]


def test_a_restart_that_continues_the_count_by_chance_is_seen_after_a_broken_connection() -> None:
    source = Source()
    stream = Continuity(source.replay)
    for _ in range(3):
        stream.live(*source.make())
    source.restart()
    for _ in range(3):
        source.make()
    unaware = Continuity(source.replay)
    unaware.__dict__.update(stream.__dict__)
    unaware._digests = stream._digests.copy()
    assert numbers(unaware.live(3, b"1/3")) == [3], "the control: without doubt it is not seen"
    stream.doubt()
    assert numbers(stream.live(*source.make())) == [Restarted(3), 0, 1, 2, 3]


def test_an_engine_that_knows_less_than_it_told_has_restarted() -> None:
    source = Source()
    stream = Continuity(source.replay)
    for _ in range(5):
        source.make()
    assert numbers(stream.check()) == list(range(5))
    source.restart()
    source.make()
    assert numbers(stream.check()) == [Restarted(5), 0]
    source.deaf = True
    assert stream.check() == [] and stream.failed_replays == 1


def test_a_publisher_that_never_replays_anything_is_not_taken_for_restarted() -> None:
    source = Source(buffer=0)
    stream = Continuity(source.replay)
    for _ in range(5):
        stream.live(*source.make())
    assert stream.check() == [] and stream.expected == 5


class Step(NamedTuple):
    kind: str
    count: int


steps = st.lists(
    st.builds(
        Step,
        st.sampled_from(["heard", "heard", "lost", "lost", "restart", "check", "deaf", "drop"]),
        st.integers(1, 6),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(script=steps, buffer=st.integers(0, 12))
@example(script=[Step("lost", 1), Step("drop", 1), Step("heard", 2), Step("check", 1)], buffer=2)
def test_every_batch_is_delivered_once_in_order_or_missed(script: list[Step], buffer: int) -> None:
    source = Source(buffer)
    stream = Continuity(source.replay)
    arrivals: list[Arrival] = []
    lives: list[list[bytes]] = []
    for step in script:
        if step.kind == "restart":
            lives.append(source.batches)
            source.restart()
            stream.doubt()  # a restart breaks the connection
        elif step.kind == "deaf":
            source.deaf = not source.deaf
        elif step.kind == "drop":
            source.drop = {len(source.batches) + step.count}
        elif step.kind == "check":
            arrivals += stream.check()
        else:
            for _ in range(step.count):
                made = source.make()
                if step.kind == "heard":
                    arrivals += stream.live(*made)
    lives.append(source.batches)
    seen: list[int] = []
    payloads: set[bytes] = set()
    expected = 0
    for item in arrivals:
        if isinstance(item, Restarted):
            assert item.had == expected
            expected = 0
            continue
        first = item.sequence if isinstance(item, Delivered) else item.first
        assert first == expected, "contiguous: nothing is skipped in silence"
        expected = item.sequence + 1 if isinstance(item, Delivered) else item.last + 1
        if isinstance(item, Delivered):
            life, number = map(int, item.payload.split(b"/"))
            assert number == item.sequence and lives[life][number] == item.payload
            assert item.payload not in payloads, "once"
            payloads.add(item.payload)
            seen.append(life)
    assert seen == sorted(seen), "no batch of an earlier life after one of a later"
