"""Queries of reports: a subject's custody, a block's history, findings.

1. Every answer is a function of ledger rows and arguments: no clock is read, so a report repeats.
2. A subject is asked for by tenant and pseudonym; `subject_rows.names_of` is the only way from a name to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson
from sqlalchemy import ColumnElement, Connection, Table, and_, func, literal, or_, select

from kvcustody.audit.evidence.subjects.subject_filter import of_tenant
from kvcustody.audit.kinds.block_runs import names_block
from kvcustody.audit.leaf.change_items import item_of
from kvcustody.audit.store.schema.all_tables import has_leaf, is_leaf_of, kinds_of
from kvcustody.audit.store.schema.leaf_tables import (
    attachments,
    custody_ends,
    orphan_findings,
    receipts,
    releases,
    residencies,
)
from kvcustody.audit.store.schema.ledger import events, incarnations, logs


class SubjectResidency(NamedTuple):
    """One residency of a subject: the blocks held, the cause of its end, and the end of its hold."""

    incarnation: str
    residency: int
    tenant: str
    classification: str
    session: str | None
    revision: int
    opened_us: int
    absolute_us: int
    released_us: int | None
    cause: str | None
    hold_us: int | None
    attached_blocks: int
    written_blocks: int


class BlockLeaf(NamedTuple):
    """One leaf in the history of a (block, generation)."""

    at_us: int
    kind: str
    log: str
    idx: int
    body: Mapping[str, Any]


class OrphanFinding(NamedTuple):
    """One orphan finding."""

    orphan: str
    cause: str
    tenant: str | None
    age_us: int
    blocks: int
    action: str
    outcome: str
    at_us: int


def custody_of(connection: Connection, tenant: str, pseudonyms: list[str]) -> tuple[SubjectResidency, ...]:
    """Return every residency of a subject or session, oldest first."""
    into, out, life = residencies.c, releases.c, incarnations.c
    query = (
        select(
            life.uuid,
            life.offset_us,
            into.residency,
            into.classification,
            into.session,
            into.revision,
            into.opened_us,
            into.absolute_boot_us,
            _over_parts(residencies, "attached_blocks").label("attached_blocks"),
            _over_parts(attachments, "attached_blocks").label("joined_blocks"),
            _over_parts(residencies, "written_blocks").label("handed_blocks"),
            _over_parts(releases, "written_blocks").label("later_blocks"),
            out.released_us,
            out.cause,
            out.hold_boot_us,
        )
        .join(incarnations, life.id == into.incarnation)
        .outerjoin(
            releases,
            and_(
                out.incarnation == into.incarnation,
                out.residency == into.residency,
                out.final,
                out.part == 1,
                has_leaf(releases),
            ),
        )
        .where(of_tenant(tenant), into.part == 1, has_leaf(residencies))
        .where(or_(into.subject.in_(pseudonyms), into.session.in_(pseudonyms)))
        .order_by(into.opened_us, into.log, into.idx)
    )
    return tuple(
        SubjectResidency(
            incarnation=row.uuid,
            residency=row.residency,
            tenant=tenant,
            classification=row.classification,
            session=row.session,
            revision=row.revision,
            opened_us=row.opened_us,
            absolute_us=row.absolute_boot_us + row.offset_us,
            released_us=row.released_us,
            cause=row.cause,
            hold_us=row.hold_boot_us + row.offset_us if row.hold_boot_us else None,
            attached_blocks=int(row.attached_blocks) + int(row.joined_blocks or 0),
            written_blocks=int(row.handed_blocks) + int(row.later_blocks or 0),
        )
        for row in connection.execute(query)
    )


def block_history(
    connection: Connection, incarnation: str, block: int, generation: int, pool: int = 0
) -> tuple[BlockLeaf, ...]:
    """Return everything recorded about one (block, generation), in time order, from the runs in the leaves."""
    life = connection.scalar(select(incarnations.c.id).where(incarnations.c.uuid == incarnation))
    leaves, is_listed = [], False
    for table in (residencies, attachments, releases, custody_ends, receipts):
        number = table.c.item if "item" in table.c else literal(0)
        query = (
            select(events.c.at_us, events.c.kind, logs.c.name, events.c.idx, events.c.leaf, number.label("item"))
            .select_from(table.join(events, is_leaf_of(table)))
            .join(logs, logs.c.id == events.c.log)
            .where(table.c.incarnation == life, table.c.low <= generation, table.c.high >= generation)
        )
        for row in connection.execute(query):
            body = item_of(orjson.loads(row.leaf), row.item, kinds_of(table))
            if body is None:
                continue
            runs = [*body["runs"], *body.get("written", ())]
            is_listed |= names_block(runs, block, generation, pool, by_index=True)
            if names_block(runs, block, generation, pool):
                leaves.append(BlockLeaf(body["at_us"], body["kind"], row.name, row.idx, body))
    if not is_listed:  # the generation is another block's
        return ()
    return tuple(sorted(leaves, key=lambda leaf: (leaf.at_us, leaf.body["sequence"], leaf.body["part"])))


def findings(connection: Connection, *, tenant: str | None = None) -> tuple[OrphanFinding, ...]:
    """Return orphan findings, oldest first."""
    column = orphan_findings.c
    query = select(*(column[name] for name in OrphanFinding._fields)).where(has_leaf(orphan_findings))
    query = query.order_by(column.at_us, column.log, column.idx)
    if tenant is not None:
        query = query.where(column.tenant == tenant)
    return tuple(OrphanFinding(*row) for row in connection.execute(query))


def _over_parts(table: Table, column: str) -> ColumnElement[Any]:
    """Return the sum over all of a residency's leaves in `table` (a long run list continues in further leaves)."""
    of = table.alias()
    same = [of.c.incarnation == residencies.c.incarnation, of.c.residency == residencies.c.residency]
    same.append(has_leaf(of))
    if table is residencies:  # parts of one opening, in one month
        same.append(of.c.opened_us == residencies.c.opened_us)
    return select(func.sum(of.c[column])).where(*same).correlate(residencies).scalar_subquery()
