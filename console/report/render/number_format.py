"""Numbers and times as readers see them, in one form everywhere."""

from __future__ import annotations

from kvcustody.times import DAY_US, HOUR_US, MINUTE_US, SECOND_US, iso

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def count(value: int) -> str:
    """A whole number with thousands apart."""
    return f"{value:,}"


def percent(part: int, whole: int) -> str:
    """A share; never rounded up to 100 % while something is missing."""
    if not whole:
        return "-"
    hundredths = part * 10_000 // whole
    return f"{hundredths // 100}.{hundredths % 100:02d} %"


def moment(at_us: int) -> str:
    """A UTC time to the microsecond; nothing for 0."""
    return iso(at_us) if at_us else ""


def second(at_us: int) -> str:
    """A UTC time to the second; nothing for 0."""
    return f"{iso(at_us)[:19]}Z" if at_us else ""


def minute(at_us: int) -> str:
    """A UTC time to the minute."""
    return iso(at_us)[:16]


def duration(value_us: int) -> str:
    """A length of time in the unit that suits it."""
    for unit, length in (("d", DAY_US), ("h", HOUR_US), ("min", MINUTE_US), ("s", SECOND_US)):
        if value_us >= length:
            return f"{value_us // length}.{value_us * 10 // length % 10} {unit}".replace(".0 ", " ")
    return f"{value_us // 1000} ms" if value_us >= 1000 else f"{value_us} µs"


def time_text(value_us: int) -> str:
    """A length of time below hours, with a digit more than `duration` where it is short."""
    if value_us < 1000:
        return f"{value_us} µs"
    return f"{value_us / 1000:,.1f} ms" if value_us < SECOND_US else f"{value_us / SECOND_US:,.1f} s"


def size(value: int) -> str:
    """Bytes in a binary unit, one digit after the point, rounded down."""
    power = min(len(_UNITS) - 1, max(0, (value.bit_length() - 1) // 10)) if value else 0
    tenths = value * 10 >> (10 * power)
    return f"{tenths // 10}.{tenths % 10} {_UNITS[power]}"
