"""Rows of `sequence_spans` against the leaves: what was found whole has leaves, or retention dropped them."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Connection, func, or_, select

from kvcustody.audit.evidence.processes.sequence_gaps import dropped_spans
from kvcustody.audit.store.schema.leaf_tables import retention_purges
from kvcustody.audit.store.schema.ledger import incarnations
from kvcustody.audit.store.schema.sequences import sequence_spans

_SHOWN = 100


def wrong_spans(connection: Connection) -> Iterator[str]:
    """Ranges that no leaf has; of a process that ended, in a ledger that was purged, nobody can say so any more."""
    is_purged = bool(connection.scalar(select(func.count()).select_from(retention_purges)))
    column, known = incarnations.c, set()
    having = set(connection.scalars(select(sequence_spans.c.incarnation).distinct()))
    for row in connection.execute(select(column.id, column.uuid, column.end).order_by(column.id)).all():
        known.add(row.id)
        if row.id not in having or (is_purged and row.end is not None):
            continue
        for first, last in dropped_spans(connection, row.id):
            yield f"`sequence_spans` has sequences `{first}` to `{last}` of `{row.uuid}`, and no leaf has them"
    span = sequence_spans.c
    impossible = or_(span.first_sequence < 0, span.last_sequence < span.first_sequence)
    query = select(span.first_sequence, span.last_sequence).where(impossible).limit(_SHOWN)
    for begin, end in connection.execute(query):
        yield f"`sequence_spans` has sequences `{begin}` to `{end}`, which no process can have"
    for life in sorted(having - known):
        yield f"`sequence_spans` has sequences of process `{life}`, which no row is of"
