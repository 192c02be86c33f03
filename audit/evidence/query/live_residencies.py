"""Live residencies, by their own leaves: running ones, and those whose hold has not ended.

1. A residency is live while its process is at work, by the leaves about its start and end. In addition, it must still
   run, or its last hold must end after `now_us`.
2. An eviction or an erasure may have ended its blocks earlier. `report.subject` counts those, block by block.
3. No clock is read. People appear as pseudonyms.
4. A hold that a narrowing act shortened ends at the act's time (`narrowed`). A running residency shows the limit that
   it began with, because no leaf has more before its release.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, func, or_, select, tuple_

from kvcustody.audit.evidence.processes.work_periods import WorkPeriod, at_work, read_work_periods
from kvcustody.audit.evidence.query.narrowed_holds import read_narrowed
from kvcustody.audit.evidence.subjects.subject_filter import of_tenant
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import releases, residencies
from kvcustody.audit.store.schema.ledger import incarnations

NEVER_US = 1 << 62


class Live(NamedTuple):
    """A live residency. Times are UTC µs; `until_us` is its hold's end, or its limit while it runs (0: none)."""

    incarnation: str
    residency: int
    tenant: str
    classification: str
    subject: str | None
    opened_us: int
    running: bool
    until_us: int

    def used_share(self, now_us: int) -> float:
        """Return the share of its time that has passed; above 1 after its deadline, 0 without one."""
        allowed = self.until_us - self.opened_us
        return (now_us - self.opened_us) / allowed if self.until_us and allowed > 0 else 0.0


def live_residencies(
    connection: Connection,
    *,
    now_us: int,
    tenant: str | None = None,
    after: tuple[int, str, int] | None = None,
    limit: int = 5000,
    periods: Mapping[str, WorkPeriod] | None = None,
    newest: int | None = None,
) -> tuple[Live, ...]:
    """Return live residencies, oldest first, at most `limit`; `after`: opened_us, incarnation and residency of one.

    `periods`: who was at work, where this connection does not see the system log. `newest`: only so many requests of
    each process are looked at, the latest ones, so that a long life costs no more than a short one.
    """
    running = at_work(read_work_periods(connection) if periods is None else periods)
    among = _requests_of(connection, running, newest)
    live: list[Live] = []
    while len(live) < limit:
        rows = _read(connection, among, now_us=now_us, tenant=tenant, after=after, limit=limit)
        narrowed = _narrowed(connection, rows)
        found = [_live(row, narrowed.get((row.id, row.residency), NEVER_US)) for row in rows]
        live += [one for one in found if one.running or one.until_us > now_us]
        if len(rows) < limit:
            break
        after = (rows[-1].opened_us, rows[-1].uuid, rows[-1].residency)
    return tuple(live[:limit])


def _requests_of(connection: Connection, processes: Sequence[str], newest: int | None) -> ColumnElement[bool]:
    """Return the condition on the requests of these processes; `newest` of each, by their numbers, which ascend."""
    life = incarnations.c
    working = life.uuid.in_(processes)
    if newest is None:
        return working
    every = residencies.alias()
    last = select(func.max(every.c.residency)).where(every.c.incarnation == life.id).scalar_subquery()
    # Known before the rows are read: a server would look for the last request again beside each of them.
    lasts = [(number, at or 0) for number, at in connection.execute(select(life.id, last).where(working))]
    span = dialect_of(connection).spans(connection, [(number, at - newest, at) for number, at in lasts])
    first = select(span.c.first).where(span.c.log == life.id).scalar_subquery()
    return and_(working, residencies.c.residency > first)


def _read(
    connection: Connection,
    among: ColumnElement[bool],
    *,
    now_us: int,
    tenant: str | None,
    after: tuple[int, str, int] | None,
    limit: int,
) -> Sequence[Any]:
    """Residencies that are live by what they and their releases say."""
    into, out, life = residencies.c, releases.c, incarnations.c
    final = and_(
        out.incarnation == into.incarnation,
        out.residency == into.residency,
        out.final,
        out.part == 1,
        has_leaf(releases),
    )
    query = (
        select(into.residency, into.tenant, into.classification, into.subject, into.opened_us)
        .add_columns(life.id, life.uuid, life.offset_us)
        .add_columns(into.absolute_boot_us, out.released_us, out.hold_boot_us)
        .join(incarnations, life.id == into.incarnation)
        .outerjoin(releases, final)
        .where(into.part == 1, among, has_leaf(residencies))
        .where(or_(out.released_us.is_(None), out.hold_boot_us + life.offset_us > now_us))
        .order_by(into.opened_us, life.uuid, into.residency)
        .limit(limit)
    )
    if after is not None:
        query = query.where(tuple_(into.opened_us, life.uuid, into.residency) > after)
    if tenant is not None:
        query = query.where(of_tenant(tenant))
    return connection.execute(query).all()


def _narrowed(connection: Connection, rows: Sequence[Any]) -> dict[tuple[int, int], int]:
    """By incarnation and residency: when a narrowing act made its hold end at the latest, in boot time (rule 4)."""
    held: dict[int, list[int]] = {}
    for row in rows:
        if row.released_us is not None:
            held.setdefault(row.id, []).append(row.residency)
    return {
        (life, residency): until_us
        for life, among in held.items()
        for residency, until_us in read_narrowed(connection, life, among=among).items()
    }


def _live(row: Any, latest_us: int) -> Live:
    running = row.released_us is None
    end_boot_us = row.absolute_boot_us if running else min(row.hold_boot_us, latest_us)
    until_us = end_boot_us + row.offset_us if end_boot_us else 0
    who = (row.uuid, row.residency, row.tenant, row.classification, row.subject)
    return Live(*who, row.opened_us, running, until_us)
