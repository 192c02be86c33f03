"""Live residencies after an act that ended holds earlier: the act's deadline holds, and what it ended is gone."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine

from kvcustody.audit.evidence.query.live_residencies import Live, live_residencies
from kvcustody.audit.kinds import Event, HoldsNarrowed, ResidencyOpened, ResidencyReleased, WorkerStarted

SHORTER, OVER, UNLISTED, LATER, RUNS = range(1, 6)
HELD_US, NARROWED_US, RELEASED_AFTER_US = 9_000_000, 3_000_000, 8_000_000


def opened(residency: int) -> Event:
    return ResidencyOpened(
        residency, residency, "acme", "ada", None, False, "internal", (), (), ("own",), 1, HELD_US + residency
    )


def released(residency: int, at_us: int, hold_us: int) -> Event:
    return ResidencyReleased(at_us, residency, "acme", "finished", (), hold_us)


def live(store: Engine, make_writer: Any, events: list[Event], now_us: int, limit: int = 100) -> dict[int, Live]:
    """By residency, read in pages of `limit`; every page but the last is full."""
    writer = make_writer(store)
    writer.submit(events)
    assert writer.flush()
    residencies: list[Live] = []
    with store.connect() as connection:
        while True:
            last = residencies[-1] if residencies else None
            after = None if last is None else (last.opened_us, last.incarnation, last.residency)
            page = live_residencies(
                connection, now_us=now_us + writer.offset_us, tenant="acme", after=after, limit=limit
            )
            residencies += page
            if len(page) < limit:
                break
    assert len({one.residency for one in residencies}) == len(residencies)
    return {one.residency: one._replace(until_us=one.until_us - writer.offset_us) for one in residencies}


def narrowed_story(*, act: bool) -> list[Event]:
    narrowed = HoldsNarrowed(200, "acme", 2, (SHORTER, OVER), (NARROWED_US, 1_000_000))
    return [
        WorkerStarted(1, "worker-1", 64, 1, 4096, "cpu", "test"),
        *map(opened, (SHORTER, OVER, UNLISTED, LATER, RUNS)),
        *(released(residency, 100, HELD_US) for residency in (SHORTER, OVER, UNLISTED)),
        *([narrowed] if act else []),
        released(LATER, 300, RELEASED_AFTER_US),
    ]


def test_deadlines_are_those_of_the_act(store: Engine, make_writer: Any) -> None:
    by_residency = live(store, make_writer, narrowed_story(act=True), 2_000_000)
    assert {residency: one.until_us for residency, one in by_residency.items()} == {
        SHORTER: NARROWED_US,
        LATER: RELEASED_AFTER_US,  # released after the act: its own leaf says
        RUNS: HELD_US + RUNS,  # what it began with
    }
    assert [one.running for one in by_residency.values()] == [False, False, True]


def test_positive_control_without_the_act_every_hold_lasts(store: Engine, make_writer: Any) -> None:
    found = live(store, make_writer, narrowed_story(act=False), 2_000_000)
    assert {residency: one.until_us for residency, one in found.items() if not one.running} == {
        SHORTER: HELD_US,
        OVER: HELD_US,
        UNLISTED: HELD_US,
        LATER: RELEASED_AFTER_US,
    }


def test_pages_are_filled_past_what_an_act_ended(store: Engine, make_writer: Any) -> None:
    assert set(live(store, make_writer, narrowed_story(act=True), 2_000_000, limit=1)) == {
        SHORTER,
        LATER,
        RUNS,
    }
