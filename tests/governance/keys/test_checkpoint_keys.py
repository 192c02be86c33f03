"""The signing key of a ledger (H1, H2): on record before it signs, apart from data keys, handed over on record."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from kvcustody.audit.kinds import GapRecorded
from kvcustody.audit.tlog.checkpoint import open_checkpoint
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.key_rotation import check_period, key_periods
from kvcustody.audit.tlog.signed_note import KeyKind, NoteError
from kvcustody.audit.tlog.signing_key import SigningKey, create_signing_key, read_signing_key, sign_checkpoint
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import SystemClock
from kvcustody.errors import ConfigError, LedgerUnavailable
from kvcustody.governance.keys.checkpoint_signing_key import (
    open_signing_key,
    recorded_keys,
    rotate_signing_key,
)
from kvcustody.governance.ledger_protocol import CountingLedger
from kvcustody.governance.settings import Settings
from standins import builders

CLOCK = SystemClock()
ORIGIN = "ledger.test/kvcustody"


@pytest.fixture
def engine(tmp_path: Path, migrated: Path) -> Iterator[Engine]:
    with builders.ledger(migrated, tmp_path / "ledger.db") as made:
        yield made


@pytest.fixture
def writer(engine: Engine, tmp_path: Path) -> Iterator[EventWriter]:
    spill = tmp_path / "spill"
    spill.mkdir()
    with contextlib.closing(builders.writer(engine, spill, clock=CLOCK)) as made:
        yield made


def test_a_ledgers_first_key_may_be_post_quantum(engine: Engine, writer: EventWriter, tmp_path: Path) -> None:
    path = tmp_path / "signing.key"
    key = open_signing_key(path, ORIGIN, engine, writer, CLOCK, KeyKind.named("ml-dsa-44"))
    assert key is not None and key.verifier.kind is KeyKind.ML_DSA_44
    assert open_signing_key(path, ORIGIN, engine, writer, CLOCK) == key, "an existing key keeps its kind"
    note = CheckpointSigner(engine, [key], memory=path.with_suffix(".last"), clock=CLOCK).sign_once()
    assert note is not None and open_checkpoint(note.note, [key.verifier]).checkpoint.head.size == note.size
    with pytest.raises(NoteError):
        open_checkpoint(note.note, [SigningKey.generate(ORIGIN, KeyKind.ML_DSA_44).verifier])


def test_a_handover_is_on_record_and_both_keys_keep_to_their_trees(
    engine: Engine, writer: EventWriter, tmp_path: Path
) -> None:
    path = tmp_path / "signing.key"
    first = open_signing_key(path, ORIGIN, engine, writer, CLOCK)
    assert first is not None and open_signing_key(path, ORIGIN, engine, writer, CLOCK) == first
    memory = tmp_path / "signing.key.last"
    old_note = None
    signer = CheckpointSigner(engine, [first], memory=memory, clock=CLOCK)
    old_note = signer.sign_once()
    second = rotate_signing_key(path, signer, writer, CLOCK, "custodian")
    writer.submit([GapRecorded(1, "test", 1, 1)])
    assert writer.flush() and old_note is not None
    assert open_signing_key(path, ORIGIN, engine, writer, CLOCK) == second != first
    note = CheckpointSigner(engine, [second], memory=memory, clock=CLOCK).sign_once()
    assert note is not None
    periods = recorded_keys(engine)
    assert [period.key for period in periods] == [first.verifier, second.verifier]
    keys = [period.key for period in periods]
    for signed in (old_note.note, note.note):
        check_period(open_checkpoint(signed, keys), periods)
    with engine.connect() as connection:
        newest = LedgerProofs(connection).checkpoint()
    leaked = sign_checkpoint(open_checkpoint(note.note, keys).checkpoint, [first])
    assert newest.size > periods[0].last_size  # type: ignore[operator]
    with pytest.raises(NoteError, match="may not sign"):
        check_period(open_checkpoint(leaked, keys), periods)
    assert read_signing_key(tmp_path / f"signing.key.{first.verifier.key_id.hex()}") == first
    assert key_periods(first.verifier, []) != periods


def test_an_interrupted_handover_is_finished_or_dropped(engine: Engine, writer: EventWriter, tmp_path: Path) -> None:
    path = tmp_path / "signing.key"
    first = open_signing_key(path, ORIGIN, engine, writer, CLOCK)
    assert first is not None
    create_signing_key(tmp_path / "signing.key.next", ORIGIN)
    assert open_signing_key(path, ORIGIN, engine, writer, CLOCK) == first  # not recorded: dropped
    assert not (tmp_path / "signing.key.next").exists()
    signer = CheckpointSigner(engine, [first], memory=tmp_path / "last", clock=CLOCK)
    second = rotate_signing_key(path, signer, writer, CLOCK, "custodian")
    path.rename(tmp_path / "signing.key.next")  # recorded, and the process died before the files changed places
    (tmp_path / f"signing.key.{first.verifier.key_id.hex()}").rename(path)
    assert open_signing_key(path, ORIGIN, engine, writer, CLOCK) == second


def test_a_handover_that_is_not_recorded_does_not_happen(engine: Engine, writer: EventWriter, tmp_path: Path) -> None:
    class Away(CountingLedger):
        def submit_durable(self, event: object, /) -> int:
            raise LedgerUnavailable("away", sequence=1, cause="away")

    path = tmp_path / "signing.key"
    first = open_signing_key(path, ORIGIN, engine, writer, CLOCK)
    assert first is not None
    signer = CheckpointSigner(engine, [first], memory=tmp_path / "last", clock=CLOCK)
    with pytest.raises(LedgerUnavailable):
        rotate_signing_key(path, signer, Away(), CLOCK, "custodian")
    assert open_signing_key(path, ORIGIN, engine, writer, CLOCK) == first
    assert len(recorded_keys(engine)) == 1


def test_another_key_never_signs_the_same_ledger(engine: Engine, writer: EventWriter, tmp_path: Path) -> None:
    assert open_signing_key(tmp_path / "one.key", ORIGIN, engine, writer, CLOCK) is not None
    assert open_signing_key(tmp_path / "two.key", ORIGIN, engine, writer, CLOCK) is None
    assert not (tmp_path / "two.key").exists()
    create_signing_key(tmp_path / "three.key", ORIGIN)
    with pytest.raises(ConfigError, match="is not the one that signs this ledger"):
        open_signing_key(tmp_path / "three.key", ORIGIN, engine, writer, CLOCK)


@pytest.mark.parametrize("other", ["root_key_path", "scope_token_key_path", "keyring_path"])
def test_the_signing_key_has_a_file_of_its_own(other: str, tmp_path: Path) -> None:
    place = tmp_path / "a.key"
    with pytest.raises(ValueError, match="a key of their own"):
        Settings(**{other: place, "signing_key_path": place})  # type: ignore[arg-type]
