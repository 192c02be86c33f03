"""Deadlines under suspend and clock steps: overdue custody is seen at once, on record, and never served or extended."""

from __future__ import annotations

from typing import Any

from kvcustody.audit.kinds import CustodyOverdue
from kvcustody.clock import MICROSECONDS
from standins.erasure.erasure_desk import PROMPT, Desk
from standins.simulation.governed import LOW_ABSOLUTE_US, LOW_IDLE_US

DAY_US = 86_400 * MICROSECONDS


class Recorded(Desk):
    """A desk that keeps the events of one kind."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.overdue: list[CustodyOverdue] = []
        submit = self.governor._ledger.submit

        def keeping(events: Any) -> int:
            self.overdue += [event for event in events if isinstance(event, CustodyOverdue)]
            return submit(events)

        self.governor._ledger.submit = keeping  # type: ignore[method-assign]

    def gauge(self) -> tuple[int, int]:
        pool = self.governor.stats().pools[0]
        return pool.overdue_residencies, pool.overdue_us


def test_what_a_suspend_made_overdue_is_seen_served_to_nobody_and_swept() -> None:
    desk = Recorded(blocks=8000)
    for number in range(400):  # more than one step sweeps
        desk.serve("a", f"s{number}", [number * 100 + at for at in range(12)])
    assert desk.gauge() == (0, 0)
    desk.clock.advance(LOW_IDLE_US + 30 * MICROSECONDS)  # the machine slept
    count, late_us = desk.gauge()
    assert count == 400 and 29 * MICROSECONDS < late_us < 31 * MICROSECONDS
    assert desk.serve("a", "s7", [700 + at for at in range(12)]) == 0
    desk.governor.step()
    assert [event.residencies for event in desk.overdue] == [desk.gauge()[0]] and desk.gauge()[0] > 0
    assert desk.overdue[0].due_us < desk.clock.now_us() - 29 * MICROSECONDS
    for _ in range(6):
        desk.governor.step()
    assert desk.gauge() == (0, 0) and [event.residencies for event in desk.overdue][1:] == [0]


def test_steps_of_the_wall_clock_make_nothing_overdue_and_extend_nothing() -> None:
    desk = Recorded()
    for step in (-DAY_US, DAY_US):
        desk.serve("a", "x", PROMPT)
        desk.clock.step_utc(step)
        desk.governor.step()
        assert desk.gauge() == (0, 0)
        desk.clock.advance(LOW_IDLE_US - MICROSECONDS)
        assert desk.serve("a", "x", PROMPT) == 36
        desk.clock.advance(LOW_IDLE_US + MICROSECONDS)
        assert desk.serve("a", "x", PROMPT) == 0
        desk.steps(1)
    assert desk.overdue == []


def test_attached_every_second_it_dies_at_its_ceiling() -> None:
    desk = Recorded()
    desk.serve("a", "x", PROMPT)
    hits = []
    for _ in range(LOW_ABSOLUTE_US // MICROSECONDS + 2):
        desk.clock.advance(MICROSECONDS)
        hits.append(desk.serve("a", "x", PROMPT))
        desk.governor.step()
    assert hits == [36] * (LOW_ABSOLUTE_US // MICROSECONDS - 1) + [0, 36, 36]
