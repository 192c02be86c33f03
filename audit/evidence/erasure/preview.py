"""Preview an erasure: what it would cover if requested now, as far as the ledger knows.

1. The ledger knows tenant, subject, session and classification of a residency. It does not know the model, segment,
   key epoch and labels of its domain: a selector with these covers at most what is counted here, and they are named
   in `not_counted`.
2. An eviction or a narrowing act may have ended a hold before its release said it would: figures are upper bounds.
   What others hold in the same domains is covered too where the selector is a domain's, and is counted by its own
   holder.
3. Nothing is recorded, and no clock is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, func, or_, select

from kvcustody.audit.evidence.erasure.who_owes import owing
from kvcustody.audit.evidence.processes.work_periods import WorkPeriod, at_work, read_work_periods
from kvcustody.audit.evidence.subjects.subject_filter import of_subjects, of_tenant
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import releases, residencies
from kvcustody.audit.store.schema.ledger import incarnations

_COUNTED_MAX = 100_000


class PreviewRow(NamedTuple):
    """Live residencies of one tenant and classification; `running` of them have a running request."""

    tenant: str
    classification: str
    residencies: int
    running: int


class Preview(NamedTuple):
    """The counts, the parts of the selector that could not be counted, and the workers that would owe an answer."""

    rows: tuple[PreviewRow, ...]
    not_counted: tuple[str, ...]
    workers: tuple[str, ...]
    is_cut: bool  # more than a hundred thousand residencies: the rest were not counted

    @property
    def residencies(self) -> int:
        """All residencies."""
        return sum(row.residencies for row in self.rows)

    @property
    def running(self) -> int:
        """The residencies with a running request."""
        return sum(row.running for row in self.rows)


def preview(
    connection: Connection,
    *,
    now_us: int,
    tenant: str | None = None,
    subjects: Sequence[str] | None = None,
    sessions: Sequence[str] | None = None,
    classification: str | None = None,
    not_counted: Sequence[str] = (),
    periods: Mapping[str, WorkPeriod] | None = None,
) -> Preview:
    """Return the preview. `subjects` and `sessions` are pseudonyms; None means any. `now_us` is UTC.

    `periods`: who was at work, where this connection does not see the system log.
    """
    into = residencies.c
    where: list[ColumnElement[bool]] = []
    if tenant is not None:
        where += [of_tenant(tenant)] if subjects is None else of_subjects(connection, tenant, subjects)
    elif subjects is not None:
        where.append(into.subject.in_(subjects))
    if classification is not None:
        where.append(into.classification == classification)
    if sessions is not None:
        where.append(into.session.in_(sessions))
    if periods is None:
        periods = read_work_periods(connection)
    rows = _rows(connection, [*where, incarnations.c.uuid.in_(at_work(periods))], now_us)
    counted = sum(row.residencies for row in rows)
    return Preview(rows, tuple(not_counted), tuple(owing(periods, now_us)), counted >= _COUNTED_MAX)


def _rows(connection: Connection, where: list[ColumnElement[bool]], now_us: int) -> tuple[PreviewRow, ...]:
    into, out, life = residencies.c, releases.c, incarnations.c
    final = and_(
        out.incarnation == into.incarnation,
        out.residency == into.residency,
        out.final,
        out.part == 1,
        has_leaf(releases),
    )
    live = (
        select(into.tenant, into.classification, out.released_us.is_(None).label("runs"))
        .join(incarnations, life.id == into.incarnation)
        .outerjoin(releases, final)
        .where(into.part == 1, has_leaf(residencies), *where)
        .where(or_(out.released_us.is_(None), out.hold_boot_us + life.offset_us > now_us))
        .limit(_COUNTED_MAX)
        .subquery()
    )
    query = (
        select(live.c.tenant, live.c.classification, live.c.runs, func.count())
        .group_by(live.c.tenant, live.c.classification, live.c.runs)
        .order_by(live.c.tenant, live.c.classification)
    )
    found: dict[tuple[str, str], list[int]] = {}
    for of, classification, runs, count in connection.execute(query):
        figures = found.setdefault((of, classification), [0, 0])
        figures[0] += count
        figures[1] += count if runs else 0
    return tuple(PreviewRow(*place, *figures) for place, figures in found.items())
