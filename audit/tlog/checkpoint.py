"""Checkpoints of logs, checked against keys that the reader trusts (C2SP tlog-checkpoint and tlog-cosignature).

1. The reader's keys decide, never the note. A line by a key that the reader does not know is ignored. A line by a known
   key that does not verify causes the whole note to be refused. Without a valid line by a log's key the note is no
   checkpoint.
2. A log's key carries the log's origin as its name, so a key of one log signs for no other.
3. An ML-DSA-44 line covers origin, size and root alone: it never vouches for a checkpoint that has extension lines.
4. A checkpoint has one spelling: no leading zeros, no empty lines, the empty tree only with its own root.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import NamedTuple

from kvcustody.audit.leaf.merkle import EMPTY_ROOT, HASH_BYTES, SIZE_MAX, TreeHead
from kvcustody.audit.tlog.backend import ed25519_verifies, ml_dsa_44_verifies
from kvcustody.audit.tlog.signed_note import (
    NAME_BYTES_MAX,
    KeyKind,
    NoteError,
    NoteSignature,
    VerifierKey,
    decode_base64,
    parse_note,
)

_SIZE = re.compile(r"0|[1-9][0-9]{0,18}")
TIME_MAX = (1 << 63) - 1
_TIME_BYTES = 8


class Checkpoint(NamedTuple):
    """A log's statement about its tree."""

    origin: str
    size: int
    root: bytes
    extensions: tuple[str, ...] = ()

    @property
    def head(self) -> TreeHead:
        """Size and root."""
        return TreeHead(self.size, self.root)

    def text(self) -> str:
        """Return the text to be signed."""
        lines = (self.origin, str(self.size), base64.b64encode(self.root).decode(), *self.extensions)
        return "\n".join(lines) + "\n"


class VerifiedSignature(NamedTuple):
    """A verified line; `at_seconds` is its stated POSIX time (0: none)."""

    key: VerifierKey
    at_seconds: int


class SignedCheckpoint(NamedTuple):
    """A checkpoint confirmed by trusted keys: the log's own, and witnesses'."""

    checkpoint: Checkpoint
    log: tuple[VerifiedSignature, ...]
    witnesses: tuple[VerifiedSignature, ...]


def parse_checkpoint(text: str) -> Checkpoint:
    """Return the checkpoint in a note's text; raises `NoteError`."""
    lines = text.split("\n")
    if len(lines) < 4 or lines.pop() or not all(lines):
        raise NoteError("a checkpoint needs at least three lines, none of them empty")
    origin, size, root, *extensions = lines
    if len(origin.encode()) > NAME_BYTES_MAX:
        raise NoteError(f"the origin of a checkpoint is longer than {NAME_BYTES_MAX} bytes")
    if not _SIZE.fullmatch(size) or int(size) > SIZE_MAX:
        raise NoteError(f"the size of a checkpoint of `{origin}` is not a number", origin=origin)
    hash_ = decode_base64(root, "root")
    if len(hash_) != HASH_BYTES or (size == "0" and hash_ != EMPTY_ROOT):
        raise NoteError(f"the root of a checkpoint of `{origin}` is not one", origin=origin)
    return Checkpoint(origin, int(size), hash_, tuple(extensions))


def open_note(data: bytes, keys: Sequence[VerifierKey]) -> tuple[str, tuple[VerifiedSignature, ...]]:
    """Return the text of a note and its trusted lines; raises `NoteError` if there are none (rule 1)."""
    note = parse_note(data)
    known = {(key.name, key.key_id): key for key in keys}
    verified = []
    for signature in note.signatures:
        key = known.get((signature.name, signature.key_id))
        if key is not None:
            verified.append(verify(key, note.text, signature))
    if not verified:
        raise NoteError("no trusted key signed the note")
    return note.text, tuple(verified)


def open_checkpoint(
    data: bytes,
    keys: Sequence[VerifierKey],
    *,
    witnesses: Sequence[VerifierKey] = (),
    log_threshold: int = 1,
    witness_threshold: int = 0,
) -> SignedCheckpoint:
    """Return the checkpoint in a note with signatures of enough distinct keys of its log, and of witnesses.

    Raises `NoteError`. `keys` are keys of the log: each counts only under the origin that is its name (rule 2).
    """
    text, verified = open_note(data, (*keys, *witnesses))
    checkpoint = parse_checkpoint(text)
    by_log = tuple(line for line in verified if line.key in keys and line.key.name == checkpoint.origin)
    by_witness = tuple(line for line in verified if line.key in witnesses)
    origin = checkpoint.origin
    if len({line.key for line in by_log}) < max(1, log_threshold):
        raise NoteError(f"the checkpoint of `{origin}` is not signed by its log's key", origin=origin)
    signed = len({line.key for line in by_witness})
    if signed < witness_threshold:
        problem = f"`{signed}` trusted witnesses signed the checkpoint of `{origin}`, not {witness_threshold}"
        raise NoteError(problem, origin=origin, witnesses=signed)
    return SignedCheckpoint(checkpoint, by_log, by_witness)


def check_witness_time(signed: SignedCheckpoint, *, now_seconds: int, age_seconds_max: int) -> None:
    """Raise `NoteError` unless a trusted witness saw this checkpoint recently, and none in the future."""
    times = [line.at_seconds for line in signed.witnesses]
    if not times or max(times) > now_seconds or now_seconds - max(times) > age_seconds_max:
        origin = signed.checkpoint.origin
        raise NoteError(f"no witness saw `{origin}` within {age_seconds_max} seconds", origin=origin, times=times)


def verify(key: VerifierKey, text: str, signature: NoteSignature) -> VerifiedSignature:
    """Verify one line by a known key; raises `NoteError`."""
    data, at_seconds = signature.data, 0
    if key.kind is not KeyKind.ED25519:
        at_seconds, data = int.from_bytes(data[:_TIME_BYTES], "big"), data[_TIME_BYTES:]
    message = signed_message(key.name, key.kind, text, at_seconds)
    if not signature_verifies(key, data, message):
        problem = f"the signature of `{key.name}` ({key.kind.name.lower()}) does not verify"
        raise NoteError(problem, name=key.name, kind=key.kind.name)
    return VerifiedSignature(key, at_seconds)


def signature_verifies(key: VerifierKey, signature: bytes, message: bytes, context: bytes | None = None) -> bool:
    """Return whether a bare signature is the key's, by the algorithm of its kind; only ML-DSA-44 uses `context`."""
    if key.kind is KeyKind.ML_DSA_44:
        return ml_dsa_44_verifies(key.public, signature, message, context)
    return ed25519_verifies(key.public, signature, message)


def signed_message(name: str, kind: KeyKind, text: str, at_seconds: int) -> bytes:
    """Return the bytes that a signature of this type covers; raises `NoteError` if it cannot cover the text."""
    if not 0 <= at_seconds <= TIME_MAX:
        raise NoteError(f"the time `{at_seconds}` of a cosignature is out of range", at_seconds=at_seconds)
    if kind is KeyKind.ED25519:
        return text.encode()
    checkpoint = parse_checkpoint(text)
    if kind is KeyKind.COSIGNATURE:
        return f"cosignature/v1\ntime {at_seconds}\n{text}".encode()
    if checkpoint.extensions:
        raise NoteError("an ML-DSA-44 signature does not cover extension lines", origin=checkpoint.origin)
    return b"".join(
        (
            b"subtree/v1\n\0",
            _counted(name),
            at_seconds.to_bytes(8, "big"),
            _counted(checkpoint.origin),
            (0).to_bytes(8, "big"),
            checkpoint.size.to_bytes(8, "big"),
            checkpoint.root,
        )
    )


def _counted(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(1, "big") + data
