"""The independent verifier (`independent.py`) and the product, side by side: keys, notes, paths and proofs of leaves.

What the one accepts and refuses must be what the other accepts and refuses.
"""

from __future__ import annotations

import hashlib
import random
import struct
from pathlib import Path

import pytest

from kvcustody.audit.leaf.merkle import leaf_hashes
from kvcustody.audit.tlog import backend, stdlib_backend
from kvcustody.audit.tlog.checkpoint import Checkpoint, open_checkpoint
from kvcustody.audit.tlog.proofs import MemoryTiles, check_consistency, consistency_proof, inclusion_proof
from kvcustody.audit.tlog.root_log import HeadProof, LeafProof, check_leaf, parse_leaf_proof, seal
from kvcustody.audit.tlog.signed_note import KeyKind
from kvcustody.audit.tlog.signing_key import SigningKey, sign_checkpoint
from kvcustody.audit.tlog.tiles import CHECKPOINT, write_export
from kvcustody.errors import LedgerError
from standins.audit.independent import (
    ORDER,
    check_leaf_file,
    decode,
    ed25519,
    fsck_tiles,
    read_checkpoint,
    root_from_path,
    roots_from_proof,
)

LOG = SigningKey.from_seed("ledger.example/root", KeyKind.ED25519, bytes(range(32)))
WITNESS = SigningKey.from_seed("witness.example/w1", KeyKind.COSIGNATURE, bytes(range(9, 41)))
LEAVES = [b'{"at_us":%d}' % number for number in range(700)]


def test_all_know_the_vectors_of_rfc_8032() -> None:
    """§7.1, tests 1 and 2: each is right, and refuses each of their edits that we try."""
    for public, message, signature in (
        (
            "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
            "",
            "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
            "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
        ),
        (
            "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
            "72",
            "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
            "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
        ),
    ):
        key, text, line = bytes.fromhex(public), bytes.fromhex(message), bytes.fromhex(signature)
        verify = (
            lambda *given: ed25519(given[0], given[2], given[1]),
            backend.ed25519_verifies,
            stdlib_backend.ed25519_verifies,
        )
        more = (int.from_bytes(line[32:], "little") + ORDER).to_bytes(32, "little")  # the same modulo the order
        wrong = [
            line[:40] + bytes([line[40] ^ 1]) + line[41:],
            line[:32] + bytes(32),
            line[:32] + more,
            line[:63],
        ]
        for verifies in verify:
            assert verifies(key, line, text) and not verifies(key, line, text + b"x")
            assert not any(verifies(key, each, text) for each in wrong)
            assert not verifies(b"\xff" * 32, line, text)


@pytest.mark.parametrize(
    "text",
    [
        *(
            b'{"a":1,"b":[null,true,"\\u00e9\\ud83d\\ude00"]}',
            b'{"a":1,"a":2}',
            b"1.5e3",
            b'"\xc3\xa9"',
            b" [ ] ",
        ),
        *(
            b"NaN",
            b"1e400",
            b"[Infinity]",
            b'"\\ud800"',
            b'"\xff"',
            b"\xef\xbb\xbf1",
            b"",
            b"[" * 100_000,
            b"01",
            b"{'a':1}",
        ),
    ],
)
def test_both_backends_read_the_same_json(text: bytes) -> None:
    answers = []
    for read in (backend.parse_json, stdlib_backend.parse_json):
        try:
            answers.append(read(text))
        except ValueError:
            answers.append("refused")
    assert answers[0] == answers[1]


@pytest.mark.parametrize("key", [LOG, WITNESS], ids=lambda key: key.kind.name)
def test_our_notes_are_read_and_their_edits_refused(key: SigningKey) -> None:
    head = MemoryTiles(leaf_hashes(LEAVES)).frontier.head()
    note = sign_checkpoint(Checkpoint(LOG.name, *head), [LOG, WITNESS], at_seconds=1_679_315_147).decode()
    assert read_checkpoint(note, str(key.verifier)) == head
    other = SigningKey.from_seed(key.name, key.kind, bytes(32))
    assert read_checkpoint(note, str(other.verifier)) is None
    assert read_checkpoint(note.replace("\n700\n", "\n701\n"), str(key.verifier)) is None


def test_an_ml_dsa_line_signs_the_structure_of_the_specification() -> None:
    """tlog-cosignature, `cosigned_message`, built here field by field; only the lattice arithmetic is the library's."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PublicKey

    key = SigningKey.from_seed("ledger.example/root", KeyKind.ML_DSA_44, bytes(range(32)))
    note = sign_checkpoint(Checkpoint("ledger.example/root", 700, bytes(range(32))), [key], at_seconds=1_679_315_147)
    name, key_id, encoded = str(key.verifier).split("+", 2)
    public = decode(encoded)
    assert (public[0], len(public)) == (6, 1 + 1312)
    data = decode(note.decode().splitlines()[-1].split(" ")[2])
    assert data[:4].hex() == key_id == hashlib.sha256(name.encode() + b"\n" + public).hexdigest()[:8]
    assert len(data) == 4 + 8 + 2420
    fields = [
        b"subtree/v1\n\x00",
        b"\x13ledger.example/root",
        struct.pack(">Q", 1_679_315_147),
        b"\x13ledger.example/root",
        struct.pack(">QQ", 0, 700),
        bytes(range(32)),
    ]
    assert data[4:12] == fields[2]
    verifier = MLDSA44PublicKey.from_public_bytes(public[1:])
    verifier.verify(data[12:], b"".join(fields))
    for place in range(len(fields)):
        wrong = b"".join([*fields[:place], bytes([fields[place][0] ^ 1]) + fields[place][1:], *fields[place + 1 :]])
        with pytest.raises(InvalidSignature):
            verifier.verify(data[12:], wrong)


def test_our_proofs_lead_to_the_roots_that_it_computes() -> None:
    chance = random.Random(1)
    tiles = MemoryTiles(leaf_hashes(LEAVES))
    for _ in range(150):
        size = chance.randrange(1, len(LEAVES) + 1)
        index, old = chance.randrange(size), chance.randrange(1, size + 1)
        root, old_root = (MemoryTiles(leaf_hashes(LEAVES[:count])).frontier.root() for count in (size, old))
        assert root_from_path(LEAVES[index], index, size, inclusion_proof(tiles, index, size)) == root
        proof = consistency_proof(tiles, old, size)
        assert roots_from_proof(old, size, proof, old_root) == (old_root, root)
        check_consistency((type(tiles.frontier.head()))(old, old_root), type(tiles.frontier.head())(size, root), proof)


def test_both_verifiers_accept_a_leaf_and_refuse_every_edit_of_its_proof() -> None:
    tenant, root_log = MemoryTiles(leaf_hashes(LEAVES)), MemoryTiles()
    openings = seal({"system": tenant.frontier.head(), "tenant/a": tenant.frontier.head()})
    root_log.extend(leaf_hashes(item.commitment() for item in openings))
    note = sign_checkpoint(Checkpoint(LOG.name, *root_log.frontier.head()), [LOG])
    head = HeadProof(openings[1], 1, tuple(inclusion_proof(root_log, 1, 2)), note)
    proof = LeafProof(5, tuple(inclusion_proof(tenant, 5, len(LEAVES))), head).to_bytes()
    vkey = str(LOG.verifier)
    assert check_leaf_file(proof, LEAVES[5], vkey) == "tenant/a"
    assert check_leaf(parse_leaf_proof(proof), LEAVES[5], [LOG.verifier]).name == "tenant/a"
    for place in range(len(proof)):
        wrong = bytearray(proof)
        wrong[place] ^= 1 + place % 127
        assert check_leaf_file(bytes(wrong), LEAVES[5], vkey) is None, place
        with pytest.raises(LedgerError):
            check_leaf(parse_leaf_proof(bytes(wrong)), LEAVES[5], [LOG.verifier])
    assert check_leaf_file(proof, LEAVES[6], vkey) is None


def test_it_verifies_an_exported_log_from_its_files(tmp_path: Path) -> None:
    """Bundles, tiles and the checkpoint, by the page of tlog-tiles; the attacks on them are in `test_tiles_tamper`."""
    head = MemoryTiles(leaf_hashes(LEAVES)).frontier.head()
    note = sign_checkpoint(Checkpoint(LOG.name, *head), [LOG])
    write_export(tmp_path / "log", LEAVES, head, {CHECKPOINT: note}, durable=False)
    assert fsck_tiles(tmp_path / "log", str(LOG.verifier))
    assert read_checkpoint(note.decode(), str(LOG.verifier)) == open_checkpoint(note, [LOG.verifier]).checkpoint.head
