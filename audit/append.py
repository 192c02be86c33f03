"""Append leaves and their projections to the ledger inside the caller's transaction.

A1 The idx of a log is assigned under the lock on its row, inside the transaction that inserts the leaf:
contiguous per log, whatever fails. A2 Rows and leaf commit together. A3 A leaf whose (incarnation,
sequence, part, log) is already there is skipped when `skip_known` is set, so a replay adds each leaf
exactly once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, Table, insert, select, update

from kvcustody.audit import schema
from kvcustody.audit.events import SYSTEM, Leaf
from kvcustody.audit.projection import Body, Ids, Incarnation, project
from kvcustody.errors import LedgerError


class Appended(NamedTuple):
    """How many leaves a call added, and how many were there already."""

    added: int
    known: int


class Appender:
    """Remembers row ids between batches; `forget()` after a rollback: ids may have gone with it."""

    def __init__(self) -> None:
        self._logs: dict[str, int] = {}
        self._incarnations: dict[str, Incarnation] = {}
        self._statements: dict[tuple[str, str], str] = {}

    def forget(self) -> None:
        """Drop every remembered id."""
        self._logs.clear()
        self._incarnations.clear()

    def append(self, connection: Connection, leaves: list[Leaf], *, skip_known: bool = False) -> Appended:
        """Insert the leaves in order, with contiguous idx per log, and their projections."""
        given = len(leaves)
        if skip_known:
            leaves = _unknown(connection, leaves, self)
        if not leaves:
            return Appended(0, given)
        for name in {leaf.log for leaf in leaves} - self._logs.keys():
            self._logs[name] = _log_id(connection, name, int(leaves[0].body["at_us"]))
        sizes = _lock(connection, sorted({self._logs[leaf.log] for leaf in leaves}))
        ids = Ids(self._logs.__getitem__, lambda body, uuid: self.incarnation(connection, uuid, body))
        rows: dict[Table, list[tuple[Any, ...]]] = {schema.events: []}
        placed = rows[schema.events]
        for leaf in leaves:
            body = leaf.body
            log = self._logs[leaf.log]
            idx = sizes[log]
            sizes[log] = idx + 1
            recorder = self.incarnation(connection, body["incarnation"], body).id
            placed.append(
                (
                    log,
                    idx,
                    recorder,
                    body["sequence"],
                    body["part"],
                    body["parts"],
                    body["kind"],
                    body["outage"],
                    body["at_us"],
                    leaf.data,
                )
            )
            projected = project(body, ids)
            if projected is not None:
                rows.setdefault(projected[0], []).append((log, idx, *projected[1]))
            if body["kind"] in _LIFE:
                _live(connection, body, ids)
        for table, values in rows.items():
            connection.exec_driver_sql(self._insert(connection, table), values)
        connection.exec_driver_sql(
            self._mark(connection, "UPDATE logs SET size = ? WHERE id = ?"),
            [(size, log) for log, size in sizes.items()],
        )
        return Appended(len(leaves), given - len(leaves))

    def incarnation(self, connection: Connection, uuid: str, body: Body | None = None) -> Incarnation:
        """The row of an incarnation; one that only its leaves mention is added with their offset."""
        known = self._incarnations.get(uuid)
        if known is None:
            table = schema.incarnations
            row = connection.execute(
                select(table.c.id, table.c.offset_us).where(table.c.uuid == uuid)
            ).first()
            if row is not None:
                known = Incarnation(row.id, row.offset_us)
            elif body is not None and body["incarnation"] == uuid:
                at_us = int(body["at_us"])
                worker = str(body.get("worker", "unknown"))
                known = register(connection, uuid, worker, at_us - int(body["boot_us"]), at_us)
            else:
                raise LedgerError(f"incarnation `{uuid}` is not in the ledger", incarnation=uuid)
            self._incarnations[uuid] = known
        return known

    def _insert(self, connection: Connection, table: Table) -> str:
        """`INSERT` by position: the driver binds plain tuples, which costs half of what named values do."""
        key = (connection.dialect.name, table.name)
        if key not in self._statements:
            columns = [column.name for column in table.columns]
            names = ", ".join(connection.dialect.identifier_preparer.quote(name) for name in columns)
            marks = ", ".join("?" * len(columns))
            statement = f"INSERT INTO {table.name} ({names}) VALUES ({marks})"  # noqa: S608 - our own names
            self._statements[key] = self._mark(connection, statement)
        return self._statements[key]

    @staticmethod
    def _mark(connection: Connection, statement: str) -> str:
        return statement if connection.dialect.name == "sqlite" else statement.replace("?", "%s")


def register(connection: Connection, uuid: str, worker: str, offset_us: int, started_us: int) -> Incarnation:
    """Insert an incarnation (and its worker, when new)."""
    workers, incarnations = schema.workers, schema.incarnations
    known = connection.scalar(select(workers.c.id).where(workers.c.name == worker))
    if known is None:
        made = connection.execute(insert(workers).values(name=worker)).inserted_primary_key
        assert made is not None
        known = int(made[0])
    values = {"uuid": uuid, "worker": known, "offset_us": offset_us, "started_us": started_us}
    placed = connection.execute(insert(incarnations).values(**values)).inserted_primary_key
    assert placed is not None
    return Incarnation(int(placed[0]), offset_us)


_LIFE = frozenset({"worker-started", "worker-stopped", "worker-died"})


def _live(connection: Connection, body: Body, ids: Ids) -> None:
    """The life of an incarnation is the one projection that is updated in place."""
    of = ids.incarnation(body, body.get("of_incarnation") or body["incarnation"])
    values: dict[str, Any]
    if body["kind"] == "worker-started":
        values = {key: body[key] for key in ("shards", "blocks", "bytes_per_block", "device", "software")}
    else:
        values = {"ended_us": body["at_us"], "end": body["kind"].removeprefix("worker-")}
    table = schema.incarnations
    connection.execute(update(table).where(table.c.id == of.id).values(**values))


def _log_id(connection: Connection, name: str, at_us: int) -> int:
    logs, tenants = schema.logs, schema.tenants
    found = connection.scalar(select(logs.c.id).where(logs.c.name == name))
    if found is not None:
        return int(found)
    made = connection.execute(insert(logs).values(name=name, size=0)).inserted_primary_key
    assert made is not None
    if name != SYSTEM:
        tenant = name.removeprefix("tenant/")
        connection.execute(insert(tenants).values(tenant=tenant, log=int(made[0]), first_seen_us=at_us))
    return int(made[0])


def _lock(connection: Connection, ids: list[int]) -> dict[int, int]:
    """The sizes of the logs, their rows locked in id order until the transaction ends."""
    logs = schema.logs
    query = select(logs.c.id, logs.c.size).where(logs.c.id.in_(ids)).order_by(logs.c.id)
    if connection.dialect.name != "sqlite":  # there, BEGIN IMMEDIATE has locked the database already
        query = query.with_for_update()
    sizes = {row.id: row.size for row in connection.execute(query)}
    if len(sizes) != len(ids):
        raise LedgerError(f"the ledger lost `{len(ids) - len(sizes)}` of its logs", logs=ids)
    return sizes


def _unknown(connection: Connection, leaves: list[Leaf], appender: Appender) -> list[Leaf]:
    """The leaves that the ledger does not hold yet."""
    events, logs = schema.events, schema.logs
    known: set[tuple[str, int, int, str]] = set()
    by_source: dict[str, list[int]] = {}
    for leaf in leaves:
        by_source.setdefault(leaf.body["incarnation"], []).append(leaf.body["sequence"])
    for uuid, sequences in by_source.items():
        source = appender.incarnation(connection, uuid, leaves[0].body).id
        query = (
            select(events.c.sequence, events.c.part, logs.c.name)
            .join(logs, logs.c.id == events.c.log)
            .where(events.c.incarnation == source)
            .where(events.c.sequence.between(min(sequences), max(sequences)))
        )
        known |= {(uuid, row.sequence, row.part, row.name) for row in connection.execute(query)}
    return [
        leaf
        for leaf in leaves
        if (leaf.body["incarnation"], leaf.body["sequence"], leaf.body["part"], leaf.log) not in known
    ]


def parse(data: bytes) -> Leaf:
    """A leaf from its bytes."""
    try:
        body = orjson.loads(data)
        return Leaf(body["log"], body, data)
    except (ValueError, KeyError, TypeError) as problem:
        raise LedgerError("bytes that are not a leaf were found in a spill") from problem
