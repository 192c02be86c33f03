"""Rotations of the signing key are followed from a trusted key, and only if the log has them."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import Engine

from kvcustody.audit.exports.export_writer import ExportSelection, write_export
from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.kinds import GapRecorded, SigningKeyRecorded
from kvcustody.audit.leaf.merkle import TreeHead
from kvcustody.audit.tlog.checkpoint import parse_checkpoint
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.key_rotation import parse_rotation, rotation_record
from kvcustody.audit.tlog.signed_note import parse_note
from kvcustody.audit.tlog.signing_key import SigningKey, sign_checkpoint
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.clock import SystemClock
from standins.audit.verifiers import verify_both

ORIGIN = "ledger.example/chain"
CLOCK = SystemClock()


class Chain(NamedTuple):
    """A ledger whose signing key was handed over twice, and its export."""

    store: Engine
    keys: list[SigningKey]
    folder: Path


def rotated(new: SigningKey, record: bytes) -> SigningKeyRecorded:
    return SigningKeyRecorded(
        CLOCK.now_us(), "rotated", str(new.verifier), base64.b64encode(record).decode(), "custodian"
    )


@pytest.fixture
def build(store: Engine, make_writer: Callable[..., Any], tmp_path: Path) -> Callable[..., Chain]:
    def make(*, root: Callable[[bytes], bytes] = lambda root: root) -> Chain:
        keys = [SigningKey.generate(ORIGIN) for _ in range(3)]
        writer = make_writer(store)
        writer.submit_durable(SigningKeyRecorded(1, "made", str(keys[0].verifier), "", "governor"))
        for old, new in zip(keys, [*keys[1:], None], strict=True):
            writer.submit([GapRecorded(1, "test", 1, 1)])
            assert writer.flush()
            signer = CheckpointSigner(store, [old], memory=tmp_path / "last", clock=CLOCK)
            assert signer.sign_once()
            if new is not None:
                head = signer.last_head()
                record = rotation_record(old, new, TreeHead(head.size, root(head.root)), 1)
                writer.submit_durable(rotated(new, record))
        write_export(tmp_path / "export", LedgerSource(store), made_at_us=1)
        return Chain(store, keys, tmp_path / "export")

    return make


def problems(folder: Path, key: SigningKey) -> list[str]:
    """What the library and the stand-alone program find wrong."""
    return verify_both(folder, str(key.verifier)).problems


def change_manifest(folder: Path, change: Callable[[Any], None]) -> None:
    path = folder / "manifest.json"
    value = json.loads(path.read_bytes())
    change(value)
    path.write_text(json.dumps(value))
    if not value["handovers"]:
        shutil.rmtree(folder / "keys", ignore_errors=True)  # a forger leaves nothing behind that is not named


def sign_again(folder: Path, key: SigningKey) -> None:
    """The same checkpoint under another signature, wherever the export has it."""
    note = (folder / "checkpoint").read_bytes()
    again = sign_checkpoint(parse_checkpoint(parse_note(note).text), [key])
    for path in [folder / "checkpoint", *folder.rglob("*.tlog-proof")]:
        path.write_bytes(path.read_bytes().replace(note, again))


def test_from_one_key_every_later_one_is_followed(build: Callable[..., Chain]) -> None:
    store, keys, folder = build()
    for key in keys:
        assert problems(folder, key) == []
    assert verify_both(folder, str(keys[0].verifier)).handovers == 2
    stranger = SigningKey.generate(ORIGIN)
    assert problems(folder, stranger)
    with store.connect() as connection:
        report = fsck(connection, keys=[keys[0].verifier])
        assert report.ok and report.verified == report.signed == 3
        # What an earlier key signed is not the word of a later one.
        assert [problem.what for problem in fsck(connection, keys=[keys[2].verifier]).problems]
    # Positive control: what is not told about handovers trusts one key alone.
    change_manifest(folder, lambda value: value.update(handovers=[]))
    assert problems(folder, keys[0])


def test_a_handover_that_is_not_in_the_log_is_refused(build: Callable[..., Chain], tmp_path: Path) -> None:
    """A thief of the first key hands over to himself, with both signatures, and signs the checkpoint."""
    _, keys, folder = build()
    thief = SigningKey.generate(ORIGIN)
    first = json.loads((folder / "keys/000001.leaf").read_bytes())
    record = base64.b64decode(first["record"])
    size, root = parse_rotation(record).head
    forged = rotation_record(keys[0], thief, TreeHead(size, root), 1)
    first |= {"vkey": str(thief.verifier), "record": base64.b64encode(forged).decode()}
    for listed in (1, 2):  # instead of the others, and before them
        place = tmp_path / f"forged-{listed}"
        shutil.copytree(folder, place)
        (place / "keys/000001.leaf").write_text(json.dumps(first, separators=(",", ":")))
        some = json.loads((folder / "manifest.json").read_bytes())["handovers"][:listed]
        change_manifest(place, partial(dict.update, handovers=some))
        for left in (place / "keys").iterdir():
            if f"keys/{left.stem}" not in [entry["place"] for entry in some]:
                left.unlink()
        sign_again(place, thief)
        assert problems(place, keys[0])
    assert "is not the one in the tree" in problems(tmp_path / "forged-1", keys[0])[0]
    assert problems(folder, keys[0]) == []


def test_a_key_signs_nothing_past_its_handover(build: Callable[..., Chain], tmp_path: Path) -> None:
    store, keys, folder = build()
    sign_again(folder, keys[0])
    assert "may not sign a tree" in problems(folder, keys[0])[0]
    # Hiding the handovers does not help where the export is whole: the system log has them.
    change_manifest(folder, lambda value: value.update(handovers=[]))
    assert problems(folder, keys[0]) == ["the system log has other handovers of the signing key than the export lists"]
    # Positive control, and the limit: in an export of a part, without that log, nothing is left to contradict it.
    write_export(tmp_path / "part", LedgerSource(store), ExportSelection(since_us=1, until_us=2), made_at_us=1)
    sign_again(tmp_path / "part", keys[0])
    assert problems(tmp_path / "part", keys[0])
    change_manifest(tmp_path / "part", lambda value: value.update(handovers=[]))
    assert problems(tmp_path / "part", keys[0]) == []


def test_a_handover_over_another_tree_is_refused(build: Callable[..., Chain]) -> None:
    """It is in the log and both keys signed it, and the old one consented to another history."""
    store, keys, folder = build(root=lambda root: bytes(32))
    assert "does not lead to the new root" in problems(folder, keys[0])[0]
    with store.connect() as connection:
        what = [problem.what for problem in fsck(connection, keys=[keys[0].verifier]).problems]
    assert sum("handed over at a tree" in each for each in what) == 2
