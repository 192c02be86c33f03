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
from sqlalchemy import Connection, or_, select

from kvcustody.audit.evidence.coverage.block_uses import NEVER, BlockUses, read_uses
from kvcustody.audit.evidence.coverage.custody_units import (
    CustodySelection,
    IncarnationLife,
    LifeUnits,
    ended_keys,
    lives_of,
    read_units,
)
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
from kvcustody.audit.store.schema.all_tables import is_leaf_of
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
    if marked is None:
        marked = read_marked(connection)
    holdings: list[Holding] = []
    evidence: list[CoverageRow] = []
    mine: dict[str, set[int]] = {}
    for life in lives_of(connection):
        rows = _openings(connection, life, tenant, pseudonyms)
        if rows:
            mine[life.uuid] = {row.residency for row in rows}
            holdings += _holdings(connection, life, rows, now_us)
    if mine:
        for each in read_units(connection, CustodySelection(tenant=tenant), now_us=now_us):
            evidence += rows_of(_of(each, mine.get(each.life.uuid, set())))
    holdings.sort(key=lambda item: (-item.opened_us, item.incarnation, item.residency))
    return SubjectPage(
        tenant,
        tuple(sorted(pseudonyms)),
        now_us,
        tuple(holdings),
        add_rows(evidence, tenant),
        tuple(
            _erasure(connection, asked, now_us, periods)
            for asked in requests(connection, tenant=tenant)
            if _covers(asked, pseudonyms)
        ),
        history(tuple(one for one in marked if one.incarnation in mine)),
    )


def _openings(connection: Connection, life: IncarnationLife, tenant: str, pseudonyms: Sequence[str]) -> list[Any]:
    column = residencies.c
    who = or_(column.subject.in_(pseudonyms), column.session.in_(pseudonyms))
    query = (
        select(column.residency, column.opened_us, column.absolute_boot_us, events.c.leaf)
        .select_from(residencies.join(events, is_leaf_of(residencies)))
        .where(column.incarnation == life.id, column.tenant == tenant, column.part == 1, who)
    )
    return list(connection.execute(query).all())


def _holdings(connection: Connection, life: IncarnationLife, rows: list[Any], now_us: int) -> list[Holding]:
    uses = read_uses(connection, life)
    ended = ended_keys(connection, life)
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


def _used(uses: BlockUses, residency: int, ended: Any) -> tuple[int, int, int | None, int]:
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
