"""A purge that writes its own export: what remains, what it refuses, and the cost of a kill at any point."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import Connection, Engine, delete, event, func, insert, select, update

from kvcustody.audit.evidence.processes.sequence_gaps import gaps
from kvcustody.audit.exports import export_writer
from kvcustody.audit.exports.export_writer import write_export
from kvcustody.audit.exports.file_formats import LeafFormat, leaves_of
from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.exports.manifest import MANIFEST, VERIFIER, parse_manifest
from kvcustody.audit.keep import purge_and_legal_hold, streamed_purge
from kvcustody.audit.keep.purge_and_legal_hold import (
    LogPlan,
    PurgeFacts,
    RetentionError,
    drop_runs,
    lift_hold,
    place_hold,
    purge,
    record_purges,
    thin_dropped,
)
from kvcustody.audit.keep.streamed_purge import PurgeResult, purge_to
from kvcustody.audit.keep.truncate_month import ExpiredLeaves
from kvcustody.audit.kinds import Event, ResidencyOpened, WorkerStarted, WorkerStopped, log_of
from kvcustody.audit.leaf.merkle import HALF, leaf_hashes, parents
from kvcustody.audit.store.database.append_only_triggers import triggers_lifted
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.database.postgres_roles import RETENTION
from kvcustody.audit.store.schema.leaf_tables import residencies, retention_purges
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.audit.store.schema.trees import tree_nodes
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.proofs import ProofError, check_consistency
from kvcustody.audit.tlog.root_log import check_leaf
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.verify.verify_export import verify_export
from kvcustody.audit.write.fold import fold
from kvcustody.clock import SystemClock
from kvcustody.errors import LedgerError
from standins import builders
from standins.postgres import set_up_roles_in_turn

pytestmark = pytest.mark.system

KEY = SigningKey.generate("ledger.example/purge")
VKEY = str(KEY.verifier)
OLD = {"acme": 700, "beta": 512, "few": 3, "one": 1}  # leaves of the process that ended, by tenant
NEW = 40  # of each tenant, of the one that goes on
ACME = "tenant/acme"


def openings(first: int, at_us: int, tenants: dict[str, int]) -> list[Event]:
    """As many leaves of each tenant, taking turns."""
    names = [name for turn in range(max(tenants.values())) for name in tenants if turn < tenants[name]]
    return [
        ResidencyOpened(at_us, first + n, name, f"u{n % 9}", None, False, "internal", (), (), (), 1, 9)
        for n, name in enumerate(names)
    ]


class Aged(NamedTuple):
    """A ledger, and what it held before any purge."""

    store: Engine
    limit_us: int
    leaves: dict[str, list[bytes]]
    size: int


def age(store: Engine, make_writer: Any, folder: Path, tenants: dict[str, int] | None = None) -> Aged:
    """Leaves of a process that ended, and later ones of another, signed."""
    tenants = OLD if tenants is None else tenants
    clock = SystemClock()
    begun = clock.now_us() - 1_000_000
    old = make_writer(store, worker="old")
    old.submit([WorkerStarted(begun, "old", 8, 1, 4096, "cpu", "test")])
    old.submit(openings(1, begun + 1, tenants))
    old.submit([WorkerStopped(begun + 2, "old", "stopped", 0, (0,))])
    assert old.flush()
    old.close()
    new = make_writer(store, worker="new", spill_directory=folder / "spill-2")
    new.submit([WorkerStarted(clock.now_us(), "new", 8, 1, 4096, "cpu", "test")])
    new.submit(openings(100_001, clock.now_us(), dict.fromkeys(tenants, NEW)))
    assert new.flush()
    new.close()
    assert CheckpointSigner(store, [KEY], memory=folder / "signed", clock=clock).sign_once()
    while fold(store):
        pass
    with store.connect() as connection:
        query = select(func.min(events.c.at_us)).where(events.c.kind == "worker-stopped")
        limit = int(connection.scalar(query) or 0) + 1
        found = {log_of(name): _leaves(connection, log_of(name)) for name in tenants}
        return Aged(store, limit, found, LedgerProofs(connection).signed().size)


def _leaves(connection: Connection, log: str) -> list[bytes]:
    query = select(events.c.leaf).join(logs, logs.c.id == events.c.log).where(logs.c.name == log)
    return [bytes(leaf) for leaf in connection.scalars(query.order_by(events.c.idx))]


@pytest.fixture
def aged(any_store: Engine, make_writer: Any, tmp_path: Path) -> Aged:
    return age(any_store, make_writer, tmp_path)


@pytest.fixture
def aged_file(store: Engine, make_writer: Any, tmp_path: Path) -> Aged:
    return age(store, make_writer, tmp_path)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts and transactions of few leaves, so that there are several of each."""
    monkeypatch.setattr(streamed_purge, "PART_LEAVES_MIN", 512)
    monkeypatch.setattr(streamed_purge, "PART_LEAVES_MAX", 512)
    monkeypatch.setattr(streamed_purge, "_DROP_LEAVES", 256)


def ask(aged: Aged, folder: Path, **rest: Any) -> PurgeResult:
    people = {"actor": "operator", "approver": "dpo", "reason": "schedule"}
    return purge_to(aged.store, aged.limit_us, folder / "purged", [VKEY], **{**people, **rest})


def exported(folder: Path) -> dict[str, dict[int, bytes]]:
    """Every leaf of every part, by log and place."""
    leaves: dict[str, dict[int, bytes]] = {}
    for part in sorted(folder.glob("part-*")):
        assert verify_export(part, [VKEY]).ok
        for log in parse_manifest((part / MANIFEST).read_bytes()).logs:
            for file in log.files:
                for idx, leaf in enumerate(leaves_of(LeafFormat.NDJSON, part / file.path), file.first):
                    assert leaves.setdefault(log.name, {}).setdefault(idx, leaf) == leaf
    return leaves


def hashes(connection: Connection, log: str, level: int) -> list[int]:
    """The places of a log's hashes of a level."""
    of = select(tree_nodes.c.idx).join(logs, logs.c.id == tree_nodes.c.log).where(logs.c.name == log)
    return list(connection.scalars(of.where(tree_nodes.c.level == level).order_by(tree_nodes.c.idx)))


def check_purged(aged: Aged, folder: Path, old: dict[str, int] | None = None) -> None:
    """Everything that a finished purge promises."""
    old = {log_of(name): leaves for name, leaves in (OLD if old is None else old).items()}
    held = exported(folder / "purged")
    assert {log: sorted(leaves) for log, leaves in held.items()} == {
        log: list(range(gone)) for log, gone in old.items()
    }
    assert all(held[log][idx] == aged.leaves[log][idx] for log in old for idx in range(old[log]))
    with aged.store.connect() as connection:
        assert gaps(connection) == ()  # what went was whole
        for log, gone in old.items():
            assert _leaves(connection, log)[:NEW] == aged.leaves[log][gone:]  # later ones are about holds
            tiles = gone // 256
            assert hashes(connection, log, 0) == list(range(256 * tiles, gone))
            assert hashes(connection, log, 1) == list(range((gone + NEW) // 256))
            assert hashes(connection, log, HALF) == list(range(16 * tiles, (gone + NEW) // 16))
        assert connection.scalar(select(func.count()).select_from(residencies)) == NEW * len(old)
        report = fsck(connection, keys=[KEY.verifier])
        assert report.ok, report.problems
        assert (report.purged, report.segmented) == (
            sum(old.values()),
            sum(gone // 256 * 256 for gone in old.values()),
        )
        recorded = connection.execute(select(retention_purges)).all()
        digests = {part.name for part in (folder / "purged").iterdir()}
        assert len({row.digest for row in recorded}) == len(digests)
    while fold(aged.store):
        pass
    with aged.store.connect() as connection:
        assert fsck(connection).ok  # the figures are those of what is left


def test_what_goes_is_exported_and_every_proof_of_the_rest_stays(aged: Aged, tmp_path: Path) -> None:
    size = aged.size
    with aged.store.connect() as connection:
        proofs = LedgerProofs(connection)
        note = proofs.signed().note
        before = {
            (log, idx): proofs.inclusion(log, idx, as_of=size)
            for log, leaves in aged.leaves.items()
            for idx in range(len(leaves) - NEW, len(leaves))
        }
        paths = {old: proofs.consistency(ACME, old, 740) for old in (256, 512, 640, 700, 720)}
        heads = proofs.logs(as_of=size)
    progress_calls: list[tuple[str, int, int]] = []
    made = ask(aged, tmp_path, progress=lambda *counts: progress_calls.append(counts))
    assert {(plan.log, plan.first, plan.below) for plan in made.plans} == {
        (log_of(name), 0, gone) for name, gone in OLD.items()
    }
    assert len(made.parts) == 3 and sum(part.leaves for part in made.parts) == sum(OLD.values())
    assert {
        what: max(done for who, done, _ in progress_calls if who == what) for what, _, _ in progress_calls
    } == dict.fromkeys(("written", "verified", "dropped"), sum(OLD.values()))
    check_purged(aged, tmp_path)
    with aged.store.connect() as connection:
        proofs = LedgerProofs(connection)
        assert proofs.signed_or_none(size).note == note and proofs.logs(as_of=size) == heads  # type: ignore[union-attr]
        for (log, idx), proof in before.items():
            assert proofs.inclusion(log, idx, as_of=size) == proof
            check_leaf(proof, aged.leaves[log][idx], [KEY.verifier])
        for old, path in paths.items():
            assert proofs.consistency(ACME, old, 740) == path
            check_consistency(_head(aged, old), _head(aged, 740), path)
    ask(aged, tmp_path)  # nothing is left: nothing happens
    check_purged(aged, tmp_path)


def _head(aged: Aged, size: int) -> Any:
    from kvcustody.audit.leaf.merkle import EMPTY

    return EMPTY.extend(leaf_hashes(aged.leaves[ACME][:size])).frontier.head()


def test_what_cannot_be_proved_any_more_is_refused_with_what_can(aged: Aged, tmp_path: Path) -> None:
    ask(aged, tmp_path)
    with aged.store.connect() as connection:
        proofs = LedgerProofs(connection)
        for old, size in ((1, 740), (300, 740), (511, 600), (256, 300), (16, 512)):
            with pytest.raises(ProofError, match=rf"`{ACME}`.*from `512` on, for sizes") as refused:
                proofs.consistency(ACME, old, size)
            inside = old if old % 256 else size
            assert refused.value.operands["size"] == inside and f"`{inside}` leaves" in refused.value.message
        for old, size in ((0, 740), (256, 512), (512, 513), (513, 740), (739, 740)):
            check_consistency(_head(aged, old), _head(aged, size), proofs.consistency(ACME, old, size))
        with pytest.raises(ProofError, match="dropped leaves `256` to `511` of log `tenant/beta`"):
            proofs.inclusion("tenant/beta", 511)
        proof = proofs.inclusion(ACME, 600)  # its content is gone, its hash is there
        check_leaf(proof, aged.leaves[ACME][600], [KEY.verifier])


def test_a_hash_that_is_missing_is_no_purge(aged_file: Aged, tmp_path: Path, unguarded: Any) -> None:
    """What nobody put on record is damage, to a proof as to `fsck`."""
    with aged_file.store.connect() as connection:
        unguarded(connection)
        log = select(logs.c.id).where(logs.c.name == ACME).scalar_subquery()
        for table in (events, residencies):
            connection.execute(delete(table).where(table.c.log == log, table.c.idx < 256))
        with pytest.raises(LedgerError, match="is incomplete; run"):
            LedgerProofs(connection).consistency(ACME, 100, 740)
        report = fsck(connection)
        assert any("are missing before" in problem.what for problem in report.problems), report.problems


@pytest.mark.parametrize("below", [200, 300])
def test_leaves_that_are_gone_without_a_purge_on_record_are_found(aged: Aged, below: int) -> None:
    """All of a purge, of a part of a tile or of more, but for its record; the record is the control."""
    with aged.store.connect() as connection:
        log = connection.scalars(select(logs.c.id).where(logs.c.name == ACME)).one()
    drop_runs(aged.store, {ACME: ExpiredLeaves(log, 0, below)})
    with aged.store.connect() as connection:
        assert ACME in {problem.log for problem in fsck(connection).problems}
    facts = PurgeFacts(aged.size, "sha256", "one", "two", "age")
    record_purges(aged.store, [LogPlan(ACME, 0, below, "")], facts)
    with aged.store.connect() as connection:
        assert fsck(connection).ok


def test_later_purges_pass_the_tile_that_was_left(
    store: Engine, make_writer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aged = age(store, make_writer, tmp_path, {"acme": 600})
    planned = streamed_purge.plan_purge

    def at(below: int) -> Callable[..., Any]:
        return lambda *asked: tuple(plan._replace(below=min(plan.below, below)) for plan in planned(*asked))

    for below in (100, 256, 300, 511, 600):
        monkeypatch.setattr(streamed_purge, "plan_purge", at(below))
        ask(aged, tmp_path)
        with store.connect() as connection:
            assert hashes(connection, ACME, 0) == list(range(below // 256 * 256, below))
            assert hashes(connection, ACME, HALF) == list(range(below // 256 * 16, 640 // 16))
            report = fsck(connection)
            assert report.ok and (report.purged, report.segmented) == (below, below // 256 * 256)
            LedgerProofs(connection).inclusion(ACME, below)
    check_purged(aged, tmp_path, {"acme": 600})


def test_the_rest_is_exported_whole_and_its_parts_by_their_lone_verifier(aged: Aged, tmp_path: Path) -> None:
    purge_result = ask(aged, tmp_path)
    write_export(tmp_path / "rest", LedgerSource(aged.store), made_at_us=1)
    found = verify_export(tmp_path / "rest", [VKEY])
    assert found.ok and {log.name: log.first for log in found.logs if log.first} == {
        log_of(name): gone for name, gone in OLD.items()
    }
    for folder in (tmp_path / "rest", *(tmp_path / "purged" / part.path for part in purge_result.parts)):
        command = [sys.executable, "-I", str(folder / VERIFIER), str(folder), "--key", VKEY]
        assert subprocess.run(command, check=False, capture_output=True).returncode == 0


# -- what is cut off


class Killed(BaseException):
    """The process ends here."""


POINTS: dict[str, tuple[Any, str]] = {
    "write": (streamed_purge, "write_export"),
    "publish": (export_writer, "publish_folder"),
    "verify": (streamed_purge, "read_back"),
    "record": (streamed_purge, "record_purges"),
    "drop": (streamed_purge, "drop_runs"),
    "drop-transaction": (purge_and_legal_hold, "drop_leaves"),
    "thin": (streamed_purge, "thin_dropped"),
}


def kill_at(patch: pytest.MonkeyPatch, point: str, when: str, nth: int) -> list[int]:
    """Kill before or after the nth call of a step; the calls that were made."""
    module, name = POINTS[point]
    real, calls, numbers = getattr(module, name), list[int](), count(1)

    def step(*given: Any, **named: Any) -> Any:
        number = next(numbers)  # of this call, whatever other threads do
        calls.append(number)
        if number == nth and when == "before":
            raise Killed
        result = real(*given, **named)
        if number == nth:
            raise Killed
        return result

    patch.setattr(module, name, step)
    return calls


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("point", "nth"),
    [(point, nth) for point in POINTS for nth in ((1,) if point == "thin" else (1, 2, 3))],
)
def test_whatever_is_cut_off_is_finished_by_asking_again(
    aged: Aged, tmp_path: Path, point: str, nth: int, when: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        calls = kill_at(patch, point, when, nth)
        with pytest.raises(Killed):
            ask(aged, tmp_path)
        assert len(calls) >= nth
    with aged.store.connect() as connection:  # sound in between, and nothing is gone that no part holds
        assert fsck(connection, keys=[KEY.verifier]).ok
        held = exported(tmp_path / "purged")
        for log, leaves in aged.leaves.items():
            left = set(_leaves(connection, log))
            assert all(leaf in left or held[log][idx] == leaf for idx, leaf in enumerate(leaves))
    ask(aged, tmp_path)
    check_purged(aged, tmp_path)


@pytest.mark.parametrize("point", ["publish", "record", "drop", "drop-transaction"])
def test_a_process_that_is_really_gone(aged_file: Aged, tmp_path: Path, point: str) -> None:
    """Nothing is unwound: no rollback, no file taken away."""
    module, name = POINTS[point]
    database = str(builders.ledger_file(aged_file.store))
    program = f"""
import os, sys
from pathlib import Path
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.keep import streamed_purge
import {module.__name__} as module
streamed_purge.PART_LEAVES_MIN = streamed_purge.PART_LEAVES_MAX = 512
streamed_purge._DROP_LEAVES = 256
real, calls = module.{name}, []
def step(*given, **named):
    calls.append(1)
    result = real(*given, **named)
    if len(calls) == 2:
        os._exit(9)
    return result
module.{name} = step
streamed_purge.purge_to(
    open_store({database!r}, timeout_seconds=5), {aged_file.limit_us}, Path({str(tmp_path / "purged")!r}), [{VKEY!r}],
    actor="operator", approver="dpo", reason="schedule",
)
"""
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)
    assert ended.returncode == 9, ended.stderr.decode()
    with aged_file.store.connect() as connection:
        assert fsck(connection).ok
    ask(aged_file, tmp_path)
    check_purged(aged_file, tmp_path)


def test_what_was_cut_off_is_finished_with_one_export_of_all_too(
    aged: Aged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--export` of an export that was made before anything went."""
    write_export(tmp_path / "whole", LedgerSource(aged.store), made_at_us=1)
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, "drop", "after", 2)
        with pytest.raises(Killed):
            ask(aged, tmp_path)
    people = {"actor": "operator", "approver": "dpo", "reason": "schedule"}
    purge(aged.store, aged.limit_us, tmp_path / "whole", [VKEY], **people)
    with aged.store.connect() as connection:
        assert fsck(connection, keys=[KEY.verifier]).ok
        assert connection.scalar(select(func.count()).select_from(residencies)) == NEW * len(OLD)


# -- what is refused


def flip_leaf(part: Path) -> None:
    path = next(path for path in sorted(part.rglob("*.ndjson")))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"internal", b"external", 1))


def cut_file(part: Path) -> None:
    path = next(path for path in sorted(part.rglob("*.ndjson")))
    path.write_bytes(path.read_bytes().rpartition(b"\n{")[0] + b"\n")


def remove_log(part: Path) -> None:
    shutil.rmtree(next(iter(sorted((part / "logs").iterdir()))))


def other_checkpoint(part: Path) -> None:
    note = (part / "checkpoint").read_text().splitlines()
    (part / "checkpoint").write_text("\n".join([*note[:-1], note[-1][:-8] + "AAAAAAA="]) + "\n")


@pytest.mark.parametrize("tamper", [flip_leaf, cut_file, remove_log, other_checkpoint, None])
def test_an_export_that_was_changed_before_it_was_read_back_drops_nothing(
    aged_file: Aged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tamper: Callable[[Path], None] | None
) -> None:
    """None is the positive control: untouched, it goes."""
    real = streamed_purge.write_export

    def written(folder: Path, *given: Any, **named: Any) -> Any:
        made = real(folder, *given, **named)
        if tamper is not None and folder.name == "part-000001":
            tamper(folder)
        return made

    monkeypatch.setattr(streamed_purge, "write_export", written)
    if tamper is None:
        ask(aged_file, tmp_path)
        check_purged(aged_file, tmp_path)
        return
    with pytest.raises(RetentionError, match="not sound"):
        ask(aged_file, tmp_path)
    with aged_file.store.connect() as connection:
        assert {log: _leaves(connection, log) for log in aged_file.leaves} == aged_file.leaves
        assert connection.scalar(select(func.count()).select_from(retention_purges)) == 0
    with pytest.raises(RetentionError, match="not sound"):  # nor when asked again: the part stays as it is
        ask(aged_file, tmp_path)
    (tmp_path / "purged" / "part-000001" / MANIFEST).unlink()
    with pytest.raises(LedgerError, match="cannot be read"):
        ask(aged_file, tmp_path)
    shutil.rmtree(tmp_path / "purged" / "part-000001")  # what its place says: nothing of it went
    monkeypatch.setattr(streamed_purge, "write_export", real)
    ask(aged_file, tmp_path)
    check_purged(aged_file, tmp_path)


def test_a_part_of_another_key_a_foreign_folder_and_one_person_are_refused(aged_file: Aged, tmp_path: Path) -> None:
    people = {"actor": "a", "approver": "b", "reason": "r"}
    other = str(SigningKey.generate("ledger.example/purge").verifier)
    with pytest.raises(RetentionError, match="not sound"):
        purge_to(aged_file.store, aged_file.limit_us, tmp_path / "other", [other], **people)
    with pytest.raises(RetentionError, match="approver"):
        ask(aged_file, tmp_path, approver="operator")
    (tmp_path / "purged").mkdir()
    (tmp_path / "purged" / "notes.txt").touch()
    with pytest.raises(RetentionError, match=r"notes\.txt"):
        ask(aged_file, tmp_path)
    with aged_file.store.connect() as connection:
        assert {log: _leaves(connection, log) for log in aged_file.leaves} == aged_file.leaves


def test_an_export_of_another_ledger_of_the_same_key_drops_nothing(
    aged_file: Aged, postgres_store: Engine, make_writer: Any, tmp_path: Path
) -> None:
    """The same logs, as long: the leaves are others. Either way of a purge; its own export is the control."""
    (tmp_path / "elsewhere").mkdir()
    other = age(postgres_store, make_writer, tmp_path / "elsewhere")
    people = {"actor": "a", "approver": "b", "reason": "r"}
    write_export(tmp_path / "theirs", LedgerSource(other.store), made_at_us=1)
    with pytest.raises(RetentionError, match="another ledger"):
        purge(aged_file.store, aged_file.limit_us, tmp_path / "theirs", [VKEY], **people)
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, "record", "before", 1)
        with pytest.raises(Killed):
            purge_to(other.store, other.limit_us, tmp_path / "purged", [VKEY], **people)
    with pytest.raises(RetentionError, match="another ledger"):
        ask(aged_file, tmp_path)
    with aged_file.store.connect() as connection:
        assert {log: _leaves(connection, log) for log in aged_file.leaves} == aged_file.leaves
    shutil.rmtree(tmp_path / "purged")
    ask(aged_file, tmp_path)
    check_purged(aged_file, tmp_path)


def test_a_hold_that_comes_midway_stops_it_and_is_asked_again(aged: Aged, tmp_path: Path) -> None:
    dropped: list[int] = []

    def hold(what: str, done: int, total: int) -> None:
        if what == "dropped" and not dropped:
            place_hold(aged.store, "late", None, actor="counsel", reason="case")
        dropped.extend([done] if what == "dropped" else [])

    with pytest.raises(RetentionError, match="late"):
        ask(aged, tmp_path, jobs=1, progress=hold)
    assert len(dropped) == 1
    with aged.store.connect() as connection:
        left = connection.scalar(select(func.count()).select_from(residencies))
        assert left == sum(OLD.values()) + NEW * len(OLD) - dropped[0]
        assert fsck(connection).ok
    assert ask(aged, tmp_path).plans == ()
    lift_hold(aged.store, "late", actor="counsel", reason="closed")
    place_hold(aged.store, "of-beta", "beta", actor="counsel", reason="case")
    assert "tenant/beta" not in {plan.log for plan in ask(aged, tmp_path).plans}
    with aged.store.connect() as connection:
        assert _leaves(connection, ACME)[:NEW] == aged.leaves[ACME][OLD["acme"] :]
    lift_hold(aged.store, "of-beta", actor="counsel", reason="closed")
    ask(aged, tmp_path)
    check_purged(aged, tmp_path)


# -- what is left


def keep_all(aged: Aged) -> None:
    """The hashes inside tiles that are gone, as versions before kept them."""
    with aged.store.begin() as connection:
        for log, gone in ((log_of(name), gone) for name, gone in OLD.items()):
            of = connection.scalars(select(logs.c.id).where(logs.c.name == log)).one()
            level = leaf_hashes(aged.leaves[log][: gone // 256 * 256])
            rows = [{"log": of, "level": 0, "idx": idx, "hash": each} for idx, each in enumerate(level)]
            for _ in range(4):
                level = parents(level)
            rows += [{"log": of, "level": HALF, "idx": idx, "hash": each} for idx, each in enumerate(level)]
            if rows:
                connection.execute(insert(tree_nodes), rows)


def test_hashes_that_older_versions_kept_go_with_the_next_purge(aged: Aged, tmp_path: Path) -> None:
    ask(aged, tmp_path)
    keep_all(aged)
    with aged.store.connect() as connection:
        report = fsck(connection)  # as an older version left it
        assert report.ok and (report.purged, report.segmented) == (sum(OLD.values()), 0)
        LedgerProofs(connection).consistency(ACME, 300, 740)
    place_hold(aged.store, "case", "acme", actor="counsel", reason="case")
    thin_dropped(aged.store)
    with aged.store.connect() as connection:
        assert len(hashes(connection, ACME, 0)) == 700 and hashes(connection, "tenant/beta", 0) == []
        assert fsck(connection).ok
    lift_hold(aged.store, "case", actor="counsel", reason="closed")
    ask(aged, tmp_path)
    check_purged(aged, tmp_path)


def test_an_edit_of_any_hash_that_is_left_is_found(aged: Aged, tmp_path: Path, unguarded: Any) -> None:
    """Of the tile that has leaves left, and of what stands for those that are gone; deletions too."""
    ask(aged, tmp_path)
    with aged.store.connect() as connection:
        assert fsck(connection).ok
        of = select(logs.c.id).where(logs.c.name == ACME).scalar_subquery()
        rows = connection.execute(select(tree_nodes).where(tree_nodes.c.log == of)).all()
    chosen = [row for row in rows if row.level == 1 or row.idx % (7 if row.level else 31) == 0]
    assert {row.level for row in chosen} == {0, 1, HALF}
    for row in chosen:
        place = (tree_nodes.c.log == row.log, tree_nodes.c.level == row.level, tree_nodes.c.idx == row.idx)
        for act in (
            update(tree_nodes).where(*place).values(hash=bytes(32)),
            *([] if row.level >= HALF else [delete(tree_nodes).where(*place)]),
        ):
            with aged.store.connect() as connection:
                unguarded(connection)
                assert connection.execute(act).rowcount == 1
                assert not fsck(connection).ok, (row.level, row.idx)
                connection.rollback()
    for level, idx in ((0, 3), (HALF, 3)):  # and one too many, inside a tile that is gone
        with aged.store.connect() as connection:
            connection.execute(insert(tree_nodes).values(log=rows[0].log, level=level, idx=idx, hash=bytes(32)))
            assert not fsck(connection).ok
            connection.rollback()


def test_many_small_logs_go_in_few_transactions(any_store: Engine, make_writer: Any, tmp_path: Path) -> None:
    tenants = {f"tenant-{n:03d}": 2 for n in range(200)}
    aged = age(any_store, make_writer, tmp_path, tenants)
    commits: list[int] = []
    event.listen(any_store, "commit", lambda _: commits.append(1))
    made = ask(aged, tmp_path)
    assert len(made.plans) == 200 and len(commits) < 80
    check_purged(aged, tmp_path, tenants)
    with any_store.connect() as connection:
        assert connection.scalar(select(func.count()).select_from(retention_purges)) == 200


def test_what_is_left_of_a_large_ledger_is_not_read_again(
    postgres_store: Engine, make_writer: Any, tmp_path: Path
) -> None:
    """No table is scanned for a group of runs, whatever the statistics say; the control is what the planner would."""
    aged = age(postgres_store, make_writer, tmp_path, {f"tenant-{n}": 600 for n in range(6)})
    with postgres_store.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("ANALYZE")
    with postgres_store.connect() as connection:
        of = list(connection.scalars(select(logs.c.id).where(logs.c.name != "system")))[:4]
        runs = "unnest(%s::int4[], %s::int8[], %s::int8[]) AS run (log, a, b)"
        asked = f"EXPLAIN DELETE FROM residencies AS t USING {runs}"
        where = " WHERE t.log = run.log AND t.idx >= run.a AND t.idx < run.b"
        plans = []
        for by_index in (False, True):
            if by_index:
                dialect_of(connection).look_up_by_index(connection)
            rows = connection.exec_driver_sql(asked + where, (of, [0] * 4, [256] * 4)).scalars()
            plans.append("Seq Scan on residencies" in "\n".join(rows))
    assert plans == [True, False]
    statements: list[str] = []
    event.listen(postgres_store, "before_cursor_execute", lambda *given: statements.append(given[2]))
    ask(aged, tmp_path)
    drops = [n for n, text in enumerate(statements) if text.startswith("DELETE FROM events")]
    assert drops and all("SET LOCAL enable_seqscan = off" in statements[max(0, n - 120) : n] for n in drops)


def test_retention_lets_go_of_no_root_of_a_tile(aged: Aged, tmp_path: Path) -> None:
    """The database itself keeps levels from a tile's root on, on PostgreSQL; nobody else deletes any."""
    ask(aged, tmp_path)
    for level, goes in ((0, True), (HALF, True), (1, False)):
        for lifted in (True, False):
            with aged.store.connect() as connection, connection.begin() as transaction:
                act = delete(tree_nodes).where(tree_nodes.c.level == level, tree_nodes.c.log != 0)
                try:
                    if lifted:
                        with triggers_lifted(connection):
                            connection.execute(act)
                    else:
                        connection.execute(act)
                    done = True
                except Exception as problem:
                    assert "never changed or deleted" in str(problem)
                    done = False
                transaction.rollback()
            assert done is (lifted and (goes or aged.store.dialect.name == "sqlite"))


def test_the_role_of_retention_may_drop_and_thin(postgres_store: Engine, make_writer: Any, tmp_path: Path) -> None:
    aged = age(postgres_store, make_writer, tmp_path)
    ask(aged, tmp_path)
    keep_all(aged)
    set_up_roles_in_turn(postgres_store)
    url = postgres_store.url.render_as_string(False)
    acting = open_store(url + ("&" if "?" in url else "?") + f"options=-c%20role%3D{RETENTION}")
    try:
        thin_dropped(acting)
        with acting.connect() as connection:
            log = connection.scalars(select(logs.c.id).where(logs.c.name == ACME)).one()
        drop_runs(acting, {ACME: ExpiredLeaves(log, 700, 710)})
    finally:
        acting.dispose()
    with postgres_store.connect() as connection:
        assert hashes(connection, ACME, 0) == list(range(512, 710))
