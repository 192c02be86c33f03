"""Stamps the service's own events with the trace of the request that caused them.

1. An event that may have a trace and has none gets that of the request during which it is submitted. Events of a job or
   a timer belong to no request. Workers' leaves are not touched: they come as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Final

from kvcustody.audit.kinds import KINDS, Event
from kvcustody.audit.kinds.registry import TRACE
from kvcustody.audit.leaf import LEAF_KEYS
from kvcustody.audit.write.event_writer import Awaited, EventWriter

CURRENT: Final[ContextVar[str]] = ContextVar("kvcustody-trace", default="")  # of the request that is answered
_TRACED: Final = frozenset(kind for kind, named in KINDS.items() if TRACE in LEAF_KEYS[named.name])


class TracedWriter(EventWriter):
    """A writer of events that are stamped where they are submitted."""

    def submit(self, events: Sequence[Event]) -> int:
        """Queue events of class B and C; returns the sequence of the last one."""
        return super().submit([_stamped(event) for event in events] if CURRENT.get() else events)

    def begin_durable(self, event: Event, decided: Callable[[], object]) -> Awaited:
        """Queue a class A event: `decided` is called, on another thread, when `end_durable` need not be waited with."""
        return super().begin_durable(_stamped(event), decided)


def _stamped(event: Event) -> Event:
    trace = CURRENT.get()
    if not trace or type(event) not in _TRACED or getattr(event, TRACE):
        return event
    return event._replace(**{TRACE: trace})
