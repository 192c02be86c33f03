"""When the answer to a person's request is due: one month (GDPR 12(3)), counted as Regulation 1182/71 counts it.

    calendar = working_calendar("Europe/Berlin", ["2026-12-25"])
    deadline(received_us, MONTH, calendar).until_us

1. The day of receipt is a date in the calendar's time zone. The period ends with the last hour of the day of the same
   date, so many months later; where that month has no such day, of its last day (3(2)(c)).
2. Where that day is a Saturday, a Sunday or a holiday of the list, it ends with the next day that is none (3(4)).
   Which days are holidays is the operator's word: those of the controller's member state.
3. Extended by two further months it is one period of three, from the same receipt; it is not the first end and two
   months more, which may be another day.
4. A day ends at the next one's midnight in that zone, however many hours it has. Nothing here reads a clock.
"""

from __future__ import annotations

from calendar import monthrange
from collections.abc import Iterable
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from kvcustody.errors import ConfigError
from kvcustody.times import utc

MONTH, EXTENDED_MONTHS = 1, 3
HOLIDAYS_MAX = 2_000
_SATURDAY = 5
_TURN_OF_YEARS = timedelta(days=130)  # the longest period, and the holidays that can follow its end
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class WorkingCalendar(NamedTuple):
    """A time zone by its IANA name, and the holidays of the list, in order."""

    zone: str
    holidays: tuple[date, ...]

    def near(self, received_us: int) -> WorkingCalendar:
        """With those holidays alone that can move an end of a period from this receipt."""
        day = received_day(received_us, self.zone)
        kept = (one for one in self.holidays if day <= one <= day + _TURN_OF_YEARS)
        return WorkingCalendar(self.zone, tuple(kept))

    def texts(self) -> tuple[str, ...]:
        """The holidays as ISO dates."""
        return tuple(one.isoformat() for one in self.holidays)


class CaseDeadline(NamedTuple):
    """The last day, and the moment it is over: UTC microseconds, the first that is too late.

    `counted` is the day that the months give; it is another one where that is no working day.
    """

    day: date
    counted: date
    until_us: int


def working_calendar(zone: str, holidays: Iterable[str] = ()) -> WorkingCalendar:
    """The calendar of a zone and of ISO dates; raises `ConfigError` for what is neither."""
    _zone(zone)
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
    """The dates of a list, one a line; what follows a `#`, and empty lines, are passed over."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return tuple(line for line in lines if line)


def received_day(received_us: int, zone: str) -> date:
    """The date of a moment in a zone."""
    return utc(received_us).astimezone(_zone(zone)).date()


def deadline(received_us: int, months: int, calendar: WorkingCalendar) -> CaseDeadline:
    """The end of a period of so many months from this receipt (rules 1 and 2)."""
    counted = _months_later(received_day(received_us, calendar.zone), months)
    holidays, day = frozenset(calendar.holidays), counted
    while day.weekday() >= _SATURDAY or day in holidays:
        day += timedelta(days=1)
    after = datetime.combine(day + timedelta(days=1), time(), _zone(calendar.zone))
    return CaseDeadline(day, counted, (after.astimezone(UTC) - _EPOCH) // timedelta(microseconds=1))


def _months_later(day: date, months: int) -> date:
    year, month = divmod(day.year * 12 + day.month - 1 + months, 12)
    return date(year, month + 1, min(day.day, monthrange(year, month + 1)[1]))


def _zone(name: str) -> tzinfo:
    if name == "UTC":  # known without a database of zones
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ConfigError(f"time zone `{name}` is not known (IANA, as `Europe/Berlin`)", zone=name) from None
