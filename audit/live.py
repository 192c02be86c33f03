"""What is held now: residencies that run or whose hold has not ended, by what their own leaves record.

W1 A residency is live while its process is not known to have ended and it runs, or its last hold is after `now_us`.
W2 An eviction or an erasure may have ended its blocks before: `report.subject` counts those, block by block.
W3 No clock is read. People appear as pseudonyms.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection, and_, or_, select, tuple_

from kvcustody.audit.schema import incarnations, releases, residencies


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
        """How much of its time has passed; above 1 it is past its deadline, 0 where it has none."""
        allowed = self.until_us - self.opened_us
        return (now_us - self.opened_us) / allowed if self.until_us and allowed > 0 else 0.0


def live_residencies(
    connection: Connection,
    *,
    now_us: int,
    tenant: str | None = None,
    after: tuple[int, str, int] | None = None,
    limit: int = 5000,
) -> tuple[Live, ...]:
    """Live residencies, oldest first, at most `limit`; `after`: opened_us, incarnation and residency of one."""
    into, out, life = residencies.c, releases.c, incarnations.c
    final = and_(
        out.incarnation == into.incarnation, out.residency == into.residency, out.final, out.part == 1
    )
    query = (
        select(into.residency, into.tenant, into.classification, into.subject, into.opened_us)
        .add_columns(life.uuid, life.offset_us, into.absolute_boot_us, out.released_us, out.hold_boot_us)
        .join(incarnations, life.id == into.incarnation)
        .outerjoin(releases, final)
        .where(into.part == 1, life.ended_us.is_(None))
        .where(or_(out.released_us.is_(None), out.hold_boot_us + life.offset_us > now_us))
        .order_by(into.opened_us, life.uuid, into.residency)
        .limit(limit)
    )
    if after is not None:
        query = query.where(tuple_(into.opened_us, life.uuid, into.residency) > after)
    if tenant is not None:
        query = query.where(into.tenant == tenant)
    made = []
    for row in connection.execute(query):
        running = row.released_us is None
        end_boot_us = row.absolute_boot_us if running else row.hold_boot_us
        until_us = end_boot_us + row.offset_us if end_boot_us else 0
        made.append(
            Live(
                row.uuid,
                row.residency,
                row.tenant,
                row.classification,
                row.subject,
                row.opened_us,
                running,
                until_us,
            )
        )
    return tuple(made)
