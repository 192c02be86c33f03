"""Ended weeks, months and quarters of a time zone, and when each one's report is due.

1. A period begins and ends at midnight of its zone: weeks on Monday, quarters in January, April, July, October. Where
   clocks are put forward over a midnight, the day begins at the moment that has its name.
2. Its report is due at a full hour of the first day after it, so that workers' last leaves are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, tzinfo
from enum import StrEnum
from typing import NamedTuple

from kvcustody.time_zones import open_zone
from kvcustody.times import utc

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MONTHS_OF_QUARTER = 3


class Cadence(StrEnum):
    """How often a report is made."""

    WEEKLY = "weekly"
    MONTHLY = "monthly"
    QUARTERLY = "quarterly"


class Period(NamedTuple):
    """The period of a report, and when it is due; UTC microseconds, `until_us` exclusive."""

    since_us: int
    until_us: int
    due_us: int


class Calendar(NamedTuple):
    """The due dates of one schedule's reports."""

    every: Cadence
    zone: str
    hour: int

    def periods(self, after_us: int, until_us: int) -> Iterator[Period]:
        """Return the periods whose reports are due after one moment and up to another, oldest first."""
        for period in self._from(after_us):
            if period.due_us > until_us:
                return
            if period.due_us > after_us:
                yield period

    def next(self, after_us: int) -> Period:
        """Return the first period whose report is due after a moment."""
        return next(period for period in self._from(after_us) if period.due_us > after_us)

    def _from(self, after_us: int) -> Iterator[Period]:
        """Every period from the one before the one that a moment is in."""
        zone = open_zone(self.zone)
        day = utc(after_us).astimezone(zone).date()
        begins = self._begins(self._begins(day) - timedelta(days=1))
        while True:
            ends = self._following(begins)
            since_us, until_us = _moment_us(begins, 0, zone), _moment_us(ends, 0, zone)
            yield Period(since_us, until_us, _moment_us(ends, self.hour, zone))
            begins = ends

    def _begins(self, day: date) -> date:
        """The first day of the period that a day is in."""
        if self.every is Cadence.WEEKLY:
            return day - timedelta(days=day.weekday())
        month = day.month
        if self.every is Cadence.QUARTERLY:
            month -= (month - 1) % _MONTHS_OF_QUARTER
        return day.replace(month=month, day=1)

    def _following(self, begins: date) -> date:
        """The first day of the next period."""
        if self.every is Cadence.WEEKLY:
            return begins + timedelta(days=7)
        months = _MONTHS_OF_QUARTER if self.every is Cadence.QUARTERLY else 1
        years, month = divmod(begins.month - 1 + months, 12)
        return date(begins.year + years, month + 1, 1)


def _moment_us(day: date, hour: int, zone: tzinfo) -> int:
    return (datetime(day.year, day.month, day.day, hour, tzinfo=zone) - _EPOCH) // timedelta(microseconds=1)
