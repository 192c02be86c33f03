"""Close the open custody that a dead process leaves behind, as unproven.

    close_predecessors(committer, engine, clock, worker, incarnation, recorder)       # behind a registration
    close_process(committer, engine, clock, uuid, Closing(SILENCE, ...), recorder)    # nothing was heard of it

1. Custody of a dead incarnation never counts as covered: its end has no receipt, and its cause states that.
2. Blocks handed out at admission are known from the opening leaf. Blocks that a running request was handed later
   (growth, copies) are listed only at its release. So after a death only the counts of allocation include those few.
3. Closing proceeds in steps, each a transaction that locks the row of the dead process. So with any number of closers
   at once, each thing is closed by one of them. Records of an interrupted closing are not repeated. `WorkerDied` comes
   last, with the figures of the whole closing.
4. The leaves of a step belong to a process that begins and ends with them (`record_apart`). So a process that is killed
   while it closes another leaves nothing open itself.
5. Copies off the device that nobody ended are ended the same way, in every tier. Copies in memory ended with the
   process. Copies in files cannot be found until the worker's next process destroys them by name and reports that.
6. A process that turns out to live continues where it was. Its own ends take precedence over those that were recorded
   for it (`verdicts`). Its next leaf states that it has not ended (`append_leaves`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Connection, Engine, func, select

from kvcustody.audit.evidence.copies.copy_rows import ENDED, open_copies
from kvcustody.audit.evidence.processes.open_processes import OpenProcess, open_processes
from kvcustody.audit.evidence.query.evidence_columns import (
    Evidence,
    read,
    read_assignments,
    read_opened,
    unit_keys,
)
from kvcustody.audit.kinds import PROCESS_DEATH, SILENCE, CustodyEnded, Event, ResidencyReleased, WorkerDied
from kvcustody.audit.kinds.block_runs import Pairs, Run, gather
from kvcustody.audit.leaf.batch import LeafBatch
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import copy_steps, custody_ends, releases, residencies
from kvcustody.audit.store.schema.ledger import events, incarnations, workers
from kvcustody.audit.write.append_leaves import record_apart
from kvcustody.clock import Clock

TEARDOWN = "process exit: device memory went back to the driver and was not re-read"
NO_MEMORY = "process exit: it had announced no memory of its own"
_STEP_RESIDENCIES = 2000
_PASSES = 3


class Closing(NamedTuple):
    """Who closes a dead process and why, for its `WorkerDied`; by default a successor."""

    closed_by: str = ""
    silent_seconds: int = 0
    bound_seconds: int = 0
    actor: str = ""
    approver: str = ""
    reason: str = ""
    spill_lost: bool = False


BY_SUCCESSOR = Closing()


class Transactions(Protocol):
    """The transactions that a closing writes through (`committer`)."""

    def write_made(self, make: Callable[[Connection], LeafBatch | None]) -> bool:
        """Commit the batch that `make` returns inside the transaction; return False if it returns none."""


def close_predecessors(
    committer: Transactions,
    engine: Engine,
    clock: Clock,
    worker: str,
    incarnation: str,
    recorder: str,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Close every earlier incarnation of a worker that neither stopped nor was closed; like `close_process`."""
    mine = select(incarnations.c.id).where(incarnations.c.uuid == incarnation).scalar_subquery()
    with engine.connect() as connection:
        dead = open_processes(connection, (workers.c.name == worker) & (incarnations.c.id < mine))
    every = (close_process(committer, engine, clock, one.uuid, BY_SUCCESSOR, recorder, stop=stop) for one in dead)
    return all(every)


def close_process(
    committer: Transactions,
    engine: Engine,
    clock: Clock,
    incarnation: str,
    why: Closing,
    recorder: str,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Close what a process holds by its leaves, and then the process; return whether it has ended now.

    False where `stop` said so between two steps, or where it handed in leaves meanwhile: what was closed by then stays
    closed. Raises what the database raises.
    """
    # One that is silent and hands in leaves now is heard again; of one that is gone they were under way.
    for _ in range(1 if why.closed_by == SILENCE else _PASSES):
        with engine.connect() as connection:
            dead = _still_open(connection, incarnation)
            heard = None if dead is None else _last_sequence(connection, dead)
        if dead is None:
            return True
        step = _Step(clock, dead, heard, why, recorder)
        if not step.end_copies(engine, committer, stop):
            return False
        while step.following is not None:
            if stop():
                return False
            with engine.connect() as connection:
                made, following = _open_after(connection, dead, step.after)
            if following is None and step.commit(committer, last=True):
                return True
            if following is not None and made:
                step.commit(committer)
            step.after, step.following = following or 0, following
    with engine.connect() as connection:
        return _still_open(connection, incarnation) is None


class _Step:
    """The transactions of one closing: what is open behind `after` is read again under the lock, and written."""

    def __init__(self, clock: Clock, dead: OpenProcess, heard: int | None, why: Closing, recorder: str) -> None:
        self.after = -1
        self.following: int | None = -1
        self._clock = clock
        self._dead = dead
        self._heard = heard
        self._why = why
        self._recorder = recorder

    def commit(self, committer: Transactions, *, last: bool = False) -> bool:
        """Commit the next batch of it; with `last` the process has then ended. Return False if nothing is left to
        close.
        """

        def make(connection: Connection) -> LeafBatch | None:
            if _still_open(connection, self._dead.uuid, lock=True) is None:
                return None
            if last and _last_sequence(connection, self._dead) != self._heard:
                return None
            now_us = self._clock.now_us()
            made = self._events(connection, now_us)
            if last:
                made.append(self._died(connection, now_us, made))
            return record_apart(connection, self._recorder, self._clock, made, now_us) if made else None

        return committer.write_made(make)

    def end_copies(self, engine: Engine, committer: Transactions, stop: Callable[[], bool]) -> bool:
        """End the copies of it, some at a time (rule 5); False where `stop` said so between two steps."""
        after: tuple[str, int] | None = ("", 0)
        while after is not None:
            with engine.connect() as connection:
                found, following = open_copies(connection, self._dead.id, after)
            if found:
                if stop():
                    return False
                committer.write_made(partial(self._ends_of_copies, after))
            after = following
        return True

    def _ends_of_copies(self, after: tuple[str, int], connection: Connection) -> LeafBatch | None:
        if _still_open(connection, self._dead.uuid, lock=True) is None:
            return None
        now_us, at_dead_us = self._clock.now_us(), self._clock.utc_us() - self._dead.offset_us
        found, _ = open_copies(connection, self._dead.id, after)
        made = [one.end(now_us, PROCESS_DEATH, at_dead_us, 0, self._dead.uuid) for one in found]
        return record_apart(connection, self._recorder, self._clock, made, now_us) if made else None

    def _events(self, connection: Connection, now_us: int) -> list[Event]:
        # Times of custody run on the dead process's boot clock; the moment of closing is expressed on it.
        at_dead_us = self._clock.utc_us() - self._dead.offset_us
        times = (at_dead_us, at_dead_us, at_dead_us)
        dead = self._dead.uuid
        unfinished, _ = _open_after(connection, self._dead, self.after)
        return [
            ResidencyReleased(now_us, one.residency, one.tenant, PROCESS_DEATH, (), 0, dead)
            if isinstance(one, _Residency)
            else CustodyEnded(
                now_us, one.tenant, one.classification, one.runs, PROCESS_DEATH, *times, 0, incarnation=dead
            )
            for one in unfinished
        ]

    def _died(self, connection: Connection, now_us: int, dead_events: list[Event]) -> Event:
        """Its end, with what earlier steps closed and this one does."""
        dead, column = self._dead, custody_ends.c
        closed = select(func.count(releases.c.residency.distinct())).where(
            releases.c.incarnation == dead.id,
            releases.c.final,
            releases.c.cause == PROCESS_DEATH,
            has_leaf(releases),
        )
        ended = select(func.sum(column.blocks)).where(
            column.incarnation == dead.id, column.cause == PROCESS_DEATH, has_leaf(custody_ends)
        )
        step = copy_steps.c
        copies = select(func.sum(step.copies)).where(
            step.incarnation == dead.id,
            step.step == ENDED,
            step.cause == PROCESS_DEATH,
            has_leaf(copy_steps),
        )
        residencies_, blocks = (int(connection.scalar(query) or 0) for query in (closed, ended))
        for event in dead_events:
            if isinstance(event, CustodyEnded):
                blocks += sum(len(run.blocks) for run in event.runs)
            else:
                residencies_ += 1
        teardown = TEARDOWN if dead.memory else NO_MEMORY
        closed_copies = int(connection.scalar(copies) or 0)
        return WorkerDied(
            now_us,
            dead.worker,
            dead.uuid,
            teardown,
            residencies_,
            blocks,
            *self._why,
            copies=closed_copies,
        )


class _Residency(NamedTuple):
    residency: int
    tenant: str


class _Custody(NamedTuple):
    tenant: str
    classification: str
    runs: tuple[Run, ...]


def _still_open(connection: Connection, incarnation: str, *, lock: bool = False) -> OpenProcess | None:
    if lock:
        row = incarnations.c
        connection.execute(select(row.id).where(row.uuid == incarnation).with_for_update())
    return next(iter(open_processes(connection, incarnations.c.uuid == incarnation)), None)


def _last_sequence(connection: Connection, dead: OpenProcess) -> int | None:
    query = select(events.c.sequence).where(events.c.incarnation == dead.id, has_leaf(events))
    found: int | None = connection.scalar(query.order_by(events.c.sequence.desc()).limit(1))
    return found


def _open_after(
    connection: Connection, dead: OpenProcess, after: int
) -> tuple[list[_Residency | _Custody], int | None]:
    """What is open of the next residencies behind `after`, and the last of them; None: there are no more."""
    column = residencies.c
    query = select(column.residency, column.tenant, column.classification).where(
        column.incarnation == dead.id, column.part == 1, column.residency > after, has_leaf(residencies)
    )
    rows = connection.execute(query.order_by(column.residency).limit(_STEP_RESIDENCIES)).all()
    last = rows[-1].residency if len(rows) == _STEP_RESIDENCIES else None
    # Behind the last one that was opened: releases of residencies whose opening is not there.
    span = releases.c.residency > after if last is None else releases.c.residency.between(after + 1, last)
    gone = select(releases.c.residency).where(
        releases.c.incarnation == dead.id, releases.c.final, span, has_leaf(releases)
    )
    released = set(connection.scalars(gone))
    made: list[_Residency | _Custody] = [
        _Residency(row.residency, row.tenant) for row in rows if row.residency not in released
    ]
    classes = {row.residency: row.classification for row in rows}
    return [*made, *_open_custody(connection, dead.id, after, last, classes)], last


def _open_custody(
    connection: Connection, incarnation: int, after: int, last: int | None, classes: dict[int, str]
) -> Iterator[_Custody]:
    """Blocks recorded as handed out whose end was never recorded, by owner and classification (rule 2)."""

    def here(table: Any) -> ColumnElement[bool]:
        mine: ColumnElement[bool] = (table.c.incarnation == incarnation) & (table.c.residency > after)
        return mine if last is None else mine & (table.c.residency <= last)

    _, handed = read_opened(connection, (residencies.c.residency, residencies.c.tenant), here(residencies))
    columns = (releases.c.residency, releases.c.tenant)
    written = _joined(handed, read(connection, releases, columns, here(releases) & releases.c.written))
    if not len(written.owner):
        return
    column, generations = custody_ends.c, written.pairs.generations
    among = column.high >= int(generations.min()), column.low <= int(generations.max())
    ended = read(connection, custody_ends, (column.tenant,), (column.incarnation == incarnation) & among[0] & among[1])
    keys = unit_keys(written.pairs.pools, generations)
    still = ~np.isin(keys, unit_keys(ended.pairs.pools, ended.pairs.generations))
    codes: dict[tuple[str, str], int] = {}
    people = zip(written.texts("tenant"), written.column("residency").tolist(), strict=True)
    rows = _numbers(((tenant, classes.get(residency, "unknown")) for tenant, residency in people), codes)
    assigned = read_assignments(connection, incarnation)
    place = assigned.of(keys)
    owner = rows[written.owner]
    if (place >= 0).any():
        owner = np.where(place >= 0, _numbers(assigned.parties, codes)[place], owner)
    for who, code in codes.items():
        theirs = still & (owner == code)
        runs: tuple[Run, ...] = ()
        for pool in np.unique(written.pairs.pools[theirs]).tolist():
            chosen = theirs & (written.pairs.pools == pool)
            runs += gather(written.pairs.blocks[chosen], generations[chosen], pool)
        if runs:
            yield _Custody(*who, runs)


def _numbers(people: Iterable[tuple[str, str]], codes: dict[tuple[str, str], int]) -> NDArray[np.int64]:
    """Return the number of each party; a new party gets the next."""
    return np.array([codes.setdefault(who, len(codes)) for who in people], np.int64)


def _joined(first: Evidence, second: Evidence) -> Evidence:
    """Two readings as one: the rows of the first, then those of the second."""
    pairs = Pairs(*map(np.concatenate, zip(first.pairs, second.pairs, strict=True)))
    owner = np.concatenate((first.owner, second.owner + first.size))
    columns: dict[str, Any] = {
        "tenant": first.texts("tenant") + second.texts("tenant"),
        "residency": np.concatenate((first.column("residency"), second.column("residency"))),
    }
    return Evidence(first.size + second.size, columns, owner, pairs)
