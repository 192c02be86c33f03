"""How long the ledger keeps the content of its leaves, and legal holds, which take precedence.

1. Only a prefix of a tenant's log loses its content: leaves older than the limit, of processes that ended before it,
   under a signed checkpoint. The roots of their tiles remain, and so do the hashes in the tile where the remaining
   leaves begin (rule 10). Roots and every proof of the remaining leaves are unchanged. The system log (policies, keys,
   workers, holds, purges) is kept whole.
2. The content must have been exported before, and the export verified here with the given keys. An export that lacks a
   leaf to be dropped is refused. `streamed_purge` writes an export of exactly these leaves.
3. `RetentionPurged` names range, checkpoint, export and two different people, and is committed first. After a crash the
   same request finishes the purge.
4. Dropped leaves count in no figure (`counters`) and have no row.
5. A process without memory and without residencies (a killed command's, a control plane's) never delays a purge. No
   later leaf decides anything about its records. A process that was closed for its silence keeps its leaves for the
   same time again. Records that it may still hand in are judged by them.
6. The age of a leaf and the end of a process are the stated times, bounded by the signatures before and after
   (`stated_times`). So a wrong clock neither stops nor hastens a purge.
7. The complete sequences are recorded before any of their leaves is dropped. So dropped leaves are not mistaken for
   lost ones.
8. An active legal hold on a tenant keeps that tenant's log whole; a hold on everything keeps all logs. The transaction
   that deletes checks the holds again.
9. `drop_leaves` removes a leaf together with its rows (in both forms of a table that has two) and its figures.
10. A tile without any remaining leaf keeps its root (level 1 of `tree_nodes`) and no hash inside it. A tile with
    remaining leaves keeps the hashes of the dropped ones, so that places in it can still be proved.
11. Runs of one log are dropped from its beginning, so the end of a log remains. `thin_tiles` removes hashes that rule
    10 does not keep: hashes that older versions kept, or a month that was emptied before another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Engine, Table, and_, func, or_, select

from kvcustody.audit.evidence.processes.open_processes import may_hold_custody
from kvcustody.audit.evidence.processes.sequence_gaps import keep_spans
from kvcustody.audit.evidence.processes.work_periods import ENDS, RETURNED, LifeLeaf, about, life_leaves
from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys
from kvcustody.audit.exports.manifest import MANIFEST
from kvcustody.audit.keep.counted_months import CountedMonths, ExpiredLeaves
from kvcustody.audit.keep.free_space import free_space
from kvcustody.audit.keep.truncate_month import counted_months, empty_months
from kvcustody.audit.keep.uncount import DroppedRun, uncount_runs
from kvcustody.audit.kinds import SYSTEM, LegalHoldChanged, RetentionPurged, log_of, tenant_of
from kvcustody.audit.leaf.merkle import HALF, HALF_HEIGHT, leaf_hashes
from kvcustody.audit.store.database.append_only_triggers import triggers_lifted
from kvcustody.audit.store.database.bulk_insert import insert_rows
from kvcustody.audit.store.database.dialect import dialect_of, fetch_all
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.database.open_changes import forms_to_drop_from
from kvcustody.audit.store.database.signed_orders import orders_of
from kvcustody.audit.store.schema.all_tables import has_leaf, is_leaf_of, projections
from kvcustody.audit.store.schema.leaf_tables import legal_holds
from kvcustody.audit.store.schema.ledger import events, incarnations, logs
from kvcustody.audit.store.schema.trees import checkpoints, tree_nodes
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.proofs import TILE_WIDTH
from kvcustody.audit.verify.ledger.stated_times import LedgerTimes
from kvcustody.audit.verify.verify_export import ExportVerdict, verify_export
from kvcustody.audit.write.record_operator_act import record_operator_act, record_operator_acts
from kvcustody.clock import Clock
from kvcustody.errors import LedgerError
from kvcustody.times import SECOND_US

PLACED, LIFTED = "placed", "lifted"
_STEP_TILES = 8  # of one transaction that drops leaves
_TILES = 256  # of one that thins


_INSIDE = (
    (0, 0),
    (HALF, HALF_HEIGHT),
)  # levels below a tile's root, and how many leaves are under each hash (log2)
# Materialized: what was just dropped is passed over once for each log, to find the first leaf that is there.
_TO_THIN = f"""
WITH purged AS MATERIALIZED (
    SELECT l.id AS log, l.name, max(p.below) AS below, (SELECT min(e.idx) FROM events AS e WHERE e.log = l.id) AS first
    FROM retention_purges AS p JOIN logs AS l ON l.name = p.of_log GROUP BY l.id, l.name
), gone AS MATERIALIZED (
    SELECT log, name, CASE WHEN first < below THEN first ELSE below END / {TILE_WIDTH} * {TILE_WIDTH} AS below
    FROM purged
)
SELECT log, name, below,
    (SELECT min(n.idx) FROM tree_nodes AS n WHERE n.log = gone.log AND n.level = 0 AND n.idx < gone.below),
    (SELECT min(n.idx) FROM tree_nodes AS n WHERE n.log = gone.log AND n.level = {HALF}
        AND n.idx < gone.below / {1 << HALF_HEIGHT})
FROM gone
"""  # noqa: S608 - our own numbers


class RetentionError(LedgerError):
    """The ledger's content may not be dropped, or not yet."""

    code = "KVC650"


class Hold(NamedTuple):
    """An active legal hold. `tenant` None means everything; `subject`, a pseudonym, limits it to one person's data."""

    hold: str
    tenant: str | None
    reason: str
    actor: str
    at_us: int
    subject: str | None = None


class LogPlan(NamedTuple):
    """A plan for one log: drop leaves `first` up to but without `below`; `kept_by` names what stops it there."""

    log: str
    first: int
    below: int
    kept_by: str

    @property
    def leaves(self) -> int:
        """The number of leaves that would lose their content."""
        return self.below - self.first


def active_holds(connection: Connection) -> tuple[Hold, ...]:
    """Return holds that were placed and not lifted, according to leaves, oldest first.

    Where orders are signed (`signed_orders`), an unsigned hold still holds, and nothing but a signed order lifts one:
    what a purge dropped does not come back.
    """
    column = legal_holds.c
    signed = orders_of(connection)
    holds: dict[str, Hold] = {}
    query = select(legal_holds).where(has_leaf(legal_holds)).order_by(column.at_us, column.log, column.idx)
    if signed is not None:
        query = query.add_columns(events.c.leaf).select_from(legal_holds).join(events, is_leaf_of(legal_holds))
    for row in connection.execute(query):
        if signed is not None and row.action != PLACED:
            body = signed.accepted(bytes(row.leaf), "legal-hold")
            said = None if body is None else (body["hold"], body["action"], int(body["at_us"]))
            if said != (row.hold, row.action, row.at_us):
                continue
        if row.action == PLACED:
            holds[row.hold] = Hold(row.hold, row.tenant, row.reason, row.actor, row.at_us, row.subject)
        else:
            holds.pop(row.hold, None)
    return tuple(holds.values())


def holds_on(connection: Connection, tenant: str | None, subjects: Sequence[str] | None) -> tuple[Hold, ...]:
    """Return the holds on everything, on the tenant, and on its subject with these pseudonyms (None: any subject)."""
    return tuple(
        hold
        for hold in active_holds(connection)
        if hold.tenant is None
        or (hold.tenant == tenant and (hold.subject is None or subjects is None or hold.subject in subjects))
    )


def check_no_hold(connection: Connection, tenant: str | None, subjects: Sequence[str] | None = None) -> None:
    """Raise `RetentionError` if this tenant, its subject (`holds_on`), or everything is under a hold."""
    for hold in holds_on(connection, tenant, subjects):
        raise RetentionError(f"legal hold `{hold.hold}` ({hold.reason}) forbids it", hold=hold.hold)


def check_no_holds(connection: Connection, names: Iterable[str]) -> None:
    """Raise `RetentionError` if one of these logs, by name, is under a hold."""
    holds = {hold.tenant: hold for hold in active_holds(connection)}
    for name in names if holds else ():
        hold = holds.get(None) or holds.get(_tenant(name))
        if hold is not None:
            raise RetentionError(f"legal hold `{hold.hold}` ({hold.reason}) forbids it", hold=hold.hold)


def place_hold(
    engine: Engine,
    hold: str,
    tenant: str | None,
    *,
    actor: str,
    reason: str,
    subject: str | None = None,
    keys: SubjectKeys | None = None,
    clear_names: bool = False,
    clock: Clock | None = None,
) -> None:
    """Place a hold on a tenant's ledger content, or on all of it; durable on return.

    `subject`: on what is held of one subject of the tenant, whose name is written as `SubjectDirectory` writes names.
    The content of the tenant's log stays whole under it: it is not divided by subject.
    """
    if subject is not None and tenant is None:
        raise RetentionError("a hold on a subject must name its tenant")
    with engine.connect() as connection:
        if any(each.hold == hold for each in active_holds(connection)):
            raise RetentionError(f"a legal hold `{hold}` is active already; lift it first", hold=hold)
    record_operator_act(
        engine,
        lambda at_us: LegalHoldChanged(at_us, hold, tenant, PLACED, reason, actor, subject),
        clock=clock,
        subject_keys=keys,
        clear_names=clear_names,
    )


def lift_hold(engine: Engine, hold: str, *, actor: str, reason: str, clock: Clock | None = None) -> None:
    """Lift a hold; raises `RetentionError` if none of this name is active."""
    with engine.connect() as connection:
        found = next((each for each in active_holds(connection) if each.hold == hold), None)
    if found is None:
        raise RetentionError(f"no legal hold `{hold}` is active", hold=hold)
    tenant = found.tenant
    record_operator_act(engine, lambda at_us: LegalHoldChanged(at_us, hold, tenant, LIFTED, reason, actor), clock=clock)


def plan_purge(connection: Connection, before_us: int) -> tuple[LogPlan, ...]:
    """Return what could be dropped of every tenant's log: leaves from before `before_us` (UTC), within rule 1."""
    signed = LedgerProofs(connection).signed_or_none()
    sizes = LedgerProofs(connection).sizes(signed.size) if signed else {}
    holds = active_holds(connection)
    times = LedgerTimes(connection)
    ends = _Ends(connection, times, before_us)
    plans = []
    tenants = select(logs.c.id, logs.c.name).where(logs.c.name != SYSTEM).order_by(logs.c.name)
    for log in connection.execute(tenants).all():
        of_log = select(events.c.idx).where(events.c.log == log.id, has_leaf(events))
        first = connection.scalar(of_log.order_by(events.c.idx).limit(1))
        if first is None:
            continue
        holding = next((each for each in holds if each.tenant is None or log_of(each.tenant) == log.name), None)
        below, kept_by = _oldest_kept(connection, times, ends, log.id, before_us, sizes.get(log.name, 0))
        if holding is not None:
            below, kept_by = first, f"legal hold {holding.hold}"
        plans.append(LogPlan(log.name, first, max(first, below), kept_by))
    return tuple(plans)


def purge(
    engine: Engine,
    before_us: int,
    export: Path,
    keys: Sequence[str],
    *,
    actor: str,
    approver: str,
    reason: str,
    progress: Callable[[str, int, int], None] | None = None,
    clock: Clock | None = None,
) -> tuple[LogPlan, ...]:
    """Drop the content of old leaves that a verified export holds (rules 1–4); return what was dropped, by log.

    Raises `RetentionError` where the export does not hold it, or where one person is both actor and approver.
    """
    check_people(actor, approver)
    with engine.connect() as connection:
        plans = [plan for plan in plan_purge(connection, before_us) if plan.leaves]
    if plans:
        keep_spans(engine)
    going = expired_leaves(engine, plans)
    with counted_months(engine, before_us, going, export.parent) as counted:
        verdict, facts = read_back(engine, export, keys, (actor, approver, reason), counted)
        for plan in plans:
            check_exported(plan, verdict)
        if plans:
            record_purges(engine, plans, facts, clock)
        purge_months(engine, going, counted)
    for plan in plans:
        _purge_log(engine, plan, progress)
    thin_dropped(engine)
    free_space(engine, before_us)
    return tuple(plans)


def check_people(actor: str, approver: str) -> None:
    """Raise `RetentionError` if actor and approver are the same person, or there is no approver."""
    if not approver or actor == approver:
        raise RetentionError("a purge needs an approver who is not the actor", actor=actor, approver=approver)


class PurgeFacts(NamedTuple):
    """A purge's facts for every log: checkpoint and digest of the export, and the people responsible."""

    size: int
    digest: str
    actor: str
    approver: str
    reason: str


def expired_leaves(engine: Engine, plans: Sequence[LogPlan]) -> dict[str, ExpiredLeaves]:
    """Return the leaves that plans drop, by name of the log."""
    with engine.connect() as connection:
        ids = {row.name: row.id for row in connection.execute(select(logs.c.name, logs.c.id))}
    return {plan.log: ExpiredLeaves(ids[plan.log], plan.first, plan.below) for plan in plans}


def read_back(
    engine: Engine,
    export: Path,
    keys: Sequence[str],
    people: tuple[str, str, str],
    counted: CountedMonths,
) -> tuple[ExportVerdict, PurgeFacts]:
    """Return the verdict on a sound export of this ledger, and its facts for the record; else raises `RetentionError`.

    What it holds of what goes is counted on the way.
    """
    manifest = export / MANIFEST
    digest = hashlib.sha256(manifest.read_bytes() if manifest.is_file() else b"").hexdigest()
    verdict = verify_export(export, keys, seen=counted.take)
    if not verdict.ok:
        raise RetentionError(f"export `{export}` is not sound: {verdict.problems[0]}", path=export)
    counted.flush()
    mine = select(checkpoints.c.root).where(checkpoints.c.size == verdict.root.size)
    with engine.connect() as connection:
        if bytes(connection.scalar(mine) or b"") != verdict.root.root:
            raise RetentionError(f"export `{export}` belongs to another ledger", path=export)
    return verdict, PurgeFacts(verdict.root.size, digest, *people)


def record_purges(engine: Engine, plans: Sequence[LogPlan], facts: PurgeFacts, clock: Clock | None = None) -> None:
    """Commit a `RetentionPurged` for each log before anything is dropped, many in one transaction."""
    record_operator_acts(
        engine,
        lambda at_us: [RetentionPurged(at_us, plan.log, plan.first, plan.below, *facts) for plan in plans],
        clock=clock,
    )


def purge_months(engine: Engine, going: Mapping[str, ExpiredLeaves], counted: CountedMonths) -> int:
    """Drop whole months of a partitioned ledger, of all logs at once; return the number of leaves."""

    def allowed(connection: Connection) -> None:
        check_no_holds(connection, going)

    return empty_months(engine, list(going.values()), allowed, counted)


def _purge_log(engine: Engine, plan: LogPlan, progress: Callable[[str, int, int], None] | None) -> None:
    """What is there of a log's part that goes, some at a time."""
    with engine.connect() as connection:
        log = int(connection.scalar(select(logs.c.id).where(logs.c.name == plan.log)) or 0)
    at = plan.first
    while (found := _next_there(engine, log, at, plan.below)) is not None:
        end = min(plan.below, (found // TILE_WIDTH + _STEP_TILES) * TILE_WIDTH)
        drop_runs(engine, {plan.log: ExpiredLeaves(log, found, end)})
        if progress is not None:
            progress(plan.log, end - plan.first, plan.leaves)
        at = end


def _next_there(engine: Engine, log: int, at: int, below: int) -> int | None:
    with engine.connect() as connection:
        column = events.c.idx
        first = select(func.min(column)).where(events.c.log == log, column >= at, column < below)
        found: int | None = connection.scalar(first)
    return found


def is_any_there(engine: Engine, runs: Sequence[ExpiredLeaves]) -> bool:
    """Return whether a leaf of these runs still exists on a server."""
    statement = (
        "SELECT EXISTS (SELECT FROM unnest(%s::int4[], %s::int8[], %s::int8[]) AS run (log, first, below)"
        " JOIN events AS e ON e.log = run.log AND e.idx >= run.first AND e.idx < run.below)"
    )
    columns = tuple(list(column) for column in zip(*runs, strict=True))
    with engine.connect() as connection:
        dialect_of(connection).look_up_by_index(connection)
        return bool(connection.exec_driver_sql(statement, columns).scalar())


def drop_runs(engine: Engine, runs: Mapping[str, ExpiredLeaves]) -> None:
    """Drop runs of leaves, by the names of their logs, in one transaction; raises `RetentionError` under a hold."""
    with engine.connect().execution_options(**WRITE) as connection, connection.begin():
        dialect_of(connection).as_long_as_it_takes(connection)
        check_no_holds(connection, runs)
        dialect_of(connection).look_up_by_index(connection)
        drop_leaves(connection, list(runs.values()))


def thin_dropped(engine: Engine) -> None:
    """Delete hashes inside tiles without leaves, some at a time, in every log that no hold keeps."""
    with engine.connect() as connection:
        found = tiles_to_thin(connection)
        held = {hold.tenant for hold in active_holds(connection)}
    for name, tiles in found if None not in held else ():
        for first in range(tiles.first, tiles.below, _TILES * TILE_WIDTH):
            if _tenant(name) in held:
                continue
            with engine.connect().execution_options(**WRITE) as connection, connection.begin():
                dialect_of(connection).as_long_as_it_takes(connection)
                check_no_holds(connection, [name])
                thin_tiles(
                    connection,
                    tiles._replace(first=first, below=min(tiles.below, first + _TILES * TILE_WIDTH)),
                )


def _tenant(log: str) -> str:
    return tenant_of(log)


class _Ends:
    """Which processes had not ended before an instant, by their leaves and by the ledger's own times (rule 6)."""

    def __init__(self, connection: Connection, times: LedgerTimes, before_us: int) -> None:
        system = connection.scalar(select(logs.c.id).where(logs.c.name == SYSTEM))
        signed = 0 if system is None else times.of(system).older_than(before_us)
        ends: dict[str, LifeLeaf] = {}
        for leaf in life_leaves(connection):
            if leaf.body["kind"] in ENDS:
                ends[about(leaf.body)] = leaf
            elif leaf.body["kind"] == RETURNED:
                ends.pop(about(leaf.body), None)
        self._over: list[str] = []  # by a signature, though they state a later end
        self._awaited: list[str] = []
        for uuid, (idx, body) in ends.items():
            at_us, waits_us = int(body["at_us"]), int(body.get("bound_seconds") or 0) * SECOND_US
            if at_us >= before_us and idx < signed:
                self._over.append(uuid)
            elif at_us < before_us <= at_us + waits_us:
                self._awaited.append(uuid)

    def not_over(self, before_us: int) -> ColumnElement[bool]:
        """Which rows of `incarnations` are of such a process."""
        row = incarnations.c
        later = and_(row.ended_us >= before_us, row.uuid.not_in(self._over))
        return or_(and_(row.end.is_(None), may_hold_custody()), later, row.uuid.in_(self._awaited))


def _oldest_kept(
    connection: Connection, times: LedgerTimes, ends: _Ends, log: int, before_us: int, signed: int
) -> tuple[int, str]:
    """Return the first leaf of a log that must stay, and why."""
    of_log, row = times.of(log), events.c
    older = of_log.older_than(before_us)  # these came before the instant, whatever they state
    younger = select(row.idx).where(row.log == log, row.idx >= older, row.at_us >= before_us, has_leaf(events))
    younger = younger.order_by(row.idx).limit(1)
    limits = [(signed, "the signed checkpoint"), (connection.scalar(younger), "the limit")]
    end = min(idx for idx, _ in limits if idx is not None)
    early = times.first_early(log, of_log, older, end)
    limits.append((early, "a leaf that states an earlier time than it can have"))
    unended = (
        select(row.idx)
        .join(incarnations, incarnations.c.id == row.incarnation)
        .where(row.log == log, row.idx < end, ends.not_over(before_us), has_leaf(events))
        .order_by(row.idx)
        .limit(1)
    )
    limits.append((connection.scalar(unended), "a process that had not ended"))
    return min((idx, why) for idx, why in limits if idx is not None)


def check_exported(plan: LogPlan, verdict: ExportVerdict) -> None:
    """Raise `RetentionError` unless a verified export holds every leaf to be dropped."""
    held = next((log for log in verdict.logs if log.name == plan.log), None)
    if held is None or held.first > plan.first or held.end < plan.below:
        raise RetentionError(
            f"the export does not hold leaves `{plan.first}` to `{plan.below}` of `{plan.log}`; export them first",
            log=plan.log,
        )


# -- dropping leaves ---------------------------------------------------------------------------------------------------


def drop_leaves(connection: Connection, runs: Sequence[ExpiredLeaves]) -> None:
    """Drop these runs, at most one of each log, inside the caller's transaction (rules 9 and 10)."""
    for table in (*projections(), *forms_to_drop_from(connection).values()):
        _delete(connection, table, runs)
    tiles = [_dropped_tiles(connection, run) for run in runs]
    with triggers_lifted(connection):
        rows = sorted(map(tuple, _delete(connection, events, runs, ", leaf")))
        _delete_inside(connection, tiles)
    found = {
        log: DroppedRun(log, of_log[0][1], [bytes(row[2]) for row in of_log])
        for log, of_log in ((log, list(some)) for log, some in groupby(rows, key=lambda row: int(row[0])))
    }
    insert_rows(connection, tree_nodes, _partial(rows, found, tiles))
    uncount_runs(connection, list(found.values()))


def tiles_to_thin(connection: Connection) -> list[tuple[str, ExpiredLeaves]]:
    """Return the leaves of tiles without leaves that still have inner hashes, with the log's name (rule 11)."""
    found = []
    for log, name, end, kept, half in fetch_all(connection, _TO_THIN, ()):
        starts = [idx << height for idx, (_, height) in zip((kept, half), _INSIDE, strict=True) if idx is not None]
        if starts:
            found.append((name, ExpiredLeaves(log, min(starts) // TILE_WIDTH * TILE_WIDTH, end)))
    return found


def thin_tiles(connection: Connection, tiles: ExpiredLeaves) -> None:
    """Delete the hashes inside these tiles, which have no leaf left."""
    assert not (tiles.first % TILE_WIDTH or tiles.below % TILE_WIDTH)
    with triggers_lifted(connection):
        _delete_inside(connection, [tiles])


def _dropped_tiles(connection: Connection, run: ExpiredLeaves) -> ExpiredLeaves:
    """Return the leaves of the tiles that are empty once the run is dropped."""
    first = run.first // TILE_WIDTH * TILE_WIDTH
    inside = (events.c.log == run.log, events.c.idx >= first, events.c.idx < run.first)
    if first < run.first and connection.scalar(select(func.min(events.c.idx)).where(*inside)) is not None:
        first += TILE_WIDTH
    return ExpiredLeaves(run.log, first, max(first, run.below // TILE_WIDTH * TILE_WIDTH))


def _partial(
    rows: Sequence[Any], found: dict[int, DroppedRun], tiles: Sequence[ExpiredLeaves]
) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield the rows of `tree_nodes` for dropped leaves of tiles with remaining leaves."""
    gone = {tile.log: tile for tile in tiles}
    kept = [row for row in rows if not gone[row[0]].first <= row[1] < gone[row[0]].below]
    for row, hash_ in zip(kept, leaf_hashes(bytes(row[2]) for row in kept), strict=True):
        yield row[0], 0, row[1], hash_


def _delete_inside(connection: Connection, tiles: Sequence[ExpiredLeaves]) -> None:
    for level, height in _INSIDE:
        some = [
            ExpiredLeaves(each.log, each.first >> height, each.below >> height)
            for each in tiles
            if each.first < each.below
        ]
        _delete(connection, tree_nodes, some, level=level)


def _delete(
    connection: Connection,
    table: Table,
    runs: Sequence[ExpiredLeaves],
    returning: str = "",
    *,
    level: int | None = None,
) -> Sequence[Any]:
    """Delete what a table has of these runs; log and idx of each row that went, where more of it is asked for."""
    if not runs:
        return ()
    of_level = "" if level is None else f" AND level = {level}"
    if dialect_of(connection).arrays:
        ending = f" RETURNING t.log, t.idx{returning}" if returning else ""
        statement = (
            f"DELETE FROM {table.fullname} AS t"  # noqa: S608 - our own names
            " USING unnest(?::int4[], ?::int8[], ?::int8[]) AS run (log, first, below)"
            f" WHERE t.log = run.log AND t.idx >= run.first AND t.idx < run.below{of_level}{ending}"
        )
        values = tuple(list(column) for column in zip(*runs, strict=True))
        if returning:
            return fetch_all(connection, statement, values)
        connection.exec_driver_sql(statement.replace("?", "%s"), values)
        return ()
    ending = f" RETURNING log, idx{returning}" if returning else ""
    inside = f"DELETE FROM {table.fullname} WHERE log = ? AND idx >= ? AND idx < ?{of_level}{ending}"  # noqa: S608 - our own names
    found: list[Any] = []
    for run in runs:
        result = connection.exec_driver_sql(inside, tuple(run))
        found += result.all() if returning else ()
    return found
