"""Figures by hour over all logs: made of the sums that are there, which stay as they are."""

import json
from collections import Counter
from itertools import groupby

import sqlalchemy as sa
from alembic import op

revision = "0036"
down_revision = "0032"
branch_labels = None
depends_on = None

_ALL_HOURS, _ALL_LOGS = -1, 0
_MEASURES = ("leaves", "events", "denied")
_ROWS = 1024  # written at once


def upgrade() -> None:
    connection = op.get_bind()
    tables = sa.MetaData()
    tables.reflect(connection, only=["counters"])
    counters = tables.tables["counters"]
    column = counters.c
    made: list[dict[str, object]] = []
    ordered = sa.select(counters).where(column.hour_us != _ALL_HOURS).order_by(column.scraped, column.hour_us)
    for (scraped, hour_us), rows in groupby(
        connection.execute(ordered), lambda row: (bool(row.scraped), row.hour_us)
    ):
        sums: Counter[tuple[str, str, str]] = Counter()
        for row in rows:
            for kind, measure, outcome, _, _, value in _read(row.figures):
                if measure in _MEASURES:
                    sums[kind, measure, outcome] += value
        figures = [[*key, "", "", value] for key, value in sorted(sums.items()) if value]
        if figures:
            packed = json.dumps(figures, ensure_ascii=False, separators=(",", ":"))
            made.append({"scraped": scraped, "hour_us": hour_us, "log": _ALL_LOGS, "figures": packed})
    for first in range(0, len(made), _ROWS):
        connection.execute(counters.insert(), made[first : first + _ROWS])


def _read(figures: str) -> list[tuple[str, str, str, str, str, int]]:
    """What is no figure counts nowhere; `fsck` names it."""
    try:
        return [(*names, int(value)) for *names, value in json.loads(figures) if len(names) == 5]
    except (TypeError, ValueError):
        return []
