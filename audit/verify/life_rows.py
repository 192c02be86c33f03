"""Rows of `incarnations` against the leaves about each process: the one projection that is updated in place.

1. What a `worker-started` leaf announces is in the row; a row without one announces no memory.
2. The end is that of a `worker-stopped` or `worker-died` leaf about the process; without one the row has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sqlalchemy import Connection, select

from kvcustody.audit.erasure.who_owes import ENDS, STARTED, about
from kvcustody.audit.schema.ledger import incarnations, workers

_MEMORY = ("shards", "blocks", "bytes_per_block", "device", "software")


class LifeRows:
    """Takes the leaves of the system log, then says which rows contradict them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._announced: dict[str, tuple[Any, ...]] = {}
        self._worker: dict[str, str] = {}
        self._ends: dict[str, set[tuple[int, str]]] = {}

    def take(self, bodies: Iterable[Mapping[str, Any]]) -> None:
        """Note what is said about lives; other leaves are passed over."""
        for body in bodies:
            if body["kind"] == STARTED:
                self._announced[about(body)] = tuple(str(body.get(name)) for name in _MEMORY)
                self._worker[about(body)] = body["worker"]
            elif body["kind"] in ENDS:
                end = (int(body["at_us"]), body["kind"].removeprefix("worker-"))
                self._ends.setdefault(about(body), set()).add(end)
                self._worker.setdefault(about(body), body["worker"])

    def wrong(self) -> Iterator[str]:
        """What is wrong, a row each."""
        column = incarnations.c
        query = select(
            column.uuid, *(column[name] for name in _MEMORY), column.ended_us, column.end, workers.c.name
        ).outerjoin(workers, workers.c.id == column.worker)
        seen = set()
        for uuid, *memory, ended_us, end, worker in self._connection.execute(query.order_by(column.id)):
            seen.add(uuid)
            if tuple(map(str, memory)) != self._announced.get(uuid, ("None",) * len(_MEMORY)):
                yield f"the row of process `{uuid}` has other memory than its start says"
            ends = self._ends.get(uuid, {(None, None)})
            if (ended_us, end) not in ends:
                yield f"the row of process `{uuid}` has another end than its leaves say"
            if uuid in self._worker and worker != self._worker[uuid]:
                yield f"the row of process `{uuid}` is of worker `{worker}`, its leaves say `{self._worker[uuid]}`"
        for uuid in sorted(self._worker.keys() - seen):
            yield f"process `{uuid}` has no row"
