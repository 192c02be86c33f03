"""The tables of the ledger's trees: stored hashes for proofs, and the checkpoints that seal them.

1. Every row here is a function of the leaves and of the salts of the root log; `fsck` computes all of it again. One
   value is not: `root_log.identity`, which is made at random with the ledger. It distinguishes the ledger from others
   for receivers of leaves from several (`ledger_identity`). No evidence depends on it.
2. Rows are only inserted, with three exceptions.
   - Retention deletes hashes (rule 3).
   - The one row of `root_log` is changed: it is the root log's place to lock, and its frontier.
   - In `unsealed_heads` each commit records the size to which it brought a sub-log. Sealing deletes what the new
     checkpoint covers. `newest_us` is the time of the newest leaf that the commit added to the sub-log, and `grown_us`
     the time of the commit.
3. `tree_nodes` holds the hashes of tile level 1 and above, one for each row. Hash `idx` of `level` is the root of the
   leaves `idx * 256**level` up to `(idx + 1) * 256**level`. Levels from 16 on are half levels (`merkle.Grown`): a proof
   reads 16 of them instead of hashing 256 below, as it does where they are absent. Level 0 is hashed again from the
   leaves. If retention dropped some of a tile's leaves, their hashes are here as level 0. If it dropped the whole tile,
   neither those hashes nor its half level are here. The root log has the log id 0.
4. A root leaf's columns open it: name by `log`, size, root and salt give the commitment.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, Integer, LargeBinary, PrimaryKeyConstraint, Table, Text

from kvcustody.audit.store.schema.ledger import metadata

ROOT = 0  # the root log's id in `tree_nodes`

tree_nodes = Table(
    "tree_nodes",
    metadata,
    Column("log", Integer, nullable=False),
    Column("level", Integer, nullable=False),
    Column("idx", BigInteger, nullable=False),
    Column("hash", LargeBinary, nullable=False),
    PrimaryKeyConstraint("log", "level", "idx"),
)

root_log = Table(
    "root_log",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("frontier", LargeBinary, nullable=False),
    Column("identity", Text, nullable=True),
)

root_leaves = Table(
    "root_leaves",
    metadata,
    Column("idx", BigInteger, primary_key=True, autoincrement=False),
    Column("log", Integer, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("root", LargeBinary, nullable=False),
    Column("salt", LargeBinary, nullable=False),
    Index("ix_root_leaves_log", "log", "size", unique=True),
)

unsealed_heads = Table(
    "unsealed_heads",
    metadata,
    Column("log", Integer, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("newest_us", BigInteger, nullable=False),
    Column("grown_us", BigInteger, nullable=False),
    PrimaryKeyConstraint("log", "size"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("size", BigInteger, primary_key=True, autoincrement=False),
    Column("root", LargeBinary, nullable=False),
    Column("at_us", BigInteger, nullable=False),
)

signed_checkpoints = Table(
    "signed_checkpoints",
    metadata,
    Column("size", BigInteger, primary_key=True, autoincrement=False),
    Column("note", LargeBinary, nullable=False),
    Column("at_us", BigInteger, nullable=False),
)
