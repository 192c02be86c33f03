"""What a dead process leaves behind: its open custody, closed by its successor as unproven.

1. Custody of a dead incarnation never counts as covered: its end has no receipt, and says so in its cause.
2. Blocks handed out at admission are known from the opening leaf. What a running request was handed later (growth,
   copies) is listed at its release only, so a death leaves those few to the counts of allocation alone.
3. Closing is idempotent: what an interrupted closing recorded is not recorded again, and `WorkerDied` comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sqlalchemy import Connection, select

from kvcustody.audit.events import PROCESS_DEATH, CustodyEnded, Event, ResidencyReleased, WorkerDied
from kvcustody.audit.events.block_runs import Pairs, Run, gather
from kvcustody.audit.query.evidence_columns import Evidence, read, read_opened, unit_keys
from kvcustody.audit.schema.ledger import custody_ends, incarnations, releases, residencies, workers

TEARDOWN = "process exit: device memory went back to the driver and was not re-read"
NO_MEMORY = "process exit: it had announced no memory of its own"


def close_dead(
    connection: Connection, worker: str, incarnation: str, now_us: int, offset_us: int
) -> list[Event]:
    """The events that close every earlier incarnation of a worker that neither stopped nor was closed."""
    query = (
        select(incarnations.c.id, incarnations.c.uuid, incarnations.c.offset_us, incarnations.c.shards)
        .join(workers, workers.c.id == incarnations.c.worker)
        .where(workers.c.name == worker, incarnations.c.end.is_(None), incarnations.c.uuid != incarnation)
    )
    made: list[Event] = []
    for dead in connection.execute(query).all():
        # Times of custody run on the dead process's boot clock; the moment of closing is expressed on it.
        at_dead_us = now_us + offset_us - dead.offset_us
        open_rows = _open_residencies(connection, dead.id)
        made += [
            ResidencyReleased(now_us, row.residency, row.tenant, PROCESS_DEATH, (), 0, dead.uuid)
            for row in open_rows
        ]
        blocks = 0
        for (tenant, classification), runs in _open_custody(connection, dead.id).items():
            blocks += sum(len(run.blocks) for run in runs)
            times = (at_dead_us, at_dead_us, at_dead_us)
            made.append(
                CustodyEnded(
                    now_us, tenant, classification, runs, PROCESS_DEATH, *times, 0, incarnation=dead.uuid
                )
            )
        teardown = NO_MEMORY if dead.shards is None else TEARDOWN
        made.append(WorkerDied(now_us, worker, dead.uuid, teardown, len(open_rows), blocks))
    return made


def _open_residencies(connection: Connection, incarnation: int) -> Sequence[Any]:
    released = select(releases.c.residency).where(releases.c.incarnation == incarnation, releases.c.final)
    query = select(residencies.c.residency, residencies.c.tenant).where(
        residencies.c.incarnation == incarnation,
        residencies.c.part == 1,
        residencies.c.residency.not_in(released),
    )
    rows: Sequence[Any] = connection.execute(query).all()
    return rows


def _open_custody(connection: Connection, incarnation: int) -> dict[tuple[str, str], tuple[Run, ...]]:
    """Blocks recorded as handed out whose end was never recorded, by owner and classification (rule 2)."""
    query = select(residencies.c.residency, residencies.c.classification).where(
        residencies.c.incarnation == incarnation, residencies.c.part == 1
    )
    classes = {row.residency: row.classification for row in connection.execute(query)}
    columns = (releases.c.residency, releases.c.tenant)
    mine = (releases.c.incarnation == incarnation) & releases.c.written
    columns_in = (residencies.c.residency, residencies.c.tenant)
    _, handed = read_opened(connection, columns_in, residencies.c.incarnation == incarnation)
    written = _joined(handed, read(connection, releases, columns, mine))
    ended = read(
        connection, custody_ends, (custody_ends.c.tenant,), custody_ends.c.incarnation == incarnation
    )
    keys = unit_keys(written.pairs.pools, written.pairs.generations)
    still = ~np.isin(keys, unit_keys(ended.pairs.pools, ended.pairs.generations))
    codes: dict[tuple[str, str], int] = {}
    people = zip(written.texts("tenant"), written.column("residency").tolist(), strict=True)
    rows = np.array(
        [
            codes.setdefault((tenant, classes.get(residency, "unknown")), len(codes))
            for tenant, residency in people
        ],
        np.int64,
    )
    made: dict[tuple[str, str], tuple[Run, ...]] = {}
    for who, code in codes.items():
        theirs = still & (rows[written.owner] == code)
        for pool in np.unique(written.pairs.pools[theirs]).tolist():
            chosen = theirs & (written.pairs.pools == pool)
            runs = gather(written.pairs.blocks[chosen], written.pairs.generations[chosen], pool)
            made[who] = made.get(who, ()) + runs
    return made


def _joined(first: Evidence, second: Evidence) -> Evidence:
    """Two readings as one: the rows of the first, then those of the second."""
    pairs = Pairs(*map(np.concatenate, zip(first.pairs, second.pairs, strict=True)))
    owner = np.concatenate((first.owner, second.owner + first.size))
    columns: dict[str, Any] = {
        "tenant": first.texts("tenant") + second.texts("tenant"),
        "residency": np.concatenate((first.column("residency"), second.column("residency"))),
    }
    return Evidence(first.size + second.size, columns, owner, pairs)
