"""Append leaves, their projections and their trees to the ledger inside the caller's transaction.

1. The idx of a log is assigned under the lock on its row, inside the transaction that inserts the leaf: contiguous
   per log, whatever fails.
2. Rows, leaf and the tree of its log commit together.
3. So does what the leaves add up to (`counters`): rows of this transaction's own, so that no writer waits for another.
4. A leaf whose (incarnation, sequence, part, log) is already there is skipped when `skip_known` is set, so a replay
   adds each leaf exactly once.
5. Whoever waits for logs waits for them in one order; `append_free` waits for those alone that it is told to, before it
   has any other: no two writers wait in a circle. It leaves what is of a log that another writer has, and all leaves of
   the same processes behind that: leaves of a process are there in the order of its batches.
6. While a table has two forms (`open_changes`), its rows go into both. Whether one has is said by the query that locks
   the logs.
7. A process that counts as dead and hands in a leaf of its own has not ended: a `worker-returned` leaf goes before it
   in the same transaction. Whoever closes a process has its row locked meanwhile.
8. With its leaves a sub-log's frontier and completed nodes are written, and to what size it grew (`unsealed_heads`).
   The root log is left to `root_sealer`, so writers of different sub-logs wait for nothing of each other's.
9. A sub-log's row is changed once a commit: on PostgreSQL by the trigger that gives leaves their places, which takes
   the frontiers from a setting of the transaction. So they are handed over before the leaves.
10. A stored frontier is loaded only when it gives its own root and the size that its log has; anything else is
    `TreeError`, and nothing is written on top of it: the database then counts as lost, and events go to the spill.
"""

from __future__ import annotations

import base64
import uuid as uuids
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from typing import NamedTuple

import orjson
from sqlalchemy import Connection, Table, insert, select, update

from kvcustody.audit.kinds import SYSTEM, Event, WorkerReturned, WorkerStopped, tenant_of
from kvcustody.audit.leaf import Context, merkle
from kvcustody.audit.leaf.batch import (
    EMPTY,
    LeafBatch,
    merge_batches,
    part_of_batch,
    read_leaves,
)
from kvcustody.audit.leaf.batch_encoder import BatchEncoder
from kvcustody.audit.leaf.merkle import Frontier, placed_nodes
from kvcustody.audit.project import (
    Figures,
    HourFigure,
    IncarnationRow,
    LifeChange,
    count_events,
    life_changes,
    project,
)
from kvcustody.audit.store.database import engine as database_engine
from kvcustody.audit.store.database.bulk_insert import Inserts, insert_rows
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.open_changes import STATE, forms_of
from kvcustody.audit.store.schema import ledger as schema
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.counters import counter_deltas
from kvcustody.audit.store.schema.trees import tree_nodes, unsealed_heads
from kvcustody.audit.tlog.root_sealer import load_frontier
from kvcustody.clock import Clock, SystemClock
from kvcustody.errors import LedgerError


class FreeLeaves(NamedTuple):
    """How many leaves of each batch `append_free` added, from its first on; and the log that stopped it, or ""."""

    added: list[int]
    stopped_by: list[str]


class _Placed(NamedTuple):
    """A batch, and the log id and the idx of each of its leaves."""

    batch: LeafBatch
    logs: list[int]
    places: list[int]


_LockedRow = tuple[int, str, int, bytes, str, int]  # a `LockedLog`, and `STATE`


class Appender:
    """Remembers row ids between batches; call `forget()` after a rollback, which may undo ids."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._logs: dict[str, int] = {}
        self._incarnations: dict[str, IncarnationRow] = {}
        self._trees = Trees()
        self._forms: Mapping[Table, Table] = {}  # the new form of a table that has two (rule 6)
        self.deltas = 0  # of figures, that the last call wrote

    def forget(self) -> None:
        """Drop every remembered id."""
        self._logs.clear()
        self._incarnations.clear()

    def append(self, connection: Connection, batch: LeafBatch, *, skip_known: bool = False) -> int:
        """Insert the leaves in order, with contiguous idx in each log, and their projections; return how many were
        added.
        """
        return self.append_all(connection, [batch], skip_known=skip_known)

    def append_all(self, connection: Connection, batches: Sequence[LeafBatch], *, skip_known: bool = False) -> int:
        """Append batches together; return how many leaves were added. No leaf may be in two of them."""
        if skip_known:
            batches = [self._unknown(connection, batch) for batch in batches]
        batches = [batch for batch in batches if batch.data]
        self.deltas = 0
        if not batches:
            return 0
        self._append(connection, [*self._returned(connection, batches), *batches], None)
        return sum(len(batch.data) for batch in batches)

    def append_free(
        self, connection: Connection, batches: Sequence[LeafBatch], waits_for: Collection[str]
    ) -> FreeLeaves:
        """Append the part of each batch that no other writer blocks, waiting only for these logs (rule 5)."""
        self.deltas = 0
        if not any(batch.data for batch in batches):
            return FreeLeaves([0] * len(batches), [""] * len(batches))
        back = self._returned(connection, batches)
        logs = self._locked(connection, [*back, *batches], {*waits_for, *(() if not back else (SYSTEM,))})
        held, stopped = {log.name for log in logs}, set[str]()
        free_leaves = FreeLeaves([], [])
        parts = []
        for batch in batches:
            added, stopped_by = _free_leaves(batch, held, stopped)
            free_leaves.added.append(added)
            free_leaves.stopped_by.append(stopped_by)
            if added:
                parts.append(part_of_batch(batch, 0, added))
        if parts or back:
            self._append(connection, [*back, *([merge_batches(parts)] if parts else ())], logs)
        return free_leaves

    def _append(self, connection: Connection, batches: Sequence[LeafBatch], locked: Sequence[LockedLog] | None) -> None:
        """Append batches whose leaves are new; `locked` are their logs, and perhaps others, where they are already."""
        if locked is None:
            logs = self._locked(connection, batches, None)
        else:
            touched = {name for batch in batches for name in batch.logs}
            logs = [log for log in locked if log.name in touched]
        nexts = {log.name: count(log.size).__next__ for log in logs}
        placed = [self._placed(batch, nexts) for batch in batches]
        hashes: dict[str, list[bytes]] = {}
        newest_us: dict[str, int] = {}
        for batch in batches:
            for log, more in leaf_hashes(batch).items():
                hashes.setdefault(log, []).extend(more)
            for log, at_us in zip(batch.logs, batch.at_us, strict=True):
                if at_us > newest_us.get(log, -1):
                    newest_us[log] = at_us
        trees = self._trees.grow(logs, hashes)
        hand_over(connection, trees)
        inserts = Inserts(connection)
        figures = Figures()
        for some in placed:
            self._insert(connection, some, inserts)
            count_events(some.batch, some.logs, figures)
        self.deltas = write_deltas(inserts, figures, {log.id: log.size + len(hashes[log.name]) for log in logs})
        inserts.finish()
        store(connection, trees, newest_us, self._clock.utc_us())

    def _returned(self, connection: Connection, batches: Sequence[LeafBatch]) -> list[LeafBatch]:
        """What is recorded of processes that count as dead and are not (rule 7)."""
        recorders = tuple({uuid for batch in batches for uuid in batch.incarnations})
        query = _LIVES.format(", ".join("?" * len(recorders)))
        if not dialect_of(connection).one_writer:
            query += " FOR KEY SHARE OF i"
        found = connection.exec_driver_sql(dialect_of(connection).with_placeholders(query), recorders)
        now_us = self._clock.now_us()
        back = [WorkerReturned(now_us, worker, uuid) for uuid, end, worker in found if end == _DIED]
        return [record_apart(connection, RETURNS, self._clock, back, now_us)] if back else []

    def _insert(self, connection: Connection, placed: _Placed, inserts: Inserts) -> None:
        """Insert leaves and projections."""
        batch, logs, places = placed
        lives = {uuid: self._incarnation(connection, uuid, batch) for uuid in set(batch.incarnations)}
        recorders = [lives[uuid].id for uuid in batch.incarnations]
        columns = (recorders, *batch[2:9])  # from `sequences` to `data`, in the order of the table
        inserts.add(schema.events, [(logs, places, *columns)])

        def life_of(uuid: str) -> IncarnationRow:
            return self._incarnation(connection, uuid, batch)

        for table, pieces in project(batch, logs, places, life_of).items():
            inserts.add(table, pieces)
            if table in self._forms:
                inserts.add(self._forms[table], pieces)
        for change in life_changes(batch, life_of):
            change_life(connection, change)

    def _locked(
        self, connection: Connection, batches: Sequence[LeafBatch], waits_for: Collection[str] | None
    ) -> list[LockedLog]:
        """Return the logs of all leaves, without locked ones that are not waited for (None: all are)."""
        names = {name for batch in batches for name in batch.logs}
        at_us, free = batches[0].at_us[0], waits_for is not None and not dialect_of(connection).one_writer
        unknown = sorted(names - self._logs.keys())
        first = [name for name in unknown if name in waits_for] if free and waits_for else []
        self._find_logs(connection, first if free else unknown, at_us, free=False)
        if not free:
            return self._taken(connection, _lock(connection, {self._logs[name]: name for name in names}))
        self._find_logs(connection, [name for name in unknown if name not in self._logs], at_us, free=True)
        ids = {self._logs[name]: name for name in names if name in self._logs}
        waited = {log: name for log, name in ids.items() if name in (waits_for or ())}
        others = ids.keys() - waited.keys()
        rows = [*(_lock(connection, waited) if waited else ()), *_lock_free(connection, others)]
        return self._taken(connection, rows)

    def _taken(self, connection: Connection, rows: Sequence[_LockedRow]) -> list[LockedLog]:
        """Return the logs of these rows, read together with the state of the schema (rule 6)."""
        for row in rows[:1]:
            is_as_ever = row[4:] == (database_engine.SCHEMA_REVISION, 0)
            self._forms = {} if is_as_ever else forms_of(connection, *row[4:])
        return [LockedLog(*row[:4]) for row in rows]

    def _find_logs(self, connection: Connection, names: Sequence[str], at_us: int, *, free: bool) -> None:
        """Remember the ids of these logs; `free`: of those alone that no other transaction is making."""
        for start in range(0, len(names), _LOGS_AT_ONCE):
            some = names[start : start + _LOGS_AT_ONCE]
            self._logs |= _log_ids(connection, some, at_us, free=free)

    def _placed(self, batch: LeafBatch, nexts: Mapping[str, Callable[[], int]]) -> _Placed:
        ids = {name: self._logs[name] for name in set(batch.logs)}
        return _Placed(batch, [ids[name] for name in batch.logs], [nexts[name]() for name in batch.logs])

    def _incarnation(self, connection: Connection, uuid: str, batch: LeafBatch) -> IncarnationRow:
        """Return the row of an incarnation; one that only its leaves mention is added with their offset."""
        known = self._incarnations.get(uuid)
        if known is None:
            table = schema.incarnations
            row = connection.execute(select(table.c.id, table.c.offset_us).where(table.c.uuid == uuid)).first()
            founder = batch.founders.get(uuid)
            if row is not None:
                known = IncarnationRow(row.id, row.offset_us)
            elif founder is not None:
                known = register(connection, uuid, *founder)
            else:
                raise LedgerError(f"incarnation `{uuid}` is not in the ledger", incarnation=uuid)
            self._incarnations[uuid] = known
        return known

    def _unknown(self, connection: Connection, batch: LeafBatch) -> LeafBatch:
        """Return the leaves that the ledger does not hold yet."""
        events, logs = schema.events, schema.logs
        known: set[tuple[str, int, int, str]] = set()
        for uuid in set(batch.incarnations):
            source = self._incarnation(connection, uuid, batch).id
            pairs = zip(batch.incarnations, batch.sequences, strict=True)
            sequences = [sequence for recorder, sequence in pairs if recorder == uuid]
            query = (
                select(events.c.sequence, events.c.part, logs.c.name)
                .join(logs, logs.c.id == events.c.log)
                .where(events.c.incarnation == source, has_leaf(events))
                .where(events.c.sequence.between(min(sequences), max(sequences)))
                .where(events.c.at_us.between(min(batch.at_us), max(batch.at_us)))  # their months
            )
            known |= {(uuid, row.sequence, row.part, row.name) for row in connection.execute(query)}
        if not known:
            return batch
        names = zip(batch.incarnations, batch.sequences, batch.parts, batch.logs, strict=True)
        fresh = [data for name, data in zip(names, batch.data, strict=True) if name not in known]
        return read_leaves(fresh) if fresh else EMPTY


def leaf_hashes(batch: LeafBatch) -> dict[str, list[bytes]]:
    """Return the RFC 6962 hashes of a batch by log, each log's in the order of its idx, for its frontier."""
    hashes: dict[str, list[bytes]] = {}
    for log, hash_ in zip(batch.logs, batch.hashes, strict=True):
        hashes.setdefault(log, []).append(hash_)
    return hashes


def write_deltas(inserts: Inserts, found: Figures, sizes: Mapping[int, int]) -> int:
    """Insert a transaction's changes of figures, given each log's size afterwards; return the number of rows."""
    rows = [
        (scraped, log, sizes[log], hour_us, _as_written(figures))
        for (scraped, log, hour_us), figures in found.items()
        if figures
    ]
    if rows:
        inserts.add(counter_deltas, [list(zip(*rows, strict=True))])
    return len(rows)


def _as_written(figures: Mapping[HourFigure, int]) -> str:
    return orjson.dumps([(*figure, value) for figure, value in figures.items()]).decode()


def register(connection: Connection, uuid: str, worker: str, offset_us: int, started_us: int) -> IncarnationRow:
    """Insert an incarnation (and its worker, if new)."""
    incarnations = schema.incarnations
    values = {
        "uuid": uuid,
        "worker": worker_id(connection, worker),
        "offset_us": offset_us,
        "started_us": started_us,
    }
    placed = connection.execute(insert(incarnations).values(**values)).inserted_primary_key
    assert placed is not None
    return IncarnationRow(int(placed[0]), offset_us)


def change_life(connection: Connection, change: LifeChange) -> None:
    """Change the row of a process according to a leaf, including its worker's name if the row has another."""
    lives, workers = schema.incarnations, schema.workers
    values = dict(change.values)
    query = select(workers.c.name).join(lives, lives.c.worker == workers.c.id)
    if change.renames(str(connection.scalar(query.where(lives.c.id == change.life.id)))):
        values["worker"] = worker_id(connection, change.worker)
    if values:
        connection.execute(update(lives).where(lives.c.id == change.life.id).values(**values))


def worker_id(connection: Connection, name: str) -> int:
    """Return the id of a worker, which is added if new."""
    workers = schema.workers
    known = connection.scalar(select(workers.c.id).where(workers.c.name == name))
    if known is None:
        connection.execute(dialect_of(connection).insert_new(workers).values(name=name))
        known = connection.scalar(select(workers.c.id).where(workers.c.name == name))
    assert known is not None
    return int(known)


def record_apart(connection: Connection, name: str, clock: Clock, events: Sequence[Event], now_us: int) -> LeafBatch:
    """Return events as the leaves of a process that begins and ends with them, so that it is never left open.

    Nobody is named in them but tenants. `now_us` is the boot-time moment of the last one.
    """
    uuid, offset_us = uuids.uuid4().hex, clock.utc_us() - clock.now_us()
    register(connection, uuid, name, offset_us, now_us + offset_us)
    context = Context(uuid, offset_us, _nobody)
    every = [*events, WorkerStopped(now_us, name, "closed", 0, ())]
    made = BatchEncoder(context).encode(list(enumerate(every, 1)))
    if made.refused:
        raise LedgerError(f"an event cannot be written: {made.refused[0]}")
    return made.batch


def _nobody(tenant: str | None, subject: str | None, session: str | None = None) -> str:
    raise LedgerError("an event of a ledger's own process names a person")


RETURNS = "ledger:returns"  # no name of a worker has a colon
_DIED = "died"
_LIVES = (
    'SELECT i.uuid, i."end", w.name FROM incarnations AS i JOIN workers AS w ON w.id = i.worker WHERE i.uuid IN ({})'
)
_LOGS_AT_ONCE = 256
_MAKING = (  # a lock for many names: a transaction has room for so many alone
    "SELECT name FROM unnest(%b::text[]) AS name WHERE pg_try_advisory_xact_lock(7215412, hashtext(name) & 1023)"
    " ORDER BY name"
)
_NO_TREE = merkle.EMPTY.to_bytes()
_NEW_LOG = "INSERT INTO logs (name, size, frontier) VALUES (?, 0, ?) ON CONFLICT (name) DO NOTHING"
_NEW_TENANT = "INSERT INTO tenants (tenant, log, first_seen_us) VALUES (?, ?, ?) ON CONFLICT (tenant) DO NOTHING"


def _log_ids(connection: Connection, names: Sequence[str], at_us: int, *, free: bool = False) -> dict[str, int]:
    """Return the ids of logs; missing logs are created, in the order of the names.

    `free`: but for those that another transaction is making, which would have to be waited for.
    """
    logs = schema.logs
    query = select(logs.c.name, logs.c.id).where(logs.c.name.in_(names))
    ids = {row.name: row.id for row in connection.execute(query)}
    missing = [name for name in names if name not in ids]
    if missing and not dialect_of(connection).one_writer:
        ours = list(connection.exec_driver_sql(_MAKING, (missing,)).scalars())
        missing = ours if free else missing
    if not missing:
        return ids
    # Another writer may be making the same log: wait for it and take its row, instead of failing the whole batch.
    connection.exec_driver_sql(
        dialect_of(connection).with_placeholders(_NEW_LOG), [(name, _NO_TREE) for name in missing]
    )
    ids = {row.name: row.id for row in connection.execute(query)}
    tenants = [(tenant_of(name), ids[name], at_us) for name in missing if name != SYSTEM]
    if tenants:
        connection.exec_driver_sql(dialect_of(connection).with_placeholders(_NEW_TENANT), tenants)
    return ids


def _lock(connection: Connection, names: dict[int, str]) -> list[_LockedRow]:
    """Return the logs in the order of their ids; their rows are locked until the transaction ends."""
    some = ", ".join(map(str, sorted(names)))
    if dialect_of(connection).one_writer:  # BEGIN IMMEDIATE has locked the database already
        rows: list[_LockedRow] = [
            (log, names[log], size, frontier, revision, changes)
            for log, size, frontier, revision, changes in sorted(_read_at_once(connection, some))
        ]
    else:
        rows = _locked_rows(connection, f"id IN ({some}) ORDER BY id FOR UPDATE")
    if len(rows) != len(names):
        raise merkle.TreeError(f"the ledger lost `{len(names) - len(rows)}` of its logs", logs=sorted(names))
    return rows


def _locked_rows(connection: Connection, where: str) -> list[_LockedRow]:
    query = f"SELECT id, name, size, frontier, {STATE} FROM logs WHERE {where}"  # noqa: S608 - row ids
    found: list[_LockedRow] = [(*row,) for row in connection.exec_driver_sql(query)]
    return found


def _lock_free(connection: Connection, logs: Collection[int]) -> list[_LockedRow]:
    """Those of these logs that no other transaction has locked; their rows are this one's until it ends."""
    if not logs:
        return []
    some = ", ".join(map(str, sorted(logs)))
    return _locked_rows(connection, f"id IN ({some}) FOR UPDATE SKIP LOCKED")


def _free_leaves(batch: LeafBatch, held: Collection[str], stopped: set[str]) -> tuple[int, str]:
    """Return how many leaves of a batch, from its first on, belong to locked logs and continuing processes.

    And the log that stopped it, or "". An event is not divided: what it has in two logs stays together.
    """
    count, stopped_by = len(batch.data), ""
    for place, (log, life) in enumerate(zip(batch.logs, batch.incarnations, strict=True)):
        if log not in held or life in stopped:
            count, stopped_by = place, "" if log in held else log
            break
    names = (batch.incarnations, batch.sequences)
    while 0 < count < len(batch.data) and all(of[count - 1] == of[count] for of in names):
        count -= 1
    stopped.update(batch.incarnations[count:])
    return count, stopped_by


def _read_at_once(connection: Connection, some: str) -> Iterator[tuple[int, int, bytes, str, int]]:
    """Id, size and frontier of logs, and `STATE`.

    It is one row: at every row SQLite would have to wait for the interpreter lock.
    """
    each = "id || ' ' || size || ' ' || hex(frontier)"
    query = f"SELECT group_concat({each}, ' '), {STATE} FROM logs WHERE id IN ({some})"  # noqa: S608 - row ids
    listed, revision, changes = connection.exec_driver_sql(query).one()
    words = iter((listed or "").split(" "))
    for log, size, frontier in zip(words, words, words, strict=False):
        yield int(log), int(size), bytes.fromhex(frontier), revision, changes


_Node = tuple[int, int, int, bytes]


class LockedLog(NamedTuple):
    """A sub-log whose row this transaction holds."""

    id: int
    name: str
    size: int
    frontier: bytes


class GrownTrees(NamedTuple):
    """The logs of a transaction with their leaves, and the nodes completed by these."""

    logs: list[LockedLog]
    nodes: list[_Node]


class Trees:
    """Grows stored trees; remembers checked frontiers by their bytes, so that nothing needs forgetting."""

    def __init__(self) -> None:
        self._checked: dict[int, tuple[bytes, Frontier]] = {}

    def grow(self, logs: Iterable[LockedLog], hashes: Mapping[str, Sequence[bytes]]) -> GrownTrees:
        """Append leaf hashes, by log name, to locked sub-logs and return them; raises `TreeError` (rule 10)."""
        trees = GrownTrees([], [])
        for log in logs:
            known = self._checked.get(log.id)
            stored = bytes(log.frontier)
            frontier = known[1] if known and known[0] == stored else load_frontier(log.id, log.size, stored)
            longer, grown = frontier.extend(hashes[log.name], halves=True)
            data = longer.to_bytes()
            self._checked[log.id] = (data, longer)
            trees.nodes.extend(placed_nodes(log.id, grown))
            trees.logs.append(LockedLog(log.id, log.name, longer.size, data))
        return trees


def hand_over(connection: Connection, trees: GrownTrees) -> None:
    """Write sizes and frontiers into the rows of logs, before the leaves (rule 9)."""
    if dialect_of(connection).arrays:
        handed = {str(log.id): base64.b64encode(log.frontier).decode() for log in trees.logs}
        connection.exec_driver_sql(_HAND_OVER, (orjson.dumps(handed).decode(),))
        return
    rows = [(log.id, log.size, log.frontier) for log in trees.logs]
    for start in range(0, len(rows), _LOGS_AT_ONCE):
        some = rows[start : start + _LOGS_AT_ONCE]
        statement = _UPDATE.format(", ".join(["(?, ?, ?)"] * len(some)))
        connection.exec_driver_sql(statement, tuple(chain.from_iterable(some)))


def store(connection: Connection, trees: GrownTrees, newest_us: Mapping[str, int], grown_us: int) -> None:
    """Store nodes, and the heads that no checkpoint covers yet; `newest_us` is the time of the newest leaf by log."""
    heads = [(log.id, log.size, newest_us[log.name], grown_us) for log in trees.logs]
    if dialect_of(connection).arrays:
        columns = [list(column) for column in zip(*trees.nodes, strict=True)] or [[]] * 4
        columns += [list(column) for column in zip(*heads, strict=True)]
        connection.exec_driver_sql(_STORE, tuple(columns))
        return
    if trees.nodes:
        insert_rows(connection, tree_nodes, trees.nodes)
    insert_rows(connection, unsealed_heads, heads)


_HAND_OVER = "SELECT set_config('kvcustody.frontiers', %s, true)"
_STORE = """
WITH nodes AS (
    INSERT INTO tree_nodes (log, level, idx, hash)
    SELECT * FROM unnest(%b::int[], %b::int[], %b::bigint[], %b::bytea[])
)
INSERT INTO unsealed_heads (log, size, newest_us, grown_us)
SELECT * FROM unnest(%b::int[], %b::bigint[], %b::bigint[], %b::bigint[])
"""
_UPDATE = (
    "UPDATE logs SET size = new.column2, frontier = new.column3 FROM (VALUES {}) AS new WHERE logs.id = new.column1"
)
