"""The clock of a request: month ends, leap years, zones and their clock changes, weekends and holidays."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcustody.audit.evidence.cases.case_clock import (
    EXTENDED_MONTHS,
    MONTH,
    WorkingCalendar,
    case_days,
    days_of,
    deadline,
    read_holidays,
    received_day,
    working_calendar,
)
from kvcustody.errors import ConfigError
from kvcustody.times import HOUR_US, moment_us, utc

UTC = working_calendar("UTC")
BERLIN = working_calendar("Europe/Berlin", ["2026-12-25", "2027-01-01", "2027-03-26", "2027-03-29"])


@pytest.mark.parametrize(
    ("received", "months", "last"),
    [
        ("2026-03-05", MONTH, "2026-04-06"),  # 5 April is a Sunday
        ("2026-05-05", MONTH, "2026-06-05"),
        ("2026-08-31", MONTH, "2026-09-30"),  # September has no 31st
        ("2027-01-31", MONTH, "2027-03-01"),  # 28 February is a Sunday
        ("2028-01-31", MONTH, "2028-02-29"),  # a leap year
        ("2028-01-30", MONTH, "2028-02-29"),
        ("2027-01-29", MONTH, "2027-03-01"),
        ("2028-02-29", MONTH, "2028-03-29"),
        ("2026-12-15", MONTH, "2027-01-15"),  # over the turn of the year
        ("2099-12-31", MONTH, "2100-02-01"),  # 31 January 2100 is a Sunday
        ("2100-01-31", MONTH, "2100-03-01"),  # 2100 is no leap year, and 28 February a Sunday
        ("2026-01-31", EXTENDED_MONTHS, "2026-04-30"),
        ("2026-11-30", EXTENDED_MONTHS, "2027-03-01"),
        ("2027-11-30", EXTENDED_MONTHS, "2028-02-29"),
    ],
)
def test_a_period_ends_with_the_day_of_the_same_date_or_the_last_of_its_month(
    received: str, months: int, last: str
) -> None:
    found = deadline(moment_us(f"{received}T12:00:00Z"), months, UTC)
    assert found.day == date.fromisoformat(last)
    assert found.until_us == moment_us((found.day + timedelta(days=1)).isoformat())


def test_extended_it_is_one_period_of_three_months_and_not_the_end_of_the_first_and_two_more() -> None:
    received_us = moment_us("2026-01-31T12:00:00Z")
    first = deadline(received_us, MONTH, UTC)
    assert (first.counted, first.day) == (date(2026, 2, 28), date(2026, 3, 2))
    assert deadline(received_us, EXTENDED_MONTHS, UTC).day == date(2026, 4, 30)


@pytest.mark.parametrize(
    ("counted", "last"),
    [
        ("2026-12-25", "2026-12-28"),  # a holiday on Friday, then the weekend
        ("2027-01-01", "2027-01-04"),
        ("2027-03-26", "2027-03-30"),  # Good Friday to Tuesday after Easter Monday
        ("2027-03-27", "2027-03-30"),
        ("2026-12-24", "2026-12-24"),  # a working day on the eve
    ],
)
def test_what_ends_on_a_weekend_or_holiday_ends_with_the_next_working_day(counted: str, last: str) -> None:
    day = date.fromisoformat(counted)
    received = date(day.year, day.month - 1, day.day) if day.month > 1 else date(day.year - 1, 12, day.day)
    found = deadline(moment_us(f"{received}T09:00:00+01:00"), MONTH, BERLIN)
    assert (found.counted, found.day) == (day, date.fromisoformat(last))


def test_without_the_holidays_of_the_list_it_ends_on_that_day() -> None:
    """Control: it is the list that moves it, and nothing else."""
    received_us = moment_us("2026-11-25T09:00:00+01:00")
    assert deadline(received_us, MONTH, BERLIN).day == date(2026, 12, 28)
    assert deadline(received_us, MONTH, working_calendar("Europe/Berlin")).day == date(2026, 12, 25)


def test_the_day_of_receipt_is_that_of_the_zone() -> None:
    late = moment_us("2026-04-30T22:30:00Z")  # half past midnight of the first of May in Berlin
    assert received_day(late, "UTC") == date(2026, 4, 30) != received_day(late, "Europe/Berlin")
    assert deadline(late, MONTH, UTC).counted == date(2026, 5, 30)
    assert deadline(late, MONTH, BERLIN).counted == date(2026, 6, 1)
    assert received_day(late, "America/Los_Angeles") == date(2026, 4, 30)
    assert received_day(late, "Pacific/Kiritimati") == date(2026, 5, 1)


@pytest.mark.parametrize("received", ["2027-02-26T10:00:00Z", "2026-09-25T10:00:00Z", "2026-08-25T10:00:00Z"])
def test_a_day_ends_at_midnight_of_the_zone(received: str) -> None:
    found = deadline(moment_us(received), MONTH, working_calendar("Europe/Berlin"))
    local = utc(found.until_us).astimezone(ZoneInfo("Europe/Berlin"))
    assert (local.hour, local.minute, local.date()) == (0, 0, found.day + timedelta(days=1))


def test_a_last_day_of_twenty_three_or_twenty_five_hours() -> None:
    """Sundays are moved, so the list is of a state whose weekend is another: the zone changes its hour on a Friday."""
    cairo = WorkingCalendar("Africa/Cairo", ())
    day = deadline(moment_us("2027-03-30T10:00:00Z"), MONTH, cairo)
    assert day.day == date(2027, 4, 30), "a Friday, which begins at one o'clock"
    begins = moment_us("2027-04-29T22:00:00Z")
    assert day.until_us - begins == 23 * HOUR_US


def test_the_calendar_of_a_case_has_those_holidays_alone_that_can_matter() -> None:
    received_us = moment_us("2026-11-25T09:00:00Z")
    near = BERLIN.near(received_us)
    assert near.texts() == ("2026-12-25", "2027-01-01", "2027-03-26", "2027-03-29")
    assert BERLIN.near(moment_us("2027-01-02T09:00:00Z")).texts() == ("2027-03-26", "2027-03-29")
    for months in (MONTH, EXTENDED_MONTHS):
        for days in range(0, 500, 7):
            at_us = received_us + days * 24 * HOUR_US
            assert deadline(at_us, months, BERLIN.near(at_us)) == deadline(at_us, months, BERLIN)


def test_every_day_of_eight_years_against_a_second_way_of_counting() -> None:
    """The twin walks day by day: the last day whose month number is at most so many more, and its date no larger."""
    day = date(2024, 1, 1)
    while day < date(2032, 1, 1):
        for months in (MONTH, EXTENDED_MONTHS):
            last = day
            while (last.year - day.year) * 12 + last.month - day.month <= months and not (
                (last.year - day.year) * 12 + last.month - day.month == months and last.day > day.day
            ):
                last += timedelta(days=1)
            last -= timedelta(days=1)
            found = deadline(moment_us(f"{day}T23:59:59Z"), months, UTC)
            assert found.counted == last, (day, months)
            assert found.day.weekday() < 5 and 0 <= (found.day - last).days <= 2
        day += timedelta(days=1)


def test_a_list_of_holidays_is_dates_and_a_zone_is_a_name_of_the_database() -> None:
    assert read_holidays("# Germany\n2026-12-25  # Christmas\n\n2026-12-26\n") == ("2026-12-25", "2026-12-26")
    with pytest.raises(ConfigError, match=r"`25\.12\.2026` is not a date"):
        working_calendar("UTC", ["25.12.2026"])
    for zone in ("Europe/Bonn", "../etc/passwd", ""):
        with pytest.raises(ConfigError, match="is not known"):
            working_calendar(zone)
    assert datetime.fromisoformat("2026-12-25").date() in BERLIN.holidays


GERMANY = WorkingCalendar("Europe/Berlin", (date(2026, 12, 25),))


def test_a_case_reads_the_days_that_it_kept_on_a_machine_without_its_zone() -> None:
    """Control: without them the days are counted, and here that zone is not known."""
    received_us = moment_us("2026-11-25T09:30:00Z")
    found = case_days(received_us, GERMANY)
    kept = " ".join(found.texts())
    assert days_of(received_us, "Nowhere/Land", "2026-12-25", kept) == found
    assert days_of(received_us, "Europe/Berlin", "2026-12-25", "") == found
    assert "`Nowhere/Land`" in days_of(received_us, "Nowhere/Land", "", "").unread


@pytest.mark.parametrize("kept", ["x", "2026-01-01", "2026-01-01 a b c d e f", "1 2 3 4 5 6 7", "0 " * 8])
def test_days_that_are_none_are_counted_and_said(kept: str) -> None:
    received_us = moment_us("2026-11-25T09:30:00Z")
    found = days_of(received_us, "Europe/Berlin", "2026-12-25", kept)
    assert found._replace(unread="") == case_days(received_us, GERMANY)
    assert found.unread == "the days that its leaf has"
    assert days_of(received_us, "Europe/Berlin", "the 25th", "").unread == "its holidays"


@given(
    received_us=st.integers(moment_us("2020-01-01T00:00:00Z"), moment_us("2030-01-01T00:00:00Z")),
    zone=st.sampled_from(["Etc/GMT+12", "Etc/GMT-14", "Asia/Kolkata", "America/New_York", "Pacific/Apia", "UTC"]),
)
def test_where_the_zone_is_not_known_no_end_is_too_late(received_us: int, zone: str) -> None:
    known, unknown = days_of(received_us, zone, "", ""), days_of(received_us, "Nowhere/Land", "", "")
    assert unknown.first.until_us <= known.first.until_us
    assert unknown.extended.until_us <= known.extended.until_us
