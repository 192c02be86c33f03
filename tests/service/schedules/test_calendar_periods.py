"""Weeks, months and quarters of a time zone: without a hole or an overlap, on the days that clocks change too."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcustody.errors import ConfigError
from kvcustody.governance.service.schedules.calendar_periods import Cadence, Calendar
from kvcustody.time_zones import open_zone
from kvcustody.times import DAY_US, moment_us

ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Pacific/Chatham", "America/Asuncion")
LONGEST = {Cadence.WEEKLY: 8, Cadence.MONTHLY: 32, Cadence.QUARTERLY: 93}


@pytest.mark.parametrize(
    ("every", "zone", "after", "period", "due"),
    [
        ("monthly", "UTC", "2026-03-15", ("2026-03-01", "2026-04-01"), "2026-04-01T06:00"),
        (
            "monthly",
            "Europe/Berlin",
            "2026-03-15",
            ("2026-02-28T23:00", "2026-03-31T22:00"),
            "2026-04-01T04:00",
        ),
        (
            "monthly",
            "Europe/Berlin",
            "2026-12-15",
            ("2026-11-30T23:00", "2026-12-31T23:00"),
            "2027-01-01T05:00",
        ),
        (
            "weekly",
            "America/New_York",
            "2026-03-08",
            ("2026-03-02T05:00", "2026-03-09T04:00"),
            "2026-03-09T10:00",
        ),
        (
            "quarterly",
            "Asia/Kolkata",
            "2026-05-05",
            ("2026-03-31T18:30", "2026-06-30T18:30"),
            "2026-07-01T00:30",
        ),
        # what ended this morning is due at six, and not over before that
        ("monthly", "UTC", "2026-04-01T05:59", ("2026-03-01", "2026-04-01"), "2026-04-01T06:00"),
        ("monthly", "UTC", "2026-04-01T06:00", ("2026-04-01", "2026-05-01"), "2026-05-01T06:00"),
    ],
)
def test_the_next_period(every: str, zone: str, after: str, period: tuple[str, str], due: str) -> None:
    found = Calendar(Cadence(every), zone, 6).next(moment_us(after))
    assert found == (moment_us(period[0]), moment_us(period[1]), moment_us(due))


@given(
    every=st.sampled_from(Cadence),
    zone=st.sampled_from(ZONES),
    hour=st.integers(0, 23),
    after_us=st.integers(moment_us("1995-01-01"), moment_us("2045-01-01")),
)
def test_periods_join_and_begin_at_midnight(every: Cadence, zone: str, hour: int, after_us: int) -> None:
    calendar = Calendar(every, zone, hour)
    found = list(calendar.periods(after_us, after_us + 400 * DAY_US))
    assert found[0] == calendar.next(after_us)
    for before, period in itertools.pairwise(found):
        assert before.until_us == period.since_us and before.due_us < period.due_us
    for period in found:
        assert after_us < period.due_us <= after_us + 400 * DAY_US and period.until_us <= period.due_us
        assert 6 * DAY_US <= period.until_us - period.since_us <= LONGEST[every] * DAY_US
        local = datetime.fromtimestamp(period.since_us / 1e6, UTC).astimezone(ZoneInfo(zone))
        assert local.hour <= 1 and (local.weekday() == 0 if every is Cadence.WEEKLY else local.day == 1)
        assert every is not Cadence.QUARTERLY or local.month in (1, 4, 7, 10)


@given(
    cut=st.integers(0, 400),
    every=st.sampled_from(Cadence),
    zone=st.sampled_from(ZONES),
)
def test_looking_twice_finds_what_looking_once_does(cut: int, every: Cadence, zone: str) -> None:
    """Whatever moment a service was down at, nothing is left out and nothing comes twice."""
    begin, calendar = moment_us("2026-01-17"), Calendar(every, zone, 6)
    middle, end = begin + cut * DAY_US, begin + 400 * DAY_US
    parts = [*calendar.periods(begin, middle), *calendar.periods(middle, end)]
    assert parts == list(calendar.periods(begin, end))


@pytest.mark.parametrize("name", ["Mars/Olympus", "../../etc/passwd", "", "/etc/localtime", "Europe"])
def test_what_is_no_zone_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="time zone"):
        open_zone(name)
