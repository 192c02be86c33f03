"""The digest of a population (`audit.report.population`, N2) from a recount's verdicts, without any table."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from kvcustody.audit.coverage.recompute.figures import Judged


def recompute_digest(every: Iterable[Judged]) -> str:
    """SHA-256, hexadecimal: of each incarnation its id, then seven numbers a custody in the order of N1."""
    made = hashlib.sha256()
    for judged in sorted(every, key=lambda item: item.incarnation):
        if not len(judged.due):
            continue
        rows = np.empty((len(judged.due), 7), ">i8")
        columns = (judged.pool, judged.generation, judged.block, judged.due, judged.verdict, judged.covered)
        for place, column in enumerate((*columns, judged.shards)):
            rows[:, place] = column
        made.update(judged.incarnation.encode() + b"\n")
        made.update(rows.tobytes())
    return made.hexdigest()
