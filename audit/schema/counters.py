"""The tables of figures: what leaves add up to by hour and log, and the verdicts of coverage by hour.

1. `counter_deltas` is only inserted into, by the transaction that writes the leaves: one row for each figure that they
   change, named by its log and the size that this has afterwards (below 0: leaves that retention dropped). No two
   transactions write one row, so none waits for another here.
2. `counters` has the sums of deltas that were folded, by hour and (hour `ALL_HOURS`) in all. A figure is always the
   sum of both tables: folding changes none.
3. `coverage_hours` has the verdicts of custody by the hour in which it was due; every row is of the one state that
   `coverage_pass` names.
4. All of it is a function of the leaves: `fsck` computes it again.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Column, Integer, PrimaryKeyConstraint, Table, Text

from kvcustody.audit.schema.ledger import metadata

ALL_HOURS = -1  # in place of the beginning of an hour: since the first leaf
VERDICT_COLUMNS = (
    *("due", "ended_in_time", "covered", "in_time", "late", "failed", "missing", "unproven", "overdue"),
    *("disputed", "launched_bytes", "retired_bytes", "sampled_bytes", "full_bytes", "reread_blocks"),
    *("fence_us_max", "lag_us_max"),
)


def _figure() -> tuple[Column[Any], ...]:
    """What a figure is of: an hour (its beginning, UTC), a kind of event, what is added up, and how it came out."""
    return (
        Column("hour_us", BigInteger, nullable=False),
        Column("kind", Text, nullable=False),
        Column("measure", Text, nullable=False),
        Column("outcome", Text, nullable=False),
        Column("detail", Text, nullable=False),
        Column("classification", Text, nullable=False),
    )


counter_deltas = Table(
    "counter_deltas",
    metadata,
    Column("log", Integer, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("number", Integer, nullable=False),
    *_figure(),
    Column("value", BigInteger, nullable=False),
    PrimaryKeyConstraint("log", "size", "number"),
)

counters = Table(
    "counters",
    metadata,
    Column("log", Integer, nullable=False),
    *_figure(),
    Column("value", BigInteger, nullable=False),
    PrimaryKeyConstraint("hour_us", "log", "kind", "measure", "outcome", "detail", "classification"),
)

coverage_hours = Table(
    "coverage_hours",
    metadata,
    Column("hour_us", BigInteger, nullable=False),
    Column("log", Integer, nullable=False),
    Column("classification", Text, nullable=False),
    *(Column(name, BigInteger, nullable=False) for name in VERDICT_COLUMNS),
    PrimaryKeyConstraint("hour_us", "log", "classification"),
)

coverage_pass = Table(
    "coverage_pass",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),  # one row, 1; none before the first
    Column("size", BigInteger, nullable=False),  # root leaves of the checkpoint whose state was judged
    Column("at_us", BigInteger, nullable=False),  # what was due by then
)
