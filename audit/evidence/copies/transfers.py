"""Decisions about moving copies, for people: newest first by page, summed up by tier, or of one request.

    transfers(connection, TransferFilter(tier="nvme", outcome="failed"), limit=50)
    transfer_summary(connection, since_us, until_us)
    explain_request(connection, 17)

1. Rows of decisions alone are read, in pages; no leaf is. With a tenant, only those in that tenant's own log.
2. Of a restore that brought a part, blocks and bytes are those that came.
3. Predictions are judged by transfers that were done and that had one (`transfer_us` above 0). What a restore saved is
   what computing its tokens was predicted to take less what it took: negative where it lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import add
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Select, and_, case, func, literal_column, select, tuple_

from kvcustody.audit.evidence.copies.copy_rows import DecidedTransfer, transfers_of
from kvcustody.audit.evidence.counters.read_figures import TierTotals, tier_totals
from kvcustody.audit.evidence.subjects.subject_filter import of_tenant
from kvcustody.audit.kinds import log_of
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import residencies, transfer_decisions
from kvcustody.audit.store.schema.ledger import incarnations, logs, workers

NO_OUTCOME = "none"  # how a filter names decisions after which nothing moved
SIZES = (0, 1 << 20, 4 << 20, 16 << 20, 64 << 20)  # bytes from which on transfers are counted together
_SHOWN_MAX = 100
_DECISION = DecidedTransfer._fields


class TransferFilter(NamedTuple):
    """Selects decisions; None means any. `residency`: the request for which blocks were restored, 0 for stores."""

    tenant: str | None = None
    tier: str | None = None
    action: str | None = None
    choice: str | None = None
    outcome: str | None = None
    residency: int | None = None
    incarnation: str | None = None
    since_us: int | None = None
    until_us: int | None = None


_EVERYTHING = TransferFilter()


class RecordedTransfer(NamedTuple):
    """One decision of one process about moving copies: the predicted times of both choices, and the outcome.

    `latency_class` is the request's. A prediction of 0 is none yet. `actual_us` was measured, 0 where nothing moved.
    """

    incarnation: str
    tenant: str
    action: str
    tier: str
    residency: int
    blocks: int
    bytes: int
    transfer_us: int
    recompute_us: int
    choice: str
    outcome: str
    actual_us: int
    reason: str
    part_blocks: int
    latency_class: str
    at_us: int


class TransferPage(NamedTuple):
    """Some decisions in their order, and the start of the next page (None: there is none)."""

    transfers: tuple[RecordedTransfer, ...]
    next: tuple[int, int, int] | None


class TransferSize(NamedTuple):
    """Completed transfers of one tier and action, from `bytes_min` up to the next row's.

    `predicted` of them had a prediction, of `predicted_us` together, and took `predicted_actual_us`. All took
    `measured_us`.
    """

    bytes_min: int
    transfers: int
    measured_us: int
    predicted: int
    predicted_us: int
    predicted_actual_us: int


class TransferSummary(NamedTuple):
    """Stores or restores of one tier in a period.

    `blocks` and `bytes` are those that were moved. `predicted` of these had a prediction, of `predicted_us`
    together, and took `predicted_actual_us`; `error` is what each was wrong by, as a share of that: None where there
    was none. `against` counts decisions after which nothing moved, by reason. `saved_us` is of restores,
    those included that failed or came in part: None for stores. `sizes` are of those that were done, in order of size.
    """

    tier: str
    action: str
    decisions: int
    transfers: int
    partial: int
    failed: int
    blocks: int
    bytes: int
    measured_us: int
    predicted: int
    predicted_us: int
    predicted_actual_us: int
    error: float | None
    saved_us: int | None
    against: dict[str, int]
    sizes: tuple[TransferSize, ...] = ()


class TierSummary(NamedTuple):
    """One tier: its copies of all time, and the decisions about it in a period.

    `net_us` is what its restores saved against computing, less what its stores took: whether the tier paid in sum.
    """

    tier: str
    stored: int
    stored_bytes: int
    ended: int
    ended_bytes: int
    living: int
    net_us: int
    transfers: tuple[TransferSummary, ...]


class ExplainedRequest(NamedTuple):
    """A request, the blocks it attached or was handed, and each decision about restoring the missing ones."""

    incarnation: str
    residency: int
    tenant: str
    classification: str
    opened_us: int
    attached_blocks: int
    written_blocks: int
    decisions: tuple[DecidedTransfer, ...]


def transfers(
    connection: Connection,
    wanted: TransferFilter = _EVERYTHING,
    *,
    after: tuple[int, int, int] | None = None,
    limit: int = 100,
    newest: bool = True,
) -> TransferPage:
    """Return decisions, newest first or oldest first (for one tenant: in its log's order).

    `after` is the place of the last one on the page before.
    """
    column = transfer_decisions.c
    place: tuple[ColumnElement[int], ...] = (column.at_us, column.log, column.idx)
    query: Select[Any] = select(incarnations.c.uuid, *(column[name] for name in _DECISION), *place)
    query = _chosen(query.join(incarnations, incarnations.c.id == column.incarnation), wanted)
    order = place
    if wanted.tenant is not None:
        order = (column.idx,)
        if after is not None:
            query = query.where(column.idx < after[2] if newest else column.idx > after[2])
    elif after is not None and newest:
        query = query.where(column.at_us <= after[0], tuple_(*place) < after)
    elif after is not None:
        query = query.where(column.at_us >= after[0], tuple_(*place) > after)
    ordered = query.order_by(*(part.desc() if newest else part.asc() for part in order)).limit(limit + 1)
    rows = connection.execute(ordered).all()
    last = rows[limit - 1] if len(rows) > limit else None
    following = None if last is None else (int(last[-3]), int(last[-2]), int(last[-1]))
    return TransferPage(tuple(RecordedTransfer(*row[:-3]) for row in rows[:limit]), following)


def transfer_summary(
    connection: Connection, since_us: int, until_us: int, *, tenant: str | None = None
) -> tuple[TransferSummary, ...]:
    """Return the decisions of a period by tier and action, in name order."""
    return _summaries(_alike(connection, since_us, until_us, tenant))


class _Alike(NamedTuple):
    """Decisions of one part of a period that are alike: how many, and their sums."""

    at_us: int
    tier: str
    action: str
    choice: str
    outcome: str
    reason: str
    bytes_min: int
    values: list[int]


def _alike(
    connection: Connection, since_us: int, until_us: int, tenant: str | None, width_us: int | None = None
) -> list[_Alike]:
    """Return the decisions of a period by what they have in common, in one read; of parts of that width, or of one."""
    column, moved = transfer_decisions.c, _moved()
    size = case(*((column.bytes >= least, least) for least in reversed(SIZES[1:])), else_=0)
    start = literal_column("0") if width_us is None else column.at_us - column.at_us % width_us
    alike = (column.tier, column.action, column.choice, column.outcome, column.reason, size.label("bytes_min"))
    key = (start.label("start"), *alike)
    known = column.transfer_us > 0
    sums = (
        func.count(),
        _sum(moved.blocks),
        _sum(case((moved.is_part, column.bytes * column.part_blocks // column.blocks), else_=column.bytes)),
        _sum(column.actual_us),
        _sum(case((known, 1), else_=0)),
        _sum(case((known, column.transfer_us), else_=0)),
        _sum(case((known, column.actual_us), else_=0)),
        _sum(case((known, func.abs(column.transfer_us - column.actual_us)), else_=0)),
        _sum(moved.saved_us),
    )
    query = _chosen(select(*key, *sums), TransferFilter(tenant, since_us=since_us, until_us=until_us))
    rows = connection.execute(query.group_by(*(alike if width_us is None else key)))
    return [_Alike._make((int(row[0]), *row[1:6], int(row[6]), list(map(int, row[7:])))) for row in rows]


def _summaries(rows: Iterable[_Alike]) -> tuple[TransferSummary, ...]:
    found: defaultdict[tuple[str, str], _Sums] = defaultdict(_Sums)
    for row in rows:
        found[row.tier, row.action].add(row.choice, row.outcome, row.reason, row.bytes_min, row.values)
    return tuple(found[key].summary(*key) for key in sorted(found))


class _Moved(NamedTuple):
    """What a decision moved and saved, as SQL (rules 2 and 3)."""

    is_part: ColumnElement[bool]
    blocks: ColumnElement[int]
    saved_us: ColumnElement[int]


def _moved() -> _Moved:
    column = transfer_decisions.c
    is_part = and_(column.outcome == "partial", column.blocks > 0)
    spared_us = case(  # of what would have been computed, the part that did not have to be
        (is_part, column.recompute_us * column.part_blocks // column.blocks),
        (column.outcome.in_(("failed", "partial")), 0),
        else_=column.recompute_us,
    )
    blocks = case((is_part, column.part_blocks), else_=column.blocks)
    return _Moved(is_part, blocks, case((column.recompute_us > 0, spared_us - column.actual_us), else_=0))


class TransferTime(NamedTuple):
    """Transfers of one action in one part of a period: blocks that came, and the time that they saved and took."""

    at_us: int
    action: str
    blocks: int
    saved_us: int
    measured_us: int


class TiersOverTime(NamedTuple):
    """Every tier with its decisions in a period, and the period's transfers by action and part of it."""

    tiers: tuple[TierSummary, ...]
    times: tuple[TransferTime, ...]


def tiers_over_time(
    connection: Connection, since_us: int, until_us: int, width_us: int, *, tenant: str | None = None
) -> TiersOverTime:
    """Return both of one read; parts begin at whole multiples of their width (µs)."""
    rows = _alike(connection, since_us, until_us, tenant, width_us)
    sums: defaultdict[tuple[int, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for row in rows:
        if row.choice == "transfer":
            _, blocks, _, actual_us, *_, saved_us = row.values
            arrived = blocks if row.outcome in ("done", "partial") else 0
            key = (row.at_us, row.action)
            sums[key] = [*map(add, sums[key], (arrived, saved_us, actual_us))]
    times = tuple(TransferTime(*key, *sums[key]) for key in sorted(sums))
    return TiersOverTime(_tiers(connection, _summaries(rows), tenant), times)


def tier_summaries(
    connection: Connection, since_us: int, until_us: int, *, tenant: str | None = None
) -> tuple[TierSummary, ...]:
    """Return every tier that the ledger knows, in name order; decisions are those of the period."""
    return _tiers(connection, transfer_summary(connection, since_us, until_us, tenant=tenant), tenant)


def _tiers(connection: Connection, decided: Sequence[TransferSummary], tenant: str | None) -> tuple[TierSummary, ...]:
    totals = {row.tier: row for row in tier_totals(connection, tenant=tenant)}
    summaries = []
    for tier in sorted(totals.keys() | {row.tier for row in decided}):
        total = totals.get(tier, TierTotals(tier, 0, 0, 0, 0, 0))
        mine = tuple(row for row in decided if row.tier == tier)
        copies = (total.stored, total.stored_bytes, total.ended, total.ended_bytes, total.living)
        net_us = sum(-row.measured_us if row.saved_us is None else row.saved_us for row in mine)
        summaries.append(TierSummary(tier, *copies, net_us, mine))
    return tuple(summaries)


def explain_request(
    connection: Connection,
    residency: int,
    *,
    incarnation: str | None = None,
    worker: str | None = None,
    tenant: str | None = None,
) -> tuple[ExplainedRequest, ...]:
    """Return the requests with this number, newest first; several unless the process is named, since each counts its
    own.
    """
    column, life = residencies.c, incarnations.c
    query: Select[Any] = (
        select(life.uuid, column.residency, column.tenant, column.classification, column.opened_us)
        .add_columns(column.attached_blocks, column.written_blocks)
        .join(incarnations, life.id == column.incarnation)
        .where(column.residency == residency, column.part == 1, has_leaf(residencies))
        .order_by(column.opened_us.desc(), life.uuid)
        .limit(_SHOWN_MAX)
    )
    if incarnation is not None:
        query = query.where(life.uuid == incarnation)
    if worker is not None:
        query = query.join(workers, workers.c.id == life.worker).where(workers.c.name == worker)
    if tenant is not None:
        query = query.where(of_tenant(tenant))
    return tuple(
        ExplainedRequest._make((*row, transfers_of(connection, row.uuid, residency, tenant=tenant)))
        for row in connection.execute(query).all()
    )


def has_tiers(connection: Connection, *, tenant: str | None = None) -> bool:
    """Return whether anything was ever stored in a tier or decided about one."""
    column = transfer_decisions.c
    query = select(column.idx).limit(1)
    if tenant is not None:
        query = query.where(_in_own_log(tenant))
    return connection.scalar(query) is not None or bool(tier_totals(connection, tenant=tenant))


class _Sums:
    """What rows of one tier and action add up to."""

    def __init__(self) -> None:
        self.decisions = self.transfers = self.partial = self.failed = self.blocks = self.bytes = 0
        self.measured_us = self.predicted = self.predicted_us = self.judged_us = self.wrong_us = 0
        self.saved_us = 0
        self.against: dict[str, int] = {}
        self.sizes: dict[int, TransferSize] = {}

    def add(self, choice: str, outcome: str, reason: str, bytes_min: int, values: list[int]) -> None:
        """Rows that are alike: how many, and the sums of the query."""
        count, blocks, size, actual_us, predicted, predicted_us, judged_us, wrong_us, saved_us = values
        self.decisions += count
        if choice != "transfer":
            self.against[reason] = self.against.get(reason, 0) + count
            return
        self.transfers += count
        self.measured_us += actual_us
        self.saved_us += saved_us
        if outcome == "partial":
            self.partial += count
            self.blocks += blocks
            self.bytes += size
        elif outcome == "failed":
            self.failed += count
        else:
            self.blocks += blocks
            self.bytes += size
            self.predicted += predicted
            self.predicted_us += predicted_us
            self.judged_us += judged_us
            self.wrong_us += wrong_us
            before = self.sizes.get(bytes_min, TransferSize(bytes_min, 0, 0, 0, 0, 0))
            more = (count, actual_us, predicted, predicted_us, judged_us)
            self.sizes[bytes_min] = TransferSize(
                bytes_min, *(one + other for one, other in zip(before[1:], more, strict=True))
            )

    def summary(self, tier: str, action: str) -> TransferSummary:
        """Return the row for display."""
        return TransferSummary(
            tier,
            action,
            self.decisions,
            self.transfers,
            self.partial,
            self.failed,
            self.blocks,
            self.bytes,
            self.measured_us,
            self.predicted,
            self.predicted_us,
            self.judged_us,
            self.wrong_us / self.judged_us if self.judged_us else None,
            self.saved_us if action == "restore" else None,
            dict(sorted(self.against.items())),
            tuple(self.sizes[least] for least in sorted(self.sizes)),
        )


def _sum(what: ColumnElement[Any]) -> ColumnElement[Any]:
    return func.coalesce(func.sum(what), 0)


def _in_own_log(tenant: str) -> ColumnElement[bool]:
    log = select(logs.c.id).where(logs.c.name == log_of(tenant)).scalar_subquery()
    return transfer_decisions.c.log == log


def _chosen(query: Select[Any], wanted: TransferFilter) -> Select[Any]:
    column = transfer_decisions.c
    query = query.where(has_leaf(transfer_decisions))
    for name in ("tier", "action", "choice", "residency"):
        value = getattr(wanted, name)
        if value is not None:
            query = query.where(column[name] == value)
    if wanted.outcome is not None:
        query = query.where(column.outcome == ("" if wanted.outcome == NO_OUTCOME else wanted.outcome))
    if wanted.incarnation is not None:
        query = query.where(incarnations.c.uuid == wanted.incarnation)
    if wanted.tenant is not None:
        query = query.where(_in_own_log(wanted.tenant))
    if wanted.since_us is not None:
        query = query.where(column.at_us >= wanted.since_us)
    if wanted.until_us is not None:
        query = query.where(column.at_us < wanted.until_us)
    return query
