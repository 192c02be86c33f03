"""Roots by interval: who seals, when, what a commit leaves untouched, and the effect of a kill in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, delete, event, func, select
from sqlalchemy.exc import IntegrityError

from kvcustody.audit.kinds import KeyEvent
from kvcustody.audit.leaf.merkle import TreeError
from kvcustody.audit.store.database.engine import WRITE, open_store
from kvcustody.audit.store.schema.ledger import logs
from kvcustody.audit.store.schema.trees import checkpoints, root_leaves, unsealed_heads
from kvcustody.audit.tlog import root_sealer
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.proofs import ProofError
from kvcustody.audit.tlog.root_sealer import RootSealer, Unsealed, seal_now, unsealed
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.write.event_writer import WriterSettings
from kvcustody.clock import MICROSECONDS, SystemClock, VirtualClock
from standins import builders

Make = Callable[..., Any]
SECOND = MICROSECONDS
NEVER = WriterSettings(interval_seconds=0.001, root_interval_seconds=3600.0)


def key_event(tenant: str = "tenant-0") -> KeyEvent:
    return KeyEvent(1, tenant, "made", 1, "test")


def sealed(engine: Engine) -> list[int]:
    """The sizes of all checkpoints."""
    with engine.connect() as connection:
        return list(connection.scalars(select(checkpoints.c.size).order_by(checkpoints.c.size)))


def waiting(engine: Engine, now_us: int = 0) -> Unsealed:
    with engine.connect() as connection:
        return unsealed(connection, now_us)


def test_a_commit_touches_no_row_of_the_root_log(any_store: Engine, make_writer: Make) -> None:
    """Beside the words: on PostgreSQL it commits while another session holds that row."""
    writer = make_writer(any_store, settings=NEVER)
    writer.submit_durable(key_event())
    statements: list[str] = []
    event.listen(any_store, "before_cursor_execute", lambda *call: statements.append(call[2]))
    if any_store.dialect.name == "postgresql":
        with any_store.connect() as other:
            other.exec_driver_sql("SELECT 1 FROM root_log FOR UPDATE")
            writer.submit_durable(key_event())
            held = other.exec_driver_sql(
                "SELECT count(*) FROM pg_locks JOIN pg_class ON pg_class.oid = relation"
                " WHERE relname = 'root_log' AND pid != pg_backend_pid()"
                " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            ).scalar()
            assert held == 0
    else:
        writer.submit_durable(key_event())
    commits = [text for text in statements if "pg_locks" not in text and "FOR UPDATE" not in text]
    assert any("logs" in text or "unsealed_heads" in text for text in commits), "the control: a commit was seen"
    assert not [text for text in commits if "root_l" in text or "checkpoints" in text]
    assert sealed(any_store) == []
    assert writer.flush()
    assert len(sealed(any_store)) == 1 and any("root_log" in text for text in statements)


def test_a_log_row_is_updated_once_a_commit(postgres_store: Engine, make_writer: Make) -> None:
    writer = make_writer(postgres_store, settings=NEVER)
    writer.submit_durable(key_event())
    count = "SELECT n_tup_upd FROM pg_stat_xact_user_tables WHERE relname = 'logs'"
    counts: list[int] = []

    def look(connection: Any) -> None:  # what the server has not added up yet, of earlier transactions too
        counts.append(int(connection.exec_driver_sql(count).scalar() or 0))

    for moment in ("begin", "commit"):
        event.listen(postgres_store, moment, look)
    writer.submit_durable(key_event())
    for moment in ("begin", "commit"):
        event.remove(postgres_store, moment, look)
    before, after = counts[-2:]
    assert after - before == 1


def test_new_logs_wait_for_no_other_tenant(postgres_store: Engine, make_writer: Make) -> None:
    writer = make_writer(postgres_store, settings=NEVER)
    writer.submit_durable(key_event("one"))
    with postgres_store.connect() as other:
        other.exec_driver_sql("SELECT 1 FROM logs WHERE name = 'tenant/one' FOR UPDATE")
        writer.submit_durable(key_event("two"))
        other.rollback()
    assert waiting(postgres_store).logs == 2


def test_the_interval_is_kept_by_an_injected_clock(any_store: Engine, make_writer: Make) -> None:
    clock = VirtualClock()
    writer = make_writer(any_store, settings=NEVER, clock=clock)
    sealer = RootSealer(any_store, clock, 10.0)
    sealer.turn()  # nothing there: it looks again in ten seconds
    assert sealer.due_seconds == 10.0
    clock.advance(4 * SECOND)
    writer.submit_durable(key_event())
    for seconds in (5, 1, 3):  # 9 s, 10 s: the first look, 13 s
        clock.advance(seconds * SECOND)
        sealer.turn()
        assert sealed(any_store) == []
    assert waiting(any_store, clock.utc_us()) == Unsealed(1, 1, 9 * SECOND)
    assert sealer.due_seconds == 1.0
    clock.advance(SECOND)
    sealer.turn()
    assert sealed(any_store) == [1] and waiting(any_store, clock.utc_us()) == Unsealed(0, 0, 0)
    writer.submit_durable(key_event())
    clock.advance(9 * SECOND)
    sealer.turn()
    assert sealed(any_store) == [1]
    sealer.soon()  # somebody would like a proof
    sealer.turn()
    assert sealed(any_store) == [1, 2]
    writer.submit_durable(key_event())
    sealer.soon()
    assert sealer.due_seconds == 1.0, "and at most once a second"
    sealer.turn()
    assert sealed(any_store) == [1, 2]
    done = sealer.ask()  # somebody waits
    sealer.turn()
    assert done.is_set() and sealed(any_store) == [1, 2, 3]


def test_a_writer_seals_by_itself(any_store: Engine, make_writer: Make) -> None:
    settings = WriterSettings(interval_seconds=0.001, root_interval_seconds=0.05)
    writer = make_writer(any_store, settings=settings)
    writer.submit_durable(key_event())
    looked = threading.Event()
    for _ in range(200):
        if sealed(any_store):
            break
        looked.wait(0.05)
    assert sealed(any_store) == [1]


def test_only_one_seals_and_the_others_go_on(postgres_store: Engine, make_writer: Make) -> None:
    writer = make_writer(postgres_store, settings=NEVER)
    writer.submit_durable(key_event())
    with postgres_store.connect() as other:
        other.exec_driver_sql("SELECT 1 FROM root_log FOR UPDATE")
        assert not seal_now(postgres_store, wait=False)
        assert sealed(postgres_store) == []
        other.rollback()
    assert seal_now(postgres_store, wait=False)
    assert sealed(postgres_store) == [1]
    assert seal_now(postgres_store) and sealed(postgres_store) == [1], "nothing grew: nothing is added"


def test_a_seal_waits_for_no_writer(postgres_store: Engine, make_writer: Make) -> None:
    """It takes what is committed, while another session is in the middle of a commit on the same log."""
    writer = make_writer(postgres_store, settings=NEVER)
    writer.submit_durable(key_event())
    with postgres_store.connect() as other:
        other.exec_driver_sql("UPDATE logs SET size = size + 7")
        assert seal_now(postgres_store)
        other.rollback()
    with postgres_store.connect() as connection:
        assert connection.execute(select(root_leaves.c.idx, root_leaves.c.size)).all() == [(0, 1)]
        assert fsck(connection).problems == []


SEALERS = 4
DYING = """
import sys, os, signal
from sqlalchemy import event
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.tlog.root_sealer import seal_now
engine = open_store(sys.argv[1], timeout_seconds=30)
event.listen(engine, "commit", lambda connection: os.kill(os.getpid(), signal.SIGKILL) if connection.
             get_execution_options().get("kvcustody_write") else None)
seal_now(engine)
"""
KILLED = """
import sys
from pathlib import Path
import structlog
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is what is told
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.kinds import KeyEvent
from kvcustody.audit.write.event_writer import EventWriter, WriterSettings
from kvcustody.clock import SystemClock
writer = EventWriter(open_store(sys.argv[1], timeout_seconds=30), worker="killed", clock=SystemClock(),
    spill_directory=Path(sys.argv[2]), settings=WriterSettings(root_interval_seconds=3600.0), clear_names=True)
for number in range(5):
    writer.submit_durable(KeyEvent(1, f"tenant-{number % 2}", "made", number, "test"))
print("committed", flush=True)
sys.stdin.readline()
"""


def test_kill_9_between_commit_and_seal_loses_nothing(any_store: Engine, make_writer: Make, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, builders.address_of(any_store), str(tmp_path / "killed")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout and killed.stdout.readline() == "committed\n"
        os.kill(killed.pid, signal.SIGKILL)
    assert sealed(any_store) == [] and waiting(any_store).leaves == 5
    dying = subprocess.run([sys.executable, "-c", DYING, builders.address_of(any_store)], check=False)
    assert dying.returncode == -signal.SIGKILL
    assert sealed(any_store) == [] and waiting(any_store).leaves == 5, "a killed sealer leaves all as it was"
    writer = make_writer(any_store, worker="another", settings=NEVER)
    assert writer.flush()
    with any_store.connect() as connection:
        heads = {log.name: log.head.size for log in LedgerProofs(connection).logs()}
        assert heads["tenant/tenant-0"] == 3 and heads["tenant/tenant-1"] == 2
        assert fsck(connection).problems == []
    assert waiting(any_store).leaves == 0


@pytest.mark.parametrize("shared", [True, False])
def test_two_writers_and_a_crowd_of_sealers(
    postgres_store: Engine, make_writer: Make, tmp_path: Path, shared: bool
) -> None:
    writers = [
        make_writer(postgres_store, worker=f"w-{number}", settings=NEVER, spill_directory=tmp_path / f"{number}")
        for number in range(2)
    ]
    over = threading.Event()

    def seal() -> None:
        while not over.is_set():
            seal_now(postgres_store, wait=False)

    crowd = [threading.Thread(target=seal) for _ in range(SEALERS)]
    for each in crowd:
        each.start()
    for number in range(40):
        for place, writer in enumerate(writers):
            tenant = f"t-{number % 3}" if shared else f"t-{place}-{number % 3}"
            writer.submit([key_event(tenant) for _ in range(5)])
            writer.submit_durable(key_event(tenant))
    over.set()
    for each in crowd:
        each.join()
    for writer in writers:
        writer.close()
    with postgres_store.connect() as connection:
        assert fsck(connection).problems == []
        tenants = select(func.sum(logs.c.size)).where(logs.c.name.like("tenant/%"))
        assert connection.scalar(tenants) == 2 * 40 * 6
        assert (connection.scalar(select(func.count()).select_from(checkpoints)) or 0) > 3, "they did seal"
        assert waiting(postgres_store).leaves == 0


def test_many_logs_are_sealed_under_several_checkpoints(
    any_store: Engine, make_writer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(root_sealer, "_LOGS_AT_ONCE", 3)
    writer = make_writer(any_store, settings=NEVER)
    for number in range(7):
        writer.submit_durable(key_event(f"tenant-{number}"))
    assert seal_now(any_store) and sealed(any_store) == [3, 6, 7]
    with any_store.connect() as connection:
        first = select(logs.c.name).join(root_leaves, root_leaves.c.log == logs.c.id)
        oldest = connection.scalars(first.order_by(root_leaves.c.idx).limit(3)).all()
        assert oldest == [f"tenant/tenant-{number}" for number in range(3)], "who waits longest is first"
        assert fsck(connection).problems == []


def test_a_damaged_tree_keeps_no_other_from_its_seal(
    any_store: Engine, make_writer: Make, unguarded: Callable[..., None]
) -> None:
    writer = make_writer(any_store, settings=NEVER)
    for tenant in ("sound", "broken"):
        writer.submit_durable(key_event(tenant))
    with any_store.connect().execution_options(**WRITE) as connection, connection.begin():
        connection.execute(logs.update().where(logs.c.name == "tenant/broken").values(frontier=b"\1" * 72))
    with pytest.raises(TreeError, match="tenant/broken"):
        seal_now(any_store)
    with any_store.connect() as connection:
        assert [log.name for log in LedgerProofs(connection).logs()] == ["tenant/sound"]
    assert waiting(any_store).logs == 1


def test_fsck_covers_what_is_not_sealed(any_store: Engine, make_writer: Make) -> None:
    clock = SystemClock()
    writer = make_writer(any_store, settings=NEVER)
    writer.submit_durable(key_event())
    assert writer.flush()
    writer.submit([key_event(), key_event("tenant-1")])
    writer.submit_durable(key_event())
    with any_store.connect() as connection:
        found = fsck(connection, overdue_before_us=clock.utc_us() - 30 * SECOND)
        assert found.ok and found.unsealed == 3
        late = fsck(connection, overdue_before_us=clock.utc_us() + 30 * SECOND)
        assert [problem.log for problem in late.problems] == ["root"] and "nobody seals" in str(late.first)
    with any_store.connect().execution_options(**WRITE) as connection:
        change = connection.begin()
        connection.execute(logs.update().where(logs.c.name == "tenant/tenant-1").values(frontier=b"\1" * 72))
        assert [problem.log for problem in fsck(connection).problems] == ["tenant/tenant-1"]
        change.rollback()
        change = connection.begin()
        connection.execute(delete(unsealed_heads))
        assert {problem.log for problem in fsck(connection).problems} == {
            "tenant/tenant-0",
            "tenant/tenant-1",
        }
        change.rollback()


def test_a_proof_of_what_is_not_sealed_is_the_error_that_says_so(
    any_store: Engine, make_writer: Make, tmp_path: Path
) -> None:
    signer = CheckpointSigner(
        any_store, [SigningKey.generate("ledger.test")], memory=tmp_path / "last", clock=SystemClock()
    )
    writer = make_writer(any_store, settings=NEVER)
    writer.submit_durable(key_event())
    assert signer.sign_once(), "whoever signs by name seals first"
    writer.submit_durable(key_event())
    with any_store.connect() as connection:
        proofs = LedgerProofs(connection)
        assert proofs.inclusion("tenant/tenant-0", 0)
        with pytest.raises(ProofError, match="not under a signed checkpoint yet"):
            proofs.inclusion("tenant/tenant-0", 1)
    assert signer.sign_once()
    with any_store.connect() as connection:
        assert LedgerProofs(connection).inclusion("tenant/tenant-0", 1)


def test_a_foreign_writer_gets_no_place_but_the_next(postgres_store: Engine, make_writer: Make) -> None:
    """What hands no frontier over moves the size alone; holes and doubles are refused as ever."""
    writer = make_writer(postgres_store, settings=NEVER)
    writer.submit_durable(key_event())
    values = "log, {0}, incarnation, 900 + {1}, part, parts, kind, outage, at_us + {1}, leaf"
    insert = f"INSERT INTO events SELECT {values} FROM events WHERE idx = 0"
    for places, right in (((1,), True), ((2,), False), ((0,), False), ((1, 1), False)):
        with postgres_store.connect() as connection:
            try:
                for number, idx in enumerate(places, 1):
                    connection.exec_driver_sql(insert.format(idx, number))
            except IntegrityError as problem:
                assert not right and "end of their log" in str(problem)
            else:
                assert right
                assert connection.exec_driver_sql("SELECT size FROM logs").scalar() == 2
            connection.rollback()


def test_opened_read_only_nothing_is_sealed(store: Engine, make_writer: Make) -> None:
    writer = make_writer(store, settings=NEVER)
    writer.submit_durable(key_event())
    reader = open_store(builders.address_of(store), read_only=True)
    sealer = RootSealer(reader, SystemClock(), 0.001)
    done = sealer.ask()
    sealer.turn()
    assert done.is_set() and sealed(store) == []
    reader.dispose()
