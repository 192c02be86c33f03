"""Which of a worker's leaves the ledger has under the newest signed checkpoint; the worker keeps the rest.

1. A leaf is covered where a root leaf below the signed size seals its log beyond it.
2. Of a process that is another worker's, or that the ledger does not know (any more), nothing is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection, func, select

from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events, incarnations, logs, workers
from kvcustody.audit.tlog.database_proofs import LedgerProofs


class LeafRun(NamedTuple):
    """Sequences of one process, from first to last."""

    incarnation: str
    first: int
    last: int


class FoundRun(NamedTuple):
    """The number of a run's leaves in the ledger, and whether all of them are covered."""

    leaves: int
    covered: bool


def find_runs(connection: Connection, worker: str, runs: Sequence[LeafRun], signed_size: int | None) -> list[FoundRun]:
    """Return the state of each run; `signed_size`: root leaves under the newest signed checkpoint, None without one."""
    query = select(incarnations.c.uuid, incarnations.c.id).join(workers, workers.c.id == incarnations.c.worker)
    mine = query.where(workers.c.name == worker, incarnations.c.uuid.in_({run.incarnation for run in runs}))
    ids = {row.uuid: row.id for row in connection.execute(mine)}
    proofs, sealed = LedgerProofs(connection), dict[str, int]()
    covered_runs = []
    for run in runs:
        counted = (
            select(logs.c.name, func.count().label("leaves"), func.max(events.c.idx).label("idx"))
            .join(logs, logs.c.id == events.c.log)
            .where(events.c.incarnation == ids.get(run.incarnation, -1))
            .where(events.c.sequence.between(run.first, run.last), has_leaf(events))
            .group_by(logs.c.name)
        )
        rows = connection.execute(counted).all()
        for row in rows:
            if signed_size is not None and row.name not in sealed:
                sealed[row.name] = proofs.head(row.name, as_of=signed_size).size
        covered = all(row.idx < sealed.get(row.name, 0) for row in rows)
        covered_runs.append(FoundRun(sum(row.leaves for row in rows), bool(rows) and covered))
    return covered_runs
