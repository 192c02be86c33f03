"""Which prefixes are worth keeping: the blocks of one request that later requests attached, from the ledger.

    rows = prefix_values(connection, since_us, until_us, costs, limit=20)

1. A row describes a *prefix writer*: the request whose blocks later ones attached. Only its process and residency
   identify it. No token, key, subject or session is read or shown.
2. Its worth is the prefill seconds that those hits saved, counted in the period of the hits. `showback.Cost` gives
   them, with each block at its place in the prompt that attached it. If its worker has reported no cost, the worth is
   None. Such rows come after those with a known worth, ordered by blocks.
3. A function of ledger rows and arguments, as `showback` is, at the same cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import nlargest
from typing import NamedTuple

import numpy as np
from sqlalchemy import Connection

from kvcustody.audit.evidence.query.evidence_columns import Evidence
from kvcustody.audit.evidence.query.showback import (
    Cost,
    LifeEvidence,
    WorkingLife,
    hits_in,
    keys_of,
    lives_at_work,
    monitored_residencies,
    places_in,
    read_life,
)
from kvcustody.audit.kinds.block_runs import Int64s


class PrefixValue(NamedTuple):
    """One prefix writer. `requests` attached some of its blocks; `foreign_requests` of them belonged to other
    tenants.
    """

    incarnation: str
    residency: int
    tenant: str
    classification: str
    blocks: int
    attached_blocks: int
    requests: int
    foreign_requests: int
    saved_seconds: float | None
    last_us: int


def prefix_values(
    connection: Connection,
    since_us: int,
    until_us: int,
    costs: Mapping[str, Cost],
    *,
    tenant: str | None = None,
    limit: int = 20,
) -> list[PrefixValue]:
    """Return the `limit` most useful prefix writers in [since, until), UTC microseconds, of one tenant or of all."""
    largest: list[PrefixValue] = []
    for life in lives_at_work(connection, since_us):
        evidence = read_life(connection, life.id, until_us)
        if evidence.attached.size:
            monitored = monitored_residencies(connection, life.id)
            rows = _of_life(life, evidence, (since_us, until_us), monitored, costs.get(life.name))
            largest = nlargest(limit, [*largest, *(row for row in rows if tenant in (None, row.tenant))], key=_worth)
    return largest


def _worth(row: PrefixValue) -> tuple[bool, float, int]:
    return row.saved_seconds is not None, row.saved_seconds or 0.0, row.attached_blocks


def _of_life(
    life: WorkingLife,
    evidence: LifeEvidence,
    period: tuple[int, int],
    monitored: Int64s,
    cost: Cost | None,
) -> list[PrefixValue]:
    attached, handed, grown = evidence
    people = zip(attached.texts("tenant"), attached.texts("classification"), strict=True)
    who = dict(zip(attached.column("residency").tolist(), people, strict=True))
    written = np.concatenate((keys_of(handed), keys_of(grown)))
    writers = np.concatenate((attached.column("residency")[handed.owner], grown.column("residency")[grown.owner]))
    order = np.argsort(written, kind="stable")
    known, first = np.unique(written[order], return_index=True)
    writers = writers[order][first]
    keys, readers, places, times = _hits(life, attached, period, monitored)
    at, is_known = places_in(known, keys)
    if not len(at):
        return []
    keys, readers, places, times = keys[is_known], readers[is_known], places[is_known], times[is_known]
    names, code = np.unique(writers[at], return_inverse=True)
    worth = np.bincount(code, cost.seconds(places), minlength=len(names)) if cost is not None else None
    last = np.zeros(len(names), dtype=np.int64)
    np.maximum.at(last, code, times)
    blocks = np.bincount(np.unique(np.stack((code, keys)), axis=1)[0], minlength=len(names))
    pairs = np.unique(np.stack((code, readers)), axis=1)
    requests, foreign = [0] * len(names), [0] * len(names)
    for writer, reader in pairs.T.tolist():
        requests[writer] += 1
        theirs, mine = who.get(reader), who.get(int(names[writer]))
        foreign[writer] += theirs is not None and mine is not None and theirs[0] != mine[0]
    attached_blocks = np.bincount(code, minlength=len(names))
    owners = [who.get(int(name), ("", "")) for name in names]
    return [
        PrefixValue(
            life.uuid,
            int(name),
            owners[place][0],
            owners[place][1],
            int(blocks[place]),
            int(attached_blocks[place]),
            requests[place],
            foreign[place],
            None if worth is None else float(worth[place]),
            int(last[place]) + life.offset_us,
        )
        for place, name in enumerate(names)
    ]


def _hits(
    life: WorkingLife, attached: Evidence, period: tuple[int, int], monitored: Int64s
) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Keys, readers, places in the prompt and boot times of what saved a prefill in the period."""
    since_us, until_us = (at_us - life.offset_us for at_us in period)
    hits = hits_in(attached, (since_us, until_us), monitored)
    rows = attached.owner[hits.which]
    readers, times = (attached.column(name)[rows] for name in ("residency", "opened_boot_us"))
    return keys_of(attached)[hits.which], readers, hits.place, times
