"""Scans for orphans in the ledger: who scanned, what, and the findings.

1. A scan is named by its process's incarnation and its number there; a finding by its scan and its number in it.
2. Whose scan it is follows from what its process says of its life on record, from no row. A process of a command or of
   the control plane, which has no memory, has said nothing before its end: until then `worker` is empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, select, tuple_

from kvcustody.audit.evidence.processes.work_periods import life_leaves, own_names
from kvcustody.audit.evidence.query.custody import OrphanFinding
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import orphan_findings, orphan_scans
from kvcustody.audit.store.schema.ledger import incarnations


class Scan(NamedTuple):
    """One scan. Times are UTC µs; `worker` is empty until the record names one."""

    incarnation: str
    scan: int
    worker: str
    mode: str
    started_us: int
    ended_us: int
    residencies: int
    blocks: int
    findings: int


class ScanPage(NamedTuple):
    """Some scans, newest first, and the start of the next page (None: there is none)."""

    scans: tuple[Scan, ...]
    next: tuple[int, int, int] | None


def scans(connection: Connection, *, after: tuple[int, int, int] | None = None, limit: int = 100) -> ScanPage:
    """Return scans of all processes, newest first; `after` is the place of the previous page's last scan."""
    column = orphan_scans.c
    place = tuple_(column.at_us, column.log, column.idx)
    query = _scans().add_columns(column.at_us, column.log, column.idx)
    if after is not None:
        query = query.where(place < after)
    ordered = query.order_by(column.at_us.desc(), column.log.desc(), column.idx.desc()).limit(limit + 1)
    rows = connection.execute(ordered).all()
    following = (rows[limit - 1][-3], rows[limit - 1][-2], rows[limit - 1][-1]) if len(rows) > limit else None
    names = own_names(leaf.body for leaf in life_leaves(connection))
    return ScanPage(tuple(_scan(row[:-3], names) for row in rows[:limit]), following)


def scan_of(connection: Connection, incarnation: str, scan: int) -> tuple[Scan, tuple[OrphanFinding, ...]] | None:
    """Return one scan with its findings; None if the ledger has none."""
    query = _scans().where(incarnations.c.uuid == incarnation, orphan_scans.c.scan == scan).limit(1)
    row = connection.execute(query).first()
    if row is None:
        return None
    column = orphan_findings.c
    life = select(incarnations.c.id).where(incarnations.c.uuid == incarnation).scalar_subquery()
    findings = (
        select(*(column[name] for name in OrphanFinding._fields))
        .where(column.incarnation == life, column.scan == scan, has_leaf(orphan_findings))
        .order_by(column.finding)
    )
    return _scan(row, own_names(leaf.body for leaf in life_leaves(connection))), tuple(
        OrphanFinding(*one) for one in connection.execute(findings)
    )


def _scan(row: Sequence[Any], names: Mapping[str, str]) -> Scan:
    """Return a scan from a row of `_scans`, with its worker (rule 2)."""
    incarnation, scan, *rest = row
    return Scan(incarnation, scan, names.get(incarnation, ""), *rest)


def _scans() -> Select[Any]:
    column, life = orphan_scans.c, incarnations.c
    return (
        select(
            life.uuid,
            column.scan,
            column.mode,
            (column.started_boot_us + life.offset_us).label("started_us"),
            (column.ended_boot_us + life.offset_us).label("ended_us"),
            column.residencies,
            column.blocks,
            column.findings,
        )
        .join(incarnations, life.id == column.incarnation)
        .where(has_leaf(orphan_scans))
    )
