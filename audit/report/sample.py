"""The sample: custodies drawn by the seed, each with its leaves and a proof that every one is under the checkpoint.

1. Leaves that name the drawn (block, generation) are taken from the state of the checkpoint; where there are more
   than `LEAVES_MAX` (a block that many requests attached) the rest is counted: ends, receipts and releases come
   first.
2. A tenant's own report holds leaves of that tenant's log alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from sqlalchemy import Connection, select

from kvcustody.audit.events.block_runs import UNNAMED
from kvcustody.audit.query.evidence_columns import POOL_SHIFT, is_among
from kvcustody.audit.report.population import CustodyPopulation, PopulationMember
from kvcustody.audit.schema.ledger import events, logs
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.root_log import HeadProof

LEAVES_MAX = 12


class LeafEvidence(NamedTuple):
    """One leaf, where it is, its bytes as text, and the text of its proof (docs/audit/ledger.md)."""

    log: str
    idx: int
    kind: str
    leaf: str
    proof: str


class SampleItem(NamedTuple):
    """One drawn custody and its evidence."""

    number: int
    custody: PopulationMember
    leaves: tuple[LeafEvidence, ...]
    leaves_left_out: int


class _Place(NamedTuple):
    rank: int
    idx: int
    log: str
    log_id: int


def draw_sample(
    connection: Connection,
    population: CustodyPopulation,
    *,
    seed: str,
    size: int,
    checkpoint: int,
    tenant: str | None,
    is_proved: bool = True,
) -> tuple[SampleItem, ...]:
    """The sample of a population, its leaves with proofs where `is_proved`; raises `ProofError` for an unsigned state."""
    numbers = population.draw(seed, size)
    drawn = [population.custody(number) for number in numbers]
    places = _places(connection, population, drawn, tenant)
    prover = _Prover(LedgerProofs(connection), checkpoint)
    made = []
    for number, custody, found in zip(numbers, drawn, places, strict=True):
        kept = sorted(found)[:LEAVES_MAX]
        leaves = tuple(
            LeafEvidence(
                place.log,
                place.idx,
                *_leaf(connection, place),
                prover.proof(place.log, place.idx) if is_proved else "",
            )
            for place in kept
        )
        made.append(SampleItem(number, custody, leaves, len(found) - len(kept)))
    return tuple(made)


def _places(
    connection: Connection,
    population: CustodyPopulation,
    drawn: Sequence[PopulationMember],
    tenant: str | None,
) -> list[list[_Place]]:
    """The leaves that name each drawn custody."""
    names = {row.id: row.name for row in connection.execute(select(logs.c.id, logs.c.name))}
    lives = {each.life.uuid: each for each in population.lives}
    keys = [(item.pool << POOL_SHIFT) | item.generation for item in drawn]
    asked = np.unique(np.array(keys, np.int64))
    near = {
        (uuid, rank): np.flatnonzero(is_among(places.keys, asked))
        for uuid in {item.incarnation for item in drawn}
        for rank, places in enumerate(lives[uuid].places)
    }
    made = []
    for item, key in zip(drawn, keys, strict=True):
        found: list[_Place] = []
        for rank, places in enumerate(lives[item.incarnation].places):
            flat = near[item.incarnation, rank]
            flat = flat[places.keys[flat] == key]
            flat = flat[np.isin(places.blocks[flat], (item.block, UNNAMED))]
            rows = np.unique(places.owner[flat])
            for log, idx in zip(places.logs[rows].tolist(), places.idx[rows].tolist(), strict=True):
                if tenant is None or names[log] == f"tenant/{tenant}":
                    found.append(_Place(rank, idx, names[log], log))
        made.append(list({place[1:]: place for place in sorted(found, reverse=True)}.values())[::-1])
    return made


class _Prover:
    """Inclusion proofs under one checkpoint; the proof of a log's head is made once."""

    def __init__(self, proofs: LedgerProofs, checkpoint: int) -> None:
        self._proofs = proofs
        self._checkpoint = checkpoint
        self._heads: dict[str, HeadProof] = {}

    def proof(self, log: str, idx: int) -> str:
        head = self._heads.get(log)
        if head is None:
            head = self._heads[log] = self._proofs.head_proof(log, as_of=self._checkpoint)
        return self._proofs.inclusion_under(head, idx).to_bytes().decode()


def _leaf(connection: Connection, place: _Place) -> tuple[str, str]:
    """The kind and the text of a leaf."""
    here = (events.c.log == place.log_id, events.c.idx == place.idx)
    row = connection.execute(select(events.c.kind, events.c.leaf).where(*here)).one()
    return row.kind, bytes(row.leaf).decode()
