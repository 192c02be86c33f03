"""Fleet: the current work of every worker and door, and where workers publish their blocks.

1. All of it is what processes say of themselves to the control plane, every few seconds. Nothing is read from NATS, so
   the page is the same with events at workers' own sockets, in the stream, at both, or at neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from starlette.responses import Response

from kvcustody.console.render.time_chart import ChartSeries, NameChart
from kvcustody.console.web.page_request import PageRequest
from kvcustody.governance.service.access.roles import Permission, Role
from kvcustody.governance.service.fleet.workers import WorkerRun
from kvcustody.governance.service.operations.parameters import LARGE

_SHOWN_MAX: Final = 500
_DRAWN_MAX: Final = 64
_PLACES: Final = {"nats": "the stream in NATS", "socket": "its own socket", "dynamo": "Dynamo's publisher"}


class ToldAt(NamedTuple):
    """Where a worker publishes its blocks. `blocks`: published and not withdrawn; None where it does not count them."""

    place: str
    is_connected: bool
    blocks: int | None
    sent: int
    lost: int


def show(visit: PageRequest) -> Response:
    """Return the running workers, and the doors; the page refreshes itself."""
    visit.caller.must(Permission.READ_OPERATIONS)
    visit.record_live("consoleFleet")
    every = [worker for _, worker in visit.service.fleet.listed(limit=LARGE, only_open=True)]
    workers = sorted((one for one in every if one.ended_us is None), key=lambda one: one.worker)
    shown = workers[:_SHOWN_MAX]
    return visit.page(
        "operate/fleet.html",
        "Fleet",
        workers=[(one, told_at(one.status)) for one in shown],
        left_out=len(workers) - len(shown),
        doors=[one for one in visit.service.epochs.takers.listed() if one.role == Role.DOOR],
        memory=_memory(shown),
    )


def told_at(status: Mapping[str, Any]) -> list[ToldAt]:
    """Return where a worker says that it publishes its blocks; empty: nowhere."""
    return [
        ToldAt(
            words,
            bool(status[f"events_connected.{place}"]),
            int(status[told]) if (told := f"events_told_blocks.{place}") in status else None,
            int(status.get(f"events_sent.{place}", 0)),
            int(status.get(f"events_lost.{place}", 0)),
        )
        for place, words in _PLACES.items()
        if f"events_connected.{place}" in status
    ]


def _memory(workers: Sequence[WorkerRun]) -> NameChart:
    """Return each worker's blocks by use."""
    drawn = [one for one in workers if one.status.get("blocks.total")][:_DRAWN_MAX]
    values = []
    for one in drawn:
        total, active, cached = (int(one.status.get(f"blocks.{name}", 0)) for name in ("total", "active", "cached"))
        values.append((active, cached, max(0, total - active - cached)))
    series = tuple(
        ChartSeries(name, [value[place] for value in values], colour)
        for place, (name, colour) in enumerate((("of running requests", 1), ("cached", 2), ("neither", 5)))
    )
    return NameChart("Blocks by worker", "count", "Worker", [one.worker for one in drawn], series, across=True)
