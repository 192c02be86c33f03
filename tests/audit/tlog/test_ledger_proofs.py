"""Trees in the writer's transaction, and proofs from what is stored (L1-L3), on both databases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, delete, select, update

from kvcustody.audit.kinds import WorkerStarted
from kvcustody.audit.leaf.merkle import EMPTY, HALF, TreeHead, leaf_hashes
from kvcustody.audit.store.database import dialect as store
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.audit.store.schema.trees import checkpoints, root_leaves, signed_checkpoints, tree_nodes
from kvcustody.audit.tlog import database_proofs as ledger_proofs
from kvcustody.audit.tlog import database_tiles as stored_tiles
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.database_tiles import LogTiles
from kvcustody.audit.tlog.proofs import ProofError, check_consistency, tree_root
from kvcustody.audit.tlog.root_log import check_head, check_leaf, parse_leaf_proof, root_checkpoint
from kvcustody.audit.tlog.signed_note import NoteError
from kvcustody.audit.tlog.signing_key import SigningKey, sign_checkpoint
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.write.event_writer import EventWriter, WriterSettings

KEY = SigningKey.generate("ledger.test")
Make = Callable[..., EventWriter]
SMALL = WriterSettings(batch=64, interval_seconds=0.0005)


@pytest.fixture
def ledger(any_store: Engine, make_writer: Make, world: Callable[..., Any]) -> Engine:
    """A few tenants' custody in many commits."""
    writer = make_writer(any_store, settings=SMALL)
    lived = world(3)
    writer.submit([WorkerStarted(1, "worker-1", 48, 2, 4096, "cpu", "test")])
    for _ in range(20):
        done = len(lived.events)
        lived.run(60)
        writer.submit(lived.events[done:])
        assert writer.flush()
    writer.close()
    return any_store


def sign(engine: Engine) -> None:
    """The newest checkpoint, signed."""
    with engine.begin() as connection:
        newest = LedgerProofs(connection).checkpoint()
        note = sign_checkpoint(root_checkpoint(KEY.name, newest.head), [KEY])
        values = {"size": newest.size, "note": note, "at_us": 1}
        connection.execute(signed_checkpoints.insert().values(**values))


def test_stored_heads_are_those_of_the_leaves(ledger: Engine) -> None:
    """Frontier, root leaf and tiles of every log agree with its leaves, and the checkpoint with the root leaves."""
    with ledger.connect() as connection:
        proofs = LedgerProofs(connection)
        log_heads = proofs.logs()
        assert len(log_heads) == 4 and sum(log.head.size for log in log_heads) > 500
        for name, head in log_heads:
            query = select(events.c.leaf).join(logs, logs.c.id == events.c.log).where(logs.c.name == name)
            leaves = [bytes(leaf) for leaf in connection.scalars(query.order_by(events.c.idx))]
            assert EMPTY.extend(leaf_hashes(leaves)).frontier.head() == head == proofs.head(name)
            assert tree_root(proofs.tiles(name), head.size) == head.root
        newest = proofs.checkpoint()
        openings = proofs.openings(0, newest.size)
        root = EMPTY.extend(leaf_hashes(opening.commitment() for opening in openings)).frontier
        assert root.head() == newest.head
        latest = {name: EMPTY.head() for name, _ in log_heads}
        for opening in openings:
            before = latest[opening.name]
            path = proofs.consistency(opening.name, before.size, opening.head.size)
            check_consistency(before, opening.head, path)
            latest[opening.name] = opening.head
        assert latest == dict(log_heads)


def test_a_leaf_is_proved_to_whoever_has_the_key(ledger: Engine) -> None:
    sign(ledger)
    with ledger.connect() as connection:
        proofs = LedgerProofs(connection)
        for name, head in proofs.logs():
            for idx in (0, head.size // 2, head.size - 1):
                leaf = proofs.leaf(name, idx)
                proof = parse_leaf_proof(proofs.inclusion(name, idx).to_bytes())
                sealed = check_leaf(proof, leaf, [KEY.verifier])
                assert (sealed.name, sealed.head) == (name, head)
                with pytest.raises(ProofError):
                    check_leaf(proof, leaf + b" ", [KEY.verifier])
                with pytest.raises(NoteError):
                    check_leaf(proof, leaf, [SigningKey.generate(KEY.name).verifier])
            assert check_head(proofs.head_proof(name), [KEY.verifier]).head == head


def proofs_of(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> tuple[list[bytes], int]:
    """Proofs over the largest log, and the most leaves that one of them hashed again with one question."""
    read: list[int] = []
    hashed = LogTiles.hashed

    def note(tiles: LogTiles, rows: Any, ranges: Any) -> dict[int, bytes]:
        read.append(len(rows))
        return hashed(tiles, rows, ranges)

    proofs = LedgerProofs(connection)
    name, head = max(proofs.logs(), key=lambda log: log.head.size)
    with monkeypatch.context() as patched:
        patched.setattr(LogTiles, "hashed", note)
        found = [proofs.inclusion(name, idx).to_bytes() for idx in range(0, head.size, 37)]
        found += [b"".join(proofs.consistency(name, size, head.size)) for size in range(0, head.size, 37)]
        newest = proofs.checkpoint().size
        found += [b"".join(proofs.root_consistency(size, newest)) for size in range(1, newest, 7)]
    return found, max(read)


def test_half_levels_change_what_a_proof_reads_and_nothing_else(
    ledger: Engine,
    unguarded: Callable[[Connection], None],
    guard: Callable[[Connection], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A ledger from before there were any, or from in between, gives the same proofs; fsck misses none of them."""
    sign(ledger)
    with ledger.connect() as connection:
        unguarded(connection)
        with_halves, read = proofs_of(connection, monkeypatch)
        assert len(with_halves) > 20 and 16 <= read <= 32
        halves = tree_nodes.c.level >= HALF
        first = connection.scalar(select(tree_nodes.c.idx).where(halves).limit(1))
        connection.execute(delete(tree_nodes).where(halves, tree_nodes.c.idx == first))
        assert proofs_of(connection, monkeypatch)[0] == with_halves
        assert connection.execute(delete(tree_nodes).where(halves)).rowcount > 30
        found, read = proofs_of(connection, monkeypatch)
        assert found == with_halves and 192 <= read <= 512
        guard(connection)
        assert fsck(connection).ok


def test_a_proof_waits_for_the_database_twice(
    ledger: Engine, unguarded: Callable[[Connection], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However high the trees: once for the head and its checkpoint, once for the hashes of both and what is beside."""
    sign(ledger)
    asked: list[int] = []  # questions of each wait

    def alone(connection: Connection, *question: Any) -> Any:
        asked.append(1)
        return store.fetch_all(connection, *question)

    def together(connection: Connection, questions: Any) -> Any:
        asked.append(len(questions))
        return store.fetch_pipelined(connection, questions)

    for module in (ledger_proofs, stored_tiles):
        monkeypatch.setattr(module, "fetch_all", alone)
    monkeypatch.setattr(stored_tiles, "fetch_pipelined", together)
    with ledger.connect() as connection:
        unguarded(connection)
        proofs = LedgerProofs(connection)
        name, head = max(proofs.logs(), key=lambda log: log.head.size)

        def waits() -> list[int]:
            asked.clear()
            leaf, proof = LedgerProofs(connection).proven(name, head.size // 3)
            assert check_leaf(proof, leaf, [KEY.verifier]).name == name
            return list(asked)

        first = waits()  # and the leaf by itself, where it does not lie beside what was read
        assert first[:2] == [1, 3] and len(first) <= 4
        connection.execute(delete(tree_nodes).where(tree_nodes.c.level >= HALF))
        assert len(waits()) > len(first), "without half levels some is read when it is missed (control)"


def test_tiles_keep_the_leaves_of_one_reading_alone(ledger: Engine) -> None:
    """An export reads a whole log through them."""
    with ledger.connect() as connection:
        proofs = LedgerProofs(connection)
        tiles = proofs.tiles(max(proofs.logs(), key=lambda log: log.head.size).name)
        assert isinstance(tiles, LogTiles)
        for index in range(3):
            tiles.row(0, 16 * index, 16 * index + 16)
            assert len(tiles.leaves) == 16


def test_a_wrong_half_level_is_found(
    ledger: Engine, unguarded: Callable[[Connection], None], guard: Callable[[Connection], None]
) -> None:
    with ledger.connect() as connection:
        assert fsck(connection).ok
        unguarded(connection)
        halves = select(tree_nodes.c.log, tree_nodes.c.idx).where(tree_nodes.c.level == HALF)
        log, idx = connection.execute(halves.where(tree_nodes.c.log > 0).limit(1)).one()
        here = (tree_nodes.c.log == log, tree_nodes.c.level == HALF, tree_nodes.c.idx == idx)
        connection.execute(update(tree_nodes).where(*here).values(hash=bytes(32)))
        guard(connection)
        problems = fsck(connection).problems
    assert [(problem.idx, problem.last) for problem in problems] == [(16 * idx, 16 * idx + 15)]


def test_as_of_an_earlier_checkpoint_nothing_later_is_seen(ledger: Engine) -> None:
    """L2."""
    with ledger.connect() as connection:
        proofs = LedgerProofs(connection)
        sizes = connection.scalars(select(checkpoints.c.size).order_by(checkpoints.c.size)).all()
        assert len(sizes) > 5
        before: dict[str, TreeHead] = {}
        for as_of in sizes:
            heads = dict(proofs.logs(as_of=as_of))
            assert sum(head.size for head in heads.values()) > sum(head.size for head in before.values())
            for name, old in before.items():
                path = proofs.consistency(name, old.size, heads[name].size)
                check_consistency(old, heads[name], path)
                assert proofs.head(name, as_of=as_of) == heads[name]
            before = heads
        assert before == dict(proofs.logs())
        first, last = proofs.checkpoint(sizes[0]), proofs.checkpoint()
        check_consistency(first.head, last.head, proofs.root_consistency(first.size, last.size))


def test_what_is_not_there_is_refused_with_a_reason(ledger: Engine) -> None:
    with ledger.connect() as connection:
        proofs = LedgerProofs(connection)
        size = proofs.checkpoint().size
        with pytest.raises(ProofError, match="no signed checkpoint covers this"):
            proofs.inclusion("system", 0)
        with pytest.raises(ProofError, match="no log `tenant/x`"):
            proofs.head("tenant/x")
        with pytest.raises(ProofError, match="holds no leaf `9999`"):
            proofs.leaf("system", 9999)
        with pytest.raises(ProofError, match="no checkpoint of"):
            proofs.logs(as_of=size + 1)
        with pytest.raises(ProofError, match="leaves, not"):
            proofs.root_consistency(1, size + 1)
        with pytest.raises(ProofError, match="leaves, not"):
            proofs.consistency("system", 0, 10**6)


@pytest.mark.parametrize("damage", ["bit", "size", "swapped"])
def test_nothing_is_written_on_a_damaged_tree(ledger: Engine, make_writer: Make, damage: str) -> None:
    """The database counts as lost, events go to the spill, and none becomes a gap."""
    with ledger.begin() as connection:
        rows = connection.execute(select(logs.c.id, logs.c.frontier, logs.c.size).order_by(logs.c.id)).all()
        bad = bytearray(rows[0].frontier)
        bad[-1] ^= 1
        frontier = {"bit": bytes(bad), "size": rows[0].frontier, "swapped": rows[1].frontier}[damage]
        size = rows[0].size + (damage == "size")
        connection.execute(update(logs).where(logs.c.id == rows[0].id).values(frontier=frontier, size=size))
        before = connection.scalar(select(root_leaves.c.idx).order_by(root_leaves.c.idx.desc()))
    writer = make_writer(ledger, worker="worker-2", settings=SMALL)
    writer.submit([WorkerStarted(1, "worker-2", 48, 2, 4096, "cpu", "test")])
    assert writer.flush()
    status = writer.status()
    assert not status.healthy and status.spilled_bytes > 0
    assert "KVC620" in status.cause
    with ledger.connect() as connection:
        assert before == connection.scalar(select(root_leaves.c.idx).order_by(root_leaves.c.idx.desc()))
