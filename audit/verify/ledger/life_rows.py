"""Compare rows of `incarnations` and `workers`, the only projection updated in place, with the leaves about processes.

1. What a `worker-started` leaf announces is in the row, and so is its moment; a row without one announces no memory.
2. The end is that of a leaf about the process's end behind the last one by which it returned; without one the row has
   none.
3. Whose process it is, is said by those leaves (`audit.project`, rule 7). Of a process that announced nothing and has
   not ended no leaf says it: it is no worker, and its name is not evidence (`unproved`).
4. A name in `workers` has a process, or is one that a process had first: `unknown`, or a name that a leaf says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sqlalchemy import Connection, exists, func, select

from kvcustody.audit.evidence.processes.work_periods import ENDS, LIVES, RETURNED, STARTED, about
from kvcustody.audit.kinds import SYSTEM
from kvcustody.audit.leaf.batch import OWN_LIFE, UNKNOWN_WORKER
from kvcustody.audit.leaf.leaf_schema import CLAIMING_KINDS, SERVING_KINDS
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events, incarnations, logs, workers
from kvcustody.plurals import several

_MEMORY = ("shards", "blocks", "bytes_per_block", "device", "software")
_NOTHING = ("None",) * len(_MEMORY)


class LifeRows:
    """Takes the leaves of the system log, then names the rows that contradict them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._announced: dict[str, tuple[Any, ...]] = {}
        self._started: dict[str, int] = {}
        self._worker: dict[str, str] = {}
        self._names = {UNKNOWN_WORKER}
        self._ends: dict[str, set[tuple[int, str]]] = {}
        self.unproved = 0

    def take(self, bodies: Iterable[Mapping[str, Any]]) -> None:
        """Note a leaf about a life; other leaves are ignored."""
        for body in bodies:
            kind, life = body["kind"], about(body)
            if kind == STARTED:
                self._announced[life] = tuple(str(body.get(name)) for name in _MEMORY)
                self._started[life] = int(body["at_us"])
            elif kind in ENDS:
                end = (int(body["at_us"]), kind.removeprefix("worker-"))
                self._ends.setdefault(life, set()).add(end)
            elif kind == RETURNED:
                self._ends.pop(life, None)
            if kind in OWN_LIFE or kind in LIVES:
                self._names.add(body["worker"])
                if kind in OWN_LIFE or self._worker.get(life, UNKNOWN_WORKER) == UNKNOWN_WORKER:
                    self._worker[life] = body["worker"]

    def wrong(self) -> Iterator[str]:
        """Yield what is wrong, one entry for each row."""
        column = incarnations.c
        query = select(
            column.uuid,
            *(column[name] for name in _MEMORY),
            column.started_us,
            column.ended_us,
            column.end,
            workers.c.name,
        ).outerjoin(workers, workers.c.id == column.worker)
        seen = set()
        for uuid, *memory, started_us, ended_us, end, worker in self._connection.execute(query.order_by(column.id)):
            seen.add(uuid)
            row = f"the row of process `{uuid}` in `incarnations`"
            if tuple(map(str, memory)) != self._announced.get(uuid, _NOTHING):
                yield f"{row} has another memory than its start leaf"
            if started_us != self._started.get(uuid, started_us):
                yield f"{row} has another start than its leaf"
            if (ended_us, end) not in self._ends.get(uuid, {(None, None)}):
                yield f"{row} has another end than its leaves"
            if worker is None:
                yield f"{row} names a worker that is not in `workers`"
            elif worker != self._worker.get(uuid, worker):
                yield f"{row} is of worker `{worker}` of `workers`, its leaves say `{self._worker[uuid]}`"
            self.unproved += uuid not in self._worker
        for uuid in sorted(self._worker.keys() - seen):
            yield f"process `{uuid}` has no row in `incarnations`"
        idle = select(workers.c.name).where(~exists().where(incarnations.c.worker == workers.c.id))
        for name in self._connection.scalars(idle.order_by(workers.c.name)):
            if name not in self._names:
                yield f"`{name}` in `workers` has no process"


def unshown_holdings(connection: Connection) -> Iterator[str]:
    """Yield leaves in which workers state a tenant's holdings although no leaf there shows that they served it.

    What would show it may be in a hole of their sequences: it is not known.
    """
    shown, life = events.alias(), incarnations.alias()
    serves = (
        exists()
        .where(shown.c.log == events.c.log, shown.c.kind.in_(sorted(SERVING_KINDS)))
        .where(shown.c.incarnation == life.c.id, life.c.worker == incarnations.c.worker)
    )
    query = (
        select(logs.c.name, workers.c.name, func.count())
        .join(logs, logs.c.id == events.c.log)
        .join(incarnations, incarnations.c.id == events.c.incarnation)
        .join(workers, workers.c.id == incarnations.c.worker)
        .where(events.c.kind.in_(sorted(CLAIMING_KINDS - SERVING_KINDS)), incarnations.c.blocks.is_not(None))
        .where(logs.c.name != SYSTEM, has_leaf(events), ~serves)
        .group_by(logs.c.name, workers.c.name)
        .order_by(logs.c.name, workers.c.name)
    )
    for log, worker, count in connection.execute(query.select_from(events)):
        what = several(count, "leaf")
        yield f"{what} of worker `{worker}` in `{log}` on what it held, and none there shows that it served it"


def silent_processes(connection: Connection) -> Iterator[str]:
    """Yield rows of `incarnations` of processes without any remaining leaf, if there are any."""
    column = incarnations.c
    query = select(column.id).where(~exists().where(events.c.incarnation == column.id))
    silent = len(connection.execute(query).all())
    if silent:
        yield f"no leaf is here of {several(silent, 'process')} in `incarnations`"
