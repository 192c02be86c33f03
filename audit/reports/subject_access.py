"""One subject's data: the residencies, their reasons and ends, what still exists, and what was erased.

1. A subject is asked for by pseudonyms; no name is in the answer, so that it may be kept.
2. Blocks count where the ledger shows this subject's residency using them; those whose custody ended count no more.
3. Every time is UTC; nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson
from sqlalchemy import Connection, func, or_, select

from kvcustody.audit.evidence.coverage.block_uses import NEVER, BlockUses, read_uses
from kvcustody.audit.evidence.coverage.custody_units import (
    CustodySelection,
    IncarnationLife,
    LifeUnits,
    ended_keys,
    lives_of,
    read_units,
)
from kvcustody.audit.evidence.coverage.recorded_ends import recorded_ends
from kvcustody.audit.evidence.coverage.summary import CoverageRow, add_rows, rows_of
from kvcustody.audit.evidence.erasure.requests_and_answers import (
    ErasureStanding,
    ErasureState,
    Requested,
    requests,
    status,
)
from kvcustody.audit.evidence.processes.marked_processes import Marked, history, read_marked
from kvcustody.audit.evidence.processes.work_periods import WorkPeriod
from kvcustody.audit.evidence.subjects.subject_filter import of_subjects
from kvcustody.audit.kinds.block_runs import Int64s
from kvcustody.audit.store.schema.all_tables import has_leaf, is_leaf_of
from kvcustody.audit.store.schema.leaf_tables import residencies
from kvcustody.audit.store.schema.ledger import events
from kvcustody.http_exchange import fact_of


class Holding(NamedTuple):
    """One residency. `state` is running, held, ending (past its time, but no recorded end) or ended.

    `until_us` is when its last hold ends by what is recorded; of one that runs, its absolute limit (0: none).
    `blocks` it used; of those, `in_custody` have no end on record.
    """

    incarnation: str
    residency: int
    classification: str
    model: str
    pseudonym: str
    asserted: bool
    reasons: tuple[str, ...]
    revision: int
    opened_us: int
    released_us: int | None
    until_us: int
    state: str
    blocks: int
    in_custody: int


class ErasureShown(NamedTuple):
    """One erasure that covers the subject, and its state."""

    erasure: str
    selector: str
    at_us: int
    deadline_us: int
    outcome: str
    waiting: tuple[str, ...]
    unreachable: tuple[str, ...]
    state: str
    why: str = ""  # nobody follows it

    @property
    def standing(self) -> ErasureStanding:
        """The state, with its reason."""
        return ErasureStanding(ErasureState(self.state), self.why)


class SubjectPage(NamedTuple):
    """Everything about one subject, newest first. `evidence` is the coverage of blocks handed to its own residencies.

    `history` says what of it is replayed or generated, where anything is.
    """

    tenant: str
    pseudonyms: tuple[str, ...]
    now_us: int
    holdings: tuple[Holding, ...]
    evidence: CoverageRow
    erasures: tuple[ErasureShown, ...]
    history: str = ""

    @property
    def held_blocks(self) -> int:
        """Blocks in custody, counted once for each residency that uses them."""
        return sum(item.in_custody for item in self.holdings)

    @property
    def until_us(self) -> int:
        """The end of the last recorded claim on anything left; 0 if nothing is left."""
        return max((item.until_us for item in self.holdings if item.in_custody), default=0)

    def data(self) -> dict[str, Any]:
        """Return the page as JSON values."""
        return self._asdict() | {
            "holdings": [item._asdict() for item in self.holdings],
            "evidence": self.evidence._asdict(),
            "erasures": [item._asdict() for item in self.erasures],
            "held_blocks": self.held_blocks,
            "until_us": self.until_us,
        }


def page_of_data(data: dict[str, Any]) -> SubjectPage:
    """Return the page from JSON values that `data` returned."""
    return SubjectPage(
        data["tenant"],
        tuple(data["pseudonyms"]),
        data["now_us"],
        tuple(fact_of(Holding, item | {"reasons": tuple(item["reasons"])}) for item in data["holdings"]),
        fact_of(CoverageRow, data["evidence"]),
        tuple(fact_of(ErasureShown, item) for item in data["erasures"]),
        data.get("history", ""),
    )


def subject_page(
    connection: Connection,
    tenant: str,
    pseudonyms: Sequence[str],
    *,
    now_us: int,
    periods: Mapping[str, WorkPeriod] | None = None,
    marked: Marked | None = None,
) -> SubjectPage:
    """Return the page of the subject with these pseudonyms, as of `now_us` (UTC).

    `periods`: who was at work, where `connection` does not see the system log (`requests_and_answers.status`).
    `marked`: who replayed or generated, likewise.
    """
    holdings: list[Holding] = []
    evidence: list[CoverageRow] = []
    mine: dict[str, set[int]] = {}
    for life in lives_of(connection):
        rows = _openings(connection, life, tenant, pseudonyms)
        if rows:
            mine[life.uuid] = {row.residency for row in rows}
            holdings += _holdings(life, rows, read_uses(connection, life), ended_keys(connection, life), now_us)
    if mine:
        for each in read_units(connection, CustodySelection(tenant=tenant), now_us=now_us):
            evidence += rows_of(_of(each, mine.get(each.life.uuid, set())))
    facts = _Beside(tenant, pseudonyms, now_us, periods, marked)
    return _page(connection, facts, holdings, add_rows(evidence, tenant))


class RecentSubject(NamedTuple):
    """The page of a subject's newest residencies, without the coverage of their blocks.

    `residencies` are on record. `unsearched` blocks count as in custody, but may have an end that was not looked for.
    """

    page: SubjectPage
    residencies: int
    unsearched: int


def recent_subject(
    connection: Connection,
    tenant: str,
    pseudonyms: Sequence[str],
    *,
    now_us: int,
    newest: int,
    own: Sequence[str] | None = None,
    periods: Mapping[str, WorkPeriod] | None = None,
    marked: Marked | None = None,
) -> RecentSubject:
    """Return the page of this many of a subject's newest residencies; the work grows only with the subject's own rows.

    `own`: the pseudonyms of the subject itself, without those of its sessions; all of them by default. Sessions without
    a subject are not looked for. The other arguments are those of `subject_page`.
    """
    column, theirs = residencies.c, of_subjects(connection, tenant, pseudonyms if own is None else own)
    mine = [*theirs, column.part == 1, has_leaf(residencies)]
    total = connection.scalar(select(func.count()).select_from(residencies).where(*mine)) or 0
    query = _OPENINGS.add_columns(column.incarnation).where(*mine).order_by(column.idx.desc()).limit(newest)
    by_life: dict[int, list[Any]] = {}
    for row in connection.execute(query):
        by_life.setdefault(row.incarnation, []).append(row)
    holdings: list[Holding] = []
    unsearched = 0
    for life in lives_of(connection, among=by_life):
        rows = by_life[life.id]
        uses = read_uses(connection, life, among=[row.residency for row in rows])
        ends = recorded_ends(connection, life, uses.keys)
        unsearched += len(ends.unsearched)
        holdings += _holdings(life, rows, uses, ends.ended, now_us)
    facts = _Beside(tenant, pseudonyms, now_us, periods, marked)
    return RecentSubject(_page(connection, facts, holdings, CoverageRow(tenant, "*")), total, unsearched)


class _Beside(NamedTuple):
    """What a page says beside its residencies."""

    tenant: str
    pseudonyms: Sequence[str]
    now_us: int
    periods: Mapping[str, WorkPeriod] | None
    marked: Marked | None


def _page(connection: Connection, beside: _Beside, holdings: list[Holding], evidence: CoverageRow) -> SubjectPage:
    """Return the page of these residencies, with the erasures that cover the subject."""
    marked = read_marked(connection) if beside.marked is None else beside.marked
    processes = {item.incarnation for item in holdings}
    return SubjectPage(
        beside.tenant,
        tuple(sorted(beside.pseudonyms)),
        beside.now_us,
        tuple(sorted(holdings, key=lambda item: (-item.opened_us, item.incarnation, item.residency))),
        evidence,
        tuple(
            _erasure(connection, asked, beside.now_us, beside.periods)
            for asked in requests(connection, tenant=beside.tenant)
            if _covers(asked, beside.pseudonyms)
        ),
        history(tuple(one for one in marked if one.incarnation in processes)),
    )


_OPENINGS = select(
    residencies.c.residency, residencies.c.opened_us, residencies.c.absolute_boot_us, events.c.leaf
).select_from(residencies.join(events, is_leaf_of(residencies)))


def _openings(connection: Connection, life: IncarnationLife, tenant: str, pseudonyms: Sequence[str]) -> list[Any]:
    column = residencies.c
    who = or_(column.subject.in_(pseudonyms), column.session.in_(pseudonyms))
    mine = _OPENINGS.where(column.incarnation == life.id, column.tenant == tenant, column.part == 1, who)
    return list(connection.execute(mine).all())


def _holdings(life: IncarnationLife, rows: list[Any], uses: BlockUses, ended: Int64s, now_us: int) -> list[Holding]:
    holdings = []
    for row in rows:
        body = orjson.loads(row.leaf)
        blocks, in_custody, released, hold_end = _used(uses, row.residency, ended)
        running = released is None
        absolute_us = row.absolute_boot_us + life.offset_us if row.absolute_boot_us else 0
        until_us = absolute_us if running else hold_end + life.offset_us
        if running:
            state = "running"
        elif not in_custody:
            state = "ended"
        else:
            state = "held" if until_us > now_us else "ending"
        holdings.append(
            Holding(
                incarnation=life.uuid,
                residency=row.residency,
                classification=body["classification"],
                model=body.get("model", ""),
                pseudonym=body["session"] or body["subject"],
                asserted=bool(body["asserted"]),
                reasons=tuple(body["reasons"]),
                revision=int(body["revision"]),
                opened_us=row.opened_us,
                released_us=None if released is None else released + life.offset_us,
                until_us=until_us,
                state=state,
                blocks=blocks,
                in_custody=in_custody,
            )
        )
    return holdings


def _used(uses: BlockUses, residency: int, ended: Int64s) -> tuple[int, int, int | None, int]:
    """Blocks it used, those without an end, when it was released (None: it runs), and when its last hold ends."""
    mine = uses.residency == residency
    keys = np.unique(uses.keys[mine])
    left = ~np.isin(keys, ended)
    released = int(uses.released[mine].max()) if len(keys) else 0
    hold_end = int(uses.hold_end[mine].max()) if len(keys) else 0
    return len(keys), int(left.sum()), None if released >= int(NEVER) else released, hold_end


def _of(each: LifeUnits, residencies_of: set[int]) -> LifeUnits:
    """Return the units handed to these residencies."""
    numbers = np.array(sorted(residencies_of), np.int64)
    return each._replace(
        units=each.units.kept(np.isin(each.units.writer, numbers)),
        overdue=each.overdue.kept(np.isin(each.overdue.writer, numbers)),
    )


def _covers(asked: Requested, pseudonyms: Sequence[str]) -> bool:
    """Return whether an erasure of the tenant covers this subject: all of the tenant, the subject, or its session."""
    return asked.selector == "tenant" or asked.subject in pseudonyms or asked.session in pseudonyms


def _erasure(
    connection: Connection, asked: Requested, now_us: int, periods: Mapping[str, WorkPeriod] | None
) -> ErasureShown:
    erasure_status = status(connection, asked.erasure, now_us, periods)
    return ErasureShown(
        asked.erasure,
        asked.selector,
        asked.at_us,
        asked.deadline_us,
        erasure_status.outcome,
        erasure_status.waiting,
        erasure_status.unreachable,
        *erasure_status.standing,
    )
