"""Agreement of the product's coverage with the oracle: every figure of every row, and the lags.

1. Nothing is rounded and nothing is left out: a row that only one side has differs in every figure that is not 0.
2. The product reads twice, rows of tables and leaves alone, and is held to the oracle in both.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from sqlalchemy import Connection

from kvcustody.audit.coverage.custody_units import CustodySelection
from kvcustody.audit.coverage.leaf_record import LeafRecord
from kvcustody.audit.coverage.leaf_sources import leaves_in_database
from kvcustody.audit.coverage.recount_process import Difference, differences, recounted
from kvcustody.audit.coverage.summary import CoverageRow, CoverageSummary, coverage
from recompute import Chosen, Recount, read_history, recompute_digest, recount, unaccounted
from recompute.recount import judge


def summary_of(found: Recount) -> CoverageSummary:
    """The oracle's figures as the product has its own."""
    rows = (CoverageRow(*who, *astuple(found.rows[who])) for who in sorted(found.rows))
    return CoverageSummary(tuple(rows), *(found.lag_us(percent) for percent in (50, 99, 100)))


def disagreements(connection: Connection, **chosen: Any) -> list[Difference | str]:
    """Where the tables, or the leaves by the product's reading, give something else than the oracle."""
    history = read_history(leaves_in_database(connection))
    oracle = summary_of(recount(history, Chosen(**chosen)))
    record = LeafRecord(leaves_in_database(connection))
    again = recounted(record, CustodySelection(**chosen), record.last_us)
    made: list[Difference | str] = [*differences(coverage(connection, **chosen), oracle)]
    made += differences(again.figures, oracle)
    if again.digest != recompute_digest(judge(history, Chosen(**chosen))):
        made.append("the digest of the population")
    if tuple(again.missing) != tuple(unaccounted(history)):
        made.append(f"unaccounted: {again.missing}, and the oracle says {unaccounted(history)}")
    if (record.leaves, record.last_us) != (history.leaves, history.last_us):
        made.append("which leaves were read")
    return made
