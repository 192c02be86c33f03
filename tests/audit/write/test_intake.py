"""The queue of a writer past its limit: exactly the lost events are named."""

from __future__ import annotations

import pytest

from kvcustody.audit.kinds import Event, GapRecorded, KeyEvent
from kvcustody.audit.write.event_queue import EventQueue, TenantShares
from kvcustody.clock import SystemClock

LIMIT = 4


@pytest.fixture
def intake() -> EventQueue:
    return EventQueue(SystemClock(), TenantShares(), capacity=LIMIT // 2, batch=1000, count_seconds=1000.0)


def events(count: int) -> list[Event]:
    return [KeyEvent(1, "acme", "made", number, "operator") for number in range(count)]


def taken(intake: EventQueue) -> tuple[list[int], list[tuple[int, int]]]:
    """The sequences of events that were kept, and those that gaps name."""
    items, _ = intake.take(1000)
    gaps = [event for _, event in items if isinstance(event, GapRecorded)]
    kept = [sequence for sequence, event in items if not isinstance(event, GapRecorded)]
    return kept, [(gap.first_sequence, gap.last_sequence) for gap in gaps]


def test_what_is_dropped_in_one_run_is_one_gap(intake: EventQueue) -> None:
    intake.submit(events(LIMIT))
    for _ in range(3):
        intake.submit(events(2))
    assert taken(intake) == ([1, 2, 3, 4], [(5, 10)])
    assert intake.sequence == 11 and intake.empty, "the gap has a sequence of its own"


def test_a_smaller_batch_that_still_fits_is_in_no_gap(intake: EventQueue) -> None:
    intake.submit(events(LIMIT - 1))
    intake.submit(events(2))
    intake.submit(events(1))
    intake.submit(events(2))
    assert taken(intake) == ([1, 2, 3, 6], [(4, 5), (7, 8)])


def test_what_the_writer_records_meanwhile_is_in_no_gap(intake: EventQueue) -> None:
    """A sequence that the writer gave to an event of its own, or somebody waits for, is in the ledger."""
    intake.submit(events(LIMIT))
    intake.submit(events(1))  # 5
    own = intake.next_sequence()
    intake.submit(events(2))  # 7 and 8
    awaited, _ = intake.submit_ticket(events(1)[0], lambda: None)
    intake.submit(events(1))  # 10
    assert (own, awaited) == (6, 9)
    assert taken(intake) == ([1, 2, 3, 4, 9], [(5, 5), (7, 8), (10, 10)])


def test_gaps_come_before_what_is_queued(intake: EventQueue) -> None:
    intake.submit(events(LIMIT - 1))
    for count in (2, 1, 2):
        intake.submit(events(count))
    items, _ = intake.take(1000)
    assert [type(event) for _, event in items[:3]] == [GapRecorded, GapRecorded, KeyEvent]
    assert [sequence for sequence, _ in items[:2]] == [9, 10]


def test_nothing_is_accounted_for_twice(intake: EventQueue) -> None:
    intake.submit(events(LIMIT + 1))
    assert taken(intake) == ([], [(1, 5)])
    assert taken(intake) == ([], []) and intake.empty
