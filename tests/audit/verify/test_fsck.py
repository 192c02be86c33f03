"""The ledger attacked inside its own database: all of it is found, by name where it can be named.

The attacker has the file and every password, and not the signing key; where he has that too, a note that somebody kept
finds him. The window is said by the test of the tail: what nobody kept a note of can be cut off unseen.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import Engine

from kvcustody.audit.evidence.counters.packed_figures import pack_hour
from kvcustody.audit.kinds import GapRecorded, WorkerStarted
from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.audit.leaf.merkle import EMPTY, TreeHead, leaf_hashes
from kvcustody.audit.project import count_events
from kvcustody.audit.store.database.dialect import Dialect
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.proofs import ProofError
from kvcustody.audit.tlog.root_log import root_checkpoint, seal
from kvcustody.audit.tlog.signing_key import SigningKey, sign_checkpoint
from kvcustody.audit.verify.ledger.fsck_ledger import FsckReport, fsck
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import SystemClock

KEY = SigningKey.generate("ledger.test")
LEAVES = 2000
Make = Callable[..., EventWriter]


class Ledger(NamedTuple):
    """A sound ledger: its file, what its signer remembers, and notes kept from the middle and the end."""

    path: Path
    memory: bytes
    kept: tuple[bytes, bytes]


_MADE: dict[str, Ledger] = {}


@pytest.fixture
def ledger(store: Engine, make_writer: Make, world: Callable[..., Any], tmp_path_factory: Any) -> Ledger:
    """2,000 events, made once; every test attacks a copy."""
    if "ledger" not in _MADE:
        folder = tmp_path_factory.mktemp("fsck")
        signer = CheckpointSigner(store, [KEY], memory=folder / "memory", clock=SystemClock())
        writer, lived, notes = make_writer(store), world(5), []
        writer.submit([WorkerStarted(1, "worker-1", 48, 2, 4096, "cpu", "test")])
        for half in (LEAVES * 5 // 9, LEAVES * 10 // 9):  # some are added up in counters
            while len(lived.events) < half:
                done = len(lived.events)
                lived.run(40)
                writer.submit(lived.events[done:half])
                assert writer.flush()
            made = signer.sign_once()
            assert made is not None
            notes.append(made.note)
        writer.close()
        with sqlite3.connect(folder / "ledger.db") as copy, store.connect() as connection:
            connection.connection.driver_connection.backup(copy)  # type: ignore[union-attr]
        _MADE["ledger"] = Ledger(folder / "ledger.db", (folder / "memory").read_bytes(), (notes[0], notes[1]))
    return _MADE["ledger"]


class Attack:
    """A copy of the ledger, open to be harmed."""

    def __init__(self, ledger: Ledger, folder: Path) -> None:
        self.path = folder / "attacked.db"
        self.path.write_bytes(ledger.path.read_bytes())
        self.database = sqlite3.connect(self.path, isolation_level=None)
        self.database.execute("PRAGMA synchronous=OFF")
        self.database.execute("PRAGMA ignore_check_constraints=ON")
        self.execute = self.database.execute
        query = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"
        self.triggers: dict[str, str] = dict(self.execute(query).fetchall())
        self.lift()

    def lift(self) -> None:
        for name in self.triggers:
            self.execute(f"DROP TRIGGER {name}")

    def check(self, kept: tuple[bytes, ...] = ()) -> FsckReport:
        """What `fsck` says once the triggers are back."""
        for made in self.triggers.values():
            self.execute(made)
        engine = open_store(self.path, read_only=True)
        with engine.connect() as connection:
            report = fsck(connection, keys=[KEY.verifier], kept=kept)
        engine.dispose()
        self.lift()
        return report

    def leaf(self, log: int, idx: int) -> bytes:
        return bytes(self.execute("SELECT leaf FROM events WHERE log = ? AND idx = ?", (log, idx)).fetchone()[0])

    def set_leaf(self, log: int, idx: int, leaf: bytes) -> None:
        self.execute("UPDATE events SET leaf = ? WHERE log = ? AND idx = ?", (leaf, log, idx))

    def shift(self, log: int, start: int, by: int) -> None:
        """Renumber the leaves of a log from `start` on, with their projections."""
        for (name,) in self.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            columns = [row[1] for row in self.execute(f"PRAGMA table_info({name})")]
            if columns[:2] == ["log", "idx"] and name not in ("root_leaves", "tree_nodes"):
                where = "log = ? AND idx >= ?"
                self.execute(f"UPDATE {name} SET idx = -idx - 1 WHERE {where}", (log, start))
                self.execute(f"UPDATE {name} SET idx = -idx - 1 + ? WHERE log = ? AND idx < 0", (by, log))
        self.execute("UPDATE logs SET size = size + ? WHERE id = ?", (by, log))

    def forget(self, log: int, idx: int) -> None:
        """Drop what was derived from one leaf, so that another can take its place."""
        for (name,) in self.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            columns = [row[1] for row in self.execute(f"PRAGMA table_info({name})")]
            if columns[:2] == ["log", "idx"] and name not in ("root_leaves", "tree_nodes"):
                self.execute(f"DELETE FROM {name} WHERE log = ? AND idx = ?", (log, idx))

    def cut(self, log: int, size: int) -> None:
        """Drop every leaf of a log from `size` on, with its projections."""
        for (name,) in self.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            columns = [row[1] for row in self.execute(f"PRAGMA table_info({name})")]
            if columns[:2] == ["log", "idx"] and name != "root_leaves":
                self.execute(f"DELETE FROM {name} WHERE log = ? AND idx >= ?", (log, size))
        self.execute("UPDATE logs SET size = ? WHERE id = ?", (size, log))

    def recount(self) -> None:
        """Figures of the leaves that are there now."""
        for name in ("counters", "counter_deltas"):
            self.execute(f"DELETE FROM {name}")
        for log, size in self.execute("SELECT id, size FROM logs").fetchall():
            leaves = self.execute("SELECT leaf FROM events WHERE log = ? ORDER BY idx", (log,)).fetchall()
            found = count_events(read_leaves([bytes(leaf) for (leaf,) in leaves]), [log] * size)
            packed = [
                (scraped, of, size, hour_us, pack_hour(figures)) for (scraped, of, hour_us), figures in found.items()
            ]
            self.database.executemany("INSERT INTO counter_deltas VALUES (?, ?, ?, ?, ?)", packed)

    def reseal(self) -> TreeHead:
        """All that the trees hold, made anew over the leaves that are there now: what no key is needed for."""
        for name in ("tree_nodes", "root_leaves", "checkpoints", "signed_checkpoints"):
            self.execute(f"DELETE FROM {name}")
        heads, ids, nodes = {}, {}, []
        for log, name in self.execute("SELECT id, name FROM logs").fetchall():
            leaves = self.execute("SELECT leaf FROM events WHERE log = ? ORDER BY idx", (log,)).fetchall()
            frontier, grown = EMPTY.extend(leaf_hashes(bytes(leaf) for (leaf,) in leaves))
            nodes += [
                (log, level, first + place, node) for level, first, row in grown for place, node in enumerate(row)
            ]
            self.execute(
                "UPDATE logs SET size = ?, frontier = ? WHERE id = ?",
                (frontier.size, frontier.to_bytes(), log),
            )
            heads[name], ids[name] = frontier.head(), log
        openings = seal(heads)
        root = EMPTY.extend(leaf_hashes(opening.commitment() for opening in openings)).frontier
        rows = [(place, ids[one.name], *one.head, one.salt) for place, one in enumerate(openings)]
        self.database.executemany("INSERT INTO root_leaves VALUES (?, ?, ?, ?, ?)", rows)
        self.database.executemany("INSERT INTO tree_nodes VALUES (?, ?, ?, ?)", nodes)
        self.execute("INSERT INTO checkpoints SELECT ?, ?, max(at_us) FROM events", root.head())
        self.execute("UPDATE root_log SET frontier = ?", (root.to_bytes(),))
        return root.head()


@pytest.fixture
def attack(ledger: Ledger, tmp_path: Path) -> Attack:
    return Attack(ledger, tmp_path)


def named(report: FsckReport, log: str, idx: int) -> bool:
    """The first bad leaf that the report names is this one, or a range of one commit that holds it."""
    first = report.first
    if first is None or first.idx is None or first.last is None:
        return False
    return first.log == log and first.idx <= idx <= first.last and first.last - first.idx < 256


def test_a_sound_ledger_has_no_problem(ledger: Ledger, attack: Attack) -> None:
    report = attack.check(ledger.kept)
    assert report.ok and report.first is None, report.problems
    assert (report.logs, report.signed, report.verified) == (4, 2, 4) and report.leaves > LEAVES // 2


def test_edits_of_single_bytes_are_found_where_they_are(attack: Attack) -> None:
    """A sample; the soak test takes every byte."""
    chance = random.Random(1)
    for _ in range(10):
        log, idx, name = chance.choice(
            attack.execute("SELECT log, idx, name FROM events JOIN logs ON logs.id = log").fetchall()
        )
        before = attack.leaf(log, idx)
        edited = bytearray(before)
        edited[chance.randrange(len(edited))] ^= chance.randrange(1, 256)
        attack.set_leaf(log, idx, bytes(edited))
        assert named(attack.check(), name, idx), (name, idx, bytes(edited))
        attack.set_leaf(log, idx, before)
    assert attack.check().ok


@pytest.mark.soak
def test_every_single_byte_edit_is_found(ledger: Ledger, attack: Attack) -> None:
    """Each byte of each of 2,000 leaves, each changed once, against the commit's seal that fsck compares."""
    chance = random.Random(2)
    tried = missed = 0
    for (log,) in attack.execute("SELECT id FROM logs").fetchall():
        query = "SELECT size, root FROM root_leaves WHERE log = ? ORDER BY size"
        frontier = EMPTY
        for size, root in attack.execute(query, (log,)).fetchall():
            leaves = [attack.leaf(log, idx) for idx in range(frontier.size, size)]
            hashes = leaf_hashes(leaves)
            for place, leaf in enumerate(leaves):
                edited = bytearray(leaf)
                for at in range(len(leaf)):
                    edited[at] ^= chance.randrange(1, 256)
                    changed = [*hashes[:place], *leaf_hashes([bytes(edited)]), *hashes[place + 1 :]]
                    missed += frontier.extend(changed).frontier.root() == bytes(root)
                    tried += 1
                    edited[at] = leaf[at]
            frontier = frontier.extend(hashes).frontier
            assert frontier.root() == bytes(root)
    print(f"{tried} edits of {LEAVES + 1} leaves, {missed} missed")
    assert missed == 0 and tried > 300 * LEAVES


def _log(attack: Attack) -> tuple[int, str, int]:
    """The largest log."""
    found: tuple[int, str, int] = attack.execute("SELECT id, name, size FROM logs ORDER BY size DESC").fetchone()
    return found


def _delete(attack: Attack) -> int:
    log, _, size = _log(attack)
    attack.execute("DELETE FROM events WHERE log = ? AND idx = ?", (log, size // 3))
    return size // 3


def _delete_and_close_the_gap(attack: Attack) -> int:
    idx, log = _delete(attack), _log(attack)[0]
    attack.forget(log, idx)
    attack.shift(log, idx + 1, -1)
    return idx


def _insert(attack: Attack, source: int = 3) -> int:
    log, _, size = _log(attack)
    attack.shift(log, size // 2, 1)
    query = "INSERT INTO events SELECT log, ?, incarnation, sequence + 1000000, part, parts, kind, outage, at_us, leaf"
    attack.execute(f"{query} FROM events WHERE log = ? AND idx = ?", (size // 2, log, source))
    return size // 2


def _duplicate(attack: Attack) -> int:
    return _insert(attack, _log(attack)[2] // 2 - 1)


def _reorder(attack: Attack) -> int:
    log, _, size = _log(attack)
    one, two = attack.leaf(log, size // 2), attack.leaf(log, size // 2 + 5)
    attack.set_leaf(log, size // 2, two)
    attack.set_leaf(log, size // 2 + 5, one)
    return size // 2


def _reorder_rows(attack: Attack) -> int:
    log, _, size = _log(attack)
    for before, after in ((size // 2, -1), (size // 2 + 5, size // 2), (-1, size // 2 + 5)):
        attack.execute("UPDATE events SET idx = ? WHERE log = ? AND idx = ?", (after, log, before))
    return size // 2


def _splice(attack: Attack) -> int:
    log, _, size = _log(attack)
    other = attack.execute("SELECT id FROM logs WHERE id != ? AND size > 9", (log,)).fetchone()[0]
    attack.set_leaf(log, size // 2, attack.leaf(other, 7))
    return size // 2


def _truncate(attack: Attack) -> int:
    log, _, size = _log(attack)
    attack.cut(log, size - 5)
    return size - 5


@pytest.mark.parametrize(
    "act",
    [_delete, _delete_and_close_the_gap, _insert, _duplicate, _reorder, _reorder_rows, _splice, _truncate],
    ids=lambda act: act.__name__[1:],
)
def test_leaves_moved_about_are_found_where_it_begins(attack: Attack, act: Callable[[Attack], int]) -> None:
    name = _log(attack)[1]
    idx = act(attack)
    report = attack.check()
    found = [(problem.idx, problem.last) for problem in report.problems if problem.log == name]
    assert found and found[0][0] is not None, report.problems[:3]
    assert any(first is not None and last is not None and first <= idx <= last for first, last in found), found[:5]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE logs SET size = size - 1 WHERE id = 2",
        "UPDATE logs SET frontier = (SELECT frontier FROM logs WHERE id = 1) WHERE id = 2",
        "UPDATE logs SET name = 'tenant/other' WHERE id = 2",
        "DELETE FROM logs WHERE id = 2",
        "UPDATE tree_nodes SET hash = zeroblob(32)",
        "DELETE FROM tree_nodes",
        "INSERT INTO tree_nodes SELECT log, level, -1, hash FROM tree_nodes WHERE level > 15 LIMIT 1",
        "UPDATE root_log SET frontier = zeroblob(40)",
        "DELETE FROM root_log",
        "UPDATE root_leaves SET salt = zeroblob(32) WHERE idx = 3",
        "UPDATE root_leaves SET root = zeroblob(32) WHERE idx = 3",
        "DELETE FROM root_leaves WHERE idx = 3",
        "DELETE FROM root_leaves WHERE idx > 20",
        "UPDATE checkpoints SET root = zeroblob(32) WHERE size = (SELECT max(size) FROM checkpoints)",
        "DELETE FROM checkpoints WHERE size = (SELECT max(size) FROM checkpoints)",
        "UPDATE signed_checkpoints SET note = replace(note, 'ledger.test', 'ledger.tset')",
        "UPDATE events SET at_us = at_us + 1 WHERE log = 2 AND idx = 5",
        "UPDATE events SET kind = 'receipt' WHERE log = 2 AND idx = 0",
        "UPDATE events SET incarnation = 9 WHERE log = 2 AND idx = 0",
        "UPDATE receipts SET verified = verified + 1 WHERE rowid = 5",
        "DELETE FROM custody_ends WHERE rowid = 5",
        "UPDATE residencies SET tenant = 'other' WHERE rowid = 2",
        "INSERT INTO hit_counters SELECT log, idx, '', '', '', '', '', 0, 0, 0, 0, 0, 0 FROM events LIMIT 1",
    ],
)
def test_what_is_derived_is_found_too(attack: Attack, statement: str) -> None:
    assert attack.execute(statement).rowcount > 0
    assert not attack.check().ok


def test_a_ledger_rewritten_as_a_whole_is_found_by_a_note_that_was_kept(ledger: Ledger, attack: Attack) -> None:
    """Whole-log replacement: everything is consistent again, and only a signature tells."""
    log, name, _ = _log(attack)
    leaf = attack.execute(
        "SELECT idx, leaf FROM events WHERE log = ? AND kind = 'residency-opened' LIMIT 1", (log,)
    ).fetchone()
    forged = bytes(leaf[1]).replace(b'"reasons":["own-scope"]', b'"reasons":["any-scope"]')
    assert forged != bytes(leaf[1])
    attack.set_leaf(log, leaf[0], forged)
    assert named(attack.check(), name, leaf[0])
    attack.reseal()
    assert attack.check().ok  # positive control: without the signed tree the same edit is not found
    for kept in ledger.kept:
        report = attack.check((kept,))
        assert [problem.log for problem in report.problems] == ["root"]


def test_the_holder_of_the_key_is_found_by_a_note_that_was_kept(ledger: Ledger, attack: Attack) -> None:
    """Fork: a second history with good signatures, from the holder of the key himself."""
    log, _, size = _log(attack)
    attack.cut(log, size // 4)
    assert any("the leaves give" in each.what for each in attack.check().problems)  # figures outlive the leaves
    attack.recount()
    head = attack.reseal()
    note = sign_checkpoint(root_checkpoint(KEY.name, head), [KEY])
    attack.execute("INSERT INTO signed_checkpoints VALUES (?, ?, 1)", (head.size, note))
    # Nothing in the trees gives the fork away; only custody whose end was cut off does not add up.
    assert {problem.log for problem in attack.check().problems} == {"figures"}
    assert "root" in {problem.log for problem in attack.check(ledger.kept[:1]).problems}


def test_a_tail_is_missed_from_the_newest_note_on_that_somebody_kept(ledger: Ledger, attack: Attack) -> None:
    """The window of truncation: cut after the first note, the second finds it, in a file or in the signer's memory."""
    first = int(ledger.kept[0].split(b"\n")[1])
    rows = attack.execute("SELECT log, max(size) FROM root_leaves WHERE idx < ? GROUP BY log", (first,)).fetchall()
    for log, size in rows:
        attack.cut(log, size)
    attack.recount()
    attack.execute("DELETE FROM tree_nodes WHERE log = 0")
    for name in ("root_leaves WHERE idx", "checkpoints WHERE size >", "signed_checkpoints WHERE size >"):
        attack.execute(f"DELETE FROM {name.removesuffix(' >')} {'>=' if 'idx' in name else '>'} ?", (first,))
    frontier = EMPTY
    for log, size in rows:
        leaves = [attack.leaf(log, idx) for idx in range(size)]
        frontier, grown = EMPTY.extend(leaf_hashes(leaves))
        attack.execute("DELETE FROM tree_nodes WHERE log = ?", (log,))
        nodes = [(log, level, at + place, node) for level, at, row in grown for place, node in enumerate(row)]
        attack.database.executemany("INSERT INTO tree_nodes VALUES (?, ?, ?, ?)", nodes)
        attack.execute("UPDATE logs SET frontier = ? WHERE id = ?", (frontier.to_bytes(), log))
    engine = open_store(attack.path)
    with engine.connect() as connection:
        openings = LedgerProofs(connection).openings(0, first)
        root = EMPTY.extend(leaf_hashes(opening.commitment() for opening in openings)).frontier
    attack.execute("UPDATE root_log SET frontier = ?", (root.to_bytes(),))
    assert attack.check(ledger.kept[:1]).ok  # nobody kept a later note: the window
    report = attack.check(ledger.kept)
    assert [problem.idx for problem in report.problems] == [first] and "cut off" in report.problems[0].what
    memory = attack.path.with_name("memory")
    memory.write_bytes(ledger.memory)
    with pytest.raises(ProofError):
        CheckpointSigner(engine, [KEY], memory=memory, clock=SystemClock()).sign_once()
    engine.dispose()


def test_progress_counts_leaves(any_store: Engine, make_writer: Make) -> None:
    writer = make_writer(any_store)
    writer.submit([GapRecorded(1, "test", number, number) for number in range(100)])
    assert writer.flush()
    told: list[tuple[str, int, int]] = []
    with any_store.connect() as connection:
        report = fsck(connection, progress=lambda *counts: told.append(counts))
    assert report.ok and report.leaves == 100 and told[-1] == ("system", 100, 100)


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_postgresql_writes_no_temporary_file(
    postgres_store: Engine,
    make_writer: Make,
    world: Make,
    monkeypatch: pytest.MonkeyPatch,
    is_in_memory: bool,
) -> None:
    """Control: by the memory that a server has for a sort, here a small one, it does."""
    writer, lived = make_writer(postgres_store), world(3)
    lived.run(400)
    writer.submit(lived.events)
    assert writer.flush(60)
    if not is_in_memory:
        monkeypatch.setattr(Dialect, "sort_in_memory", lambda dialect, connection: None)
    with postgres_store.connect() as connection:
        for setting in ("work_mem = '64kB'", "hash_mem_multiplier = 1", "stats_fetch_consistency = none"):
            connection.exec_driver_sql(f"SET {setting}")
        connection.commit()
        assert fsck(connection).ok
        connection.exec_driver_sql("SELECT pg_stat_force_next_flush()")
        connection.rollback()
        written = "SELECT temp_bytes FROM pg_stat_database WHERE datname = current_database()"
        assert (connection.exec_driver_sql(written).scalar_one() == 0) == is_in_memory
