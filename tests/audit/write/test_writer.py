"""The writer on SQLite and PostgreSQL: durable means durable, outages lose nothing (R-AUD-1)."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from sqlalchemy import Engine, event, func, select

from kvcustody.audit.evidence.counters.read_figures import denials_by_rule
from kvcustody.audit.evidence.coverage.summary import coverage
from kvcustody.audit.evidence.erasure.requests_and_answers import names as asked_names
from kvcustody.audit.evidence.erasure.requests_and_answers import request as requested
from kvcustody.audit.evidence.processes.sequence_gaps import gaps
from kvcustody.audit.evidence.subjects import pseudonym_directory as pseudonyms
from kvcustody.audit.evidence.subjects import subject_table as subject_rows
from kvcustody.audit.kinds import (
    BlocksAttached,
    CustodyEnded,
    DecisionRecorded,
    ErasureRequested,
    Event,
    HitCounted,
    KeyEvent,
    ResidencyOpened,
    ResidencyReleased,
    WorkerStarted,
    WorkerStopped,
)
from kvcustody.audit.kinds.block_runs import Run
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.leaf_tables import hit_counters, outages, releases, residencies
from kvcustody.audit.store.schema.ledger import events, incarnations, logs, subjects
from kvcustody.audit.write.event_writer import EventWriter, WriterSettings
from kvcustody.audit.write.spill_file import SpillSegment
from kvcustody.errors import LedgerUnavailable
from standins.waiting import until


def opened(residency: int, tenant: str = "acme", subject: str | None = "alice") -> Any:
    return ResidencyOpened(1, residency, tenant, subject, "chat", False, "internal", (), (), ("own",), 1, 9)


def key_event(epoch: int = 1) -> KeyEvent:
    return KeyEvent(1, "acme", "made", epoch, "operator")


def sequences(store: Engine, incarnation: str) -> list[int]:
    query = (
        select(events.c.sequence)
        .join(incarnations, incarnations.c.id == events.c.incarnation)
        .where(incarnations.c.uuid == incarnation)
        .order_by(events.c.sequence)
    )
    with store.connect() as connection:
        return list(connection.scalars(query))


def pairs(rows: Any) -> dict[Any, Any]:
    return {row[0]: row[1] for row in rows}


def check_logs(store: Engine) -> None:
    """Every log is contiguous from 0, and as long as its row says, at one moment: its writer may work."""
    with store.connect() as connection:
        if store.dialect.name == "postgresql":
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        for log, size in connection.execute(select(logs.c.id, logs.c.size)).all():
            found = list(connection.scalars(select(events.c.idx).where(events.c.log == log).order_by(events.c.idx)))
            assert found == list(range(size))


def healthy(writer: EventWriter, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not writer.status().healthy and time.monotonic() < end:
        time.sleep(0.005)
    assert writer.status().healthy, writer.status()
    assert writer.flush()


def outage_kinds(store: Engine) -> Counter[str]:
    with store.connect() as connection:
        return Counter(connection.scalars(select(outages.c.kind)))


def test_leaves_and_rows_commit_together_in_contiguous_logs(any_store: Engine, make_writer: Any) -> None:
    writer = make_writer(any_store)
    blocks = (Run(np.array([4, 9, 2]), 7),)
    last = writer.submit([opened(1), opened(2, "labs"), ResidencyReleased(2, 1, "acme", "finish", blocks, 0)])
    assert last == 2 and writer.flush() and writer.durable_sequence == 3  # a release may share a leaf: it comes after
    with any_store.connect() as connection:
        bodies = [orjson.loads(leaf) for leaf in connection.scalars(select(events.c.leaf))]
        assert Counter(body["log"] for body in bodies) == {"tenant/acme": 2, "tenant/labs": 1}
        assert connection.execute(select(releases.c.written_blocks, releases.c.low, releases.c.high)).one() == (3, 7, 9)
        assert connection.scalar(select(func.count()).select_from(residencies)) == 2
    check_logs(any_store)


def test_every_connection_of_a_writer_syncs_each_commit(store: Engine, make_writer: Any) -> None:
    """Write-ahead log, and FULL (2): NORMAL would leave the last commits to the operating system."""
    opened_by_it: list[Any] = []
    event.listen(store, "connect", lambda connection, _: opened_by_it.append(connection))
    store.dispose()
    writer = make_writer(store)
    writer.submit_durable(key_event())
    assert opened_by_it
    for connection in opened_by_it:
        modes = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("synchronous", "journal_mode")]
        assert modes == [2, "wal"]


def test_a_commit_waits_for_the_disk_where_the_database_would_not(postgres_store: Engine) -> None:
    """Its default is what an administrator made of it, for all that is written there."""
    with postgres_store.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        name = connection.exec_driver_sql("SELECT current_database()").scalar()
        connection.exec_driver_sql(f"ALTER DATABASE {name} SET synchronous_commit = off")
    postgres_store.dispose()
    with postgres_store.connect() as connection:
        assert connection.exec_driver_sql("SHOW synchronous_commit").scalar() == "on"
        control = "SELECT setconfig FROM pg_db_role_setting JOIN pg_database ON oid = setdatabase WHERE datname = %s"
        assert connection.exec_driver_sql(control, (name,)).scalar() == ["synchronous_commit=off"]


def test_no_statement_runs_on_the_submitting_thread(store: Engine, make_writer: Any) -> None:
    writer = make_writer(store)
    threads: set[int] = set()
    event.listen(store, "before_cursor_execute", lambda *_: threads.add(threading.get_ident()))
    writer.submit([opened(number) for number in range(3000)])
    writer.submit_durable(key_event())
    assert writer.flush()
    assert threads and threading.get_ident() not in threads


def test_class_a_is_committed_when_it_returns(any_store: Engine, make_writer: Any) -> None:
    writer = make_writer(any_store)
    for epoch in range(3):
        sequence = writer.submit_durable(key_event(epoch))
        assert sequence in sequences(any_store, writer.incarnation)


def test_class_a_is_refused_in_an_outage_and_accounted_for(any_store: Engine, make_writer: Any, lock: Any) -> None:
    writer = make_writer(any_store)
    with lock(any_store):
        start = time.monotonic()
        with pytest.raises(LedgerUnavailable, match="not done because it could not be recorded") as caught:
            writer.submit_durable(key_event(), timeout_seconds=1.0)
        assert time.monotonic() - start < 60
        assert "\n" not in str(caught.value)
        sequence = writer.submit([opened(1)])  # positive control: class B is taken, and durable, all the same
        assert writer.flush(3.0) and writer.durable_sequence >= sequence
    healthy(writer)
    refused = caught.value.operands["sequence"]
    assert refused not in sequences(any_store, writer.incarnation)
    assert sequence in sequences(any_store, writer.incarnation)
    with any_store.connect() as connection:
        row = connection.execute(select(outages.c.first_sequence).where(outages.c.kind == "withdrawn")).one()
        assert row.first_sequence == refused
        assert gaps(connection) == ()


def test_who_waits_for_a_ledger_that_hangs_waits_once(store: Engine, make_writer: Any) -> None:
    writer = make_writer(store, settings=WriterSettings(interval_seconds=0.002, durable_seconds=0.2))
    writer.submit_durable(key_event(), timeout_seconds=60)
    answers, hangs = threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            hangs.set()
            assert answers.wait(60)

    event.listen(store, "before_cursor_execute", hang)
    with pytest.raises(LedgerUnavailable):
        writer.submit_durable(key_event(1))
    assert hangs.wait(60)
    time.sleep(0.25)  # it has hung for longer than anybody waits
    queued = writer.status().submitted_sequence
    with pytest.raises(LedgerUnavailable, match="the ledger does not answer"):
        writer.submit_durable(key_event(2))
    assert writer.status().submitted_sequence == queued, "it was refused before it was queued"
    answers.set()
    assert writer.flush(60)
    assert writer.submit_durable(key_event(3), timeout_seconds=60) in sequences(store, writer.incarnation)


def test_a_deadline_in_the_queue_withdraws_the_event(store: Engine, make_writer: Any) -> None:
    writer = make_writer(store, settings=WriterSettings(interval_seconds=0.002))
    with pytest.raises(LedgerUnavailable):
        writer.submit_durable(key_event(), timeout_seconds=0.0)
    writer.submit([opened(1)])
    assert writer.flush()
    with store.connect() as connection:
        assert gaps(connection) == ()
        assert connection.scalars(select(outages.c.kind)).all() == ["withdrawn"]


def test_nobody_waits_for_a_batch_to_form(store: Engine, make_writer: Any) -> None:
    """However long events may wait for others, a class A event and a flush take them along at once."""
    writer = make_writer(store, settings=WriterSettings(interval_seconds=600.0))
    for number in range(1, 11):
        writer.submit([opened(number)])
        assert writer.flush(20.0)
        last = writer.submit([opened(100 + number)])
        assert writer.submit_durable(key_event()) > last
        assert writer.durable_sequence > last


def test_behind_work_nobody_wakes_the_writer(store: Engine, make_writer: Any) -> None:
    """It looks again by itself once, and whoever submits pays for no wake; one that found nothing then is woken."""
    writer = make_writer(store, settings=WriterSettings(interval_seconds=1.0))
    queue = writer._intake
    writer.submit([opened(1)])
    assert writer.flush(20.0)
    last = writer.submit([opened(2)])
    assert not queue.idle and not queue.wake.is_set()
    assert until(lambda: writer.durable_sequence >= last), "and it is written"
    assert until(lambda: queue.idle), "nothing came"
    last = writer.submit([opened(3)])
    assert queue.wake.is_set() or writer.durable_sequence >= last
    assert until(lambda: writer.durable_sequence >= last)


def test_an_outage_spills_and_replays_exactly_once(
    any_store: Engine, make_writer: Any, lock: Any, tmp_path: Path
) -> None:
    writer = make_writer(any_store)
    writer.submit([opened(1)])
    assert writer.flush()
    with lock(any_store):
        last = writer.submit([opened(number, subject=f"user-{number}") for number in range(2, 40)])
        assert writer.flush(3.0) and writer.durable_sequence >= last
        status = writer.status()
        assert status.spilled_bytes and not status.healthy and status.admitting and status.cause
    healthy(writer)
    assert not list((tmp_path / "spill").glob("*.spill"))
    found = sequences(any_store, writer.incarnation)
    assert found == sorted(set(found)) and set(range(1, last + 1)) <= set(found)
    assert outage_kinds(any_store) == {"spill-started": 1, "replay-completed": 1}
    with any_store.connect() as connection:
        names = set(connection.scalars(select(subjects.c.subject)))
        assert {f"user-{number}" for number in range(2, 40)} <= names
    check_logs(any_store)


def test_a_spill_replayed_again_adds_nothing(any_store: Engine, make_writer: Any, lock: Any, tmp_path: Path) -> None:
    writer = make_writer(any_store)
    with lock(any_store):
        writer.submit([opened(number) for number in range(10)])
        assert writer.flush(3.0)
        saved = [shutil.copy(path, tmp_path / path.name) for path in (tmp_path / "spill").glob("*.spill")]
    healthy(writer)
    writer.close()
    before = sequences(any_store, writer.incarnation)
    for path in saved:  # as if the process had died between the commit and the deletion
        shutil.copy(path, tmp_path / "spill" / Path(path).name)
    make_writer(any_store).flush()
    after = sequences(any_store, writer.incarnation)
    assert after == before
    with any_store.connect() as connection:
        duplicates = connection.scalars(select(outages.c.duplicates).order_by(outages.c.at_us)).all()
    assert max(duplicates) >= 10
    check_logs(any_store)


def test_a_spill_with_a_torn_tail_gives_every_whole_record(
    store: Engine, make_writer: Any, lock: Any, tmp_path: Path
) -> None:
    writer = make_writer(store)
    with lock(store):
        writer.submit([opened(number) for number in range(10)])
        assert writer.flush(3.0)
        (path,) = (tmp_path / "spill").glob("*.spill")
        saved = path.read_bytes()
    healthy(writer)
    writer.close()
    other = tmp_path / "other"
    other.mkdir()
    (other / path.name).write_bytes(saved + b"\x99\x01\x00\x00torn")
    make_writer(store, worker="worker-2", spill_directory=other).flush()
    assert [item.suffix for item in other.iterdir() if item.stem == path.stem] == [".torn"]
    check_logs(store)


@pytest.mark.parametrize("how", ["the file", "the folder", "another file in its place"])
def test_a_spill_that_is_removed_under_the_writer_loses_nothing(
    store: Engine, make_writer: Any, lock: Any, tmp_path: Path, how: str
) -> None:
    """What was called durable is written again from what is held open: one segment being filled, one tried before."""
    writer = make_writer(store)
    folder = tmp_path / "spill"
    with lock(store):
        for number in range(2):
            writer.submit([opened(10 * number + each) for each in range(10)])
            assert writer.flush(3.0)
            until = time.monotonic() + 30
            while not number and writer._spill._descriptor >= 0 and time.monotonic() < until:
                time.sleep(0.005)  # a replay was tried: the first segment is closed
        paths = list(folder.glob("*.spill"))
        assert len(paths) == 2
        if how == "the folder":
            shutil.rmtree(folder)
        for path in paths if how != "the folder" else ():
            path.unlink()
            if how != "the file":
                path.write_bytes(b"")
        writer.submit([opened(20)])
        assert writer.flush(3.0)
        survivors = b"".join(
            record
            for path in folder.glob("*.spill")
            for record in SpillSegment(path, os.open(path, os.O_RDONLY)).records()
        )
        assert all(b'"residency":%d,' % number in survivors for number in range(21))  # kill -9 now loses nothing
    healthy(writer)
    with store.connect() as connection:
        assert sorted(connection.scalars(select(residencies.c.residency))) == [*range(21)]
        assert gaps(connection) == ()
    assert not list(folder.glob("*.spill"))


def test_a_full_spill_stops_admission_but_never_the_caller(store: Engine, make_writer: Any, lock: Any) -> None:
    settings = WriterSettings(interval_seconds=0.002, retry_seconds=0.02, spill_bytes=1000)
    writer = make_writer(store, settings=settings)
    with lock(store):
        waits = []
        for number in range(60):
            start = time.perf_counter()
            writer.submit([opened(number)])
            waits.append(time.perf_counter() - start)
            time.sleep(0.005)
        deadline = time.monotonic() + 30
        while writer.admitting and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not writer.admitting and "limit" in writer.status().cause
        assert sorted(waits)[50] < 0.1  # a writer behind the lock waits 0.2 s every time
        with pytest.raises(LedgerUnavailable):
            writer.submit_durable(key_event(), timeout_seconds=1.0)
    healthy(writer)
    assert writer.admitting
    with store.connect() as connection:
        assert connection.scalar(select(func.count()).select_from(residencies)) == 60
        assert gaps(connection) == ()


def test_own_hits_become_counters(any_store: Engine, make_writer: Any) -> None:
    writer = make_writer(any_store)
    hit = HitCounted(1, "acme", "acme", "reuse", "permit", "own-scope", 3, blocks=4, tokens=64)
    denial = HitCounted(2, "labs", "acme", "reuse", "deny", "no-restricted", 3)
    sequence = writer.submit([*[hit] * 50, opened(1), *[denial] * 7])
    assert sequence == 1  # class C takes no sequence
    writer.submit_durable(DecisionRecorded(3, "reuse", "deny", "labs", "acme", "internal", ("no-restricted",), 3))
    writer.close()
    with any_store.connect() as connection:
        query = select(hit_counters.c.requests, hit_counters.c.blocks, hit_counters.c.tokens)
        assert connection.execute(query.where(hit_counters.c.tenant == "acme")).one() == (50, 200, 3200)
        assert [tuple(row) for row in denials_by_rule(connection)] == [("labs", "acme", "no-restricted", 3, 8)]


@pytest.mark.parametrize(
    "bad",
    [
        key_event(1.5),  # type: ignore[arg-type]
        opened(1, subject="nul\0"),
        opened(1, tenant="lone\ud800"),
        opened(1)._replace(attached="no runs"),
        opened(1)._replace(absolute_us=None),
    ],
)
def test_an_event_that_cannot_be_written_is_a_gap_and_stops_nothing(
    any_store: Engine, make_writer: Any, bad: Event
) -> None:
    writer = make_writer(any_store)
    writer.submit([opened(5), bad, opened(6)])
    assert writer.flush()
    with any_store.connect() as connection:
        assert connection.scalar(select(func.count()).select_from(residencies)) == 2
        assert [(gap.first_sequence, gap.last_sequence) for gap in gaps(connection)] == [(2, 2)]
    assert writer.status().healthy
    with pytest.raises(LedgerUnavailable):
        writer.submit_durable(bad)
    check_logs(any_store)


def test_a_row_that_the_database_refuses_is_a_gap(any_store: Engine, make_writer: Any) -> None:
    writer = make_writer(any_store)
    writer.submit([opened(5), opened(6), opened(5), opened(7)])
    assert writer.flush()
    with any_store.connect() as connection:
        assert sorted(connection.scalars(select(residencies.c.residency))) == [5, 6, 7]
        assert [gap.first_sequence for gap in gaps(connection)] == [3]
    check_logs(any_store)


def test_a_ledger_file_deleted_under_the_writer_is_noticed(store: Engine, make_writer: Any, tmp_path: Path) -> None:
    writer = make_writer(store)
    writer.submit([opened(1)])
    assert writer.flush()
    away = tmp_path / "away"
    away.mkdir()
    for path in tmp_path.glob("ledger.db*"):
        path.rename(away / path.name)
    last = writer.submit([opened(2)])
    assert writer.flush(3.0) and writer.durable_sequence >= last
    assert not writer.status().healthy
    with pytest.raises(LedgerUnavailable, match=r"removed|missing"):
        writer.submit_durable(key_event())
    for path in away.iterdir():
        path.rename(tmp_path / path.name)
    healthy(writer)
    assert last in sequences(store, writer.incarnation)


def test_a_subject_keeps_its_pseudonym_until_it_is_unlinked(any_store: Engine, make_writer: Any) -> None:
    for residency in (1, 2):
        writer = make_writer(any_store)
        writer.submit([opened(residency)])
        writer.close()
    with any_store.connect() as connection:
        (name,) = set(connection.scalars(select(residencies.c.subject)))
        (session,) = set(connection.scalars(select(residencies.c.session)))
        assert sorted([name, session]) == subject_rows.names_of(connection, "acme", "alice")
        assert subject_rows.subject_names(connection, "acme", "alice") == [name]
        assert session in subject_rows.session_names(connection, "acme", "alice", str(opened(1).session))
        assert session not in subject_rows.session_names(connection, "acme", "alice", "another")
        leaves = list(connection.scalars(select(events.c.leaf)))
        assert not [leaf for leaf in leaves if b"alice" in leaf or b"chat" in leaf]
        assert connection.scalar(select(func.count()).select_from(subjects)) == 1  # the session's comes from its secret
        assert subject_rows.unlink(connection, "acme", "alice") == 1
        assert subject_rows.names_of(connection, "acme", "alice") == []
        assert list(connection.scalars(select(events.c.leaf))) == leaves
        connection.rollback()


@pytest.mark.parametrize("is_told", [True, False])
def test_a_writer_that_runs_forgets_who_was_unlinked(
    any_store: Engine, make_writer: Any, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    if not is_told:  # positive control: what a process kept in memory would come back as the unlinked pseudonym
        monkeypatch.setattr(pseudonyms, "unlinkings", lambda _: 0)
    writer = make_writer(any_store)
    writer.submit([opened(1), opened(2)._replace(subject="bob")])
    assert writer.flush()
    with any_store.connect().execution_options(**WRITE) as connection, connection.begin():
        assert subject_rows.unlink(connection, "acme", "alice") == 1
    writer.submit([opened(3), opened(4)._replace(subject="bob")])
    assert writer.flush()
    with any_store.connect() as connection:
        query = select(residencies.c.residency, residencies.c.subject, residencies.c.session)
        alice, bob, again, bob_again = sorted(connection.execute(query))
        found = subject_rows.names_of(connection, "acme", "alice")
    assert (bob.subject, bob.session) == (bob_again.subject, bob_again.session)
    assert (again.subject != alice.subject, again.session != alice.session) == (is_told, is_told)
    assert found == (sorted([again.subject, again.session]) if is_told else [])


def test_a_session_without_its_subjects_secret_is_another(any_store: Engine, make_writer: Any) -> None:
    names = []
    for residency in (1, 2, 3):
        writer = make_writer(any_store)
        writer.submit([opened(residency)])
        writer.close()
        with any_store.connect().execution_options(**WRITE) as connection, connection.begin():
            which = residencies.c.residency == residency
            names.append(connection.execute(select(residencies.c.subject, residencies.c.session).where(which)).one())
            if residency == 2:
                subject_rows.unlink(connection, "acme", "alice")
    assert names[0] == names[1]  # positive control: with the row there, both are as before
    assert names[2].subject != names[1].subject and names[2].session != names[1].session


def test_an_erasures_session_can_be_found_by_its_pseudonym(any_store: Engine, make_writer: Any) -> None:
    writer = make_writer(any_store)
    writer.submit([opened(1)])
    assert writer.flush()
    session = opened(1).session
    writer.submit([ErasureRequested(5, "e1", "acme", "session", "alice", session, 9, "dpo")])
    writer.close()
    with any_store.connect() as connection:
        asked = requested(connection, "e1")
        assert asked.session == connection.scalar(select(residencies.c.session))
        assert asked_names(connection, asked) == ("alice", session)


def test_a_dead_incarnation_is_closed_as_unproven(any_store: Engine, make_writer: Any) -> None:
    first = make_writer(any_store)
    blocks = (Run(np.array([3, 1, 2, 8]), 5),)
    first.submit(
        [
            WorkerStarted(1, "worker-1", 8, 2, 4096, "cpu", "test"),
            opened(1),
            opened(2)._replace(written=(Run(np.array([9, 4]), 20),)),
            BlocksAttached(4, 2, "acme", (Run(np.array([1, 2, 8]), 6),)),
            ResidencyReleased(5, 1, "acme", "finish", blocks, 900),
            CustodyEnded(6, "acme", "internal", (Run(np.array([3]), 5),), "evicted", 6, 6, 5, 1000),
        ]
    )
    first.close()  # without WorkerStopped, as far as the ledger can tell, it died
    second = make_writer(any_store)
    assert second.flush()
    with any_store.connect() as connection:
        ends = pairs(connection.execute(select(incarnations.c.uuid, incarnations.c.end)))
        assert ends.pop(first.incarnation) == "died" and ends.pop(second.incarnation) is None
        assert [*ends.values()] == ["stopped"]  # whose leaves these are: it began and ended with them
        causes = pairs(connection.execute(select(releases.c.residency, releases.c.cause)))
        assert causes == {1: "finish", 2: "unproven: process death"}
        row = coverage(connection).total
        # Two shards: three released blocks and the two that residency 2 held when the process died.
        assert (row.due, row.unproven, row.missing) == (12, 10, 2)
    second.submit([WorkerStopped(9, "worker-1", "shutdown", 0, (0, 0))])
    second.close()
    third = make_writer(any_store)
    third.close()
    with any_store.connect() as connection:
        ends = pairs(connection.execute(select(incarnations.c.uuid, incarnations.c.end)))
        lives = [first.incarnation, second.incarnation, third.incarnation]
        assert [ends.pop(life) for life in lives] == ["died", "stopped", None] and len(ends) == 1
    assert len(sequences(any_store, third.incarnation)) == 0


def test_closing_drains_and_a_closed_writer_refuses_class_a(store: Engine, make_writer: Any) -> None:
    writer = make_writer(store)
    last = writer.submit([opened(number) for number in range(2500)])
    writer.close()
    assert writer.durable_sequence == last
    with pytest.raises(LedgerUnavailable, match="stopped"):
        writer.submit_durable(key_event())
