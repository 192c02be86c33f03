"""Moments and spans as text: UTC microseconds out and in, exact, the same wherever a person or a file reads them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

SECOND_US, MINUTE_US, HOUR_US, DAY_US = 1_000_000, 60_000_000, 3_600_000_000, 86_400_000_000
TO_THE_SECOND = "%Y-%m-%d %H:%M:%S"
TO_THE_MINUTE = "%Y-%m-%d %H:%M"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def utc(at_us: int) -> datetime:
    """The moment, exactly; raises `OverflowError` for one that no calendar has."""
    return _EPOCH + timedelta(microseconds=at_us)


def iso(at_us: int) -> str:
    """ISO 8601 in UTC, with a fraction of six digits only where there is one: `2026-11-20T14:00:00Z`."""
    return utc(at_us).isoformat().replace("+00:00", "Z")


def readable(at_us: int | None, form: str = TO_THE_SECOND, *, none: str = "-") -> str:
    """A moment for people; `none` where there is none (0 is none)."""
    return utc(at_us).strftime(form) if at_us else none


WHOLE_NUMBER = re.compile("-?[1-9][0-9]*|0")  # how a number is written that somebody gives as text


def moment_us(text: str) -> int:
    """UTC microseconds from ISO 8601: a date is its midnight, and without an offset it is UTC. Raises `ValueError`."""
    found = datetime.fromisoformat(text)
    return ((found if found.tzinfo else found.replace(tzinfo=UTC)) - _EPOCH) // timedelta(microseconds=1)


def span(length_us: int) -> str:
    """A length in the largest unit that measures it whole: `30m`, `7d`, `250ms`; `0s` for none."""
    for unit, size in (("d", DAY_US), ("h", HOUR_US), ("m", MINUTE_US), ("s", SECOND_US), ("ms", 1_000)):
        if length_us and length_us % size == 0:
            return f"{length_us // size}{unit}"
    return f"{length_us}us" if length_us else "0s"
