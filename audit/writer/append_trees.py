"""The trees grow with the leaves, in the transaction that inserts them.

1. A commit that adds leaves to some sub-logs writes their frontiers and completed nodes, one salted root leaf for
   each, the root log's frontier and nodes, and one checkpoint; all of it commits with the leaves, or none.
2. Sub-logs are locked before the root log, and the root log last: writers of different sub-logs wait for each other
   only at the very end, and never in a circle. On PostgreSQL one statement stands between that lock and the commit.
3. A stored frontier is loaded only when it gives its own root and the size that its log has; anything else is
   `TreeError`, and nothing is written on top of it: the database then counts as lost, and events go to the spill.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from sqlalchemy import Connection

from kvcustody.audit.database.bulk_insert import insert_rows
from kvcustody.audit.database.dialect import dialect_of
from kvcustody.audit.schema.trees import ROOT, checkpoints, root_leaves, tree_nodes
from kvcustody.audit.tlog.merkle import EMPTY, Frontier, Grown, TreeError, TreeHead, leaf_hashes
from kvcustody.audit.tlog.root_log import seal

_Node = tuple[int, int, int, bytes]
_RootLeaf = tuple[int, int, int, bytes, bytes]


class LockedLog(NamedTuple):
    """A sub-log whose row this transaction holds."""

    id: int
    name: str
    size: int
    frontier: bytes


class Trees:
    """Grows stored trees; remembers the frontiers it has checked, by their bytes, so that nothing needs forgetting."""

    def __init__(self) -> None:
        self._checked: dict[int, tuple[bytes, Frontier]] = {ROOT: (EMPTY.to_bytes(), EMPTY)}

    def grow(
        self,
        connection: Connection,
        logs: Iterable[LockedLog],
        hashes: Mapping[int, Sequence[bytes]],
        at_us: int,
    ) -> None:
        """Append leaf hashes, by log id, to locked sub-logs, and seal the new heads under a checkpoint (rule 1)."""
        nodes: list[_Node] = []
        rows: list[tuple[int, int, bytes]] = []
        heads: dict[str, TreeHead] = {}
        ids: dict[str, int] = {}
        for log in logs:
            frontier = self.load(log.id, log.size, log.frontier)
            longer, grown = frontier.extend(hashes[log.id], halves=True)
            nodes += _nodes(log.id, grown)
            heads[log.name], ids[log.name] = longer.head(), log.id
            rows.append((log.id, longer.size, self._keep(log.id, longer, heads[log.name].root)))
        _update(connection, rows)
        self._seal(connection, heads, ids, nodes, at_us)

    def load(self, log: int, size: int | None, stored: bytes) -> Frontier:
        """The frontier in these bytes; raises `TreeError` where they are not one, or not of this size (rule 3)."""
        known = self._checked.get(log)
        stored = bytes(stored)
        frontier = known[1] if known and known[0] == stored else Frontier.from_bytes(stored)
        if size is not None and frontier.size != size:
            problem = f"log `{log}` has `{size}` leaves, its tree `{frontier.size}`"
            raise TreeError(f"{problem}; run `kvcustody audit fsck`", log=log, size=size)
        return frontier

    def _keep(self, log: int, frontier: Frontier, root: bytes) -> bytes:
        data = frontier.to_bytes(root)
        self._checked[log] = (data, frontier)
        return data

    def _seal(
        self,
        connection: Connection,
        heads: Mapping[str, TreeHead],
        ids: Mapping[str, int],
        nodes: list[_Node],
        at_us: int,
    ) -> None:
        openings = seal(heads)
        leaves = leaf_hashes(opening.commitment() for opening in openings)
        before = self.load(ROOT, None, lock_root(connection))
        after, grown = before.extend(leaves, halves=True)
        nodes += _nodes(ROOT, grown)
        rows = [
            (idx, ids[opening.name], opening.head.size, opening.head.root, opening.salt)
            for idx, opening in enumerate(openings, before.size)
        ]
        root = after.root()
        _store(connection, rows, nodes, (after.size, root, at_us), self._keep(ROOT, after, root))


def lock_root(connection: Connection) -> bytes:
    """The root log's frontier, its row locked until the transaction ends; raises `TreeError` where it is lost."""
    query = "SELECT frontier FROM root_log WHERE id = 1"
    if not dialect_of(connection).one_writer:
        query += " FOR UPDATE"
    row = connection.exec_driver_sql(query).first()
    if row is None:
        raise TreeError("the ledger lost its root log")
    return bytes(row[0])


_CHECKPOINT = f"INSERT INTO {checkpoints.name} (size, root, at_us) VALUES (?, ?, ?)"  # noqa: S608 - our own names
_ROOT = "UPDATE root_log SET frontier = ? WHERE id = 1"
_STORE = """
WITH leaves AS (
    INSERT INTO root_leaves (idx, log, size, root, salt)
    SELECT * FROM unnest(%s::bigint[], %s::int[], %s::bigint[], %s::bytea[], %s::bytea[])
), nodes AS (
    INSERT INTO tree_nodes (log, level, idx, hash)
    SELECT * FROM unnest(%s::int[], %s::int[], %s::bigint[], %s::bytea[])
), head AS (
    INSERT INTO checkpoints (size, root, at_us) VALUES (%s, %s, %s)
)
UPDATE root_log SET frontier = %s WHERE id = 1
"""
_UPDATE = (
    "UPDATE logs SET size = new.column2, frontier = new.column3"
    " FROM (VALUES {}) AS new WHERE logs.id = new.column1"
)
_LOGS_AT_ONCE = 256
_UPDATE_MANY = (
    "UPDATE logs SET size = new.size, frontier = new.frontier"
    " FROM unnest(%s::int[], %s::bigint[], %s::bytea[]) AS new (id, size, frontier) WHERE logs.id = new.id"
)


def _update(connection: Connection, rows: list[tuple[int, int, bytes]]) -> None:
    if not dialect_of(connection).arrays:
        for start in range(0, len(rows), _LOGS_AT_ONCE):
            some = rows[start : start + _LOGS_AT_ONCE]
            statement = _UPDATE.format(", ".join(["(?, ?, ?)"] * len(some)))
            connection.exec_driver_sql(statement, tuple(chain.from_iterable(some)))
    else:
        connection.exec_driver_sql(_UPDATE_MANY, tuple(map(list, zip(*rows, strict=True))))


def _store(
    connection: Connection,
    leaves: list[_RootLeaf],
    nodes: list[_Node],
    checkpoint: tuple[int, bytes, int],
    frontier: bytes,
) -> None:
    """Root leaves, nodes, checkpoint and the root log's frontier; on PostgreSQL in one statement (rule 2)."""
    if dialect_of(connection).arrays:
        columns = [list(column) for column in zip(*leaves, strict=True)]
        columns += [list(column) for column in zip(*nodes, strict=True)] or [[]] * 4
        connection.exec_driver_sql(_STORE, (*columns, *checkpoint, frontier))
        return
    insert_rows(connection, root_leaves, leaves)
    if nodes:
        insert_rows(connection, tree_nodes, nodes)
    connection.exec_driver_sql(_CHECKPOINT, checkpoint)
    connection.exec_driver_sql(_ROOT, (frontier,))


def _nodes(log: int, grown: Iterable[Grown]) -> list[_Node]:
    return [
        (log, level, idx, node) for level, first, hashes in grown for idx, node in enumerate(hashes, first)
    ]
