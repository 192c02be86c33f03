"""Leaves in the order in which they were sealed, resumable from a position.

1. The order is the root log's: its leaves say, one after the other, which sub-log grew and to what size. It never
   changes, so a position always means the same, and nothing that commits late is overtaken. Within a log it is that of
   the commits. What is not sealed yet is given later.
2. A position is (root leaf, idx): the next root leaf to read, and from which idx of its sub-log, with a digest of the
   last root leaf that was read. It has the same size however many tenants there are.
3. Every leaf is given once for a sequence of positions; leaves that retention dropped are left out, and counted.
4. A restored or another ledger has no such root leaf there: it is read again from its first, and the page says so.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, Row, func, select

from kvcustody.audit.evidence.query.events import EventRow
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.audit.store.schema.trees import root_leaves

_SEALS_MAX = 2_000  # root leaves that one call looks at


class Position(NamedTuple):
    """A follower's position: it has received everything below (rule 2)."""

    seal: int
    idx: int
    digest: str = ""  # of the last root leaf that was read, in part or whole: its salt is new for each


START = Position(0, 0)


class CommitOrderPage(NamedTuple):
    """Some leaves, the next position, and whether more are available now.

    `restarted`: the position is of another state of the ledger (rule 4). `purged`: leaves that were left out (rule 3).
    """

    rows: tuple[EventRow, ...]
    position: Position
    more: bool
    restarted: bool = False
    purged: int = 0


def read_in_commit_order(
    connection: Connection, position: Position = START, *, log: str | None = None, limit: int = 1000
) -> CommitOrderPage:
    """Return at most `limit` leaves from a position on, of all logs or of one."""
    restarted = not _continues(connection, position)
    position = START if restarted else position
    column = root_leaves.c
    query = select(root_leaves, logs.c.name).join(logs, logs.c.id == column.log)
    query = query.where(column.idx >= position.seal).order_by(column.idx).limit(_SEALS_MAX)
    if log is not None:
        query = query.where(logs.c.name == log)
    seals = connection.execute(query).all()
    rows: list[EventRow] = []
    at, purged = position, 0
    for seal in seals:
        if len(rows) == limit:
            return CommitOrderPage(tuple(rows), at, True, restarted, purged)
        start = _before(connection, seal.log, seal.idx)
        first = max(start, at.idx) if at.seal == seal.idx else start
        some = _between(connection, seal.log, seal.name, first, seal.size, limit - len(rows))
        rows += some
        end = some[-1].idx + 1 if len(rows) == limit else seal.size
        purged += end - first - len(some)
        if end < seal.size:
            at = Position(seal.idx, end, _digest(seal))
            return CommitOrderPage(tuple(rows), at, True, restarted, purged)
        at = Position(seal.idx + 1, 0, _digest(seal))
    return CommitOrderPage(tuple(rows), at, len(seals) == _SEALS_MAX, restarted, purged)


def newest(connection: Connection) -> Position:
    """Return the position after everything that exists, for a follower that only wants new leaves."""
    last = connection.execute(select(root_leaves).order_by(root_leaves.c.idx.desc()).limit(1)).first()
    return START if last is None else Position(last.idx + 1, 0, _digest(last))


def _continues(connection: Connection, position: Position) -> bool:
    """Return whether the ledger still holds the root leaf at the position (rule 4)."""
    read = position.seal if position.idx else position.seal - 1
    seal = connection.execute(select(root_leaves).where(root_leaves.c.idx == read)).first()
    return position.digest == ("" if seal is None else _digest(seal)) and (seal is not None or position == START)


def _digest(seal: Row[Any]) -> str:
    return hashlib.sha256(seal.salt + seal.root).hexdigest()[:32]


def _before(connection: Connection, log: int, seal: int) -> int:
    """Return the size of a log before a root leaf of it."""
    column = root_leaves.c
    query = select(func.max(column.size)).where(column.log == log, column.idx < seal)
    return connection.scalar(query) or 0


def _between(connection: Connection, log: int, name: str, first: int, end: int, limit: int) -> list[EventRow]:
    column = events.c
    query = (
        select(column.idx, column.at_us, column.kind, column.leaf)
        .where(column.log == log, column.idx >= first, column.idx < end)
        .order_by(column.idx)
        .limit(limit)
    )
    return [
        EventRow(name, row.idx, row.at_us, row.kind, orjson.loads(bytes(row.leaf)), bytes(row.leaf))
        for row in connection.execute(query)
    ]
