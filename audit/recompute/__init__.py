"""Deletion coverage a second time: from the canonical leaves alone, in plain Python, one custody after the other.

P1 Nothing here is shared with `audit.coverage`: not its tables, its arithmetic or its reading of runs. Leaves go in
as bytes, from a database or an export; figures come out.
P2 The definition is that of docs/coverage.md, and so are the names of the figures: the two must agree to the row.
"""

from __future__ import annotations

from kvcustody.audit.recompute.completeness import Unaccounted, unaccounted
from kvcustody.audit.recompute.digest import recompute_digest
from kvcustody.audit.recompute.figures import Figures, Judged, Recount
from kvcustody.audit.recompute.history import History, read_history
from kvcustody.audit.recompute.recount import EVERYTHING, Chosen, count_up, judge, recount

__all__ = [
    "EVERYTHING",
    "Chosen",
    "Figures",
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
