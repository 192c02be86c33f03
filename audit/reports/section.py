"""A section of a report, declared once: its facts, title, place, and the controls that may cite it.

1. Each file of `sections/` declares one `SECTION`; a template of the same name beside it says how it is printed.
   Nothing else lists sections: JSON, reading back, verification and citations follow from the declarations.
2. Facts are a function of a `ReportReading`: the ledger as one checkpoint left it, each part read once.
   Facts that follow from other sections' facts alone are a function of a `ReportFacts`: a reader makes them again.
3. Nothing of another tenant is in a tenant's own report: its custody, its log, counts of its own, and of what all
   share (workers, policies, the root log) only what names nobody.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import cache, cached_property
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast, get_type_hints

from sqlalchemy import ColumnElement, Connection, Table, and_, select, true

from kvcustody.audit.evidence.copies.copy_coverage import CopyCoverage, JudgedCopies, copy_coverage
from kvcustody.audit.evidence.coverage.custody_units import (
    CustodySelection,
    LifeUnits,
    lives_of,
    read_units,
    within_period,
)
from kvcustody.audit.evidence.coverage.recount_process import RecountProcess
from kvcustody.audit.evidence.coverage.summary import CoverageSummary, summary
from kvcustody.audit.evidence.processes.marked_processes import Marked, marked_processes
from kvcustody.audit.evidence.processes.work_periods import LIVES, WorkPeriod, work_periods
from kvcustody.audit.kinds import log_of
from kvcustody.audit.reports.framework import Framework
from kvcustody.audit.reports.given import PolicyProof, Response
from kvcustody.audit.reports.leaf_counts import LeafCounts, first_leaf_us, read_leaf_counts
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.reports.sampling.population import CustodyPopulation
from kvcustody.audit.reports.short_ids import short_ids
from kvcustody.audit.reports.trend import TrendPeriod, trend_of, trend_start_us
from kvcustody.audit.store.database.snapshot import AsOf
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import logs

FOLDER = "kvcustody.audit.reports.sections"
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class PagePart(StrEnum):
    """Where a section is printed: before the evidence, with it, or behind it."""

    FRONT = "front"
    BODY = "body"
    ANNEX = "annex"


class FactStage(IntEnum):
    """When facts are computed: `RECOUNT` waits for a process that runs beside the sections of `LEDGER`."""

    LEDGER = 1
    RECOUNT = 2
    CONCLUSION = 3  # they follow from other sections' facts alone


class ReportFacts(Protocol):
    """Facts of sections, of a finished report or of one in progress."""

    @property
    def asked(self) -> ReportParameters:
        """The report's parameters."""

    @property
    def framework(self) -> Framework:
        """Its framework."""

    def __getitem__(self, section: Section[T], /) -> T:
        """Return the facts of a section."""


class Citation(NamedTuple):
    """Evidence that controls cite by name (`controls.toml`); a report has it if `carries` is true."""

    title: str
    carries: Callable[[ReportFacts], bool]


def _is_always_shown(_: ReportFacts) -> bool:
    return True


def _no_disagreements(_: ReportFacts) -> Iterable[str]:
    return ()


@dataclass(frozen=True, eq=False)
class Section(Generic[T_co]):
    """One section.

    Args:
        name: the name of its file in `sections/`.
        title: its heading.
        facts: makes its facts; the return type is what a report's JSON is read back as.
        order: its place among all sections.
        about: what a reader finds in it, for the documentation.
        fields: its fields in the JSON, each with what of it nobody can check in the file alone (empty: all of it can
            be). With several, the facts are a named tuple of these fields; with none, the section has no facts.
        part: where it is printed; None: the template of `printed_in` prints it.
        printed_in: the name of the section that prints it, where it has no place of its own.
        stage: when its facts are made.
        cited: what controls may cite of it, by name.
        is_shown: whether a report prints it.
        disagreements: says where its facts disagree with each other, or with other sections' facts.
    """

    name: str
    title: str
    facts: Callable[[ReportReading], T_co]
    order: int
    about: str
    fields: Mapping[str, str] = field(default_factory=dict)
    part: PagePart | None = PagePart.BODY
    printed_in: str = ""
    stage: FactStage = FactStage.LEDGER
    cited: Mapping[str, Citation] = field(default_factory=dict)
    is_shown: Callable[[ReportFacts], bool] = _is_always_shown
    disagreements: Callable[[ReportFacts], Iterable[str]] = _no_disagreements

    @property
    def template(self) -> str:
        """The path of its template in the package."""
        return f"audit/reports/sections/{self.name}.html"

    @cached_property
    def type(self) -> Any:
        """The type of its facts."""
        return get_type_hints(self.facts)["return"]

    @cached_property
    def types(self) -> Mapping[str, Any]:
        """The type of each field in the JSON."""
        if len(self.fields) > 1:
            return get_type_hints(self.type)
        return dict.fromkeys(self.fields, self.type)

    def to_fields(self, facts: Any) -> Mapping[str, Any]:
        """Return the fields for these facts."""
        values = tuple(facts) if len(self.fields) > 1 else (facts,) * len(self.fields)
        return dict(zip(self.fields, values, strict=True))

    def of_fields(self, values: Mapping[str, Any]) -> T_co:
        """Return the facts from fields."""
        mine = [values[name] for name in self.fields]
        made: Any = self.type._make(mine) if len(mine) > 1 else mine[0] if mine else None
        return cast(T_co, made)

    def problems(self, report: ReportFacts) -> Iterator[str]:
        """Yield the section's contradictions within the report."""
        if self.stage is FactStage.CONCLUSION:
            conclude = cast(Callable[[ReportFacts], T_co], self.facts)
            if report[self] != conclude(report):
                yield f"{self.title}: the facts are not those that follow from the report's other facts"
        yield from self.disagreements(report)


def no_facts(_: ReportReading) -> None:
    """Stand in for the facts of a section that only prints other sections' facts."""


@cache
def sections() -> tuple[Section[Any], ...]:
    """Return every section of a report, in order (rule 1)."""
    folder = importlib.import_module(FOLDER)
    found = [importlib.import_module(f"{FOLDER}.{one.name}") for one in pkgutil.iter_modules(folder.__path__)]
    return tuple(sorted((module.SECTION for module in found), key=lambda each: (each.order, each.name)))


def sections_table() -> str:
    """Return the contents of a report as a Markdown table, section by section."""
    rows = ["| section | in the JSON | content |", "|---|---|---|"]
    for each in sections():
        title = each.title if each.part is not None else f"*{each.title}*"
        rows.append(f"| {title} | {', '.join(f'`{name}`' for name in each.fields)} | {each.about} |")
    return "\n".join(rows) + "\n"


@cache
def citations() -> Mapping[str, Citation]:
    """Return everything that controls may cite, by name."""
    return {name: one for section in sections() for name, one in section.cited.items()}


class ReportReading:
    """The ledger as of a checkpoint, for one report; each part is read when a section first needs it.

    Args:
        state: what the checkpoint covers; `now_us` is when its newest leaf was written.
        proof, responses: what people gave to be part of the report.
        recount: the process that counts again from leaves.
        is_proved: whether sampled leaves come with inclusion proofs.
        progress: is told the title of each section whose facts are made.
    """

    def __init__(
        self,
        connection: Connection,
        asked: ReportParameters,
        framework: Framework,
        *,
        state: AsOf,
        now_us: int,
        proof: PolicyProof | None = None,
        responses: tuple[Response, ...] = (),
        recount: RecountProcess | None = None,
        is_proved: bool = True,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.connection, self.asked, self.framework = connection, asked, framework
        self.state, self.now_us, self.recount, self.is_proved = state, now_us, recount, is_proved
        self.proof, self.responses = proof, responses
        self.since_us, self.until_us = asked.since_us, asked.until_us
        self._progress = progress
        self._made: dict[str, Any] = {}

    def __getitem__(self, section: Section[T], /) -> T:
        """Return the facts of a section, computed once."""
        if section.name not in self._made:
            if self._progress is not None and section.fields:
                self._progress(section.title)
            self._made[section.name] = section.facts(self)
        made: T = self._made[section.name]
        return made

    @cached_property
    def own_log(self) -> int | None:
        """The log of the tenant whose report it is (-1: there is none); None for a report on all tenants."""
        if self.asked.tenant is None:
            return None
        query = select(logs.c.id).where(logs.c.name == log_of(self.asked.tenant))
        return self.connection.scalar(query) or -1

    def of_own_log(self, table: Table) -> ColumnElement[bool]:
        """Return the condition that a row is in the state and, in a tenant's own report, in its own log."""
        mine = true() if self.own_log is None else table.c.log == self.own_log
        return and_(self.state.has(table), has_leaf(table), mine)

    def within(self, table: Table) -> ColumnElement[bool]:
        """Return the condition that a row of `of_own_log` was written in the period."""
        at_us = table.c.at_us
        return and_(self.of_own_log(table), at_us >= self.since_us, at_us < self.until_us)

    @cached_property
    def counts(self) -> LeafCounts:
        """Leaves by process and kind."""
        return read_leaf_counts(self.connection, self.state, self.since_us, self.until_us, tenant=self.asked.tenant)

    @cached_property
    def periods(self) -> dict[str, WorkPeriod]:
        """The periods in which each process was at work."""
        return work_periods(self.counts.of_kind(*LIVES))

    def name_of(self, worker: str, incarnation: str) -> str:
        """Return the name of a worker's process in the report's texts."""
        return f"{worker} {self._short(incarnation)}"

    @cached_property
    def _short(self) -> Callable[[str], str]:
        return short_ids(self.periods)

    @cached_property
    def marked(self) -> Marked:
        """Processes that replay or generate history."""
        return marked_processes(self.counts.of_kind(*LIVES))

    @property
    def selection(self) -> CustodySelection:
        """The custody that the report covers."""
        return CustodySelection(self.since_us, self.until_us, self.asked.tenant)

    @cached_property
    def _units(self) -> tuple[list[LifeUnits], list[TrendPeriod]]:
        """The units of the period, and the trend, from one reading of the ledger."""
        first_us = first_leaf_us(self.connection, self.state) or self.since_us
        start_us = trend_start_us(self.since_us, self.until_us, first_us)
        wider = self.selection._replace(since_us=start_us)
        lives = list(read_units(self.connection, wider, now_us=self.now_us, as_of=self.state, with_rules=True))
        trend = trend_of(lives, start_us, self.since_us, self.until_us)
        return [within_period(each, self.since_us, self.until_us) for each in lives], trend

    @property
    def lives(self) -> list[LifeUnits]:
        """The units due in the period, by process."""
        return self._units[0]

    @property
    def trend(self) -> list[TrendPeriod]:
        """Units of this period and of earlier ones."""
        return self._units[1]

    @cached_property
    def coverage(self) -> CoverageSummary:
        """Coverage of the units."""
        return summary(self.lives)

    @cached_property
    def _copies(self) -> tuple[CopyCoverage, list[JudgedCopies]]:
        listed: list[JudgedCopies] = []
        found = copy_coverage(self.connection, self.selection, as_of=self.state, as_of_us=self.now_us, keep=listed)
        return found, listed

    @property
    def copies(self) -> CopyCoverage:
        """Coverage of copies off the device."""
        return self._copies[0]

    @cached_property
    def population(self) -> CustodyPopulation:
        """Every custody and copy due in the period."""
        lives, copies = self.lives, self._copies[1]
        return CustodyPopulation(lives, copies, {life.uuid: life.offset_us for life in lives_of(self.connection)})
