"""Every kind of event: its name in leaves, its outage class and its logs; and the keys common to all."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from kvcustody.audit.kinds import (
    case_events,
    control_events,
    copy_events,
    custody_events,
    epoch_events,
    ledger_events,
    route_events,
)
from kvcustody.audit.kinds.event import Event

SYSTEM = "system"
SCHEMA = "kvcustody/event@1"


class EventKind(NamedTuple):
    """An event's name in leaves and its outage class."""

    name: str
    outage: str


KINDS: dict[type[Event], EventKind] = {
    kind: EventKind(str(kind.__struct_config__.tag), kind.outage)
    for module in (
        *(
            control_events,
            custody_events,
            copy_events,
            ledger_events,
            case_events,
            epoch_events,
            route_events,
        ),
    )
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Event) and kind.__struct_config__.tag
}

HEAD_KEYS = (
    "schema",
    "kind",
    "outage",
    "log",
    "incarnation",
    "sequence",
    "at_us",
    "boot_us",
    "part",
    "parts",
)
TOTALS = {"runs": "blocks", "written": "written_blocks"}  # run lists and the keys of their sizes
ROWS = ("holds", "until_boot_us")  # lists of numbers that belong together and continue together
COPIES = (
    "names",
    "numbers",
    "blocks_each",
    "bytes_each",
)  # equally long, as moments beside them: one place a copy
COPY_MOMENTS = ("due_boot_us", "stored_boot_us", "ended_boot_us", "destroyed_boot_us")
TRACE, SIGNATURE = "trace", "signature"
EARLIER = "earlier_blocks"
SPARSE = (
    TRACE,
    SIGNATURE,
    "orders",
    EARLIER,
    "in_service",
    "ends_utc",
)  # keys that a leaf lacks where its event has nothing to say


_LOGS_KEPT = 4096  # names, each one text for all leaves of its log
ACTING = {kind: kind.acting for kind in KINDS if kind.acting}
"""Kinds that are written in two logs, and the field that names who acted; `owner` is the other party."""


@lru_cache(_LOGS_KEPT)
def log_of(tenant: str | None) -> str:
    """Return the log for a tenant's leaves; the system log if there is no tenant."""
    return SYSTEM if tenant is None else f"tenant/{tenant}"


def tenant_of(log: str) -> str:
    """Return the tenant of a log, by its name; the system log's name stays."""
    return log.removeprefix(log_of(""))


def logs_of(event: Event) -> tuple[str, ...]:
    """Return the logs of an event: both parties' if one tenant reads another's blocks."""
    acting = ACTING.get(type(event))
    if acting is not None:
        parties = getattr(event, acting), getattr(event, "owner")  # noqa: B009 - the base has no owner
        return tuple(dict.fromkeys(map(log_of, parties)))
    return (log_of(getattr(event, "tenant", None)),)
