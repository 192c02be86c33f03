"""Redaction, retention of the ledger's content and legal holds."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event, func, select
from sqlalchemy.pool import Pool

from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys, empty_wal
from kvcustody.audit.evidence.subjects.subject_table import (
    names_of,
    session_names,
    store_names,
    subject_names,
    unlink,
)
from kvcustody.audit.exports.export_writer import write_export
from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.keep.purge_and_legal_hold import (
    LIFTED,
    RetentionError,
    active_holds,
    lift_hold,
    place_hold,
    plan_purge,
    purge,
)
from kvcustody.audit.keep.sqlite_to_postgres import move_ledger
from kvcustody.audit.keep.unlink_subject import NO_KEYS, unlink_subject
from kvcustody.audit.kinds import ResidencyOpened, WorkerStarted, WorkerStopped
from kvcustody.audit.store.database.engine import WRITE, open_store
from kvcustody.audit.store.schema.leaf_tables import residencies
from kvcustody.audit.store.schema.ledger import events, subjects
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.database_tiles import DroppedTileError
from kvcustody.audit.tlog.root_log import check_leaf
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.verify.verify_export import verify_export
from kvcustody.clock import SystemClock
from kvcustody.errors import LedgerError
from kvcustody.migrations.upgrade import upgrade
from standins import builders

KEY = SigningKey.generate("ledger.example/keeping")
ALICE = "alice@example.org-4711"


@pytest.fixture
def keys(tmp_path: Path) -> SubjectKeys:
    return SubjectKeys.open(tmp_path / "subjects.db")


def opening(number: int, subject: str | None, session: str | None = None, tenant: str = "acme") -> ResidencyOpened:
    return ResidencyOpened(number, number, tenant, subject, session, False, "internal", (), (), (), 1, 9)


def sign(store: Engine, folder: Path) -> None:
    CheckpointSigner(store, [KEY], memory=folder / "signed", clock=SystemClock()).sign_once()


def bytes_of(store: Engine) -> bytes:
    """Everything that the ledger has on disk: database, write-ahead log, index of it."""
    path = builders.ledger_file(store)
    return b"".join(each.read_bytes() for each in path.parent.glob(path.name + "*"))


def pseudonyms_in_leaves(store: Engine) -> list[str]:
    with store.connect() as connection:
        return list(connection.scalars(select(residencies.c.subject).order_by(residencies.c.residency)))


def test_with_subject_keys_no_copy_of_the_ledger_names_anybody(
    store: Engine, make_writer: Any, keys: SubjectKeys, tmp_path: Path
) -> None:
    writer = make_writer(store, subject_keys=keys)
    writer.submit(
        [
            opening(1, ALICE, "session-one"),
            opening(2, ALICE),
            opening(3, "bob"),
            opening(4, None, "lone-session"),
        ]
    )
    assert writer.flush()
    backup = bytes_of(store)
    for name in (ALICE, "session-one", "lone-session"):
        assert name.encode() not in backup
    first = pseudonyms_in_leaves(store)
    assert first[0] == first[1] != first[2] and first[3] is None
    with store.connect() as connection:
        assert len(names_of(connection, "acme", ALICE, keys)) == 2  # her own, and her session's
        assert names_of(connection, "acme", ALICE) == []  # without the key nobody finds her
        own, of_session = (
            set(subject_names(connection, "acme", ALICE, keys)),
            set(names_of(connection, "acme", ALICE, keys)),
        )
        assert (
            own == {first[0]} and {*session_names(connection, "acme", ALICE, "session-one", keys)} >= of_session - own
        )
        assert session_names(connection, "acme", ALICE, "session-one") == []
    found = unlink_subject(store, "acme", ALICE, keys=keys, actor="dpo", reason="request 7")
    assert (found.pseudonyms, found.keys, found.remains) == (2, 1, ())
    with store.connect() as connection:
        assert names_of(connection, "acme", ALICE, keys) == []
        assert len(names_of(connection, "acme", "bob", keys)) == 1
    # The backup has her tag still, and no key that exists gives it: what a new key gives is another.
    tags = {row[0] for row in sqlite3_subjects(backup, tmp_path)}
    assert keys.tag(("acme", ALICE, ""), "subject", ALICE) not in tags
    assert keys.tag(("acme", "bob", ""), "subject", "bob") in tags  # positive control: an undestroyed key finds its own
    assert ALICE.encode() not in (tmp_path / "subjects.db").read_bytes()


def sqlite3_subjects(copy: bytes, folder: Path) -> list[tuple[str]]:
    """The column of a copy's own bytes: tags as text."""
    import re

    return [(found.decode(),) for found in re.findall(rb"k1:[0-9a-f]{40}", copy)]


def test_without_keys_the_report_says_what_remains_where(store: Engine, make_writer: Any) -> None:
    writer = make_writer(store)
    writer.submit([opening(1, ALICE)])
    assert writer.flush()
    assert ALICE.encode() in bytes_of(store)  # positive control: without keys the name is there
    writer.close()
    found = unlink_subject(store, "acme", ALICE, keys=None, actor="dpo", reason="request 7")
    assert found.pseudonyms == 1 and NO_KEYS in found.remains
    assert ALICE.encode() not in bytes_of(store)  # overwritten, and out of the write-ahead log


@pytest.mark.system
@pytest.mark.parametrize("keyed", [True, False])
def test_neither_rows_nor_wal_of_postgresql_ever_held_a_name_where_there_are_keys(
    postgres_store: Engine, make_writer: Any, keys: SubjectKeys, tmp_path: Path, keyed: bool
) -> None:
    """A backup of the server's files, its write-ahead log included. Positive control: without keys she is there."""
    name = f"alice-{tmp_path.name}-{keyed}"
    writer = make_writer(postgres_store, subject_keys=keys if keyed else None)
    writer.submit([opening(1, name, f"session of {name}")])
    assert writer.flush()
    writer.close()
    with postgres_store.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("SET statement_timeout = 0")  # of the whole server, which others share
        connection.exec_driver_sql("CHECKPOINT")
        query = "SELECT current_setting('data_directory'), oid FROM pg_database WHERE datname = current_database()"
        server, database = connection.exec_driver_sql(query).one()
    folders = (Path(server) / "base" / str(database), Path(server) / "pg_wal")
    holding = set()
    for path in [path for folder in folders for path in folder.iterdir() if path.is_file()]:
        with contextlib.suppress(FileNotFoundError):  # the server recycles its log
            holding |= {path.parent.name} if name.encode() in path.read_bytes() else set()
    assert holding == (set() if keyed else {str(database), "pg_wal"})


@pytest.mark.parametrize("overwriting", [True, False])
def test_no_page_keeps_a_copy_of_a_redacted_name(tmp_path: Path, overwriting: bool) -> None:
    """On a build of SQLite that leaves what is deleted. Positive control: without the store's own setting it does."""
    chance = random.Random(3)
    names = [f"person-{chance.getrandbits(40):010x}" for _ in range(3000)]

    def build_default(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA secure_delete=OFF")

    event.listen(Pool, "connect", build_default)
    try:
        engine = open_store(f"sqlite:///{tmp_path}/ledger.db")
        if not overwriting:
            event.listen(engine, "connect", build_default)
        upgrade(engine)
        for start in range(0, len(names), 100):  # in no order: pages of the index are split
            rows = [(f"{chance.getrandbits(96):024x}", "acme", name, "", None) for name in names[start : start + 100]]
            with engine.connect().execution_options(**WRITE) as connection, connection.begin():
                store_names(connection, rows)
        with engine.connect().execution_options(**WRITE) as connection, connection.begin():
            assert sum(unlink(connection, "acme", name) for name in names[::30]) == 100
        assert empty_wal(engine)
        engine.dispose()
    finally:
        event.remove(Pool, "connect", build_default)
    stored = (tmp_path / "ledger.db").read_bytes()
    assert names[1].encode() in stored, "void: names are elsewhere"
    assert any(name.encode() in stored for name in names[::30]) is not overwriting


def test_proofs_outlive_redaction(store: Engine, make_writer: Any, keys: SubjectKeys, tmp_path: Path) -> None:
    writer = make_writer(store, subject_keys=keys)
    writer.submit([opening(number, ALICE, tenant="acme") for number in range(1, 300)])
    assert writer.flush()
    sign(store, tmp_path)
    with store.connect() as connection:
        proofs = LedgerProofs(connection)
        leaf, proof, head = (
            proofs.leaf("tenant/acme", 5),
            proofs.inclusion("tenant/acme", 5),
            proofs.head("tenant/acme"),
        )
    unlink_subject(store, "acme", ALICE, keys=keys, actor="dpo", reason="request 7")
    assert check_leaf(proof, leaf, [KEY.verifier]).head == head
    with store.connect() as connection:
        size = check_leaf(proof, leaf, [KEY.verifier]).signed.checkpoint.size
        assert LedgerProofs(connection).inclusion("tenant/acme", 5, as_of=size) == proof
    sign(store, tmp_path)
    write_export(tmp_path / "export", LedgerSource(store), made_at_us=1)
    found = verify_export(tmp_path / "export", [str(KEY.verifier)])
    assert found.ok and sum(log.kinds["subject-unlinked"] for log in found.logs) == 1


def test_whoever_comes_back_is_somebody_else(any_store: Engine, make_writer: Any, keys: SubjectKeys) -> None:
    writer = make_writer(any_store, subject_keys=keys)
    writer.submit([opening(1, ALICE)])
    assert writer.flush()
    unlink_subject(any_store, "acme", ALICE, keys=SubjectKeys(keys._engine), actor="dpo", reason="request 7")
    writer.submit([opening(2, ALICE)])  # the worker had name and key in memory
    assert writer.flush()
    before, after = pseudonyms_in_leaves(any_store)
    assert before != after
    with any_store.connect() as connection:
        assert names_of(connection, "acme", ALICE, keys) == [after]


def test_two_processes_have_one_key(tmp_path: Path) -> None:
    one, two = SubjectKeys.open(tmp_path / "keys"), SubjectKeys.open(tmp_path / "keys")
    owner = ("acme", ALICE, "")
    one.prepare([owner]), two.prepare([owner])
    assert one.tag(owner, "subject", ALICE) == two.tag(owner, "subject", ALICE)
    assert one.tag(owner, "session", ALICE) != one.tag(owner, "subject", ALICE)
    assert (tmp_path / "keys").stat().st_mode & 0o077 == 0


# -- retention and holds


@pytest.fixture
def aged(store: Engine, make_writer: Any, tmp_path: Path) -> Engine:
    return age(store, make_writer, tmp_path)


@pytest.fixture
def aged_any(any_store: Engine, make_writer: Any, tmp_path: Path) -> Engine:
    """On both databases."""
    return age(any_store, make_writer, tmp_path)


def age(store: Engine, make_writer: Any, tmp_path: Path) -> Engine:
    """A ledger with an ended process's leaves, and a running one's."""
    clock = SystemClock()
    old = make_writer(store, worker="old")
    begun = clock.now_us() - 1_000_000  # all of its leaves are over, however fast this machine is
    old.submit([WorkerStarted(begun, "old", 8, 1, 4096, "cpu", "test")])
    old.submit(
        [opening(begun + number, f"u{number % 9}", tenant=("acme", "beta")[number % 2]) for number in range(700)]
    )
    old.submit([WorkerStopped(begun + 700, "old", "stopped", 0, (0,))])
    assert old.flush()
    old.close()
    new = make_writer(store, worker="new", spill_directory=tmp_path / "spill-2")
    new.submit([WorkerStarted(clock.now_us(), "new", 8, 1, 4096, "cpu", "test")])
    new.submit([opening(clock.now_us(), "u", tenant="acme")])
    assert new.flush()
    sign(store, tmp_path)
    write_export(tmp_path / "export", LedgerSource(store), made_at_us=1)
    return store


def limit_us(store: Engine) -> int:
    """A time after the old process and before the new one's leaves."""
    with store.connect() as connection:
        query = select(func.max(events.c.at_us)).where(events.c.kind == "worker-stopped")
        return int(connection.scalar(query) or 0) + 1


def drop(store: Engine, folder: Path, **rest: Any) -> Any:
    people = {"actor": "operator", "approver": "dpo", "reason": "schedule"}
    return purge(store, limit_us(store), folder / "export", [str(KEY.verifier)], **{**people, **rest})


def test_content_goes_and_every_proof_stays(aged_any: Engine, tmp_path: Path) -> None:
    with aged_any.connect() as connection:
        proofs = LedgerProofs(connection)
        before = {log.name: log.head for log in proofs.logs()}
        size = proofs.signed().size
        kept = proofs.inclusion("tenant/acme", 350, as_of=size)
        leaf = proofs.leaf("tenant/acme", 350)
    gone = drop(aged_any, tmp_path)
    assert {plan.log: (plan.first, plan.below) for plan in gone} == {
        "tenant/acme": (0, 350),
        "tenant/beta": (0, 350),
    }
    with aged_any.connect() as connection:
        proofs = LedgerProofs(connection)
        now = {log.name: log.head for log in proofs.logs()}
        assert all(now[name] == head for name, head in before.items() if name != "system")
        assert proofs.inclusion("tenant/acme", 350, as_of=size) == kept
        check_leaf(kept, leaf, [KEY.verifier])
        assert connection.scalar(select(func.count()).select_from(residencies)) == 1
        with pytest.raises(LedgerError):
            proofs.leaf("tenant/acme", 3)
    sign(aged_any, tmp_path)
    write_export(tmp_path / "after", LedgerSource(aged_any), made_at_us=1)
    verdict = verify_export(tmp_path / "after", [str(KEY.verifier)])
    assert verdict.ok and {log.name: log.first for log in verdict.logs} == {
        "system": 0,
        "tenant/acme": 350,
        "tenant/beta": 350,
    }
    assert any("only their hashes" in line for line in verdict.limits)
    assert [log.kinds["retention-purged"] for log in verdict.logs if log.name == "system"] == [2]


def test_a_purged_ledger_is_moved_with_the_hashes_that_are_left(
    aged: Engine, postgres_store: Engine, tmp_path: Path
) -> None:
    drop(aged, tmp_path)
    moved = move_ledger(aged, postgres_store)
    with aged.connect() as source, postgres_store.connect() as other:
        here, there = LedgerProofs(source), LedgerProofs(other)
        assert moved.head == here.checkpoint().head == there.checkpoint().head
        for idx in (256, 350):  # its content is gone, and there
            assert there.inclusion("tenant/acme", idx) == here.inclusion("tenant/acme", idx)
        assert fsck(other).segmented == fsck(source).segmented == 512
        assert fsck(other).purged == fsck(source).purged == 700
        assert there.logs() == here.logs()


def test_a_legal_hold_wins(aged_any: Engine, tmp_path: Path) -> None:
    place_hold(aged_any, "case-9", "acme", actor="counsel", reason="case 9")
    with pytest.raises(RetentionError, match="already"):
        place_hold(aged_any, "case-9", "beta", actor="counsel", reason="case 9")
    with aged_any.connect() as connection:
        plans = {plan.log: plan for plan in plan_purge(connection, limit_us(aged_any))}
    assert plans["tenant/acme"].leaves == 0 and plans["tenant/acme"].kept_by == "legal hold case-9"
    with pytest.raises(RetentionError, match="case-9"):
        unlink_subject(aged_any, "acme", "u1", keys=None, actor="dpo", reason="request")
    assert [plan.log for plan in drop(aged_any, tmp_path)] == ["tenant/beta"]
    lift_hold(aged_any, "case-9", actor="counsel", reason="closed")
    assert [plan.log for plan in drop(aged_any, tmp_path)] == ["tenant/acme"]
    with aged_any.connect() as connection:
        assert active_holds(connection) == ()
    with pytest.raises(RetentionError, match="no legal hold"):
        lift_hold(aged_any, "case-9", actor="counsel", reason=LIFTED)


def test_a_hold_that_comes_while_a_purge_runs_stops_it(
    aged: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcustody.audit.keep.purge_and_legal_hold._STEP_TILES", 1)
    calls: list[int] = []

    def hold(log: str, done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == 1:
            place_hold(aged, "late", None, actor="counsel", reason="case")

    with pytest.raises(RetentionError, match="late"):
        drop(aged, tmp_path, progress=hold)
    with aged.connect() as connection:
        rows = connection.scalar(select(func.count()).select_from(residencies))
        assert rows == 701 - 256
        with pytest.raises(DroppedTileError, match="ask for leaves from `256` on"):
            LedgerProofs(connection).tiles("tenant/acme").tile(0, 0, 256)
        assert LedgerProofs(connection).tiles("tenant/acme").tile(0, 1, 95)
        report = fsck(connection)
        assert report.ok and (report.purged, report.segmented) == (256, 256)


def test_what_was_not_exported_is_not_dropped(aged: Engine, tmp_path: Path) -> None:
    from kvcustody.audit.exports.export_writer import ExportSelection

    write_export(tmp_path / "part", LedgerSource(aged), ExportSelection(("tenant/beta",)), made_at_us=1)
    with pytest.raises(RetentionError, match="export them first"):
        purge(aged, limit_us(aged), tmp_path / "part", [str(KEY.verifier)], actor="a", approver="b", reason="r")
    with pytest.raises(RetentionError, match="not sound"):
        drop_key = [str(SigningKey.generate("ledger.example/keeping").verifier)]
        purge(aged, limit_us(aged), tmp_path / "export", drop_key, actor="a", approver="b", reason="r")
    with pytest.raises(RetentionError, match="approver"):
        drop(aged, tmp_path, approver="operator")
    with aged.connect() as connection:
        assert connection.scalar(select(func.count()).select_from(residencies)) == 701


def test_leaves_of_a_running_process_and_unsigned_ones_stay(aged: Engine, make_writer: Any) -> None:
    with aged.connect() as connection:
        everything = SystemClock().utc_us() + 10**12
        plans = {plan.log: plan for plan in plan_purge(connection, everything)}
        assert plans["tenant/acme"].below == 350 and "not ended" in plans["tenant/acme"].kept_by
        assert "system" not in plans
        assert plan_purge(connection, 0)[0].leaves == 0


def test_names_of_the_dropped_are_unlinked_as_ever(aged: Engine, tmp_path: Path) -> None:
    drop(aged, tmp_path)
    with aged.connect() as connection:
        assert connection.scalar(select(func.count()).select_from(subjects)) > 0
    assert unlink_subject(aged, "acme", "u2", keys=None, actor="dpo", reason="request").pseudonyms == 1
