"""Processes without a recorded end, and when each last gave a sign of life.

for one in open_processes(connection):
    silent_us = now_us - last_heard_us(connection, one, now_us)
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, exists, or_, select, true

from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import residencies
from kvcustody.audit.store.schema.ledger import events, incarnations, workers
from kvcustody.audit.store.schema.service import service_workers


class OpenProcess(NamedTuple):
    """A process without a recorded end; `memory`: whether it announced any. `started_us` is UTC."""

    id: int
    uuid: str
    worker: str
    offset_us: int
    started_us: int
    memory: bool


def may_hold_custody() -> ColumnElement[bool]:
    """Return which rows of `incarnations` belong to a process with memory, or with residencies of its own.

    A killed command's, or control plane's, is none: no later leaf decides anything about what it recorded.
    """
    opened = exists().where(residencies.c.incarnation == incarnations.c.id, has_leaf(residencies))
    return or_(incarnations.c.shards.is_not(None), opened)


def open_processes(connection: Connection, where: ColumnElement[bool] | None = None) -> list[OpenProcess]:
    """Return the open processes among `incarnations` and `workers`, in the order of their registration."""
    row = incarnations.c
    query = (
        select(row.id, row.uuid, workers.c.name, row.offset_us, row.started_us, row.shards.is_not(None))
        .join(workers, workers.c.id == row.worker)
        .where(row.end.is_(None), true() if where is None else where)
        .order_by(row.id)
    )
    return [
        OpenProcess(number, uuid, worker, offset_us, started_us, bool(memory))
        for number, uuid, worker, offset_us, started_us, memory in connection.execute(query)
    ]


def last_heard_us(connection: Connection, process: OpenProcess, now_us: int) -> int:
    """Return when it last called a control plane or wrote to the ledger; times after `now_us` (UTC) are ignored."""
    row = service_workers.c
    seen = select(row.seen_us).where(row.incarnation == process.uuid, row.seen_us.between(0, now_us))
    last = select(events.c.at_us).where(events.c.incarnation == process.id, has_leaf(events))
    last = last.order_by(events.c.sequence.desc()).limit(1)
    times = (process.started_us, connection.scalar(seen) or 0, connection.scalar(last) or 0)
    return max((time_us for time_us in times if time_us <= now_us), default=0)
