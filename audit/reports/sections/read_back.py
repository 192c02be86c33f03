"""Memory read back after overwriting, from receipts of the period; those of boots are separate.

1. `level` is what a receipt says was meant; `verified` of its blocks were really read. A receipt of level `sampled` may
   have read none: its blocks were overwritten, and nothing more is said of them.
2. Bytes that were read are those of the blocks that were. No block that was not read is in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sqlalchemy import case, func, select

from kvcustody.audit.reports.section import Citation, ReportFacts, ReportReading, Section
from kvcustody.audit.store.schema.leaf_tables import receipts

CUSTODY, BOOT = "custody", "boot"  # a scrub of memory at a process's start is of nobody's custody


class ReadBack(NamedTuple):
    """Receipts of one level and result; `receipts_unread` read no block."""

    scrub: str
    level: str
    result: str
    receipts: int
    receipts_unread: int
    blocks: int
    blocks_read: int
    bytes: int
    bytes_read: int


def read_back(reading: ReportReading) -> tuple[ReadBack, ...]:
    """Return receipts whose leaf is in the period; for one tenant, those in its own log."""
    column = receipts.c
    scrub = case((column.high > 0, CUSTODY), else_=BOOT).label("scrub")
    bytes_each = func.coalesce(column.bytes.op("/")(func.nullif(column.blocks, 0)), 0)
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
            func.sum(bytes_each * column.verified),
        )
        .where(reading.within(receipts))
        .group_by(scrub, column.level, column.result)
    )
    rows = reading.connection.execute(query)
    return tuple(sorted(ReadBack(*row[:3], *(int(value or 0) for value in row[3:])) for row in rows))


def _disagreements(report: ReportFacts) -> Iterator[str]:
    for row in report[SECTION]:
        if row.receipts_unread > row.receipts or row.blocks_read > row.blocks or row.bytes_read > row.bytes:
            yield f"more was read back than receipts of level `{row.level}` have"


SECTION: Section[tuple[ReadBack, ...]] = Section(
    "read_back",
    "Read-back",
    read_back,
    order=81,
    about="receipts of the period by how much was actually read back",
    part=None,
    printed_in="coverage",
    fields={"read_back": "what was read back"},
    cited={"read_back": Citation("Read-back", lambda report: any(row.blocks_read for row in report[SECTION]))},
    disagreements=_disagreements,
)
