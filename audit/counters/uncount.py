"""Leaves that retention drops count no more: deltas that take them off, in the transaction that drops them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection

from kvcustody.audit.counters.count_events import COUNTED_KEYS, count_events
from kvcustody.audit.counters.fold import write_deltas
from kvcustody.audit.counters.hourly_coverage import drop_verdicts
from kvcustody.audit.database.bulk_insert import Inserts
from kvcustody.audit.database.gc_pause import gc_paused
from kvcustody.audit.events.batch import read_leaves


class DroppedRun(NamedTuple):
    """Leaves of a log, the first of them at `first`."""

    log: int
    first: int
    leaves: Sequence[bytes]


def uncount(connection: Connection, log: int, first: int, leaves: Sequence[bytes]) -> None:
    """Take off what these leaves of a log counted, the first of them at `first`; verdicts over them go too."""
    uncount_runs(connection, [DroppedRun(log, first, leaves)])


def uncount_runs(connection: Connection, runs: Sequence[DroppedRun]) -> None:
    """The same for a run of each of several logs."""
    drop_verdicts(connection)
    leaves = [leaf for run in runs for leaf in run.leaves]
    if not leaves:
        return
    with gc_paused():
        batch = read_leaves(leaves, hashed=False, keys=COUNTED_KEYS)
        found = count_events(batch, [run.log for run in runs for _ in run.leaves])
    inserts = Inserts(connection)
    # No other delta has this name: a size is above 0, and a leaf is dropped once.
    off = {place: {name: -value for name, value in figures.items()} for place, figures in found.items()}
    write_deltas(inserts, off, {run.log: -run.first - 1 for run in runs})
    inserts.finish()
