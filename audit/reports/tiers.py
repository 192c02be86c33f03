"""The tiers of a report: copies off the device by tier, their identities, and what was decided about moving them.

1. Copies are counted in the state of the checkpoint, those that were due in the period; decisions by the time of their
   leaves.
2. A tier's own counters are those that a worker recorded when it stopped; of one that runs, or died, there are none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sqlalchemy import Connection, func, select

from kvcustody.audit.evidence.copies.copy_coverage import CopyCoverage, CopyCoverageRow
from kvcustody.audit.evidence.copies.copy_rows import CopyTotals, copy_totals
from kvcustody.audit.kinds import log_of
from kvcustody.audit.reports.reconciliation import Balance
from kvcustody.audit.reports.system_boundary import ReportedWorker
from kvcustody.audit.store.database.snapshot import AsOf
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import transfer_decisions
from kvcustody.audit.store.schema.ledger import incarnations, logs


class DecisionTotal(NamedTuple):
    """Decisions of one kind: how many, about how much, what was predicted both ways, and what moving then took."""

    tier: str
    action: str
    choice: str
    outcome: str
    decisions: int
    bytes: int
    transfer_us: int
    recompute_us: int
    actual_us: int


class TierFacts(NamedTuple):
    """All of it; `digest` is of every copy that was counted (`copies.copy_coverage`, rule 6)."""

    rows: tuple[CopyCoverageRow, ...]
    digest: str
    balances: tuple[Balance, ...]
    decisions: tuple[DecisionTotal, ...]

    @property
    def is_empty(self) -> bool:
        """No copy was due, and nothing was decided about any."""
        return not (self.rows or self.decisions)


def read_tiers(
    connection: Connection,
    state: AsOf,
    copies: CopyCoverage,
    workers: tuple[ReportedWorker, ...],
    since_us: int,
    until_us: int,
    *,
    tenant: str | None,
) -> TierFacts:
    """The facts about tiers; of one tenant no worker's counters are among them."""
    balances = [*_verdicts(copies)]
    if tenant is None:
        for worker in workers:
            balances += _of_worker(connection, worker, state)
    decisions = _decisions(connection, state, since_us, until_us, tenant)
    return TierFacts(copies.rows, copies.digest, tuple(balances), decisions)


def _verdicts(copies: CopyCoverage) -> Iterator[Balance]:
    for row in copies.by_tier():
        yield Balance(
            f"copies due in {row.tier} = covered + late + open + unproven + disputed",
            row.due,
            row.covered + row.late + row.open + row.unproven + row.disputed,
            "copies, listed one by one",
            "verdicts, added up",
        )


def _of_worker(connection: Connection, worker: ReportedWorker, state: AsOf) -> Iterator[Balance]:
    life = connection.scalar(select(incarnations.c.id).where(incarnations.c.uuid == worker.incarnation))
    if life is None or not worker.tiers:
        return
    totals, who = copy_totals(connection, life, state), f"{worker.name} {worker.incarnation[:8]}"
    for tier in worker.tiers:
        said = totals.get(tier.tier, CopyTotals())
        for step in ("stored", "ended", "destroyed"):
            yield Balance(
                f"{who}: copies {step} in {tier.tier} by its counter when it stopped = in leaves",
                getattr(tier, step),
                getattr(said, step),
                "the tier's own counter",
                f"leaves of copies {step}",
            )


def _decisions(
    connection: Connection, state: AsOf, since_us: int, until_us: int, tenant: str | None
) -> tuple[DecisionTotal, ...]:
    column = transfer_decisions.c
    where = [state.has(transfer_decisions), has_leaf(transfer_decisions)]
    where += [column.at_us >= since_us, column.at_us < until_us]
    if tenant is not None:
        own = connection.scalar(select(logs.c.id).where(logs.c.name == log_of(tenant)))
        where.append(column.log == (own or -1))
    key = (column.tier, column.action, column.choice, column.outcome)
    sums = (func.sum(column[name]) for name in DecisionTotal._fields[5:])
    query = select(*key, func.count(), *sums).where(*where).group_by(*key)
    rows = connection.execute(query)
    return tuple(sorted(DecisionTotal(*row[:4], *map(int, row[4:])) for row in rows))
