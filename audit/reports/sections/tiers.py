"""The tiers of a report: copies off the device by tier, their identities, and decisions about moving them.

1. Copies are counted in the state of the checkpoint, those that were due in the period; decisions by the time of their
   leaves.
2. A tier's own counters are those that a worker recorded when it stopped; of one that runs, or died, there are none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sqlalchemy import func, select

from kvcustody.audit.evidence.copies.copy_coverage import CopyCoverage, CopyCoverageRow
from kvcustody.audit.evidence.copies.copy_rows import CopyTotals, copy_totals
from kvcustody.audit.reports.section import Citation, ReportFacts, ReportReading, Section
from kvcustody.audit.reports.sections.boundary import SECTION as BOUNDARY
from kvcustody.audit.reports.sections.boundary import ReportedWorker
from kvcustody.audit.reports.sections.population import Balance
from kvcustody.audit.store.schema.leaf_tables import transfer_decisions
from kvcustody.audit.store.schema.ledger import incarnations


class DecisionTotal(NamedTuple):
    """Decisions of one kind: their number, size, predicted times of both choices, and measured times."""

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
    """All tier facts; `digest` covers every counted copy (`copies.copy_coverage`, rule 6)."""

    rows: tuple[CopyCoverageRow, ...]
    digest: str
    balances: tuple[Balance, ...]
    decisions: tuple[DecisionTotal, ...]

    @property
    def is_empty(self) -> bool:
        """Whether no copy was due, and nothing was decided about any."""
        return not (self.rows or self.decisions)


def read_tiers(reading: ReportReading) -> TierFacts:
    """Return the facts about tiers; for one tenant without any worker's counters."""
    copies = reading.copies
    balances = [*_verdicts(copies)]
    if reading.asked.tenant is None:
        for worker in reading[BOUNDARY].workers:
            balances += _of_worker(reading, worker)
    return TierFacts(copies.rows, copies.digest, tuple(balances), _decisions(reading))


def _verdicts(copies: CopyCoverage) -> Iterator[Balance]:
    for row in copies.by_tier():
        yield Balance(
            f"copies due in {row.tier} = covered + late + open + unproven + disputed",
            row.due,
            row.covered + row.late + row.open + row.unproven + row.disputed,
            "copies, listed one by one",
            "verdicts, added up",
        )


def _of_worker(reading: ReportReading, worker: ReportedWorker) -> Iterator[Balance]:
    query = select(incarnations.c.id).where(incarnations.c.uuid == worker.incarnation)
    life = reading.connection.scalar(query)
    if life is None or not worker.tiers:
        return
    totals = copy_totals(reading.connection, life, reading.state)
    who = reading.name_of(worker.name, worker.incarnation)
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


def _decisions(reading: ReportReading) -> tuple[DecisionTotal, ...]:
    column = transfer_decisions.c
    key = (column.tier, column.action, column.choice, column.outcome)
    sums = (func.sum(column[name]) for name in DecisionTotal._fields[5:])
    query = select(*key, func.count(), *sums).where(reading.within(transfer_decisions)).group_by(*key)
    rows = reading.connection.execute(query)
    return tuple(sorted(DecisionTotal(*row[:4], *map(int, row[4:])) for row in rows))


def _disagreements(report: ReportFacts) -> Iterator[str]:
    for row in report[SECTION].rows:
        verdicts = row.covered + row.late + row.open + row.unproven + row.disputed
        if verdicts != row.due or not 0 <= row.waiting <= row.open:
            yield f"verdicts of copies in tier `{row.tier}` do not add up to what was due"
    due = {f"copies due in {row.tier} ": 0 for row in report[SECTION].rows}
    for row in report[SECTION].rows:
        due[f"copies due in {row.tier} "] += row.due
    stated = {
        f"{balance.name.partition(' = ')[0]} ": (balance.left, balance.right)
        for balance in report[SECTION].balances
        if balance.name.startswith("copies due in ")
    }
    if stated != {name: (copies, copies) for name, copies in due.items()}:
        yield "the identities of copies that were due are not those of the tiers"


SECTION: Section[TierFacts] = Section(
    "tiers",
    "Tiers",
    read_tiers,
    order=100,
    about=(
        "where copies off the device were due or decided about: verdicts and evidence by tier, tenant and "
        "classification; counters of tiers against leaves; decisions to move, predicted and measured"
    ),
    fields={"tiers": "copies off the device"},
    cited={"tiers": Citation("Tiers", lambda report: any(row.due for row in report[SECTION].rows))},
    is_shown=lambda report: not report[SECTION].is_empty,
    disagreements=_disagreements,
)
