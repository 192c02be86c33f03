"""The trend of coverage: consecutive periods of the report's length, ending with its own.

1. A period that ended before the ledger began is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcustody.audit.evidence.coverage.custody_units import LifeUnits
from kvcustody.audit.evidence.coverage.summary import periods_of

PERIODS = 4


class TrendPeriod(NamedTuple):
    """One period's units: due, and covered."""

    since_us: int
    until_us: int
    due: int
    covered: int


def trend_start_us(since_us: int, until_us: int, first_us: int) -> int:
    """Return the start of the trend's earliest period (rule 1); `first_us`: the start of the ledger."""
    span = until_us - since_us
    periods = min(PERIODS - 1, max(0, -(-(since_us - first_us) // span)))
    return since_us - periods * span


def trend_of(lives: Sequence[LifeUnits], start_us: int, since_us: int, until_us: int) -> list[TrendPeriod]:
    """Return the trend from units read from its start on, oldest first."""
    span = until_us - since_us
    found = periods_of(lives, start_us, until_us, span)
    return [TrendPeriod(start, start + span, row.due, row.covered) for start, row in found]
