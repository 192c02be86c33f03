"""The signer: behind the commits, never past a contradiction, and never blocking others."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, delete, select, update

from kvcustody.audit.kinds import GapRecorded
from kvcustody.audit.store.schema.trees import checkpoints, root_leaves, signed_checkpoints
from kvcustody.audit.tlog.checkpoint import open_checkpoint
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner, last_signed
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.proofs import ProofError
from kvcustody.audit.tlog.signed_note import NoteError
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import SystemClock

KEY = SigningKey.generate("ledger.test")
Make = Callable[..., EventWriter]
Unguarded = Callable[[Connection], None]


def signer(engine: Engine, folder: Path, **rest: float) -> CheckpointSigner:
    return CheckpointSigner(engine, [KEY], memory=folder / "signed", clock=SystemClock(), **rest)  # type: ignore[arg-type]


def write(writer: EventWriter, count: int = 1) -> None:
    for number in range(count):
        writer.submit([GapRecorded(1, "test", number, number)])
        assert writer.flush()


def test_the_newest_checkpoint_is_signed_once(any_store: Engine, make_writer: Make, tmp_path: Path) -> None:
    """With nothing new nothing is signed, and each note is the newest checkpoint's."""
    signs, writer = signer(any_store, tmp_path), make_writer(any_store)
    assert signs.sign_once() is None
    sizes = []
    for _ in range(3):
        write(writer, 2)
        checkpoint = signs.sign_once()
        assert checkpoint is not None and signs.sign_once() is None
        sizes.append(checkpoint.size)
        with any_store.connect() as connection:
            proofs = LedgerProofs(connection)
            stored = proofs.signed()
            assert stored == checkpoint and proofs.checkpoint().size == checkpoint.size
            assert open_checkpoint(stored.note, [KEY.verifier]).checkpoint.head == proofs.checkpoint().head
    assert sizes == sorted(set(sizes)) and signs.status() == (sizes[-1], checkpoint.at_us, "", "")


@pytest.mark.parametrize("harm", ["cut", "rewritten", "emptied"])
def test_what_contradicts_the_last_signature_is_not_signed(
    any_store: Engine, make_writer: Make, unguarded: Unguarded, tmp_path: Path, harm: str
) -> None:
    """Z2, with the notes gone from the database too: the file remembers."""
    signs, writer = signer(any_store, tmp_path), make_writer(any_store)
    write(writer, 3)
    assert signs.sign_once() is not None
    with any_store.begin() as connection:
        unguarded(connection)
        connection.execute(delete(signed_checkpoints))
        if harm == "rewritten":
            connection.execute(update(root_leaves).where(root_leaves.c.idx == 0).values(salt=b"\1" * 32))
        else:
            newest = connection.scalars(select(checkpoints.c.size).order_by(checkpoints.c.size)).all()
            kept = 0 if harm == "emptied" else newest[0]
            connection.execute(delete(checkpoints).where(checkpoints.c.size > kept))
    if harm == "rewritten":
        write(writer)
    with pytest.raises(ProofError):
        signs.sign_once()
    signs._try()
    assert signs.status().refused and not signs.status().problem
    with any_store.connect() as connection:
        assert LedgerProofs(connection).signed_or_none() is None


def test_without_its_memory_the_same_cut_is_signed(
    any_store: Engine, make_writer: Make, unguarded: Unguarded, tmp_path: Path
) -> None:
    """Positive control of Z2."""
    signs, writer = signer(any_store, tmp_path), make_writer(any_store)
    write(writer, 3)
    assert signs.sign_once() is not None
    with any_store.begin() as connection:
        unguarded(connection)
        connection.execute(delete(signed_checkpoints))
        first = min(connection.scalars(select(checkpoints.c.size)).all())
        connection.execute(delete(checkpoints).where(checkpoints.c.size > first))
    (tmp_path / "signed").unlink()
    assert signs.sign_once() is not None


def test_a_crash_between_memory_and_database_signs_the_same_again(
    any_store: Engine, make_writer: Make, unguarded: Unguarded, tmp_path: Path
) -> None:
    """Z3."""
    signs = signer(any_store, tmp_path)
    write(make_writer(any_store))
    checkpoint = signs.sign_once()
    assert checkpoint is not None
    with any_store.begin() as connection:
        unguarded(connection)
        connection.execute(delete(signed_checkpoints))
    again = signs.sign_once()
    assert again is not None and (again.size, last_signed(tmp_path / "signed")) == (
        checkpoint.size,
        open_checkpoint(again.note, [KEY.verifier]).checkpoint.head,
    )


def test_the_thread_signs_and_a_lost_database_is_a_problem_not_an_end(
    store: Engine, make_writer: Make, tmp_path: Path, lock: Callable[[Engine], object]
) -> None:
    """Z4, and a waiter of class A is not kept waiting by a signer that is stuck on a damaged memory."""
    signs, writer = signer(store, tmp_path, interval_seconds=0.02), make_writer(store)
    signs.start()
    write(writer)
    deadline = time.monotonic() + 60
    while signs.status().size == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert signs.status().size == 1
    (tmp_path / "signed").write_bytes(b"damaged")
    write(writer)
    while not signs.status().problem and time.monotonic() < deadline:
        time.sleep(0.01)
    assert signs.status().problem
    with pytest.raises(NoteError):
        last_signed(tmp_path / "signed")
    signs.close()
    signs.close()
