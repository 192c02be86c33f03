"""The tables of figures: hourly sums of leaves by log, and coverage verdicts by hour.

1. `counter_deltas` is only inserted into, by the transaction that writes the leaves. It has one row for each log and
   hour that they touch. The row is named by the size that the log has afterwards (below 0: leaves that retention
   dropped). No two transactions write one row, so none waits for another here.
2. `counters` has the sums of folded deltas, by hour and (hour `ALL_HOURS`) in total. It also has them (log `ALL_LOGS`)
   by hour over all logs. So the cost of a history of all tenants depends on its hours, not on the number of tenants. A
   figure is always the sum of both tables: folding changes none.
3. `figures` is JSON, a list of [kind, measure, outcome, detail, classification, value]. A table row for each figure of
   each tenant would mean ten rows for every leaf of a fleet with many tenants. What is read over all tenants at every
   scrape stands in rows of its own (`scraped`), so that nobody reads all others for it.
4. `coverage_hours` has the verdicts of custody by the hour in which it was due, for 31 days, and of the last day's
   hours together (`ALL_HOURS`): a scrape reads one row of a tenant and class. `lags` counts the times from due to
   overwritten (`coverage.lag_counts`). Every row is of the one state that `coverage_pass` names.
5. All of it is a function of the leaves: `fsck` computes it again. But for what dropped leaves left in custody
   (`project.CARRIED`, under `ALL_HOURS`): `fsck` holds it to what processes that run hold.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Integer, PrimaryKeyConstraint, Table, Text, text

from kvcustody.audit.store.schema.ledger import metadata

ALL_HOURS = -1  # in place of the beginning of an hour: since the first leaf
ALL_LOGS = 0  # in place of a log's id: of every log
VERDICT_COLUMNS = (
    *("due", "ended_in_time", "covered", "in_time", "late", "failed", "missing", "unproven", "overdue"),
    *("disputed", "launched_bytes", "retired_bytes", "sampled_bytes", "full_bytes", "reread_blocks"),
    *("fence_us_max", "lag_us_max"),
)

counter_deltas = Table(
    "counter_deltas",
    metadata,
    Column("scraped", Boolean, nullable=False),
    Column("log", Integer, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("hour_us", BigInteger, nullable=False),  # its beginning, UTC
    Column("figures", Text, nullable=False),
    PrimaryKeyConstraint("scraped", "log", "size", "hour_us"),
)

counters = Table(
    "counters",
    metadata,
    Column("scraped", Boolean, nullable=False),
    Column("hour_us", BigInteger, nullable=False),
    Column("log", Integer, nullable=False),
    Column("figures", Text, nullable=False),
    PrimaryKeyConstraint("scraped", "hour_us", "log"),
)

coverage_hours = Table(
    "coverage_hours",
    metadata,
    Column("hour_us", BigInteger, nullable=False),
    Column("log", Integer, nullable=False),
    Column("classification", Text, nullable=False),
    *(Column(name, BigInteger, nullable=False) for name in VERDICT_COLUMNS),
    Column("lags", Text, nullable=False, server_default=text("''")),
    PrimaryKeyConstraint("hour_us", "log", "classification"),
)

coverage_pass = Table(
    "coverage_pass",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),  # one row, 1; none before the first
    Column("size", BigInteger, nullable=False),  # root leaves of the checkpoint whose state was judged
    Column("at_us", BigInteger, nullable=False),  # what was due by then
)
