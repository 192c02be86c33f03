"""What every event is: a small record of one moment, made on the hot path and turned into leaves later.

1. A kind of event is declared once, as a class with its outage class as base and its name in leaves as `tag`. All that
   is known of it elsewhere (`leaf_schema`) follows: to add a field, add it here, last and with a default.
"""

from __future__ import annotations

from typing import ClassVar, Self

import msgspec


class Event(msgspec.Struct, frozen=True, gc=False):
    """Something that happened at `at_us`, in boot-time microseconds of its incarnation."""

    outage: ClassVar[str] = ""
    at_us: int

    def _replace(self, **changes: object) -> Self:
        """The event with other values of some fields."""
        return msgspec.structs.replace(self, **changes)


class GuardingEvent(Event, frozen=True):
    """Class A: durable before the act that it records takes effect."""

    outage: ClassVar[str] = "A"


class LifecycleEvent(Event, frozen=True):
    """Class B: spilled to disk when the database is away."""

    outage: ClassVar[str] = "B"


class CountedEvent(Event, frozen=True):
    """Class C: added up into counters."""

    outage: ClassVar[str] = "C"
