"""Leaves from where a reader stopped: at least once, in the order of each log, resumable at any time.

1. A place is the next idx of a log, with the hash of the last leaf that the reader took there. A reader stores the
   `positions` of a batch after it has the batch safe; a crash before that gives the batch again, never a hole.
2. The position file is replaced whole and fsynced. A damaged one is refused: only the reader decides to start over.
3. Only committed leaves are read, and idx has no holes, so nothing that commits late is overtaken.
4. A restored or another ledger is recognised: a log is shorter than its place, or holds another leaf there. Such a log
   is read again from its first leaf, and `SinkPositions.restarted` counts it.
5. `SinkPositions.purged` counts the leaves that retention deleted before the reader took them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, select, tuple_

from kvcustody.audit.evidence.query.events import EventRow
from kvcustody.audit.leaf.merkle import leaf_hash
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.errors import LedgerError
from kvcustody.files import write_file
from kvcustody.plurals import several

_SCHEMA = "kvcustody/positions@2"
_PLACES_A_QUERY = 400  # two parameters each; SQLite takes 999 at least


class LogPlace(NamedTuple):
    """A reader's place in a log: the next idx, and the last leaf it received (-1: none yet)."""

    next: int
    taken: int = -1
    digest: str = ""


class SinkLosses(NamedTuple):
    """Losses by log: the events of rule 4 and the leaves of rule 5."""

    restarted: Mapping[str, int] = MappingProxyType({})
    purged: Mapping[str, int] = MappingProxyType({})

    def since(self, before: SinkLosses) -> SinkLosses:
        """Return the losses after `before`."""
        return SinkLosses(*(dict(Counter(now) - Counter(then)) for now, then in zip(self, before, strict=True)))

    def to_bytes(self) -> bytes:
        """Return the losses as a file's content."""
        return json.dumps({name: dict(counts) for name, counts in self._asdict().items()}, sort_keys=True).encode()


class SinkPositions(NamedTuple):
    """A reader's place in each log, and its losses (`SinkLosses`)."""

    places: Mapping[str, LogPlace] = MappingProxyType({})
    restarted: Mapping[str, int] = MappingProxyType({})
    purged: Mapping[str, int] = MappingProxyType({})

    @property
    def losses(self) -> SinkLosses:
        """The losses by rules 4 and 5."""
        return SinkLosses(self.restarted, self.purged)

    def to_bytes(self) -> bytes:
        """Return the canonical form of these positions, the file's content."""
        counts = {"restarted": dict(self.restarted), "purged": dict(self.purged)}
        value = {"schema": _SCHEMA, "places": dict(self.places), **counts}
        return json.dumps(value, sort_keys=True).encode()


class CursorBatch(NamedTuple):
    """Some leaves, and the positions after them."""

    rows: tuple[EventRow, ...]
    positions: SinkPositions


def pull(connection: Connection, positions: SinkPositions, *, limit: int = 1000) -> CursorBatch:
    """Return at most `limit` leaves after the positions, log by log; none if nothing is new."""
    query = select(logs.c.id, logs.c.name, logs.c.size).order_by(logs.c.name)
    heads = {row.name: row for row in connection.execute(query)}
    foreign = _foreign(connection, heads, positions.places)
    places = {name: place for name, place in positions.places.items() if name not in foreign}
    purged = Counter(positions.purged)
    rows: list[EventRow] = []
    behind = [(log, places.get(log.name, LogPlace(0))) for log in heads.values()]
    behind = [(log, place) for log, place in behind if log.size > place.next]
    for number, (log, place) in enumerate(behind):
        share = max(1, (limit - len(rows)) // (len(behind) - number))  # no busy log starves the others
        log_rows = _between(connection, log.id, log.name, place.next, log.size, share)
        rows += log_rows
        end = log_rows[-1].idx + 1 if len(log_rows) == share else log.size
        missing = end - place.next - len(log_rows)
        if missing:
            purged[log.name] += missing
        last = log_rows[-1] if log_rows else None
        places[log.name] = (
            place._replace(next=end) if last is None else LogPlace(end, last.idx, leaf_hash(last.leaf).hex())
        )
        if len(rows) >= limit:
            break
    restarted = Counter(positions.restarted) + Counter(foreign)
    return CursorBatch(tuple(rows), SinkPositions(places, dict(restarted), dict(purged)))


def newest_positions(connection: Connection) -> SinkPositions:
    """Return the places after everything that exists, for a reader that only wants new leaves."""
    query = (
        select(logs.c.name, logs.c.size, events.c.leaf)
        .select_from(logs.outerjoin(events, (events.c.log == logs.c.id) & (events.c.idx == logs.c.size - 1)))
        .where(logs.c.size > 0)
    )
    return SinkPositions(
        {
            row.name: LogPlace(row.size)
            if row.leaf is None  # retention purged it
            else LogPlace(row.size, row.size - 1, leaf_hash(bytes(row.leaf)).hex())
            for row in connection.execute(query)
        }
    )


def read_losses(path: Path) -> SinkLosses:
    """Return the losses in a file; none if it is missing or damaged."""
    try:
        value = json.loads(path.read_bytes())
        return SinkLosses(_counts(value["restarted"]), _counts(value["purged"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return SinkLosses()


def read_positions(path: Path) -> SinkPositions:
    """Return the positions in a file; empty without a file. Raises `LedgerError` for a damaged one (rule 2)."""
    try:
        value = json.loads(path.read_bytes())
        if value["schema"] != _SCHEMA:
            raise ValueError
        places = {
            str(name): LogPlace(int(idx), int(taken), str(digest))
            for name, (idx, taken, digest) in value["places"].items()
        }
        return SinkPositions(places, _counts(value["restarted"]), _counts(value["purged"]))
    except FileNotFoundError:
        return SinkPositions()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        problem = f"position file `{path}` is damaged; remove it to start over, which sends every leaf again"
        raise LedgerError(problem, path=path) from None


def write_positions(path: Path, positions: SinkPositions) -> None:
    """Replace the file durably; raises `LedgerError` if the disk refuses."""
    try:
        write_file(path, positions.to_bytes())
    except OSError as problem:
        raise LedgerError(f"position file `{path}`: {problem.strerror}", path=path) from None


def describe_losses(losses: SinkLosses) -> list[str]:
    """Return what a reader must know besides its leaves (rules 4 and 5), one sentence each."""
    return [
        f"log `{name}` was shorter than before or another one, as after a restore: read again from its first leaf"
        for name in sorted(losses.restarted)
    ] + [
        f"retention purged {several(count, 'leaf')} of log `{name}` before this reader took them"
        for name, count in sorted(losses.purged.items())
    ]


def _counts(value: dict[str, Any]) -> dict[str, int]:
    return {str(name): int(count) for name, count in value.items()}


def _foreign(connection: Connection, heads: Mapping[str, Any], places: Mapping[str, LogPlace]) -> Sequence[str]:
    """Return the logs whose places belong to another state of the ledger (rule 4).

    NOTE: logs that have nothing new are compared only when no log has: then there is time for it.
    """
    shorter = [name for name, place in places.items() if name not in heads or heads[name].size < place.next]
    compared = {
        (heads[name].id, place.taken): (name, place.digest)
        for name, place in places.items()
        if name not in shorter and place.taken >= 0
    }
    grown = {key: named for key, named in compared.items() if heads[named[0]].size > places[named[0]].next}
    compared = grown or compared
    keys, column, replaced = sorted(compared), events.c, []
    for first in range(0, len(keys), _PLACES_A_QUERY):
        query = select(column.log, column.idx, column.leaf).where(
            tuple_(column.log, column.idx).in_(keys[first : first + _PLACES_A_QUERY])
        )
        for row in connection.execute(query):
            name, digest = compared[row.log, row.idx]
            if leaf_hash(bytes(row.leaf)).hex() != digest:
                replaced.append(name)
    return shorter + replaced


def _between(connection: Connection, log: int, name: str, idx: int, end: int, limit: int) -> list[EventRow]:
    column = events.c
    query = (
        select(column.idx, column.at_us, column.kind, column.leaf)
        .where(column.log == log, column.idx >= idx, column.idx < end)
        .order_by(column.idx)
        .limit(limit)
    )
    return [
        EventRow(name, row.idx, row.at_us, row.kind, orjson.loads(bytes(row.leaf)), bytes(row.leaf))
        for row in connection.execute(query)
    ]
