"""The root log. Its leaves are salted commitments to the heads of sub-logs, so that one checkpoint covers all.

1. A root leaf is HMAC-SHA-256 under a random 32-byte salt over the sub-log's name, size and root. Who holds the
   opening can check it; who does not learns neither name nor size, and cannot tell two sub-logs apart.
2. One `seal` commits to every sub-log that a batch touched; the checkpoint after it covers them, and through the
   older leaves every other sub-log as it was left.
3. A head is trusted only through all three: the opening gives the leaf, the path gives the root, and the root stands
   in a checkpoint that a trusted key signed. A leaf of a sub-log needs its own path besides.
4. Successive heads of one sub-log must extend each other. Whoever holds its leaves and the openings checks it: a whole
   export has both (`verify_export`). A second, hidden line of heads is invisible to a holder who is shown only the
   first.

A head's proof is a c2sp.org/tlog-proof whose extra data is the opening. A leaf's proof is one line of kind,
index and path in the sub-log, an empty line, and the head's proof.
"""

from __future__ import annotations

import base64
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcustody.audit.leaf.merkle import EMPTY_ROOT, HASH_BYTES, SIZE_MAX, TreeHead, leaf_hash
from kvcustody.audit.tlog.checkpoint import Checkpoint, SignedCheckpoint, open_checkpoint
from kvcustody.audit.tlog.proofs import PATH_HASHES_MAX, ProofError, check_inclusion
from kvcustody.audit.tlog.signed_note import NOTE_BYTES_MAX, NoteError, VerifierKey, decode_base64

SALT_BYTES = 32
LOG_NAME_BYTES_MAX = 1024
_DOMAIN = b"kvcustody/sub-log-head@1\0"
_HEAD_PROOF = "c2sp.org/tlog-proof@v1"
_LEAF_PROOF = "kvcustody/leaf-proof@1"


class RootLeafOpening(NamedTuple):
    """The opening of a root leaf: the sub-log's name and head, and the salt that hid them."""

    name: str
    head: TreeHead
    salt: bytes

    def commitment(self) -> bytes:
        """Return the root leaf (rule 1). Every field but the name has a fixed length, so encodings are unambiguous."""
        return commitment(self.name.encode(), *self.head, self.salt)

    def to_bytes(self) -> bytes:
        """Return salt, size (8 bytes, big-endian), root, name."""
        return self.salt + self.head.size.to_bytes(8, "big") + self.head.root + self.name.encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> RootLeafOpening:
        """Return the opening from its bytes; raises `ProofError` for anything else."""
        fixed = SALT_BYTES + 8 + HASH_BYTES
        try:
            name = data[fixed:].decode() if fixed < len(data) <= fixed + LOG_NAME_BYTES_MAX else ""
        except UnicodeDecodeError:
            name = ""
        size = int.from_bytes(data[SALT_BYTES : SALT_BYTES + 8], "big")
        root = data[SALT_BYTES + 8 : fixed]
        if not name or size > SIZE_MAX or (size == 0 and root != EMPTY_ROOT):
            raise ProofError("the opening of a sub-log's head is malformed")
        return cls(name, TreeHead(size, root), data[:SALT_BYTES])


def commitment(name: bytes, size: int, root: bytes, salt: bytes) -> bytes:
    """Return the root leaf for these fields: `RootLeafOpening.commitment` for callers that only need the leaf."""
    return hmac.digest(salt, _DOMAIN + size.to_bytes(8, "big") + root + name, "sha256")


@dataclass(frozen=True, slots=True)
class HeadProof:
    """A proof that a sub-log's head stands under a checkpoint of the root log."""

    opening: RootLeafOpening
    index: int
    path: tuple[bytes, ...]
    note: bytes

    def to_bytes(self) -> bytes:
        """Return the proof as a tlog-proof file."""
        extra = base64.b64encode(self.opening.to_bytes()).decode()
        return _proof_lines(f"{_HEAD_PROOF}\nextra {extra}", self.index, self.path).encode() + self.note


@dataclass(frozen=True, slots=True)
class LeafProof:
    """A proof that a leaf is at `index` of a sub-log whose head is under a checkpoint of the root log."""

    index: int
    path: tuple[bytes, ...]
    head: HeadProof

    def to_bytes(self) -> bytes:
        """Return the proof as a file."""
        return _proof_lines(_LEAF_PROOF, self.index, self.path).encode() + self.head.to_bytes()


class SealedHead(NamedTuple):
    """A sub-log's head, confirmed by trusted keys."""

    name: str
    head: TreeHead
    signed: SignedCheckpoint


def seal(heads: Mapping[str, TreeHead]) -> tuple[RootLeafOpening, ...]:
    """Return fresh openings for the sub-logs of a batch, in name order; their commitments are the next root leaves."""
    for name in heads:
        if not 0 < len(name.encode()) <= LOG_NAME_BYTES_MAX:
            raise ProofError(f"the name of a sub-log has `{len(name)}` characters", name=name)
    salts = secrets.token_bytes(SALT_BYTES * len(heads))  # one call of the kernel, not one for each
    return tuple(
        RootLeafOpening(name, heads[name], salts[SALT_BYTES * place : SALT_BYTES * (place + 1)])
        for place, name in enumerate(sorted(heads))
    )


def parse_head_proof(data: bytes) -> HeadProof:
    """Return a head's proof from its bytes, unchecked; raises `ProofError`."""
    lines, note = _split_proof(data)
    if len(lines) < 3 or lines[0] != _HEAD_PROOF or not lines[1].startswith("extra "):
        raise ProofError("bytes are not the proof of a sub-log's head")
    opening = RootLeafOpening.from_bytes(_decode_line(lines[1].removeprefix("extra "), "opening"))
    return HeadProof(opening, *_index_and_path(lines[2:]), note)


def parse_leaf_proof(data: bytes) -> LeafProof:
    """Return a leaf's proof from its bytes, unchecked; raises `ProofError`."""
    lines, rest = _split_proof(data)
    if len(lines) < 2 or lines[0] != _LEAF_PROOF:
        raise ProofError("bytes are not the proof of a leaf")
    return LeafProof(*_index_and_path(lines[1:]), parse_head_proof(rest))


def check_head(
    proof: HeadProof,
    keys: Sequence[VerifierKey],
    *,
    witnesses: Sequence[VerifierKey] = (),
    witness_threshold: int = 0,
    signed: SignedCheckpoint | None = None,
) -> SealedHead:
    """Return the head that a proof seals; raises `NoteError` or `ProofError` (rule 3).

    `signed` is what the proof's own note was opened to already, by these keys, where it was.
    """
    if signed is None:
        signed = open_checkpoint(proof.note, keys, witnesses=witnesses, witness_threshold=witness_threshold)
    check_inclusion(leaf_hash(proof.opening.commitment()), proof.index, signed.checkpoint.head, proof.path)
    return SealedHead(proof.opening.name, proof.opening.head, signed)


def check_leaf(
    proof: LeafProof,
    leaf: bytes,
    keys: Sequence[VerifierKey],
    *,
    witnesses: Sequence[VerifierKey] = (),
    witness_threshold: int = 0,
    signed: SignedCheckpoint | None = None,
) -> SealedHead:
    """Return the sealed head under which `leaf` is at the proof's index; raises `NoteError` or `ProofError` (rule
    3).
    """
    sealed = check_head(proof.head, keys, witnesses=witnesses, witness_threshold=witness_threshold, signed=signed)
    check_inclusion(leaf_hash(leaf), proof.index, sealed.head, proof.path)
    return sealed


def root_checkpoint(origin: str, head: TreeHead) -> Checkpoint:
    """Return the root log's checkpoint, to be signed."""
    return Checkpoint(origin, head.size, head.root)


def _proof_lines(start: str, index: int, path: Sequence[bytes]) -> str:
    hashes = "".join(base64.b64encode(hash_).decode() + "\n" for hash_ in path)
    return f"{start}\nindex {index}\n{hashes}\n"


def _split_proof(data: bytes) -> tuple[list[str], bytes]:
    """Return the lines before the first empty line, and everything after it."""
    head, found, rest = data.partition(b"\n\n")
    if not found or len(data) > 2 * NOTE_BYTES_MAX or not head.isascii():
        raise ProofError("a proof is not lines of text, an empty line and a checkpoint")
    return head.decode("ascii").split("\n"), rest


def _index_and_path(lines: list[str]) -> tuple[int, tuple[bytes, ...]]:
    number = lines[0].removeprefix("index ")
    if lines[0] != f"index {number}" or not number.isdigit() or str(int(number[:20])) != number:
        raise ProofError("a proof has a malformed index")
    if len(lines) > 1 + PATH_HASHES_MAX:
        raise ProofError(f"a path of `{len(lines) - 1}` hashes is longer than any tree's")
    return int(number), tuple(_decode_line(line, "path") for line in lines[1:])


def _decode_line(text: str, what: str) -> bytes:
    try:
        return decode_base64(text, what)
    except NoteError as problem:
        raise ProofError(problem.message) from None
