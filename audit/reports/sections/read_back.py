"""What was read back after it was overwritten: by receipts of the period, custody's and those of boots apart.

1. `level` is what a receipt says was meant; `verified` of its blocks were really read. A receipt of level `sampled` may
   have read none: its blocks were overwritten, and nothing more is said of them.
2. Bytes that were read are those of the blocks that were. No block that was not read is in them.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection, case, func, select

from kvcustody.audit.kinds import log_of
from kvcustody.audit.store.database.snapshot import AsOf
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import receipts
from kvcustody.audit.store.schema.ledger import logs

CUSTODY, BOOT = "custody", "boot"  # a scrub of memory at a process's start is of nobody's custody


class ReadBack(NamedTuple):
    """Receipts of one level and result; `receipts_unread` read no block at all."""

    scrub: str
    level: str
    result: str
    receipts: int
    receipts_unread: int
    blocks: int
    blocks_read: int
    bytes: int
    bytes_read: int


def read_back(
    connection: Connection, state: AsOf, since_us: int, until_us: int, *, tenant: str | None
) -> tuple[ReadBack, ...]:
    """Receipts whose leaf is of the period; of one tenant, those in its own log."""
    column = receipts.c
    where = [state.has(receipts), has_leaf(receipts), column.at_us >= since_us, column.at_us < until_us]
    if tenant is not None:
        own = connection.scalar(select(logs.c.id).where(logs.c.name == log_of(tenant)))
        where.append(column.log == (own or -1))
    scrub = case((column.high > 0, CUSTODY), else_=BOOT).label("scrub")
    each = func.coalesce(column.bytes.op("/")(func.nullif(column.blocks, 0)), 0)
    query = (
        select(
            scrub,
            column.level,
            column.result,
            func.count(),
            func.sum(case((column.verified == 0, 1), else_=0)),
            func.sum(column.blocks),
            func.sum(column.verified),
            func.sum(column.bytes),
            func.sum(each * column.verified),
        )
        .where(*where)
        .group_by(scrub, column.level, column.result)
    )
    rows = connection.execute(query)
    return tuple(sorted(ReadBack(*row[:3], *(int(value or 0) for value in row[3:])) for row in rows))
