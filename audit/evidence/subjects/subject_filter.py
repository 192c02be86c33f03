"""Conditions on `residencies` that select a tenant's, or those of a tenant's subjects.

1. A tenant's residencies are in that tenant's log, and in no other.
2. The index of subjects divides each log into consecutive spans of equally many leaves. Within a span it is ordered by
   subject. So an opening changes only pages of its log's last span, which are in memory. An index ordered only by
   subject changed another page for each subject. The larger the ledger was, the slower it took in openings.
3. A query looks into every span of the log: one search for each thousand leaves of the tenant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, any_, false, func, literal, select

from kvcustody.audit.kinds import log_of
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.schema.leaf_tables import SPAN_LEAVES, residencies, span_of
from kvcustody.audit.store.schema.ledger import logs


def of_tenant(tenant: str) -> ColumnElement[bool]:
    """Return the tenant's residencies (rule 1)."""
    log = select(logs.c.id).where(logs.c.name == log_of(tenant)).scalar_subquery()
    return residencies.c.log == log


def of_subjects(connection: Connection, tenant: str, names: Sequence[str]) -> list[ColumnElement[bool]]:
    """Return the residencies of a tenant's subjects, given by pseudonym: three conditions, the columns of the index."""
    query = select(logs.c.id, logs.c.size).where(logs.c.name == log_of(tenant))
    found = connection.execute(query).first()
    if found is None or not names:
        return [false()]
    column = residencies.c
    spans = _each_span(connection, found.size // SPAN_LEAVES)
    return [column.log == found.id, spans, column.subject.in_(names)]


def _each_span(connection: Connection, last: int) -> ColumnElement[bool]:
    """In one of the spans from the first to the last."""
    span = span_of(residencies.c.idx)
    if dialect_of(connection).arrays:
        numbers: Select[Any] = select(func.generate_series(0, last))
        return span == any_(func.array(numbers.scalar_subquery()))
    first = select(literal(0).label("number")).cte("spans", recursive=True)
    each = first.union_all(select(first.c.number + 1).where(first.c.number < last))
    return span.in_(select(each.c.number))
