"""`kvcustody audit rotate-key` and `keys`: a handover by command, on record; what the old key signed still verifies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.signed_note import KeyKind
from kvcustody.audit.tlog.signing_key import SigningKey, create_signing_key, read_signing_key
from kvcustody.audit.write.record_operator_act import recorder
from kvcustody.clock import SystemClock
from kvcustody.governance.keys.checkpoint_signing_key import open_signing_key
from kvcustody.migrations.upgrade import upgrade
from standins.console.command_line import Run, answer

CLOCK = SystemClock()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a signed ledger, its key on record, and an export of then."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVCUSTODY_DATABASE_URL", raising=False)
    engine = open_store("sqlite:///kvcustody.db", timeout_seconds=2.0)
    upgrade(engine)
    with recorder(engine, CLOCK) as writer:
        key = open_signing_key(tmp_path / "signing.key", "ledger.example/acme", engine, writer, CLOCK)
    assert key is not None
    CheckpointSigner(engine, [key], memory=tmp_path / "signing.key.last", clock=CLOCK).sign_once()
    engine.dispose()
    return tmp_path


def test_a_handover_is_recorded_and_old_notes_still_verify(run: Run, place: Path) -> None:
    old = read_signing_key(place / "signing.key")
    run("audit export before")
    handover = answer(run("audit rotate-key --signing-key signing.key --actor custodian --json"))
    new = read_signing_key(place / "signing.key")
    assert (handover["old"], handover["new"]) == (str(old.verifier), str(new.verifier)) and old != new
    assert read_signing_key(Path(handover["kept"])) == old
    recorded = answer(run("audit query --kind signing-key --json"))
    assert "custodian" in json.dumps(recorded) and str(new.verifier) in json.dumps(recorded)
    chain = answer(run(f"audit keys --key {old.verifier} --json"))["keys"]
    assert [each["key"] for each in chain] == [str(old.verifier), str(new.verifier)]
    assert chain[0]["last_size"] == chain[1]["first_size"] == handover["size"]
    run("audit export after")
    run(f"audit verify before --key {old.verifier}")
    run(f"audit verify after --key {new.verifier}")
    run(f"audit verify after --key {old.verifier}")  # by the handover on record
    run(f"audit verify after --key {SigningKey.generate(old.verifier.name).verifier}", exits=1)
    assert answer(run(f"audit fsck --key {old.verifier} --key {new.verifier} --json"))["verified"] == 3


def test_a_post_quantum_key_takes_over_and_hands_back(run: Run, place: Path) -> None:
    old = read_signing_key(place / "signing.key").verifier
    made = answer(run("audit rotate-key --signing-key signing.key --actor custodian --kind ml-dsa-44 --json"))
    lattice = read_signing_key(place / "signing.key").verifier
    assert lattice.kind is KeyKind.ML_DSA_44 and made["new"] == str(lattice)
    (place / "lattice.vkey").write_text(f"{lattice}\n")
    run("audit export after")
    run("audit verify after --key lattice.vkey")
    run(f"audit verify after --key {old}")  # by the handover on record
    run(f"audit verify after --key {SigningKey.generate(old.name, KeyKind.ML_DSA_44).verifier}", exits=1)
    alone = [sys.executable, str(place / "after" / "verify_kvcustody.py"), str(place / "after"), "--key"]
    told = subprocess.run([*alone, str(lattice)], capture_output=True, text=True, check=False)
    assert told.returncode != 0 and "cannot check ML-DSA-44" in told.stdout + told.stderr
    kept = answer(run("audit rotate-key --signing-key signing.key --actor custodian --json"))["new"]
    assert read_signing_key(place / "signing.key").verifier.kind is KeyKind.ML_DSA_44, "without --kind: the same"
    back = answer(run("audit rotate-key --signing-key signing.key --actor custodian --kind ed25519 --json"))
    chain = [each["key"] for each in answer(run("audit keys --json"))["keys"]]
    assert chain == [str(old), str(lattice), kept, back["new"]]


def test_a_key_that_signs_or_is_another_ledgers_is_not_rotated(run: Run, place: Path) -> None:
    before = (place / "signing.key").read_bytes()
    engine = open_store("sqlite:///kvcustody.db")
    key = read_signing_key(place / "signing.key")
    signer = CheckpointSigner(engine, [key], memory=place / "signing.key.last", clock=CLOCK)
    signer.start()
    assert "stop it first" in run("audit rotate-key --signing-key signing.key --actor custodian", exits=2).stderr
    signer.close()
    engine.dispose()
    assert "does not exist" in run("audit rotate-key --signing-key other.key --actor custodian", exits=2).stderr
    assert (place / "signing.key").read_bytes() == before
    assert len(answer(run("audit keys --json"))["keys"]) == 1
    other = create_signing_key(place / "other.key", "ledger.example/acme")
    assert "not the one" in run("audit rotate-key --signing-key other.key --actor custodian", exits=2).stderr
    assert "no handover" in run(f"audit keys --key {other.verifier}", exits=2).stderr
