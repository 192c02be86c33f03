"""Numbers and times for readers, in one format everywhere."""

from __future__ import annotations

from datetime import timedelta
from zoneinfo import ZoneInfo

from kvcustody.plurals import several
from kvcustody.times import DAY_US, HOUR_US, MINUTE_US, SECOND_US, iso, utc

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_LONG = 24  # letters of an identifier that is shown short


def count(value: int) -> str:
    """Return a whole number with separated thousands."""
    return f"{value:,}"


def percent(part: int, whole: int) -> str:
    """Return a share; never rounded up to 100 % while something is missing."""
    if not whole:
        return "-"
    hundredths = part * 10_000 // whole
    return f"{hundredths // 100}.{hundredths % 100:02d} %"


def moment(at_us: int) -> str:
    """Return a UTC time to the microsecond; nothing for 0."""
    return iso(at_us) if at_us else ""


def second(at_us: int) -> str:
    """Return a UTC time to the second; nothing for 0."""
    return f"{iso(at_us)[:19]}Z" if at_us else ""


def minute(at_us: int) -> str:
    """Return a UTC time to the minute."""
    return f"{iso(at_us)[:16]}Z"


def duration(value_us: int) -> str:
    """Return a length of time in the unit that suits it."""
    for unit, length in (("d", DAY_US), ("h", HOUR_US), ("min", MINUTE_US), ("s", SECOND_US)):
        if value_us >= length:
            return f"{value_us // length}.{value_us * 10 // length % 10} {unit}".replace(".0 ", " ")
    return f"{value_us // 1000} ms" if value_us >= 1000 else f"{value_us} µs"


def time_text(value_us: int) -> str:
    """Return a length of time below hours, with one digit more than `duration` where it is short."""
    if value_us < 1000:
        return f"{value_us} µs"
    return f"{value_us / 1000:,.1f} ms" if value_us < SECOND_US else f"{value_us / SECOND_US:,.1f} s"


def relative(at_us: int, now_us: int) -> str:
    """Return how long ago a moment is, or in how long, in whole units; below a second it is now."""
    length_us = abs(now_us - at_us)
    for unit, length in (("d", DAY_US), ("h", HOUR_US), ("min", MINUTE_US), ("s", SECOND_US)):
        if length_us >= length:
            distance = f"{count(length_us // length)} {unit}"
            return f"{distance} ago" if at_us < now_us else f"in {distance}"
    return "now"


def size(value: int) -> str:
    """Return bytes in a binary unit, one digit after the point, rounded down."""
    power = min(len(_UNITS) - 1, max(0, (value.bit_length() - 1) // 10)) if value else 0
    tenths = value * 10 >> (10 * power)
    return f"{tenths // 10}.{tenths % 10} {_UNITS[power]}"


def share(low_ppm: int, high_ppm: int, unknown: int) -> str:
    """Return a share in millionths, as a range where that many units are unknown; never rounded up."""
    low, high = (f"{value // 10_000}.{value // 100 % 100:02d}" for value in (low_ppm, high_ppm))
    return f"{low}–{high} %" if low != high or unknown else f"{low} %"


def ppm(value: int) -> str:
    """Return a share in millionths as a percentage, with as many digits as it has."""
    return f"{value / 10_000:.4f}".rstrip("0").rstrip(".") + " %"


def short(identifier: str) -> str:
    """Return the beginning of a long identifier or digest; the full one is in an annex."""
    kind, colon, rest = identifier.rpartition(":")
    return f"{kind}{colon}{rest[:8]}" if len(rest) >= _LONG else identifier


def coordinate(value: float) -> str:
    """Return a coordinate with one digit after the point, and none where it is whole."""
    return f"{value:.1f}".removesuffix(".0")


def local(at_us: int, zone: str) -> str:
    """Return a time to the second in an IANA time zone, with the zone's short name; nothing for UTC."""
    return "" if zone == "UTC" else utc(at_us).astimezone(ZoneInfo(zone)).strftime("%Y-%m-%d %H:%M:%S %Z")


def period_length(since_us: int, until_us: int, zone: str = "UTC") -> str:
    """Return a period's length in whole calendar months or days (UTC, else the zone's), or as `duration`."""
    for name in dict.fromkeys(("UTC", zone)):
        first, last = (utc(at_us).astimezone(ZoneInfo(name)).replace(tzinfo=None) for at_us in (since_us, until_us))
        months = 12 * (last.year - first.year) + last.month - first.month
        if months > 0 and (first.day, first.time()) == (last.day, last.time()):
            return several(months, "month")
        days = last - first
        if days >= timedelta(days=1) and days == timedelta(days=days.days):
            return several(days.days, "day")
    return duration(until_us - since_us)
