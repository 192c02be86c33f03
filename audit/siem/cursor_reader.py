"""Leaves from where a reader left off: at least once, in the order of each log, for ever resumable.

1. A position is the next idx of each log. `positions` of a batch are stored by the reader after it has the batch
   safe; a crash before that gives the batch again, never a hole.
2. The position file is replaced whole and fsynced. One that is damaged is refused: starting over is the reader's act.
3. Only committed leaves are read, and idx has no holes, so nothing that commits late is overtaken.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import orjson
from sqlalchemy import Connection, select

from kvcustody.audit.query.events import EventRow
from kvcustody.audit.schema.ledger import events, logs
from kvcustody.errors import LedgerError
from kvcustody.files import write_file

_SCHEMA = "kvcustody/positions@1"
Positions = dict[str, int]


class CursorBatch(NamedTuple):
    """Some leaves, and where a reader who has them goes on."""

    rows: tuple[EventRow, ...]
    positions: Positions


def pull(connection: Connection, positions: Positions, *, limit: int = 1000) -> CursorBatch:
    """At most `limit` leaves after the positions, log by log; none when there is nothing new."""
    rows: list[EventRow] = []
    after = dict(positions)
    names = connection.execute(select(logs.c.id, logs.c.name, logs.c.size).order_by(logs.c.name)).all()
    behind = [log for log in names if log.size > positions.get(log.name, 0)]
    for number, log in enumerate(behind):
        share = max(1, (limit - len(rows)) // (len(behind) - number))  # no busy log starves the others
        some = _after(connection, log.id, log.name, positions.get(log.name, 0), share)
        rows += some
        if some:
            after[log.name] = some[-1].idx + 1
        if len(rows) >= limit:
            break
    return CursorBatch(tuple(rows), after)


def newest(connection: Connection) -> Positions:
    """Positions after everything that is there: for a reader who wants only what comes."""
    return {row.name: row.size for row in connection.execute(select(logs.c.name, logs.c.size))}


def read_positions(path: Path) -> Positions:
    """The positions in a file; none where there is no file. Raises `LedgerError` for a damaged one (rule 2)."""
    try:
        value = json.loads(path.read_bytes())
        if value["schema"] != _SCHEMA:
            raise ValueError
        return {str(name): int(idx) for name, idx in value["next"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        problem = f"position file `{path}` is damaged; remove it to start over, every leaf will be sent again"
        raise LedgerError(problem, path=path) from None


def write_positions(path: Path, positions: Positions) -> None:
    """Replace the file, durably; raises `LedgerError` where the disk refuses."""
    data = json.dumps({"schema": _SCHEMA, "next": positions}, sort_keys=True).encode()
    try:
        write_file(path, data)
    except OSError as problem:
        raise LedgerError(f"position file `{path}`: {problem.strerror}", path=path) from None


def _after(connection: Connection, log: int, name: str, idx: int, limit: int) -> list[EventRow]:
    column = events.c
    query = (
        select(column.idx, column.at_us, column.kind, column.leaf)
        .where(column.log == log, column.idx >= idx)
        .order_by(column.idx)
        .limit(limit)
    )
    return [
        EventRow(name, row.idx, row.at_us, row.kind, orjson.loads(bytes(row.leaf)), bytes(row.leaf))
        for row in connection.execute(query)
    ]
