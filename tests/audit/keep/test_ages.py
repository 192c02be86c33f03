"""The age of a leaf with an impossible stated time, and the processes that delay a purge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select

from kvcustody.audit.keep.purge_and_legal_hold import LogPlan, plan_purge
from kvcustody.audit.kinds import (
    DECLARED,
    GENERATED,
    SILENCE,
    Event,
    KeyEvent,
    ResidencyOpened,
    SpillStarted,
    WorkerStarted,
    WorkerStopped,
)
from kvcustody.audit.store.schema.ledger import logs
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.verify.ledger import stated_times
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.verify.ledger.stated_times import LedgerTimes, OddTime
from kvcustody.audit.write.committer import closing_committer
from kvcustody.audit.write.crash_recovery import Closing, close_process
from kvcustody.clock import SystemClock

KEY = SigningKey.generate("ledger.example/ages")
DAY = 86_400_000_000
YEAR = 365 * DAY


class Shifted(SystemClock):
    """A machine whose wall clock is wrong by so much."""

    def __init__(self, by_us: int) -> None:
        super().__init__()
        self._by_us = by_us

    def utc_us(self) -> int:
        return super().utc_us() + self._by_us


class World:
    """A ledger that is signed by a right clock, and processes with clocks of their own."""

    def __init__(self, store: Engine, make_writer: Any, folder: Path) -> None:
        self.store = store
        self.make_writer = make_writer
        self.folder = folder
        self.made = 0

    def process(self, shift_us: int, *extra: Event, stop: bool = True, memory: bool = True, origin: str = "") -> Any:
        """One that opens three residencies of `acme` behind `extra`, by a clock that is wrong by `shift_us`."""
        self.made += 1
        clock = Shifted(shift_us)
        name = f"worker-{self.made}"
        writer = self.make_writer(self.store, worker=name, clock=clock, spill_directory=self.folder / name)
        now = clock.now_us()
        begun = [WorkerStarted(now, name, 8, 1, 4096, "cpu", "test", origin=origin)] if memory else []
        opened = [
            ResidencyOpened(now + n, n, "acme", None, None, False, "internal", (), (), (), 1, now + 9)
            for n in range(3 if memory else 0)
        ]
        writer.submit([*begun, *extra, *opened, *([WorkerStopped(now + 9, name, "end", 0, (0,))] if stop else [])])
        assert writer.flush()
        return writer

    def sign(self) -> int:
        """Sign what there is; the time after it."""
        CheckpointSigner(self.store, [KEY], memory=self.folder / "signed", clock=SystemClock()).sign_once()
        return SystemClock().utc_us() + 1

    def plan(self, before_us: int) -> LogPlan:
        with self.store.connect() as connection:
            (found,) = [plan for plan in plan_purge(connection, before_us) if plan.log == "tenant/acme"]
        return found

    def odd(self, log: str = "tenant/acme") -> list[OddTime]:
        with self.store.connect() as connection:
            return list(LedgerTimes(connection).odd(log))

    def close(self, writer: Any, why: Closing) -> None:
        clock = SystemClock()
        with closing_committer(self.store, clock) as committer:
            assert close_process(committer, self.store, clock, writer.incarnation, why, "test:closing")


@pytest.fixture
def world(store: Engine, make_writer: Any, tmp_path: Path) -> World:
    return World(store, make_writer, tmp_path)


@pytest.fixture
def world_any(any_store: Engine, make_writer: Any, tmp_path: Path) -> World:
    """On both databases."""
    return World(any_store, make_writer, tmp_path)


def test_a_leaf_dated_a_year_ahead_does_not_stop_a_purge(world_any: World) -> None:
    world = world_any
    before_signing = SystemClock().utc_us()
    world.process(YEAR)  # its end states a year ahead, too
    world.process(0)
    after = world.sign()
    plan = world.plan(after)
    assert (plan.first, plan.below, plan.kept_by) == (0, 6, "the signed checkpoint")
    assert world.plan(before_signing).leaves == 0, "control: a signature from after that says no more than that"
    found = world.odd()
    assert [(odd.idx, odd.why) for odd in found] == [(0, "ahead"), (1, "ahead"), (2, "ahead")]
    assert found[0].not_before_us == 0 and before_signing < found[0].not_after_us < after
    assert found[0].at_us > after + YEAR // 2
    with world.store.connect() as connection:
        report = fsck(connection)
    assert report.ok and any("5 leaves with a time" in remark for remark in report.remarks)


def test_a_leaf_dated_a_year_back_does_not_hasten_one(world_any: World) -> None:
    world = world_any
    world.process(0)
    world.sign()
    world.process(-YEAR)
    world.sign()
    month_ago = SystemClock().utc_us() - 30 * DAY
    plan = world.plan(month_ago)
    assert plan.leaves == 0  # the honest leaves, of today, are in front
    found = world.odd()
    assert [(odd.idx, odd.why) for odd in found] == [(3, "early"), (4, "early"), (5, "early")]
    assert all(odd.at_us < odd.not_before_us <= odd.not_after_us for odd in found)


def test_backdated_leaves_alone_stay_and_late_ones_are_as_old_as_they_say(world: World) -> None:
    """One process writes what its spill held for a month, as it says itself; one only claims the date."""
    writer = world.make_writer(world.store, worker="first", spill_directory=world.folder / "first")
    writer.submit([SpillStarted(SystemClock().now_us(), "so that there is a first signature", 0)])
    assert writer.flush()
    world.sign()
    late = SpillStarted(SystemClock().now_us(), "the database is away", 0)
    world.process(-60 * DAY, late)
    world.process(-60 * DAY)
    world.sign()
    plan = world.plan(SystemClock().utc_us() - 30 * DAY)
    assert (plan.below, plan.kept_by) == (3, "a leaf that states an earlier time than it can have")
    assert [odd.why for odd in world.odd()] == ["late"] * 3 + ["early"] * 3
    assert world.plan(SystemClock().utc_us() + 1).below == 6, "control: by the signature they are old enough by then"


@pytest.mark.parametrize("at_once", [1, 2, 3, 5, 20_000])
def test_the_first_early_leaf_is_found_whatever_is_asked_at_once(
    world_any: World, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Of every range; where none is early, no row is read."""
    world = world_any
    for shift_us in (0, -YEAR, 0, -60 * DAY, YEAR):
        world.process(shift_us)
        world.sign()
    early = [odd.idx for odd in world.odd() if odd.why == "early"]
    assert early == [3, 4, 5, 9, 10, 11]
    monkeypatch.setattr(stated_times, "_AT_ONCE", at_once)
    with world.store.connect() as connection:
        times = LedgerTimes(connection)
        log = int(connection.scalar(select(logs.c.id).where(logs.c.name == "tenant/acme")) or 0)
        of_log = times.of(log)
        for since in range(16):
            for below in range(since, 16):
                expected = next((idx for idx in early if since <= idx < below), None)
                assert times.first_early(log, of_log, since, below) == expected, (since, below)
        monkeypatch.setattr(times, "_rows", None)
        assert times.first_early(log, of_log, 0, 3) is None
        with pytest.raises(TypeError):
            times.first_early(log, of_log, 0, 4)


def test_generated_history_states_its_own_time(world: World) -> None:
    writer = world.make_writer(world.store, worker="first", spill_directory=world.folder / "first")
    writer.submit([SpillStarted(SystemClock().now_us(), "so that there is a first signature", 0)])
    assert writer.flush()
    world.sign()
    world.process(-YEAR, origin=GENERATED)
    world.sign()
    assert world.odd() == [] and world.plan(SystemClock().utc_us() - 30 * DAY).below == 3


def test_what_a_killed_command_left_open_stops_nothing(world: World) -> None:
    key = KeyEvent(SystemClock().now_us(), "acme", "made", 1, "operator")
    world.process(0, key, stop=False, memory=False)
    world.process(0)
    assert world.plan(world.sign()).below == 4
    world.process(0, stop=False)
    plan = world.plan(world.sign())
    assert (plan.below, plan.kept_by) == (4, "a process that had not ended"), "control: one with memory"


@pytest.mark.parametrize(
    ("why", "days", "goes"),
    [
        (Closing(DECLARED, 90, 0, "ops", "dpo", "burnt", spill_lost=True), 0, True),
        (Closing(SILENCE, 8 * 86_400, 7 * 86_400, "plane"), 0, False),
        (Closing(SILENCE, 8 * 86_400, 7 * 86_400, "plane"), 6, False),
        (Closing(SILENCE, 8 * 86_400, 7 * 86_400, "plane"), 8, True),
    ],
)
def test_a_dead_process_stops_no_purge_for_ever(world_any: World, why: Closing, days: int, goes: bool) -> None:
    """What one that was closed for its silence may hand in yet is judged by its leaves: they wait as long again."""
    world = world_any
    dead = world.process(0, stop=False)
    after = world.sign()
    assert world.plan(after + 3650 * DAY).kept_by == "a process that had not ended", "control: not closed"
    world.close(dead, why)
    after = world.sign()
    plan = world.plan(after + days * DAY)
    assert plan.leaves == (plan.below - plan.first if goes else 0) and (plan.leaves > 0) == goes
