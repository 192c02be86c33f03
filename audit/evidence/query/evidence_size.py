"""The size of a ledger's evidence, for planning: leaves, their bytes, and the database's disk usage."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection, func, select

from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.schema.leaf_tables import residencies
from kvcustody.audit.store.schema.ledger import events, incarnations


class EvidenceSize(NamedTuple):
    """All leaves of a ledger. `kinds` has (kind, leaves, bytes), largest first; `requests` counts openings."""

    requests: int
    leaves: int
    leaf_bytes: int
    disk_bytes: int  # with rows, trees and indexes
    kinds: tuple[tuple[str, int, int], ...]


def evidence_size(connection: Connection, incarnation: str | None = None) -> EvidenceSize:
    """Count every leaf, or those of one process: `incarnation`. `disk_bytes` is the whole database's in both cases."""
    size = func.sum(func.length(events.c.leaf))
    query = select(events.c.kind, func.count(), size).group_by(events.c.kind).order_by(size.desc())
    opened = select(func.count()).select_from(residencies).where(residencies.c.part == 1)
    if incarnation is not None:
        of_process = select(incarnations.c.id).where(incarnations.c.uuid == incarnation).scalar_subquery()
        query = query.where(events.c.incarnation == of_process)
        opened = opened.where(residencies.c.incarnation == of_process)
    kinds = tuple((kind, int(leaves), int(total)) for kind, leaves, total in connection.execute(query))
    requests = connection.scalar(opened)
    return EvidenceSize(
        int(requests or 0),
        sum(leaves for _, leaves, _ in kinds),
        sum(total for _, _, total in kinds),
        dialect_of(connection).size_bytes(connection),
        kinds,
    )
