"""Makes rows from existing leaves without assigning a place, beginning a process or adding a leaf.

1. `rebuild_rows` makes the rows that are a function of one leaf (`audit.project`), with the ledger's own ids. It is for
   a ledger that has its leaves, logs and processes: one that moves to another database, or has a new table.
2. `rebuild_ledger` fills an empty database from leaves alone, as an export has them. Ids of logs and processes are new.
   A log whose first leaves are gone begins at the first remaining one. Processes come from the system log's leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from sqlalchemy import Connection, Table, delete, exists, insert, select

from kvcustody.audit.kinds import SYSTEM, tenant_of
from kvcustody.audit.leaf.batch import LeafBatch, read_leaves
from kvcustody.audit.leaf.merkle import EMPTY
from kvcustody.audit.project import Figures, IncarnationRow, count_events, life_changes, project
from kvcustody.audit.store.database.bulk_insert import Inserts
from kvcustody.audit.store.schema.ledger import events, incarnations, logs, tenants, workers
from kvcustody.audit.write.append_leaves import change_life, register, write_deltas

_AT_ONCE = 5_000


class LogLeaves(NamedTuple):
    """The remaining leaves of one log, in order; `first` is the place of the first of them."""

    name: str
    first: int
    size: int
    leaves: Iterable[bytes]


def rebuild_rows(
    reading: Connection,
    writing: Connection,
    *,
    tables: frozenset[Table] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Counter[str]:
    """Insert the rows of the leaves that `reading` has, of these tables or of all; return the number for each table.

    `writing` may be another ledger's: its processes have the same ids. `progress` is told how many leaves were read.
    """
    column = incarnations.c
    lives = {
        row.uuid: IncarnationRow(row.id, row.offset_us)
        for row in reading.execute(select(column.uuid, column.id, column.offset_us))
    }
    counts, inserts, done = Counter[str](), Inserts(writing), 0
    query = select(events.c.log, events.c.idx, events.c.leaf).order_by(events.c.log, events.c.idx)
    for rows in reading.execution_options(yield_per=_AT_ONCE).execute(query).partitions(_AT_ONCE):
        of_log, idx, leaves = zip(*rows, strict=True)
        batch = read_leaves(list(map(bytes, leaves)), hashed=False)
        for table, pieces in project(batch, of_log, idx, lives.__getitem__, tables=tables).items():
            counts[table.name] += sum(len(piece[0]) for piece in pieces)
            inserts.add(table, pieces)
        done += len(rows)
        if progress is not None:
            progress(done)
    inserts.finish()
    return counts


def rebuild_ledger(connection: Connection, every: Iterable[LogLeaves]) -> None:
    """Fill an empty database from leaves (rule 2): leaves, their rows, processes and figures; trees stay empty."""
    lives = _Lives(connection)
    for log in sorted(every, key=lambda log: log.name != SYSTEM):  # who wrote is known by the system log
        made = connection.execute(insert(logs).values(name=log.name, size=log.size, frontier=EMPTY.to_bytes()))
        assert made.inserted_primary_key is not None
        number, place, seen_us = int(made.inserted_primary_key[0]), log.first, 0
        figures = Figures()
        inserts = Inserts(connection)
        for some in _windows(log.leaves):
            batch = read_leaves(some, hashed=False)
            seen_us = seen_us or batch.at_us[0]
            of_log, idx = [number] * len(some), range(place, place + len(some))
            lives.take(batch)
            recorders = [lives.of(uuid).id for uuid in batch.incarnations]
            inserts.add(events, [(of_log, idx, recorders, *batch[2:9])])
            for table, pieces in project(batch, of_log, idx, lives.of).items():
                inserts.add(table, pieces)
            count_events(batch, of_log, figures)
            place = idx.stop
        if log.name != SYSTEM:  # a tenant whose leaves were all dropped has its log
            tenant = {"tenant": tenant_of(log.name), "log": number}
            connection.execute(insert(tenants).values(**tenant, first_seen_us=seen_us))
        write_deltas(inserts, figures, {number: log.size})
        inserts.finish()
    lives.drop_idle()


class _Lives:
    """The processes of a ledger that is filled."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._rows: dict[str, IncarnationRow] = {}
        self.of = self._rows.__getitem__

    def take(self, batch: LeafBatch) -> None:
        """Add processes that these leaves are the first of, then what they change of processes."""
        for uuid, founder in batch.founders.items():
            if uuid not in self._rows:
                self._rows[uuid] = register(self._connection, uuid, *founder)
        for change in life_changes(batch, self.of):
            change_life(self._connection, change)

    def drop_idle(self) -> None:
        """Drop the name that stood in for workers whose processes said theirs later."""
        idle = ~exists().where(incarnations.c.worker == workers.c.id)
        self._connection.execute(delete(workers).where(idle))


def _windows(leaves: Iterable[bytes]) -> Iterator[list[bytes]]:
    left = iter(leaves)
    while some := list(islice(left, _AT_ONCE)):
        yield some
