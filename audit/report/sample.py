"""The sample: custodies drawn by the seed, each with its leaves and a proof that every one is under the checkpoint.

M1 Leaves that name the drawn (block, generation) are taken from the state of the checkpoint, oldest first; where there
are more than `LEAVES_MAX` (a block that many requests attached), the rest is counted, the decisive kinds come first.
M2 A tenant's own report holds leaves of that tenant's log alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, and_, or_, select

from kvcustody.audit.as_of import AsOf
from kvcustody.audit.ledger_proofs import LedgerProofs
from kvcustody.audit.report.population import Custody, Population
from kvcustody.audit.runs import decode
from kvcustody.audit.schema import (
    attachments,
    custody_ends,
    events,
    incarnations,
    logs,
    receipts,
    releases,
    residencies,
)

LEAVES_MAX = 12
_TABLES = (custody_ends, receipts, residencies, releases, attachments)  # what decides comes first


class LeafEvidence(NamedTuple):
    """One leaf, where it is, its bytes as text, and the text of its proof (docs/ledger-proofs.md)."""

    log: str
    idx: int
    kind: str
    leaf: str
    proof: str


class SampleItem(NamedTuple):
    """One drawn custody and its evidence."""

    number: int
    custody: Custody
    leaves: tuple[LeafEvidence, ...]
    leaves_left_out: int


class _Place(NamedTuple):
    rank: int
    idx: int
    log: str
    kind: str
    leaf: bytes


def draw_sample(
    connection: Connection,
    population: Population,
    *,
    seed: str,
    size: int,
    checkpoint: int,
    as_of: AsOf,
    tenant: str | None,
) -> tuple[SampleItem, ...]:
    """The sample of a population; raises `ProofError` where the checkpoint is not signed."""
    numbers = population.draw(seed, size)
    drawn = [population.custody(number) for number in numbers]
    places = _places(connection, drawn, as_of, tenant)
    proofs = LedgerProofs(connection)
    made = []
    for number, custody, found in zip(numbers, drawn, places, strict=True):
        kept = sorted(found)[:LEAVES_MAX]
        leaves = tuple(
            LeafEvidence(
                place.log,
                place.idx,
                place.kind,
                place.leaf.decode(),
                proofs.inclusion(place.log, place.idx, as_of=checkpoint).to_bytes().decode(),
            )
            for place in kept
        )
        made.append(SampleItem(number, custody, leaves, len(found) - len(kept)))
    return tuple(made)


def _places(
    connection: Connection, drawn: Sequence[Custody], as_of: AsOf, tenant: str | None
) -> list[list[_Place]]:
    """The leaves that name each drawn custody."""
    found: list[list[_Place]] = [[] for _ in drawn]
    if not drawn:
        return found
    ids = {row.uuid: row.id for row in connection.execute(select(incarnations.c.id, incarnations.c.uuid))}
    for rank, table in enumerate(_TABLES):
        near = or_(
            *(
                and_(
                    table.c.incarnation == ids[item.incarnation],
                    table.c.low <= item.generation,
                    table.c.high >= item.generation,
                )
                for item in drawn
            )
        )
        query = (
            select(
                table.c.incarnation,
                table.c.low,
                table.c.high,
                logs.c.name,
                table.c.idx,
                events.c.kind,
                events.c.leaf,
            )
            .join(events, and_(events.c.log == table.c.log, events.c.idx == table.c.idx))
            .join(logs, logs.c.id == table.c.log)
            .where(near, as_of.has(table))
        )
        if tenant is not None:
            query = query.where(logs.c.name == f"tenant/{tenant}")
        for row in connection.execute(query):
            body: dict[str, Any] = {}
            for place, item in enumerate(drawn):
                if ids[item.incarnation] == row.incarnation and row.low <= item.generation <= row.high:
                    body = body or orjson.loads(row.leaf)
                    if _names([*body["runs"], *body.get("written", ())], item):
                        found[place].append(_Place(rank, row.idx, row.name, row.kind, bytes(row.leaf)))
    return found


def _names(runs: list[Any], item: Custody) -> bool:
    for text in runs:
        first, length = int(text[0]), sum(text[2]) if text[2] else len(text[1])
        if first <= item.generation < first + length and (text[3] if len(text) > 3 else 0) == item.pool:
            return int(decode(text).blocks[item.generation - first]) == item.block
    return False
