"""The figures recomputed only from leaf bytes, in a process that runs while tables are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvcustody.audit.evidence.coverage.recount_process import Difference, copy_differences, differences
from kvcustody.audit.kinds import log_of
from kvcustody.audit.reports.section import Citation, FactStage, ReportFacts, ReportReading, Section
from kvcustody.audit.reports.sections.population import SECTION as POPULATION
from kvcustody.audit.tlog.database_proofs import LedgerProofs


class Recounted(NamedTuple):
    """The same figures, recomputed only from leaf bytes."""

    leaves: int
    digest: str
    unaccounted_residencies: int
    unaccounted_generations: int
    unaccounted_receipts: int
    differences: tuple[Difference, ...]


def recounted(reading: ReportReading) -> Recounted | None:
    """Return the recount of the whole state, compared with the tables; None if the report was requested without one.

    A tenant's custody can be used by others, through grants, so that no part of the state is enough.
    """
    if reading.recount is None:
        return None
    again, tenant = reading.recount.answer(), reading.asked.tenant
    differing = differences(reading.coverage, again.figures) + copy_differences(reading.copies, again.copies)
    if tenant is None:
        return Recounted(again.leaves, again.digest, *again.missing, differing)
    # How much others recorded is theirs to know.
    leaves = LedgerProofs(reading.connection).sizes(reading.asked.checkpoint).get(log_of(tenant), 0)
    return Recounted(leaves, again.digest, 0, 0, 0, differing)


def _carries(report: ReportFacts) -> bool:
    recount = report[SECTION]
    return recount is not None and recount.leaves > 0


def _disagreements(report: ReportFacts) -> Iterator[str]:
    again = report[SECTION]
    if (again is None) == report.asked.recount:
        yield "a recount is there that was not asked for, or the reverse"
    if again is not None and not again.differences and again.digest != report[POPULATION].digest:
        yield "the recount names no difference, and has another digest"


SECTION: Section[Recounted | None] = Section(
    "recount",
    "Recount from leaves",
    recounted,
    order=110,
    about="every figure recomputed from leaf bytes only, and where the tables differ",
    fields={"recount": "the recount from leaves"},
    stage=FactStage.RECOUNT,
    cited={"recount": Citation("Recount from leaves", _carries)},
    disagreements=_disagreements,
)
