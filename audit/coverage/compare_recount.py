"""Agreement of the two implementations of coverage: every figure of every row, and the lags.

1. Nothing is rounded and nothing is left out: a row that only one side has differs in every figure that is not 0.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import NamedTuple

from kvcustody.audit.coverage.recompute import CoverageFigures, Recount
from kvcustody.audit.coverage.summary import CoverageSummary


class Difference(NamedTuple):
    """A figure on which the tables and the leaves disagree."""

    tenant: str
    classification: str
    figure: str
    tables: int
    leaves: int


def differences(found: CoverageSummary, again: Recount) -> tuple[Difference, ...]:
    """Where they differ; empty when they agree."""
    tables = {(row.tenant, row.classification): row._asdict() for row in found.rows}
    leaves = {who: asdict(figures) for who, figures in again.rows.items()}
    nothing = asdict(CoverageFigures())
    made = [
        Difference(*who, name, mine.get(name, 0), theirs[name])
        for who in sorted({*tables, *leaves})
        for mine, theirs in [(tables.get(who, nothing), leaves.get(who, nothing))]
        for name in nothing
        if mine.get(name, 0) != theirs[name]
    ]
    lags = {"lag_us_p50": (found.lag_us_p50, 50), "lag_us_p99": (found.lag_us_p99, 99)}
    lags["lag_us_max"] = (found.lag_us_max, 100)
    made += [
        Difference("*", "*", name, lag, again.lag_us(percent))
        for name, (lag, percent) in lags.items()
        if lag != again.lag_us(percent)
    ]
    return tuple(made)
