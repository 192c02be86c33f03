"""The population: its derivation, and its totals compared with totals from other sources.

1. Counters of pools and devices are those that a worker recorded when it stopped. For a worker that still runs, or
   died, the ledger has none, and the identity is left out rather than filled in.
2. A request lists what it grew by at its end. Until then its growth is a term of the identity: generations that no leaf
   lists, behind the first block of a request that runs. Only a process all of whose sequences have leaves has such a
   term: where one is missing, its leaf may have listed them, and the identity does not hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sqlalchemy import func, select

from kvcustody.audit.evidence.coverage.custody_units import LifeUnits
from kvcustody.audit.evidence.processes.sequence_gaps import lacks_leaves
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.reports.section import Citation, ReportFacts, ReportReading, Section
from kvcustody.audit.reports.sections.boundary import SECTION as BOUNDARY
from kvcustody.audit.reports.sections.boundary import ReportedWorker
from kvcustody.audit.reports.sections.coverage import SECTION as COVERAGE
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import receipts
from kvcustody.times import iso

QUERY = """\
custody = for each (incarnation, pool, generation) that a custody-ended leaf names, its first end;
          and each that a leaf lists as handed out, that is due, and that no custody-ended leaf names
due_at  = max(last release, min(ceiling, end of the last hold, erasure)), from the residencies' own leaves
taken   = leaves with idx < size of their log under the checkpoint
where   {since} <= due_at < {until}{tenant}
order   incarnation, ended before overdue, pool, generation
again   kvcustody audit recompute --as-of {checkpoint} --since {since} --until {until}{option}"""
HANDED_OUT = "handed out by the pool's counter when it stopped"


class Balance(NamedTuple):
    """An identity with both sides and their sources."""

    name: str
    left: int
    right: int
    left_source: str
    right_source: str

    @property
    def holds(self) -> bool:
        """Whether both sides are equal."""
        return self.left == self.right


class PopulationFacts(NamedTuple):
    """The counts, the query behind them, and their reconciliation."""

    query: str
    custodies: int
    units: int
    digest: str
    balances: tuple[Balance, ...]


def population_facts(reading: ReportReading) -> PopulationFacts:
    """Return the population of the report."""
    population = reading.population
    return PopulationFacts(
        _query(reading.asked),
        population.custodies,
        population.units,
        population.digest(),
        reconcile(reading),
    )


def reconcile(reading: ReportReading) -> tuple[Balance, ...]:
    """Return every identity; for one tenant only those of its own units (counters cover all tenants together)."""
    total = reading.coverage.total
    disputed = total.in_time - total.covered
    parts = (total.covered, disputed, total.late, total.failed, total.missing, total.unproven, total.overdue)
    balances = [
        Balance(
            "units in the population = covered + disputed + late + failed + missing + unproven + overdue",
            reading.population.units,
            sum(parts),
            "population, listed one by one",
            "coverage, added up by verdict",
        )
    ]
    if reading.asked.tenant is not None:
        return tuple(balances)
    workers = {worker.incarnation: worker for worker in reading[BOUNDARY].workers}
    for each in reading.lives:
        worker = workers.get(each.life.uuid)
        if worker is not None:
            balances += _of_life(reading, each, worker)
    return tuple(balances)


def _of_life(reading: ReportReading, life_units: LifeUnits, worker: ReportedWorker) -> Iterator[Balance]:
    account, who = life_units.account, reading.name_of(worker.name, worker.incarnation)
    growth = account.unlisted
    if growth and lacks_leaves(reading.connection, life_units.life.id, reading.state):
        growth = 0
    yield Balance(
        f"{who}: generations up to the highest on record = listed as handed out + growth",
        account.reached - worker.generation * account.pools,
        account.handed_out + growth,
        "the pool's generation counter, as leaves show it",
        "leaves of openings and releases, and generations between them since a request that runs began",
    )
    yield Balance(
        f"{who}: listed as handed out = ended + still in custody",
        account.handed_out,
        account.ended + account.unended,
        "leaves of openings and releases",
        "leaves of custody ends, and what they leave over",
    )
    if worker.allocated is None:
        return
    yield Balance(
        f"{who}: {HANDED_OUT} = listed as handed out",
        worker.allocated,
        account.handed_out,
        "the pool's own counter",
        "leaves of openings and releases",
    )
    query = select(receipts.c.shard, func.sum(receipts.c.blocks)).where(
        receipts.c.incarnation == life_units.life.id, reading.state.has(receipts), has_leaf(receipts)
    )
    rows = reading.connection.execute(query.group_by(receipts.c.shard))
    wiped = {shard: int(blocks) for shard, blocks in rows}
    for shard, counter in enumerate(worker.scrubbed):
        yield Balance(
            f"{who}: blocks zeroized on shard {shard} = blocks in its receipts",
            counter,
            wiped.get(shard, 0),
            "a counter kept on the device",
            "leaves of receipts",
        )


def _query(parameters: ReportParameters) -> str:
    tenant = f" and owner = {parameters.tenant}" if parameters.tenant else ""
    option = f" --tenant {parameters.tenant}" if parameters.tenant else ""
    return QUERY.format(
        since=iso(parameters.since_us),
        until=iso(parameters.until_us),
        tenant=tenant,
        checkpoint=parameters.checkpoint,
        option=option,
    )


def _is_reconciled(report: ReportFacts) -> bool:
    return report[COVERAGE].total.due > 0 and bool(report[SECTION].balances)


def _disagreements(report: ReportFacts) -> Iterator[str]:
    facts = report[SECTION]
    if facts.units != report[COVERAGE].total.due:
        yield "the population has other units than coverage"
    if not 0 <= facts.custodies <= facts.units:
        yield "the population has more custodies than units"


SECTION: Section[PopulationFacts] = Section(
    "population",
    "Population and reconciliation",
    population_facts,
    order=70,
    about=("the definition, count and digest; totals against counters of the pool and the device, both sides shown"),
    fields={"population": "the definition, count, digest and identities"},
    cited={
        "population": Citation("Population", lambda report: report[SECTION].custodies > 0),
        "reconciliation": Citation("Reconciliation", _is_reconciled),
    },
    disagreements=_disagreements,
)
