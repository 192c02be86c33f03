"""The sample: members of the population drawn by the seed, with every leaf behind their verdicts, and proofs.

1. For a custody, the sample has the leaves that name its (block, generation), and its process's start. It also has the
   last releases of the residencies that used it, the leaves that narrowed its tenant's holds, and erasures that may
   apply. For a copy, it has the leaves that list its number, and its process's start. So a reader can reach the verdict
   again from the report alone. If there are more than `LEAVES_MAX` leaves, the rest is counted and is in an export.
2. A tenant's own report holds only leaves of that tenant's log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import orjson
from sqlalchemy import ColumnElement, Connection, Table, or_, select

from kvcustody.audit.evidence.coverage.custody_units import DEVICE_TIER
from kvcustody.audit.evidence.query.evidence_columns import POOL_SHIFT, is_among
from kvcustody.audit.kinds import log_of
from kvcustody.audit.kinds.block_runs import UNNAMED
from kvcustody.audit.reports.sampling.attribute_size import RISK_PPM
from kvcustody.audit.reports.sampling.population import CustodyPopulation, PopulationMember
from kvcustody.audit.reports.sampling.strata import Sampling, Stratum, concluded, draw_strata
from kvcustody.audit.reports.section import Citation, PagePart, ReportFacts, ReportReading, Section
from kvcustody.audit.reports.sections.population import SECTION as POPULATION
from kvcustody.audit.reports.sections.tiers import SECTION as TIERS
from kvcustody.audit.store.database.dialect import fetch_all
from kvcustody.audit.store.database.snapshot import AsOf
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import (
    attachments,
    copy_steps,
    erasure_effects,
    erasures,
    releases,
    residencies,
)
from kvcustody.audit.store.schema.ledger import events, incarnations, logs
from kvcustody.audit.tlog.database_proofs import LedgerProofs

LEAVES_MAX = 2_000
_CONTEXT_RANK = 100  # behind the leaves that name the custody
CONTEXT = (
    "worker-started",
    "holds-narrowed",
    "erasure-requested",
    "erasure-applied",
)  # they name no block, or many


class LeafEvidence(NamedTuple):
    """One leaf, its place, its bytes as text, and the text of its proof (docs/reference/formats/proofs.md)."""

    log: str
    idx: int
    kind: str
    leaf: str
    proof: str


class SampleItem(NamedTuple):
    """One drawn member and its evidence: the number of its stratum, its place there, and its number overall."""

    stratum: int
    place: int
    number: int
    custody: PopulationMember
    leaves: tuple[LeafEvidence, ...]
    leaves_left_out: int


class _Place(NamedTuple):
    rank: int
    idx: int
    log: str
    log_id: int


class SampleFacts(NamedTuple):
    """How the sample was drawn, and its members."""

    sampling: Sampling
    sample: tuple[SampleItem, ...]


def draw_sample(reading: ReportReading) -> SampleFacts:
    """Return the sample of the population; its leaves have proofs if the reading requests them.

    Raises `ProofError` where the checkpoint is not signed.
    """
    connection, population, parameters = reading.connection, reading.population, reading.asked
    size, risk_ppm = parameters.sample_size(), parameters.risk_ppm or RISK_PPM
    strata = population.strata()
    draws = draw_strata(parameters.seed, size, [len(members) for members in strata.values()])
    drawn = [
        (number, place, int(members[place]))
        for number, (members, draw) in enumerate(zip(strata.values(), draws, strict=True))
        for place in draw.places
    ]
    people = [population.custody(number) for _, _, number in drawn]
    finder = _LeafFinder(connection, population, reading.state, people, parameters.tenant)
    found_of = [finder.of(person) for person in people]
    proofs: dict[tuple[str, int], str] = {}
    if reading.is_proved:
        places = {(at.log, at.idx) for found in found_of for at in found[:LEAVES_MAX]}
        proofs = _proofs(LedgerProofs(connection), parameters.checkpoint, places)
    items = []
    for (stratum, place, number), person, found in zip(drawn, people, found_of, strict=True):
        kept = found[:LEAVES_MAX]
        leaves = tuple(
            LeafEvidence(at.log, at.idx, *_leaf(connection, at), proofs.get((at.log, at.idx), "")) for at in kept
        )
        items.append(SampleItem(stratum, place, number, person, leaves, len(found) - len(kept)))
    counted = tuple(
        Stratum(
            *key,
            len(members),
            len(draw.places),
            draw.duplicates,
            sum(not item.custody.covered for item in items if item.stratum == number),
        )
        for number, ((key, members), draw) in enumerate(zip(strata.items(), draws, strict=True))
    )
    return SampleFacts(concluded(size, risk_ppm, counted), tuple(items))


class _LeafFinder:
    """Finds the leaves of drawn members (rule 1)."""

    def __init__(
        self,
        connection: Connection,
        population: CustodyPopulation,
        state: AsOf,
        drawn: Sequence[PopulationMember],
        tenant: str | None,
    ) -> None:
        self._connection, self._state, self._tenant = connection, state, tenant
        self._context: dict[tuple[str, str, tuple[str, ...]], list[_Place]] = {}
        self._erased: dict[tuple[str, str], list[_Place]] = {}
        self._names = {row.id: row.name for row in connection.execute(select(logs.c.id, logs.c.name))}
        self._ids = {row.uuid: row.id for row in connection.execute(select(incarnations.c.id, incarnations.c.uuid))}
        self._places = {each.life.uuid: each.places for each in population.lives}
        device = [item for item in drawn if item.tier == DEVICE_TIER]
        asked = np.unique(np.array([_key(item) for item in device], np.int64))
        self._near = {
            (uuid, rank): np.flatnonzero(is_among(places.keys, asked))
            for uuid in {item.incarnation for item in device}
            for rank, places in enumerate(self._places[uuid])
        }

    def of(self, item: PopulationMember) -> list[_Place]:
        """Return the leaves of a member, those that name it first."""
        if item.tier != DEVICE_TIER:
            named = self._of_copy(item)
            return self._kept([*named, *self._of_kinds(item, ("worker-started",))])
        named = self._named(item)
        places = [*named, *self._releases(item, named), *self._erasures(item)]
        return self._kept([*places, *self._of_kinds(item, ("worker-started", "holds-narrowed"))])

    def _kept(self, found: Iterable[_Place]) -> list[_Place]:
        """Each leaf once, and of one tenant only its own log's."""
        own = None if self._tenant is None else log_of(self._tenant)
        first: dict[tuple[str, int], _Place] = {}
        for place in sorted(found):
            if own in (None, place.log):
                first.setdefault((place.log, place.idx), place)
        return list(first.values())

    def _named(self, item: PopulationMember) -> list[_Place]:
        numbered_places = []
        for rank, places in enumerate(self._places[item.incarnation]):
            flat = self._near[item.incarnation, rank]
            flat = flat[places.keys[flat] == _key(item)]
            flat = flat[np.isin(places.blocks[flat], (item.block, UNNAMED))]
            rows = np.unique(places.owner[flat])
            for log, idx in zip(places.logs[rows].tolist(), places.idx[rows].tolist(), strict=True):
                numbered_places.append(_Place(rank, idx, self._names[log], log))
        return numbered_places

    def _releases(self, item: PopulationMember, named: Sequence[_Place]) -> list[_Place]:
        """Return the last releases of the residencies in the named leaves."""
        at: dict[int, list[int]] = {}
        for place in named:
            at.setdefault(place.log_id, []).append(place.idx)
        used: set[int] = set()
        for table in (residencies, attachments, releases):
            column = table.c
            for log, places in at.items():
                for start in range(0, len(places), 200):
                    some_places = places[start : start + 200]
                    here = (column.log == log, column.idx.in_(some_places), has_leaf(table))
                    used |= set(self._connection.scalars(select(column.residency).where(*here)))
        release_places = []
        life, residencies_used = self._ids[item.incarnation], sorted(used)
        for start in range(0, len(residencies_used), 200):
            some = residencies_used[start : start + 200]
            release_places += self._rows(
                releases, releases.c.incarnation == life, releases.c.final, releases.c.residency.in_(some)
            )
        return release_places

    def _erasures(self, item: PopulationMember) -> list[_Place]:
        """Requests that may select it, and their effects in its process."""
        key = (item.incarnation, item.tenant)
        found = self._erased.get(key)
        if found is None:
            found = self._erased[key] = self._erasures_of(item)
        return found

    def _erasures_of(self, item: PopulationMember) -> list[_Place]:
        asked = or_(erasures.c.tenant == item.tenant, erasures.c.tenant.is_(None))
        names = select(erasures.c.erasure).where(asked, self._state.has(erasures), has_leaf(erasures))
        effect = erasure_effects.c
        return [
            *self._rows(erasures, asked),
            *self._rows(erasure_effects, effect.incarnation == self._ids[item.incarnation], effect.erasure.in_(names)),
        ]

    def _of_kinds(self, item: PopulationMember, kinds: tuple[str, ...]) -> list[_Place]:
        key = (item.incarnation, item.tenant, kinds)
        places = self._context.get(key)
        if places is None:
            life = self._ids[item.incarnation]
            every = self._rows(events, events.c.kind.in_(kinds), events.c.incarnation == life)
            own = ("system", log_of(item.tenant))
            places = self._context[key] = [place for place in every if place.log in own]
        return places

    def _of_copy(self, item: PopulationMember) -> list[_Place]:
        column = copy_steps.c
        near = self._rows(
            copy_steps,
            column.incarnation == self._ids[item.incarnation],
            column.tier == item.tier,
            column.low <= item.copy,
            column.high >= item.copy,
        )
        return [
            place._replace(rank=0)
            for place in near
            if item.copy in orjson.loads(_leaf(self._connection, place)[1])["numbers"]
        ]

    def _rows(self, table: Table, *where: ColumnElement[bool]) -> list[_Place]:
        query = select(table.c.log, table.c.idx).where(self._state.has(table), has_leaf(table), *where)
        return [_Place(_CONTEXT_RANK, idx, self._names[log], log) for log, idx in self._connection.execute(query)]


def _key(item: PopulationMember) -> int:
    return (item.pool << POOL_SHIFT) | item.generation


def _proofs(proofs: LedgerProofs, checkpoint: int, places: Iterable[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """Inclusion proofs under one checkpoint, log by log."""
    of_log: dict[str, list[int]] = {}
    for log, idx in sorted(places):
        of_log.setdefault(log, []).append(idx)
    return {
        (log, proof.index): proof.to_bytes().decode()
        for log, some in of_log.items()
        for proof in proofs.inclusions_under(proofs.head_proof(log, as_of=checkpoint), some)
    }


def _leaf(connection: Connection, place: _Place) -> tuple[str, str]:
    """Return the kind and the text of a leaf."""
    [(kind, leaf)] = fetch_all(connection, _LEAF, (place.log_id, place.idx))
    return kind, bytes(leaf).decode()


_LEAF = "SELECT kind, leaf FROM events WHERE log = ? AND idx = ?"


def _disagreements(report: ReportFacts) -> Iterator[str]:
    yield from _of_tiers(report)
    parameters, sampling = report.asked, report[SECTION].sampling
    members = [stratum.members for stratum in sampling.strata]
    if not parameters.is_risk_whole():
        yield "a risk is stated without a tolerable rate, or the reverse"
    if sum(members) != report[POPULATION].custodies + sum(row.due for row in report[TIERS].rows):
        yield "the strata are not the population"
    if sampling.size != parameters.sample_size() or sampling.risk_ppm != (parameters.risk_ppm or RISK_PPM):
        yield "the sample is of another size than was asked for"
        return
    draws = draw_strata(parameters.seed, sampling.size, members)
    drawn = [(number, place) for number, draw in enumerate(draws) for place in draw.places]
    counted = [(stratum.drawn, stratum.duplicates) for stratum in sampling.strata]
    if counted != [(len(draw.places), draw.duplicates) for draw in draws] or drawn != [
        (item.stratum, item.place) for item in report[SECTION].sample
    ]:
        yield "the sample is not the one that the seed draws from the population"
        return
    for number, stratum in enumerate(sampling.strata):
        mine = [item.custody for item in report[SECTION].sample if item.stratum == number]
        if any((each.tier, each.tenant, each.classification, each.cause) != stratum[:4] for each in mine):
            yield f"a drawn member is of another stratum than number {number}"
        if stratum.deviations != sum(not each.covered for each in mine):
            yield f"deviations of stratum {number} are not those of its drawn members"
    if concluded(sampling.size, sampling.risk_ppm, sampling.strata) != sampling:
        yield "what the sample says of the population does not follow from it"


def _of_tiers(report: ReportFacts) -> Iterator[str]:
    by_tier: dict[tuple[str, str, str], int] = {}
    for stratum in report[SECTION].sampling.strata:
        if stratum.tier != DEVICE_TIER:
            key = stratum[:3]
            by_tier[key] = by_tier.get(key, 0) + stratum.members
    if by_tier != {row[:3]: row.due for row in report[TIERS].rows}:
        yield "the strata of copies are not the copies that were due, by tier, tenant and classification"


SECTION: Section[SampleFacts] = Section(
    "sample",
    "Annex: sample",
    draw_sample,
    order=200,
    about=(
        "strata, size from a stated risk, members that the seed draws, every leaf that their verdicts need, "
        "inclusion proofs (in `report.json`)"
    ),
    part=PagePart.ANNEX,
    fields={
        "sampling": "how many members each stratum has",
        "sample": "verdicts of drawn custodies, but for the leaves that are proved",
    },
    cited={"sample": Citation("Sample", lambda report: bool(report[SECTION].sample))},
    disagreements=_disagreements,
)
