"""The deadline for answering a person's request: one month (GDPR 12(3)), counted according to Regulation 1182/71.

    calendar = working_calendar("Europe/Berlin", ["2026-12-25"])
    deadline(received_us, MONTH, calendar).until_us

1. The day of receipt is a date in the calendar's time zone. The period ends with the last hour of the day with the same
   date, that many months later. If that month has no such day, it ends with the month's last day (3(2)(c)).
2. If that day is a Saturday, a Sunday or a listed holiday, the period ends with the next day that is none of these
   (3(4)). The operator states the holidays: those of the controller's member state.
3. An extension by two months gives one period of three months from the same receipt. It is not two months added to the
   first end, which may give another day.
4. A day ends at the next one's midnight in that zone, however many hours it has. Nothing here reads a clock.
5. A case keeps the days that its calendar gave when it was opened (`CaseDays.texts`). So a machine without its zone, or
   with other rules for it, reads the same days. If they are neither kept nor computable, `days_of` gives ends that are
   never too late, and reports that.
"""

from __future__ import annotations

from calendar import monthrange
from collections.abc import Iterable
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from typing import NamedTuple

from kvcustody.errors import ConfigError
from kvcustody.time_zones import check_zone, open_zone
from kvcustody.times import utc

MONTH, EXTENDED_MONTHS = 1, 3
HOLIDAYS_MAX = 2_000
_SATURDAY = 5
_TURN_OF_YEARS = timedelta(days=130)  # the longest period, and the holidays that can follow its end
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_ZONE, _LAST_ZONE = (
    timezone(timedelta(hours=14)),
    timezone(timedelta(hours=-12)),
)  # where days begin and end


class WorkingCalendar(NamedTuple):
    """A time zone by its IANA name, and the listed holidays, in order."""

    zone: str
    holidays: tuple[date, ...]

    def near(self, received_us: int) -> WorkingCalendar:
        """Return the calendar with only the holidays that can move an end of a period from this receipt."""
        day = received_day(received_us, self.zone)
        kept = (one for one in self.holidays if day <= one <= day + _TURN_OF_YEARS)
        return WorkingCalendar(self.zone, tuple(kept))

    def texts(self) -> tuple[str, ...]:
        """Return the holidays as ISO dates."""
        return tuple(one.isoformat() for one in self.holidays)


class CaseDeadline(NamedTuple):
    """The last day, and the moment when it is over: UTC microseconds, the first moment that is too late.

    `counted` is the day that the months give; it is another one where that is no working day.
    """

    day: date
    counted: date
    until_us: int


class CaseDays(NamedTuple):
    """The day of receipt, and the ends of a case's two periods. `unread`: parts of its leaf that could not be read."""

    received: date
    first: CaseDeadline
    extended: CaseDeadline
    unread: str = ""

    def texts(self) -> tuple[str, ...]:
        """Return the days as a leaf has them: the day of receipt; then for each period its day, the day counted, and
        its moment.
        """
        ends = (self.first, self.extended)
        return (
            self.received.isoformat(),
            *(f"{one.day.isoformat()} {one.counted.isoformat()} {one.until_us}" for one in ends),
        )


def working_calendar(zone: str, holidays: Iterable[str] = ()) -> WorkingCalendar:
    """Return the calendar of a zone and ISO dates; raises `ConfigError` for an unknown zone or an invalid date."""
    check_zone(zone)
    listed = set()
    for text in holidays:
        try:
            listed.add(date.fromisoformat(text))
        except ValueError:
            raise ConfigError(f"holiday `{text}` is not a date (YYYY-MM-DD)", holiday=text) from None
    if len(listed) > HOLIDAYS_MAX:
        raise ConfigError(f"{len(listed)} holidays are more than {HOLIDAYS_MAX}")
    return WorkingCalendar(zone, tuple(sorted(listed)))


def read_holidays(text: str) -> tuple[str, ...]:
    """Return the dates of a list, one on each line; comments after `#` and empty lines are ignored."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return tuple(line for line in lines if line)


def received_day(received_us: int, zone: str) -> date:
    """Return the date of a moment in a zone."""
    return utc(received_us).astimezone(open_zone(zone)).date()


def deadline(received_us: int, months: int, calendar: WorkingCalendar) -> CaseDeadline:
    """Return the end of a period of that many months from this receipt (rules 1 and 2)."""
    received = received_day(received_us, calendar.zone)
    return _end(received, months, calendar.holidays, open_zone(calendar.zone))


def case_days(received_us: int, calendar: WorkingCalendar) -> CaseDays:
    """Return the days that the calendar gives for a request; raises `ConfigError` for an unknown zone."""
    first, extended = (deadline(received_us, months, calendar) for months in (MONTH, EXTENDED_MONTHS))
    return CaseDays(received_day(received_us, calendar.zone), first, extended)


def days_of(received_us: int, zone: str, holidays: str, kept: str) -> CaseDays:
    """Return the days of a case from the texts of its row (rule 5). Never raises, because a list contains other cases
    too.
    """
    try:
        received, *ends = kept.split()
        first, extended = (
            CaseDeadline(date.fromisoformat(day), date.fromisoformat(counted), int(until_us))
            for day, counted, until_us in (ends[:3], ends[3:])
        )
        return CaseDays(date.fromisoformat(received), first, extended)
    except ValueError:
        unread = "the days that its leaf has" if kept else ""
    try:
        days = tuple(date.fromisoformat(text) for text in holidays.split())
        return case_days(received_us, WorkingCalendar(zone, days))._replace(unread=unread)
    except ConfigError:
        unread = f"its time zone `{zone}` (unknown on this machine)"
    except ValueError:
        unread = "its holidays"
    received_at = utc(received_us).astimezone(_LAST_ZONE).date()  # the earliest day that it is anywhere
    first, extended = (_end(received_at, months, (), _FIRST_ZONE) for months in (MONTH, EXTENDED_MONTHS))
    return CaseDays(received_at, first, extended, unread)


def _end(received: date, months: int, holidays: Iterable[date], zone: tzinfo) -> CaseDeadline:
    counted = _months_later(received, months)
    free, day = frozenset(holidays), counted
    while day.weekday() >= _SATURDAY or day in free:
        day += timedelta(days=1)
    after = datetime.combine(day + timedelta(days=1), time(), zone)
    return CaseDeadline(day, counted, (after.astimezone(UTC) - _EPOCH) // timedelta(microseconds=1))


def _months_later(day: date, months: int) -> date:
    year, month = divmod(day.year * 12 + day.month - 1 + months, 12)
    return date(year, month + 1, min(day.day, monthrange(year, month + 1)[1]))
