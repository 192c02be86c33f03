"""Subtract dropped leaves from the figures, by deltas in the transaction that drops them.

1. What they leave in custody is carried on, in a figure of no hour: a hand-out may go before the end of its blocks.
2. Of a process whose leaves do not add up nothing is carried: what is left of it is taken off where it is read
   (`read_figures`, rule 3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

from sqlalchemy import Connection

from kvcustody.audit.evidence.counters.hourly_coverage import drop_verdicts
from kvcustody.audit.evidence.counters.read_figures import uneven_lives
from kvcustody.audit.leaf.batch import LeafBatch, read_leaves
from kvcustody.audit.project import CARRIED, COUNTED_KEYS, Figures, count_events, custody_of
from kvcustody.audit.store.database.bulk_insert import Inserts
from kvcustody.audit.store.database.gc_pause import gc_paused
from kvcustody.audit.store.schema.counters import ALL_HOURS
from kvcustody.audit.write.append_leaves import write_deltas


class DroppedRun(NamedTuple):
    """Leaves of a log, the first of them at `first`."""

    log: int
    first: int
    leaves: Sequence[bytes]


def uncount(connection: Connection, log: int, first: int, leaves: Sequence[bytes]) -> None:
    """Subtract what these leaves of a log counted, the first of them at `first`; verdicts over them are dropped too."""
    uncount_runs(connection, [DroppedRun(log, first, leaves)])


def uncount_runs(connection: Connection, runs: Sequence[DroppedRun]) -> None:
    """Subtract a run of each of several logs."""
    drop_verdicts(connection)
    leaves = [leaf for run in runs for leaf in run.leaves]
    if not leaves:
        return
    uneven = frozenset(life.uuid for life in uneven_lives(connection))
    with gc_paused():
        batch = read_leaves(leaves, hashed=False, keys=COUNTED_KEYS)
        off = taken_off(batch, [run.log for run in runs for _ in run.leaves], uneven)
    inserts = Inserts(connection)
    # No other delta has this name: a size is above 0, and a leaf is dropped once.
    write_deltas(inserts, off, {run.log: -run.first - 1 for run in runs})
    inserts.finish()


def taken_off(batch: LeafBatch, logs: Sequence[int], uneven: frozenset[str]) -> Figures:
    """Return the change of these logs' figures without these leaves, given the log of each and rule 2's processes."""
    counted = count_events(batch, logs)
    off = Figures()
    for place, figures in counted.items():
        off[place] = {name: -value for name, value in figures.items()}
    lives = _about(batch)
    if not uneven.isdisjoint(lives):
        is_even = [life not in uneven for life in lives]
        even = read_leaves(list(compress(batch.data, is_even)), hashed=False, keys=COUNTED_KEYS)
        counted = count_events(even, list(compress(logs, is_even))) if even.data else Figures()
    carried = Counter[int]()
    for (_, log, _), figures in counted.items():
        carried[log] += custody_of(figures)
    for log, blocks in carried.items():
        if blocks:
            off[False, log, ALL_HOURS] = {CARRIED: blocks}
    return off


def _about(batch: LeafBatch) -> list[str]:
    """Return the process that each leaf concerns: the one it names, else its recorder."""
    lives = list(batch.incarnations)
    for group in batch.groups:
        for place, named in zip(group.places, group.columns.get("of_incarnation", ()), strict=False):
            lives[place] = named or lives[place]
    return lives
