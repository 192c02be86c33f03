"""One ledger that has everything a row can come from, written by the real writers, purge, spill and operator's acts.

1. January and February: two processes that stopped. A purge drops all of January and the first days of February, so
   a tenant's log begins inside a tile; PostgreSQL empties January's partition at once.
2. April: an event of every kind, one of several parts, events in two logs, and two writers in turns on one log.
3. A process that is closed as dead, comes back, and is closed again.
4. A withdrawn event, and a spill of a process of February that a successor replays behind leaves of April.
5. An unlinked subject. Some figures are folded, others wait in deltas.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
from sqlalchemy import Engine

from kvcustody.audit.exports.export_writer import write_export
from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.keep.purge_and_legal_hold import LogPlan, purge
from kvcustody.audit.keep.unlink_subject import unlink_subject
from kvcustody.audit.kinds import (
    DECLARED,
    BlocksAttached,
    Event,
    KeyEvent,
    LogBroken,
    ObservationStarted,
    PrincipalChanged,
    ResidencyOpened,
    RetentionPurged,
    SigningKeyRecorded,
    WorkerDied,
    WorkerReturned,
    WorkerStarted,
    WorkerStopped,
)
from kvcustody.audit.kinds.block_runs import Run, gather
from kvcustody.audit.leaf.merkle import TreeHead
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.monthly_partitions import create_partitions
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.log_break import LogBreak, break_record
from kvcustody.audit.tlog.signed_note import KeyKind
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.write.committer import closing_committer
from kvcustody.audit.write.crash_recovery import Closing, close_process
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.audit.write.fold import fold
from kvcustody.clock import VirtualClock
from kvcustody.errors import LedgerUnavailable
from kvcustody.governance.credentials.api_key import KeyHasher
from kvcustody.governance.service.access.principals import Principals
from kvcustody.governance.service.access.roles import Role
from standins import builders
from standins.audit.recorded_events import KIND_OF, WRITTEN, event_of

Lock = Callable[[Engine], AbstractContextManager[None]]
KEY = SigningKey.from_seed("ledger.example/whole", KeyKind.ED25519, bytes([5]) * 32)
DAY_US = 86_400_000_000
JANUARY_LEAVES, FEBRUARY_LEAVES = 300, 40
TENANT = "tenant-0"  # whose log is purged, and written in turns
REAL_ACTS = {
    LogBroken,
    PrincipalChanged,
    RetentionPurged,
    SigningKeyRecorded,
    WorkerDied,
    WorkerReturned,
    WorkerStarted,
    WorkerStopped,
}
SCATTERED_BLOCKS = 3_000  # of so many generations apart that a leaf does not hold them


class WholeLedger(NamedTuple):
    """What was written, for a test to look for."""

    purged: tuple[LogPlan, ...]
    returned: str  # the process that died, came back, and died
    late: str  # the process whose spill came late
    turns: tuple[str, str]


def fill(engine: Engine, folder: Path, lock: Lock) -> WholeLedger:
    """Write all of it into an empty ledger; `lock` keeps every other client from writing."""
    if dialect_of(engine).roles:
        with engine.begin() as connection:
            create_partitions(connection, _instant(1, 1), 3)
    clock = VirtualClock(utc_us=_instant(4, 1))
    signer = CheckpointSigner(engine, [KEY], memory=folder / "signed", clock=clock)
    _finished_process(engine, folder, _instant(1, 10), JANUARY_LEAVES)
    _finished_process(engine, folder, _instant(2, 1), FEBRUARY_LEAVES)
    late = _begin(engine, folder, "late", _instant(2, 20))
    assert signer.sign_once()
    purged = _purge(engine, folder, clock)
    assert fold(engine)
    with lock(engine):
        late.submit([_opened(at_us=n, residency=n) for n in range(2, 9)])
        assert late.flush(20) and late.status().spilled_bytes, "void: nothing was spilled"
        late.close(3)
    turns = _begin(engine, folder, "first", _instant(4, 2)), _begin(engine, folder, "second", _instant(4, 2))
    for number in range(2, 8):
        _submit(turns[number % 2], [_opened(number, number)])
    _submit(turns[0], [_of_several_parts(9), *_of_every_kind(10, "first")])
    _own_registers(engine, turns[1], clock)
    with suppress(LedgerUnavailable):
        turns[1].submit_durable(KeyEvent(99, "made", TENANT, 1, "test", "dpo"), timeout_seconds=0.0)
    returned = _died_twice(engine, folder, clock)
    successor = _begin(engine, folder, "late", _instant(4, 3))
    unlink_subject(engine, TENANT, "user-1", keys=None, actor="dpo", reason="request 7", clock=clock)
    for writer in (*turns, successor):
        assert writer.flush(20)
        writer.close(20)
    clock.advance(DAY_US)
    assert signer.sign_once()
    first, second = (writer.incarnation for writer in turns)
    return WholeLedger(purged, returned, late.incarnation, (first, second))


@contextmanager
def locked(engine: Engine) -> Iterator[None]:
    """Another client holds the ledger: every write waits until its timeout."""
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            raw = connection.connection.driver_connection
            assert raw is not None
            raw.execute("BEGIN EXCLUSIVE")
        else:
            connection.exec_driver_sql("LOCK TABLE logs, events, incarnations IN ACCESS EXCLUSIVE MODE")
        try:
            yield
        finally:
            if engine.dialect.name == "sqlite":
                raw.execute("ROLLBACK")
            connection.rollback()


def _instant(month: int, day: int) -> int:
    return int(datetime(2026, month, day, tzinfo=UTC).timestamp()) * 1_000_000


def _opened(at_us: int, residency: int, tenant: str = TENANT) -> ResidencyOpened:
    run = Run(np.array([2 * residency, 2 * residency + 1]), 2 * residency + 1)
    person = f"user-{residency % 3}"
    opened = ResidencyOpened(at_us, residency, tenant, person, None, False, "low", (1,), (), ("own",), 1, DAY_US)
    return opened._replace(written=(run,))


def _of_several_parts(at_us: int) -> BlocksAttached:
    generations = 100_000 + np.sort(np.random.default_rng(3).permutation(1 << 20)[:SCATTERED_BLOCKS])
    return BlocksAttached(at_us, 3, TENANT, gather(np.arange(SCATTERED_BLOCKS), generations))


def _begin(engine: Engine, folder: Path, worker: str, at_us: int) -> EventWriter:
    writer = builders.writer(engine, folder / f"spill-{worker}", worker=worker, clock=VirtualClock(1, at_us))
    _submit(writer, [WorkerStarted(1, worker, 1 << 20, 1, 4096, "cpu", "test")])
    return writer


def _submit(writer: EventWriter, events: Iterable[Event]) -> None:
    writer.submit([*events])
    assert writer.flush(20), writer.status()


def _finished_process(engine: Engine, folder: Path, at_us: int, leaves: int) -> None:
    worker = f"finished-{at_us}"
    writer = _begin(engine, folder, worker, at_us)
    _submit(writer, [_opened(n, n) for n in range(2, leaves)])
    _submit(writer, [_opened(n, n, "tenant-1") for n in range(leaves, leaves + 3)])
    _submit(writer, [WorkerStopped(DAY_US, worker, "closed", 0, (0,))])
    writer.close(20)


def _purge(engine: Engine, folder: Path, clock: VirtualClock) -> tuple[LogPlan, ...]:
    write_export(folder / "export", LedgerSource(engine), made_at_us=_instant(4, 1))
    return purge(
        engine,
        _instant(2, 10),
        folder / "export",
        [str(KEY.verifier)],
        actor="operator",
        approver="dpo",
        reason="schedule",
        clock=clock,
    )


def _of_every_kind(at_us: int, worker: str) -> list[Event]:
    """The first recorded event of each kind as this worker's, but of those that real acts here give."""
    first = {KIND_OF[recorded["kind"]]: recorded for recorded in reversed(WRITTEN)}
    made = [event_of(first[kind])._replace(at_us=at_us) for kind in first if kind not in REAL_ACTS]
    return [one._replace(worker=worker) if isinstance(one, ObservationStarted) else one for one in made]


def _own_registers(engine: Engine, writer: EventWriter, clock: VirtualClock) -> None:
    """A key and a break of the log, as its key states them, and a person with a role."""
    writer.submit_durable(SigningKeyRecorded(20, "made", str(KEY.verifier), "", "governor"))
    head = TreeHead(1, bytes(32))
    statement = break_record(KEY, LogBreak(KEY.name, head, head, head, 0, 1))
    record = base64.b64encode(statement).decode()
    writer.submit_durable(LogBroken(21, head.size, head.size, record, "operator", "restored"))
    Principals(engine, KeyHasher(), clock, writer.submit_durable).enrol("ada", [Role.AUDITOR], by="local:test")


def _died_twice(engine: Engine, folder: Path, clock: VirtualClock) -> str:
    writer = _begin(engine, folder, "returning", _instant(4, 1))
    _submit(writer, [_opened(2, 2)])
    why = Closing(DECLARED, 90, 0, "operator", "dpo", "the machine is gone", spill_lost=True)
    for residency in (3, 4):
        with closing_committer(engine, clock) as committer:
            assert close_process(committer, engine, clock, writer.incarnation, why, "operator:closing")
        if residency == 3:
            _submit(writer, [_opened(3, 3)])
    writer.close(20)
    return writer.incarnation
