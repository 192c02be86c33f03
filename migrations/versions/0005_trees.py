"""Merkle trees over the leaves that are there: frontiers, nodes, and a root log that seals every log's head.

A log whose leaves are not contiguous from 0 up to its size is refused: a tree over what is left would vouch for
a loss. Leaves are read once, in order, and none is changed.
"""

from collections.abc import Callable, Iterator

import sqlalchemy as sa
from alembic import context, op

from kvcustody.audit.tlog.merkle import EMPTY, Grown, TreeError, TreeHead, leaf_hashes
from kvcustody.audit.tlog.root_log import seal

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_LEAVES = 4096  # read at once
Progress = Callable[[str, int, int], None]


def upgrade() -> None:
    _tables()
    op.add_column("logs", sa.Column("frontier", sa.LargeBinary(), nullable=True))
    progress: Progress = context.config.attributes.get("progress") or (lambda what, done, total: None)
    _build(op.get_bind(), progress)
    with op.batch_alter_table("logs") as batch:
        batch.alter_column("frontier", existing_type=sa.LargeBinary(), nullable=False)


def _tables() -> None:
    op.create_table(
        "tree_nodes",
        sa.Column("log", sa.Integer(), nullable=False),
        sa.Column("level", sa.Integer(), nullable=False),
        sa.Column("idx", sa.BigInteger(), nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("log", "level", "idx", name=op.f("pk_tree_nodes")),
    )
    op.create_table(
        "root_log",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("frontier", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_root_log")),
    )
    op.create_table(
        "root_leaves",
        sa.Column("idx", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("log", sa.Integer(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("root", sa.LargeBinary(), nullable=False),
        sa.Column("salt", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("idx", name=op.f("pk_root_leaves")),
    )
    op.create_index("ix_root_leaves_log", "root_leaves", ["log", "size"], unique=True)
    for name, column in (("checkpoints", "root"), ("signed_checkpoints", "note")):
        op.create_table(
            name,
            sa.Column("size", sa.BigInteger(), autoincrement=False, nullable=False),
            sa.Column(column, sa.LargeBinary(), nullable=False),
            sa.Column("at_us", sa.BigInteger(), nullable=False),
            sa.PrimaryKeyConstraint("size", name=op.f(f"pk_{name}")),
        )


def _build(connection: sa.Connection, progress: Progress) -> None:
    tables = sa.MetaData()
    tables.reflect(
        connection, only=["logs", "events", "tree_nodes", "root_log", "root_leaves", "checkpoints"]
    )
    logs, events = tables.tables["logs"], tables.tables["events"]
    total = connection.scalar(sa.select(sa.func.count()).select_from(events)) or 0
    heads: dict[str, TreeHead] = {}
    ids: dict[str, int] = {}
    at_us = done = 0
    for log in connection.execute(sa.select(logs).order_by(logs.c.id)).all():
        frontier = EMPTY
        for leaves, latest_us in _leaves(connection, events, log.id):
            frontier, grown = frontier.extend(leaf_hashes(leaves), halves=True)
            _insert_nodes(connection, tables.tables["tree_nodes"], log.id, grown)
            at_us, done = max(at_us, latest_us), done + len(leaves)
            progress("trees over the ledger's leaves", done, total)
        if frontier.size != log.size:
            raise TreeError(
                f"log `{log.name}` should hold `{log.size}` leaves and holds `{frontier.size}` in one piece; "
                "restore it before trees are built",
                log=log.name,
                size=log.size,
            )
        connection.execute(logs.update().where(logs.c.id == log.id).values(frontier=frontier.to_bytes()))
        if frontier.size:
            heads[log.name], ids[log.name] = frontier.head(), log.id
    if done != total:
        raise TreeError(f"`{total - done}` leaves are in no log; restore the ledger before trees are built")
    _seal(connection, tables, heads, ids, at_us)


def _leaves(connection: sa.Connection, events: sa.Table, log: int) -> Iterator[tuple[list[bytes], int]]:
    """The leaves of a log in order, some at a time, with the latest time among them, up to the first hole."""
    first = 0
    while True:
        query = sa.select(events.c.idx, events.c.leaf, events.c.at_us).where(
            events.c.log == log, events.c.idx >= first, events.c.idx < first + _LEAVES
        )
        rows = connection.execute(query.order_by(events.c.idx)).all()
        if not rows or [row.idx for row in rows] != list(range(first, first + len(rows))):
            return
        yield [bytes(row.leaf) for row in rows], max(row.at_us for row in rows)
        first += len(rows)
        if len(rows) < _LEAVES:
            return


def _insert_nodes(connection: sa.Connection, table: sa.Table, log: int, grown: tuple[Grown, ...]) -> None:
    rows = [
        {"log": log, "level": level, "idx": idx, "hash": node}
        for level, first, hashes in grown
        for idx, node in enumerate(hashes, first)
    ]
    if rows:
        connection.execute(table.insert(), rows)


def _seal(
    connection: sa.Connection,
    tables: sa.MetaData,
    heads: dict[str, TreeHead],
    ids: dict[str, int],
    at_us: int,
) -> None:
    """One root leaf for every log that holds leaves, and the first checkpoint; an empty ledger has neither."""
    openings = seal(heads)
    frontier, grown = EMPTY.extend(leaf_hashes(opening.commitment() for opening in openings), halves=True)
    if openings:
        rows = [
            {
                "idx": idx,
                "log": ids[opening.name],
                "size": opening.head.size,
                "root": opening.head.root,
                "salt": opening.salt,
            }
            for idx, opening in enumerate(openings)
        ]
        connection.execute(tables.tables["root_leaves"].insert(), rows)
        _insert_nodes(connection, tables.tables["tree_nodes"], 0, grown)
        first = {"size": frontier.size, "root": frontier.root(), "at_us": at_us}
        connection.execute(tables.tables["checkpoints"].insert(), [first])
    connection.execute(tables.tables["root_log"].insert(), [{"id": 1, "frontier": frontier.to_bytes()}])
