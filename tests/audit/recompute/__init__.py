"""Deletion coverage a second time, as an oracle: from the canonical leaves alone, one incarnation after the other.

Leaves are read field by field (`reading`) into columns (`columns`, `history`); every generation that any names gets a
place, and the entries at a place are folded into a verdict (`recount`, `verdict`).

1. Nothing here is shared with `audit.coverage`: not its tables, its arithmetic or its reading of runs. Leaves go in
   as bytes, from a database or an export; figures come out.
2. The definition is that of docs/audit/coverage.md, and so are the names of the figures: the two must agree to the
   row.
"""

from __future__ import annotations

from recompute.completeness import Unaccounted, unaccounted
from recompute.figures import (
    CoverageFigures,
    Judged,
    Recount,
    count_up,
    recompute_digest,
)
from recompute.history import History
from recompute.read_leaves import read_history
from recompute.recount import EVERYTHING, Chosen, judge, recount

__all__ = [
    "EVERYTHING",
    "Chosen",
    "CoverageFigures",
    "History",
    "Judged",
    "Recount",
    "Unaccounted",
    "count_up",
    "judge",
    "read_history",
    "recompute_digest",
    "recount",
    "unaccounted",
]
