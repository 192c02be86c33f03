"""Facts that are few: who was erased, and whose holds were made to end earlier."""

from __future__ import annotations

from typing import NamedTuple

OPEN = 1 << 62  # the release of a residency that was never released
DEVICE_TIER = "device"  # the tier of all custody that leaves record today
LEVELS = ("launched", "retired", "sampled", "full")  # weakest first


class Person(NamedTuple):
    """Whose residency it is; `opened` is boot time."""

    tenant: str
    subject: str | None
    session: str | None
    opened: int


class ErasureFact(NamedTuple):
    """Who was erased, and when by UTC."""

    erasure: str
    at_us: int
    selector: str
    tenant: str | None
    subject: str | None
    session: str | None


class Narrowing(NamedTuple):
    """Holds of a tenant were made to end earlier: `standing` is each that was left, and until when it lasts."""

    tenant: str
    at: int
    standing: dict[int, int]
