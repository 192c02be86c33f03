"""Which processes are and were at work, and when, read only from signed leaves.

1. A process is at work from its `worker-started` leaf until the last `worker-stopped` or `worker-died` leaf about it. A
   later `worker-returned` leaf cancels that end: the process had been wrongly taken for dead. No row of `incarnations`
   counts. An edited row changes nothing here, and `audit fsck` names it.
2. Processes that announced no memory, such as those of commands and of the control plane, are never at work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, bindparam, select

from kvcustody.audit.kinds import SYSTEM
from kvcustody.audit.store.database.postgres_roles import sees_one_tenant
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.errors import LedgerError

STARTED = "worker-started"
RETURNED = "worker-returned"
STOPPED = "worker-stopped"
ENDS = (STOPPED, "worker-died")
LIVES = (STARTED, *ENDS, RETURNED)  # the kinds of leaves about processes' lives
Body = Mapping[str, Any]


_LIFE_LEAVES = (
    select(events.c.idx, events.c.leaf)
    .join(logs, logs.c.id == events.c.log)
    .where(
        logs.c.name == SYSTEM,
        events.c.kind.in_(LIVES),
        events.c.idx >= bindparam("first_idx"),
        has_leaf(events),
    )
    .order_by(events.c.idx)
)


class WorkPeriod(NamedTuple):
    """One process of a worker: from `started_us` to `ended_us` (UTC; None: no recorded end), and how it ended."""

    worker: str
    started_us: int
    ended_us: int | None
    end: str | None = None

    def at_work(self, at_us: int) -> bool:
        """Return whether it had memory at a moment."""
        return self.started_us <= at_us and (self.ended_us is None or self.ended_us >= at_us)


def about(body: Body) -> str:
    """Return the process that a leaf about a life concerns: the one it names, else its recorder."""
    return str(body.get("of_incarnation") or body["incarnation"])


def work_periods(bodies: Iterable[Body]) -> dict[str, WorkPeriod]:
    """Return the processes that started, by incarnation (rule 1); other leaves are ignored."""
    every = list(bodies)
    starts: dict[str, Body] = {}
    for body in every:
        if body["kind"] == STARTED:
            starts.setdefault(about(body), body)
    over = ends(every)
    return {
        life: WorkPeriod(body["worker"], int(body["at_us"]), *over.get(life, (None, None)))
        for life, body in starts.items()
    }


def own_names(bodies: Iterable[Body]) -> dict[str, str]:
    """Return each process's own worker name, from its start or end; leaves must be in order."""
    said = (body for body in bodies if body["kind"] in (STARTED, STOPPED) and about(body) == body["incarnation"])
    return {body["incarnation"]: body["worker"] for body in said}


def ends(bodies: Iterable[Body]) -> dict[str, tuple[int, str]]:
    """Return when and how processes ended, whether they announced memory or not; leaves must be in order."""
    found: dict[str, tuple[int, str]] = {}
    for body in bodies:
        note_end(found, body)
    return found


def note_end(ends: dict[str, tuple[int, str]], body: Body) -> None:
    """Update the ends found so far with the next leaf; other leaves are ignored."""
    if body["kind"] in ENDS:
        end = (int(body["at_us"]), str(body["kind"]).removeprefix("worker-"))
        ends[about(body)] = max(end, ends.get(about(body), end))
    elif body["kind"] == RETURNED:
        ends.pop(about(body), None)


def at_work(periods: Mapping[str, WorkPeriod]) -> list[str]:
    """Return the processes without a recorded end, by incarnation."""
    return [life for life, period in periods.items() if period.ended_us is None]


def read_work_periods(connection: Connection) -> dict[str, WorkPeriod]:
    """Return the processes that started, by incarnation, from the system log; raises like `life_leaves`."""
    return work_periods(leaf.body for leaf in life_leaves(connection))


class LifeLeaf(NamedTuple):
    """A leaf about a process's life, and its place in the system log."""

    idx: int
    body: Body


def life_leaves(connection: Connection, first_idx: int = 0) -> list[LifeLeaf]:
    """Return every start and end of a worker's process from a place on, in order. The system log is never purged.

    Raises `LedgerError` on a connection that sees the rows of one tenant alone: nobody would seem to owe anything.
    """
    if sees_one_tenant(connection):
        raise LedgerError("the system log records who was at work, and a connection of one tenant cannot read it")
    rows = connection.execute(_LIFE_LEAVES, {"first_idx": first_idx})
    return [LifeLeaf(row.idx, orjson.loads(bytes(row.leaf))) for row in rows]
