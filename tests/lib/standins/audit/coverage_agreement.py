"""The product's coverage beside the oracle's (`coverage_oracle`): every figure of every row, lags, and the digest.

The product reads twice, rows of tables and leaves alone, and is held to the oracle in both.
"""

from __future__ import annotations

from typing import Any

from coverage_oracle import Chosen, Custody, History, figures, judge, lag_us, population_digest, unaccounted
from sqlalchemy import Connection

from kvcustody.audit.evidence.coverage.custody_units import CustodySelection
from kvcustody.audit.evidence.coverage.leaf_record import LeafRecord
from kvcustody.audit.evidence.coverage.recount_process import (
    Difference,
    RecountResult,
    differences,
    leaves_in_database,
    recounted,
)
from kvcustody.audit.evidence.coverage.summary import CoverageRow, CoverageSummary, coverage


def counted(leaves: list[bytes], **chosen: Any) -> RecountResult:
    """What the product makes of leaves alone."""
    record = LeafRecord(leaves)
    return recounted(record, CustodySelection(**chosen), record.last_us)


def summary_of(custodies: list[Custody]) -> CoverageSummary:
    """The oracle's figures as the product has its own."""
    groups: dict[tuple[str, str], list[Custody]] = {}
    for each in custodies:
        groups.setdefault((each.tenant, each.classification), []).append(each)
    rows = tuple(CoverageRow(*who, **figures(groups[who])) for who in sorted(groups))
    return CoverageSummary(rows, *(lag_us(custodies, percent) for percent in (50, 99, 100)))


def disagreements(connection: Connection, **chosen: Any) -> list[Difference | str]:
    """Where the tables, or the leaves by the product's reading, give something else than the oracle."""
    leaves = [bytes(leaf) for leaf in leaves_in_database(connection)]
    history, again = History(leaves), counted(leaves, **chosen)
    custodies = list(judge(history, Chosen(**chosen)))
    oracle = summary_of(custodies)
    differing: list[Difference | str] = [*differences(coverage(connection, **chosen), oracle)]
    differing += differences(again.figures, oracle)
    if again.digest != population_digest(custodies):
        differing.append("the digest of the population")
    if tuple(again.missing) != unaccounted(history):
        differing.append(f"unaccounted: {again.missing}, and the oracle says {unaccounted(history)}")
    if (again.leaves, again.as_of_us) != (history.leaves, history.last_us):
        differing.append("which leaves were read")
    return differing
