"""Time for deadlines: never back, never far ahead unless somebody says so, over restarts and boots."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcustody.clock import MICROSECONDS, SystemClock, VirtualClock
from kvcustody.deadline_clock import AWAY_SECONDS, JUMP_SECONDS, DeadlineClock
from kvcustody.errors import ConfigError

SECOND, DAY, YEAR = MICROSECONDS, 86_400 * MICROSECONDS, 365 * 86_400 * MICROSECONDS
JUMP, AWAY = JUMP_SECONDS * SECOND, AWAY_SECONDS * SECOND


@pytest.fixture
def wall() -> VirtualClock:
    return VirtualClock(now_us=1_000 * DAY)


@pytest.mark.parametrize("back_us", [1, SECOND, 20 * DAY])
def test_a_wall_clock_that_steps_back_neither_turns_time_back_nor_stops_it(wall: VirtualClock, back_us: int) -> None:
    clock = DeadlineClock(wall)
    before = clock.utc_us()
    wall.step_utc(-back_us)
    assert clock.utc_us() == before
    wall.advance(5 * SECOND)
    assert clock.utc_us() == before + 5 * SECOND and not clock.in_doubt
    assert clock.state().behind_us == back_us


def test_a_step_ahead_within_the_bound_is_followed_and_no_series_of_them_leads_beyond_it(
    wall: VirtualClock,
) -> None:
    clock = DeadlineClock(wall)
    began = clock.utc_us()
    for _ in range(10):
        wall.step_utc(JUMP // 10)
        clock.look()
    assert clock.utc_us() == began + JUMP and not clock.in_doubt
    wall.step_utc(1)
    assert clock.utc_us() == began + JUMP and clock.in_doubt


def test_ten_years_ahead_and_back_leave_nothing_behind(wall: VirtualClock, tmp_path: Path) -> None:
    clock = DeadlineClock(wall, tmp_path / "clock.json")
    began = clock.utc_us()
    wall.step_utc(10 * YEAR)
    wall.advance(SECOND)
    assert clock.utc_us() == began + SECOND and clock.in_doubt
    clock.keep()
    again = DeadlineClock(wall, tmp_path / "clock.json")  # a restart while it is in doubt
    assert again.utc_us() == began + SECOND and again.in_doubt
    wall.step_utc(-10 * YEAR)
    for each in (clock, again):
        assert each.utc_us() == began + SECOND and not each.in_doubt


def test_a_confirmed_jump_holds_for_every_process_that_shares_the_file(wall: VirtualClock, tmp_path: Path) -> None:
    clocks = [DeadlineClock(wall, tmp_path / "clock.json") for _ in range(2)]
    wall.step_utc(YEAR)
    assert {each.state().in_doubt for each in clocks} == {True}
    clocks[0].confirm()
    clocks[1].keep()
    assert [each.utc_us() for each in clocks] == [wall.utc_us()] * 2
    assert not clocks[1].in_doubt
    wall.step_utc(-YEAR)
    assert [each.utc_us() for each in clocks] == [wall.utc_us() + YEAR] * 2, "what was confirmed is never taken back"


def test_another_clock_that_agrees_confirms_and_one_that_does_not_changes_nothing(wall: VirtualClock) -> None:
    clock = DeadlineClock(wall)
    began = clock.utc_us()
    wall.step_utc(YEAR)
    clock.look()
    clock.agree(began)  # the control plane's is where ours was
    assert clock.in_doubt and clock.utc_us() == began
    clock.agree(wall.utc_us() - SECOND)
    assert not clock.in_doubt and clock.utc_us() == wall.utc_us()


@pytest.mark.parametrize("boot", ["same", "next"])
@pytest.mark.parametrize("back_us", [SECOND, 20 * DAY])
def test_a_restart_with_the_clock_set_back_goes_on_where_it_was(tmp_path: Path, boot: str, back_us: int) -> None:
    wall = VirtualClock(now_us=50 * DAY, boot="same")
    clock = DeadlineClock(wall, tmp_path / "clock.json")
    wall.advance(DAY)
    until = clock.utc_us()
    clock.keep()
    boot_us = wall.now_us() if boot == "same" else 7 * SECOND
    later = VirtualClock(now_us=boot_us, utc_us=wall.utc_us() - back_us, boot=boot)
    again = DeadlineClock(later, tmp_path / "clock.json")
    assert again.utc_us() == until
    later.advance(SECOND)
    assert again.utc_us() == until + SECOND


def test_a_killed_process_loses_nothing_of_its_boot(tmp_path: Path) -> None:
    """What went by since the file was written is known from the boot clock."""
    wall = VirtualClock(boot="same")
    DeadlineClock(wall, tmp_path / "clock.json")
    wall.advance(DAY)
    until = wall.utc_us()
    wall.step_utc(-DAY)
    assert DeadlineClock(wall, tmp_path / "clock.json").utc_us() == until


def test_a_machine_that_was_off_may_come_back_later_but_not_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "clock.json"
    wall = VirtualClock(boot="one")
    DeadlineClock(wall, path)
    began = wall.utc_us()
    weeks = VirtualClock(utc_us=began + AWAY, boot="two")
    clock = DeadlineClock(weeks, path)
    assert clock.utc_us() == began + AWAY and not clock.in_doubt
    weeks.step_utc(JUMP + 1)
    assert clock.state().in_doubt, "once the wall clock was accepted, a step is a step"
    years = VirtualClock(utc_us=began + 10 * YEAR, boot="three")
    clock = DeadlineClock(years, path)
    assert clock.in_doubt and clock.utc_us() < began + AWAY + 2 * JUMP


def test_a_clock_that_is_set_after_boot_is_an_absence_not_a_step(tmp_path: Path) -> None:
    """A machine without a battery begins in 1970 and learns the date minutes later."""
    path = tmp_path / "clock.json"
    began = DeadlineClock(VirtualClock(boot="one"), path).utc_us()
    wall = VirtualClock(utc_us=0, boot="two")
    clock = DeadlineClock(wall, path)
    assert clock.utc_us() == began
    wall.step_utc(began + 10 * DAY)
    assert clock.utc_us() == began + 10 * DAY and not clock.in_doubt


def test_a_damaged_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "clock.json"
    for text in ("", "{}", '{"boot":"b","boot_us":"1","utc_us":1,"limit_us":1,"is_anchored":true}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="put back its last copy"):
            DeadlineClock(VirtualClock(), path)
    with pytest.raises(ConfigError, match="cannot be kept"):
        DeadlineClock(VirtualClock(), Path("/proc/nowhere/clock.json"))


def test_the_machine_s_own_clock_is_kept_by_a_thread_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "clock.json"
    clock = DeadlineClock(SystemClock(), path)
    first = path.read_bytes()
    clock.start()
    clock.close()
    clock.close()
    assert path.read_bytes() != first
    assert DeadlineClock(SystemClock(), path).utc_us() >= clock.utc_us() - SECOND
