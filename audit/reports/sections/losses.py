"""Known losses of the ledger, and events that went through a spill, in the state of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, func, select

from kvcustody.audit.evidence.processes.sequence_gaps import dropped_spans
from kvcustody.audit.reports.leaf_counts import LeafCounts
from kvcustody.audit.reports.section import Citation, ReportReading, Section
from kvcustody.audit.reports.sections.activity import recorded_kinds
from kvcustody.audit.store.database.snapshot import AsOf
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events, incarnations
from kvcustody.plurals import several

LISTED_MAX = 200


class MissingSequences(NamedTuple):
    """Sequences of one incarnation that no leaf has."""

    incarnation: str
    first_sequence: int
    last_sequence: int
    cause: str


class SpillPeriod(NamedTuple):
    """Events that went to a worker's local spill or came back from it.

    `ended_us`: of a spill that began, when its process had read it back; 0: that is not on record.
    """

    incarnation: str
    at_us: int
    kind: str
    detail: str
    ended_us: int


class GapsAndSpills(NamedTuple):
    """Counts of all of them, and the first `LISTED_MAX` of each."""

    gaps: int
    spills: int
    listed_gaps: tuple[MissingSequences, ...]
    listed_spills: tuple[SpillPeriod, ...]


def read_gaps_and_spills(reading: ReportReading) -> GapsAndSpills:
    """Return gaps and spills in the state; for one tenant only their counts, because all tenants share sequences."""
    connection, as_of, overview = reading.connection, reading.state, reading.counts
    known = _recorded(overview)
    gaps = [gap for gap in known if gap.cause != "refused"]
    if any(item.continued for item in overview.counted):
        gaps += _torn(connection, as_of)
    gaps += _holes(connection, as_of, overview, known)
    spills = _spills(overview)
    if reading.asked.tenant is not None:
        return GapsAndSpills(len(gaps), len(spills), (), ())
    return GapsAndSpills(len(gaps), len(spills), tuple(sorted(gaps)[:LISTED_MAX]), tuple(spills[:LISTED_MAX]))


def _recorded(overview: LeafCounts) -> list[MissingSequences]:
    """Losses that the writer recorded, and refused acts, whose sequence is not used either."""
    missing = []
    for body in overview.of_kind("gap", "withdrawn"):
        first = int(body.get("first_sequence") or body.get("of_sequence") or 0)
        last = int(body.get("last_sequence") or first)
        cause = "refused" if body["kind"] == "withdrawn" else body["cause"]
        missing.append(MissingSequences(body["incarnation"], first, last, cause))
    return missing


def _torn(connection: Connection, as_of: AsOf) -> list[MissingSequences]:
    column = events.c
    query = (
        select(incarnations.c.uuid, column.sequence)
        .join(incarnations, incarnations.c.id == column.incarnation)
        .where(column.parts > 1, as_of.has(events), has_leaf(events))
        .group_by(incarnations.c.uuid, column.sequence, column.log, column.parts)
        .having(func.count() != column.parts)
    )
    return [
        MissingSequences(row.uuid, row.sequence, row.sequence, "a continuation leaf is missing")
        for row in connection.execute(query)
    ]


def _holes(
    connection: Connection, as_of: AsOf, overview: LeafCounts, known: Sequence[MissingSequences]
) -> list[MissingSequences]:
    held: dict[str, int] = {}
    for item in overview.counted:
        held[item.incarnation] = held.get(item.incarnation, 0) + item.sequences
    made: list[MissingSequences] = []
    for uuid, number in sorted(held.items()):
        if number < overview.highest[uuid]:  # rarely: only then are sequences looked at one by one
            made += _holes_of(connection, as_of, uuid, known)
    return made


def _holes_of(
    connection: Connection, as_of: AsOf, uuid: str, known: Sequence[MissingSequences]
) -> list[MissingSequences]:
    life = connection.scalar(select(incarnations.c.id).where(incarnations.c.uuid == uuid))
    here = select(events.c.sequence).where(events.c.incarnation == life, as_of.has(events), has_leaf(events))
    here = here.distinct()
    spans = [(number, number) for number in connection.scalars(here)]
    spans += [(gap.first_sequence, gap.last_sequence) for gap in known if gap.incarnation == uuid]
    spans += dropped_spans(connection, int(life or 0))
    holes, reached = [], 0
    for first, last in sorted(spans):
        if first > reached + 1:
            holes.append(
                MissingSequences(uuid, reached + 1, first - 1, "no leaf under the checkpoint has these sequences")
            )
        reached = max(reached, last)
    return holes


def _spills(overview: LeafCounts) -> list[SpillPeriod]:
    periods, replays = [], list(overview.of_kind("replay-completed"))
    for body in overview.of_kind("spill-started", "replay-completed"):
        ended_us = 0
        if body["kind"] == "spill-started":
            detail = f"{body['cause']}, from sequence {body['first_sequence']} on"
            ended_us = _read_back_us(body, replays)
        else:
            added, torn = several(body["added"], "leaf"), several(body["torn_bytes"], "torn byte")
            detail = f"{added} added, {body['duplicates']} there already, {torn}"
        periods.append(SpillPeriod(body["incarnation"], int(body["at_us"]), body["kind"], detail, ended_us))
    return periods


def _read_back_us(started: dict[str, Any], replays: Sequence[dict[str, Any]]) -> int:
    """When the process of a spill first said after its beginning that it read the spill back; 0: it did not."""
    later = [
        (int(body["sequence"]), int(body["at_us"]))
        for body in replays
        if body["incarnation"] == started["incarnation"] and int(body["sequence"]) > int(started["sequence"])
    ]
    return min(later)[1] if later else 0


SECTION: Section[GapsAndSpills] = Section(
    "losses",
    "Gaps, spills and witnesses",
    read_gaps_and_spills,
    order=140,
    about="missing records; without a witness, split views and cut tails are undetected",
    fields={"losses": "gaps and spills"},
    cited={"losses": Citation("Gaps and spills", lambda report: bool(recorded_kinds(report)))},
)
