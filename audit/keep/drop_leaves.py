"""Drops the content of leaves: runs of many logs in one transaction, each given by its first leaf and its end.

    with engine.connect().execution_options(**WRITE) as connection, connection.begin():
        drop_leaves(connection, runs)

1. What was derived from a leaf (in both forms of a table that has two), what it counts in figures, and the leaf go
   together.
2. Of a tile none of whose leaves is left, the root (level 1 of `tree_nodes`) stays and no hash inside it. Of one that
   has leaves left, the hashes of those that went stay, so that places in it can still be proved.
3. Runs of one log are dropped from its beginning, so what is left of a log is its end. `thin_tiles` lets go what ought
   to be gone by rule 2 and is not: hashes that older versions kept, or a month that was emptied before another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, Table, func, select

from kvcustody.audit.keep.counted_months import ExpiredLeaves
from kvcustody.audit.keep.uncount import DroppedRun, uncount_runs
from kvcustody.audit.leaf.merkle import HALF, HALF_HEIGHT, leaf_hashes
from kvcustody.audit.store.database.append_only_triggers import triggers_lifted
from kvcustody.audit.store.database.bulk_insert import insert_rows
from kvcustody.audit.store.database.dialect import dialect_of, fetch_all
from kvcustody.audit.store.database.open_changes import forms_to_drop_from
from kvcustody.audit.store.schema.all_tables import projections
from kvcustody.audit.store.schema.ledger import events
from kvcustody.audit.store.schema.trees import tree_nodes
from kvcustody.audit.tlog.proofs import TILE_WIDTH

_INSIDE = (
    (0, 0),
    (HALF, HALF_HEIGHT),
)  # levels below a tile's root, and how many leaves are under each hash (log2)
# Materialized: what was just dropped is passed over once for each log, to find the first leaf that is there.
_TO_THIN = f"""
WITH purged AS MATERIALIZED (
    SELECT l.id AS log, l.name, max(p.below) AS below, (SELECT min(e.idx) FROM events AS e WHERE e.log = l.id) AS first
    FROM retention_purges AS p JOIN logs AS l ON l.name = p.of_log GROUP BY l.id, l.name
), gone AS MATERIALIZED (
    SELECT log, name, CASE WHEN first < below THEN first ELSE below END / {TILE_WIDTH} * {TILE_WIDTH} AS below
    FROM purged
)
SELECT log, name, below,
    (SELECT min(n.idx) FROM tree_nodes AS n WHERE n.log = gone.log AND n.level = 0 AND n.idx < gone.below),
    (SELECT min(n.idx) FROM tree_nodes AS n WHERE n.log = gone.log AND n.level = {HALF}
        AND n.idx < gone.below / {1 << HALF_HEIGHT})
FROM gone
"""  # noqa: S608 - our own numbers


def drop_leaves(connection: Connection, runs: Sequence[ExpiredLeaves]) -> None:
    """Drop these runs, at most one of each log, inside the caller's transaction (rules 1 and 2)."""
    for table in (*projections(), *forms_to_drop_from(connection).values()):
        _delete(connection, table, runs)
    tiles = [_dropped_tiles(connection, run) for run in runs]
    with triggers_lifted(connection):
        rows = sorted(map(tuple, _delete(connection, events, runs, ", leaf")))
        _delete_inside(connection, tiles)
    found = {
        log: DroppedRun(log, of_log[0][1], [bytes(row[2]) for row in of_log])
        for log, of_log in ((log, list(some)) for log, some in groupby(rows, key=lambda row: int(row[0])))
    }
    insert_rows(connection, tree_nodes, _partial(rows, found, tiles))
    uncount_runs(connection, list(found.values()))


def tiles_to_thin(connection: Connection) -> list[tuple[str, ExpiredLeaves]]:
    """The leaves of each log's tiles that are gone, with its name, where hashes inside them are left (rule 3)."""
    found = []
    for log, name, end, kept, half in fetch_all(connection, _TO_THIN, ()):
        starts = [idx << height for idx, (_, height) in zip((kept, half), _INSIDE, strict=True) if idx is not None]
        if starts:
            found.append((name, ExpiredLeaves(log, min(starts) // TILE_WIDTH * TILE_WIDTH, end)))
    return found


def thin_tiles(connection: Connection, tiles: ExpiredLeaves) -> None:
    """Let go of the hashes inside these tiles, of which no leaf is left."""
    assert not (tiles.first % TILE_WIDTH or tiles.below % TILE_WIDTH)
    with triggers_lifted(connection):
        _delete_inside(connection, [tiles])


def _dropped_tiles(connection: Connection, run: ExpiredLeaves) -> ExpiredLeaves:
    """The leaves of the tiles that are gone when the run is."""
    first = run.first // TILE_WIDTH * TILE_WIDTH
    inside = (events.c.log == run.log, events.c.idx >= first, events.c.idx < run.first)
    if first < run.first and connection.scalar(select(func.min(events.c.idx)).where(*inside)) is not None:
        first += TILE_WIDTH
    return ExpiredLeaves(run.log, first, max(first, run.below // TILE_WIDTH * TILE_WIDTH))


def _partial(
    rows: Sequence[Any], found: dict[int, DroppedRun], tiles: Sequence[ExpiredLeaves]
) -> Iterator[tuple[int, int, int, bytes]]:
    """The rows of `tree_nodes` for leaves that went from a tile in which others are left."""
    gone = {tile.log: tile for tile in tiles}
    kept = [row for row in rows if not gone[row[0]].first <= row[1] < gone[row[0]].below]
    for row, hash_ in zip(kept, leaf_hashes(bytes(row[2]) for row in kept), strict=True):
        yield row[0], 0, row[1], hash_


def _delete_inside(connection: Connection, tiles: Sequence[ExpiredLeaves]) -> None:
    for level, height in _INSIDE:
        some = [
            ExpiredLeaves(each.log, each.first >> height, each.below >> height)
            for each in tiles
            if each.first < each.below
        ]
        _delete(connection, tree_nodes, some, level=level)


def _delete(
    connection: Connection,
    table: Table,
    runs: Sequence[ExpiredLeaves],
    returning: str = "",
    *,
    level: int | None = None,
) -> Sequence[Any]:
    """Delete what a table has of these runs; log and idx of each row that went, where more of it is asked for."""
    if not runs:
        return ()
    of_level = "" if level is None else f" AND level = {level}"
    if dialect_of(connection).arrays:
        ending = f" RETURNING t.log, t.idx{returning}" if returning else ""
        statement = (
            f"DELETE FROM {table.fullname} AS t"  # noqa: S608 - our own names
            " USING unnest(?::int4[], ?::int8[], ?::int8[]) AS run (log, first, below)"
            f" WHERE t.log = run.log AND t.idx >= run.first AND t.idx < run.below{of_level}{ending}"
        )
        values = tuple(list(column) for column in zip(*runs, strict=True))
        if returning:
            return fetch_all(connection, statement, values)
        connection.exec_driver_sql(statement.replace("?", "%s"), values)
        return ()
    ending = f" RETURNING log, idx{returning}" if returning else ""
    inside = f"DELETE FROM {table.fullname} WHERE log = ? AND idx >= ? AND idx < ?{of_level}{ending}"  # noqa: S608 - our own names
    found: list[Any] = []
    for run in runs:
        result = connection.exec_driver_sql(inside, tuple(run))
        found += result.all() if returning else ()
    return found
