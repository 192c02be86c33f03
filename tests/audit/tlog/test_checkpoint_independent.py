"""A second verifier, written from RFC 8032, RFC 6962 and the C2SP pages alone, reads what we write.

It shares no code with the product and needs only the standard library: Ed25519 is computed here from its definition.
What it accepts and refuses must be what the product accepts and refuses.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import random
import struct
from pathlib import Path

import pytest

from kvcustody.audit.tlog.checkpoint import Checkpoint, open_checkpoint
from kvcustody.audit.tlog.merkle import leaf_hashes
from kvcustody.audit.tlog.proofs import MemoryTiles, check_consistency, consistency_proof, inclusion_proof
from kvcustody.audit.tlog.root_log import HeadProof, LeafProof, check_leaf, parse_leaf_proof, seal
from kvcustody.audit.tlog.signed_note import KeyKind
from kvcustody.audit.tlog.signing_key import SigningKey, sign_checkpoint
from kvcustody.audit.tlog.tiles import CHECKPOINT, write_export
from kvcustody.errors import LedgerError

# -- Ed25519 by RFC 8032 §5.1.4, a point as (X, Y, Z, T) with x = X/Z, y = Y/Z, xy = T/Z -------------------------------

P = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P
Point = tuple[int, int, int, int]


def add(p: Point, q: Point) -> Point:
    a, b = (p[1] - p[0]) * (q[1] - q[0]) % P, (p[1] + p[0]) * (q[1] + q[0]) % P
    c, d = 2 * p[3] * q[3] * D % P, 2 * p[2] * q[2] % P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % P, g * h % P, f * g % P, e * h % P


def multiply(factor: int, point: Point) -> Point:
    total: Point = (0, 1, 1, 0)
    while factor:
        if factor & 1:
            total = add(total, point)
        point, factor = add(point, point), factor >> 1
    return total


def decode_point(data: bytes) -> Point | None:
    y = int.from_bytes(data, "little")
    sign, y = y >> 255, y & (2**255 - 1)
    if y >= P:
        return None
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    if (x * x - square) % P:
        x = x * pow(2, (P - 1) // 4, P) % P
    if (x * x - square) % P or (x == 0 and sign):
        return None
    x = P - x if x & 1 != sign else x
    return x, y, 1, x * y % P


@functools.cache
def ed25519(public: bytes, message: bytes, signature: bytes) -> bool:
    base = decode_point((4 * pow(5, -1, P) % P).to_bytes(32, "little"))
    key, point = decode_point(public), decode_point(signature[:32])
    s = int.from_bytes(signature[32:], "little")
    if len(signature) != 64 or base is None or key is None or point is None or s >= ORDER:
        return False
    challenge = int.from_bytes(hashlib.sha512(signature[:32] + public + message).digest(), "little") % ORDER
    left, right = multiply(s, base), add(point, multiply(challenge, key))
    return not (
        (left[0] * right[2] - right[0] * left[2]) % P or (left[1] * right[2] - right[1] * left[2]) % P
    )


# -- the C2SP pages ----------------------------------------------------------------------------------------------------


def decode(text: str) -> bytes:
    data = base64.b64decode(text, validate=True)
    assert base64.b64encode(data).decode() == text
    return data


def value_of(line: str, word: str) -> str:
    assert line.startswith(word + " ")
    return line[len(word) + 1 :]


def number(text: str) -> int:
    assert text == str(int(text))
    return int(text)


def read_checkpoint(note: str, vkey: str) -> tuple[int, bytes] | None:
    """Size and root, where the note carries a good line by the key."""
    name, key_id, encoded = vkey.split("+", 2)
    key = decode(encoded)
    assert hashlib.sha256(name.encode() + b"\n" + key).hexdigest()[:8] == key_id
    cut = note.rindex("\n\n")
    text, lines = note[: cut + 1], note[cut + 2 :]
    assert lines.endswith("\n")
    for line in lines[:-1].split("\n"):
        dash, signer, payload = line.split(" ")
        assert dash == "\u2014"
        data = decode(payload)
        if (signer, data[:4].hex()) != (name, key_id):
            continue
        message, signature = text.encode(), data[4:]
        if key[0] == 4:
            time = int.from_bytes(data[4:12], "big")
            message, signature = f"cosignature/v1\ntime {time}\n".encode() + message, data[12:]
        if ed25519(key[1:], message, signature):
            _, size, root = text[:-1].split("\n")
            return number(size), decode(root)
    return None


def root_from_path(leaf: bytes, index: int, size: int, path: list[bytes]) -> bytes:
    """RFC 6962 §2.1.1, turned round: which side the sibling is on follows from where the split is."""
    if size == 1:
        assert not path
        return hashlib.sha256(b"\x00" + leaf).digest()
    split = 1 << (size - 1).bit_length() - 1
    if index < split:
        return hashlib.sha256(b"\x01" + root_from_path(leaf, index, split, path[:-1]) + path[-1]).digest()
    return hashlib.sha256(
        b"\x01" + path[-1] + root_from_path(leaf, index - split, size - split, path[:-1])
    ).digest()


def roots_from_proof(
    old: int, size: int, proof: list[bytes], old_root: bytes, whole: bool = True
) -> tuple[bytes, bytes]:
    """RFC 6962 §2.1.2, turned round: the old root and the new one that a proof leads to."""
    if old == size:
        if whole:
            assert not proof
            return old_root, old_root
        assert len(proof) == 1
        return proof[0], proof[0]
    split = 1 << (size - 1).bit_length() - 1
    if old <= split:
        before, after = roots_from_proof(old, split, proof[:-1], old_root, whole)
        return before, hashlib.sha256(b"\x01" + after + proof[-1]).digest()
    before, after = roots_from_proof(old - split, size - split, proof[:-1], old_root, False)
    return (
        hashlib.sha256(b"\x01" + proof[-1] + before).digest(),
        hashlib.sha256(b"\x01" + proof[-1] + after).digest(),
    )


def check_leaf_file(data: bytes, leaf: bytes, vkey: str) -> str | None:
    """The sub-log that a leaf's proof places it in, by the formats of docs/audit/ledger.md#proofs-of-the-ledger."""
    try:
        of_leaf, of_head, note = data.decode().split("\n\n", 2)
        kind, index, *path = of_leaf.split("\n")
        head_kind, extra, head_index, *head_path = of_head.split("\n")
        assert (kind, head_kind) == ("kvcustody/leaf-proof@1", "c2sp.org/tlog-proof@v1")
        opening = decode(value_of(extra, "extra"))
        salt, size, root, name = (
            opening[:32],
            int.from_bytes(opening[32:40], "big"),
            opening[40:72],
            opening[72:],
        )
        found = root_from_path(leaf, number(value_of(index, "index")), size, [decode(item) for item in path])
        signed = read_checkpoint(note, vkey)
        assert found == root and signed is not None
        commitment = hmac.new(salt, b"kvcustody/sub-log-head@1\0" + opening[32:], hashlib.sha256).digest()
        at = number(value_of(head_index, "index"))
        above = root_from_path(commitment, at, signed[0], [decode(item) for item in head_path])
        return name.decode() if above == signed[1] else None
    except (AssertionError, ValueError, IndexError):
        return None


# -- both, side by side ------------------------------------------------------------------------------------------------

LOG = SigningKey.from_seed("ledger.example/root", KeyKind.ED25519, bytes(range(32)))
WITNESS = SigningKey.from_seed("witness.example/w1", KeyKind.COSIGNATURE, bytes(range(9, 41)))
LEAVES = [b'{"at_us":%d}' % number for number in range(700)]


def test_it_knows_the_vectors_of_rfc_8032() -> None:
    """§7.1, tests 1 and 2: the verifier itself is right, and refuses each of their edits that we try."""
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
        assert ed25519(key, text, line)
        assert not ed25519(key, text + b"x", line)
        assert not ed25519(key, text, line[:40] + bytes([line[40] ^ 1]) + line[41:])


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
    note = sign_checkpoint(
        Checkpoint("ledger.example/root", 700, bytes(range(32))), [key], at_seconds=1_679_315_147
    )
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
        wrong = b"".join(
            [*fields[:place], bytes([fields[place][0] ^ 1]) + fields[place][1:], *fields[place + 1 :]]
        )
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
        check_consistency(
            (type(tiles.frontier.head()))(old, old_root), type(tiles.frontier.head())(size, root), proof
        )


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
    """Bundles, tiles and the checkpoint, read by the page of tlog-tiles."""
    head = MemoryTiles(leaf_hashes(LEAVES)).frontier.head()
    note = sign_checkpoint(Checkpoint(LOG.name, *head), [LOG])
    write_export(tmp_path / "log", LEAVES, head, {CHECKPOINT: note}, durable=False)
    tree = tmp_path / "log" / "tile"
    found: list[bytes] = []
    for name in ("000", "001", "002.p/188"):
        data, hashes = (tree / "entries" / name).read_bytes(), b""
        while data:
            length = int.from_bytes(data[:2], "big")
            found.append(data[2 : 2 + length])
            hashes += hashlib.sha256(b"\x00" + found[-1]).digest()
            data = data[2 + length :]
        assert (tree / "0" / name).read_bytes() == hashes
    assert found == LEAVES
    level = [hashlib.sha256(b"\x00" + leaf).digest() for leaf in found[:512]]
    for _ in range(8):
        level = [
            hashlib.sha256(b"\x01" + a + b).digest() for a, b in zip(level[::2], level[1::2], strict=True)
        ]
    assert (tree / "1" / "000.p" / "2").read_bytes() == b"".join(level)
    assert sorted(path.name for path in tree.iterdir()) == ["0", "1", "entries"]
    signed = read_checkpoint((tmp_path / "log" / "checkpoint").read_text(), str(LOG.verifier))
    assert signed == (700, head.root)
    assert open_checkpoint(note, [LOG.verifier]).checkpoint.head == signed
