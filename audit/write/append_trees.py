"""The trees of sub-logs grow with their leaves, in the transaction that inserts them.

1. A commit that adds leaves to some sub-logs writes their frontiers and completed nodes, and to what size it brought
   each (`unsealed_heads`); all of it commits with the leaves, or none. The root log is left to `root_sealer`, so
   writers of different sub-logs wait for nothing of each other's.
2. A sub-log's row is changed once a commit: on PostgreSQL by the trigger that gives leaves their places, which takes
   the frontiers from a setting of the transaction. So they are handed over before the leaves.
3. A stored frontier is loaded only when it gives its own root and the size that its log has; anything else is
   `TreeError`, and nothing is written on top of it: the database then counts as lost, and events go to the spill.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import orjson
from sqlalchemy import Connection

from kvcustody.audit.leaf.merkle import Frontier
from kvcustody.audit.store.database.bulk_insert import insert_rows
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.schema.trees import tree_nodes, unsealed_heads
from kvcustody.audit.tlog.database_tiles import node_rows
from kvcustody.audit.tlog.root_sealer import load_frontier

_Node = tuple[int, int, int, bytes]


class LockedLog(NamedTuple):
    """A sub-log whose row this transaction holds."""

    id: int
    name: str
    size: int
    frontier: bytes


class GrownTrees(NamedTuple):
    """The logs of a transaction with their leaves, and the nodes that these completed."""

    logs: list[LockedLog]
    nodes: list[_Node]


class Trees:
    """Grows stored trees; remembers the frontiers it has checked, by their bytes, so that nothing needs forgetting."""

    def __init__(self) -> None:
        self._checked: dict[int, tuple[bytes, Frontier]] = {}

    def grow(self, logs: Iterable[LockedLog], hashes: Mapping[str, Sequence[bytes]]) -> GrownTrees:
        """Locked sub-logs with the leaf hashes, by name, that are appended to them; raises `TreeError` (rule 3)."""
        made = GrownTrees([], [])
        for log in logs:
            known = self._checked.get(log.id)
            stored = bytes(log.frontier)
            frontier = known[1] if known and known[0] == stored else load_frontier(log.id, log.size, stored)
            longer, grown = frontier.extend(hashes[log.name], halves=True)
            data = longer.to_bytes()
            self._checked[log.id] = (data, longer)
            made.nodes.extend(node_rows(log.id, grown))
            made.logs.append(LockedLog(log.id, log.name, longer.size, data))
        return made


def hand_over(connection: Connection, trees: GrownTrees) -> None:
    """Sizes and frontiers into the rows of logs, before the leaves go in (rule 2)."""
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
    """Nodes, and the heads that no checkpoint covers yet; `newest_us` is the time of the newest leaf by log."""
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
_LOGS_AT_ONCE = 256
_UPDATE = (
    "UPDATE logs SET size = new.column2, frontier = new.column3"
    " FROM (VALUES {}) AS new WHERE logs.id = new.column1"
)
