"""A log's signing keys, made once and stored in separate files.

1. A signing key signs checkpoints and nothing else: it wraps no secret and derives no data key.
2. A key file appears whole or not at all, and never replaces another. It is a regular file of mode 0600 that belongs to
   this user, reached through no symbolic link. Any other file is refused with instructions.
3. A log never signs what contradicts what it signed before: `sign_successor` demands a consistency proof.
4. A statement by a key (`sign_statement`) cannot pass for a checkpoint, nor the reverse. The second line of a
   checkpoint is a number, and that of a statement is not. With ML-DSA-44 the context differs too.

The text of a key is `PRIVATE+KEY+name+id+base64(type ‖ 32-byte seed)`, as the note tools of Go write it.
"""

from __future__ import annotations

import base64
import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvcustody.audit.leaf.merkle import TreeHead
from kvcustody.audit.tlog.checkpoint import Checkpoint, signature_verifies, signed_message
from kvcustody.audit.tlog.proofs import check_consistency
from kvcustody.audit.tlog.signed_note import (
    PUBLIC_BYTES,
    KeyKind,
    Note,
    NoteError,
    NoteSignature,
    VerifierKey,
    check_name,
    decode_base64,
    key_id,
    parse_note,
)
from kvcustody.errors import LedgerError
from kvcustody.files import write_file

SEED_BYTES = 32
_PREFIX = "PRIVATE+KEY+"
_FILE_BYTES_MAX = 1024
_STATEMENT_TYPE = b"\xffkvcustody/statement"  # signed-note keeps 0xff and an identifier for such types
_STATEMENT_CONTEXT = b"kvcustody/statement"


class SigningKeyError(LedgerError):
    """A signing key file is missing, exposed, malformed, or already exists."""

    code = "KVC624"


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A named private key. Its representation never shows it."""

    name: str
    kind: KeyKind
    seed: bytes = field(repr=False)
    verifier: VerifierKey = field(repr=False)

    @classmethod
    def from_seed(cls, name: str, kind: KeyKind, seed: bytes) -> SigningKey:
        """Return the key derived from 32 random bytes; raises `NoteError` for a bad name or an unavailable
        algorithm.
        """
        check_name(name)
        if len(seed) != SEED_BYTES:
            raise NoteError(f"the seed of key `{name}` has `{len(seed)}` bytes, not {SEED_BYTES}")
        return cls(name, kind, seed, VerifierKey(name, kind, _public(kind, seed)))

    @classmethod
    def generate(cls, name: str, kind: KeyKind = KeyKind.ED25519) -> SigningKey:
        """Return a fresh key."""
        return cls.from_seed(name, kind, secrets.token_bytes(SEED_BYTES))

    def sign(self, text: str, *, at_seconds: int = 0) -> NoteSignature:
        """Return a signature line over a note's text; kinds with a time state `at_seconds`."""
        made = self.raw(signed_message(self.name, self.kind, text, at_seconds))
        time = b"" if self.kind is KeyKind.ED25519 else at_seconds.to_bytes(8, "big")
        return NoteSignature(self.name, self.verifier.key_id, time + made)

    def raw(self, message: bytes, context: bytes | None = None) -> bytes:
        """Return the bare signature of a message. Callers must ensure that no two meanings share a message."""
        if self.kind is KeyKind.ML_DSA_44:
            from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PrivateKey

            return MLDSA44PrivateKey.from_seed_bytes(self.seed).sign(message, context)
        return Ed25519PrivateKey.from_private_bytes(self.seed).sign(message)


def sign_checkpoint(checkpoint: Checkpoint, keys: Sequence[SigningKey], *, at_seconds: int = 0) -> bytes:
    """Return a checkpoint as a note with one line for each key."""
    text = checkpoint.text()
    note = Note(text, tuple(key.sign(text, at_seconds=at_seconds) for key in keys)).to_bytes()
    parse_note(note)  # whatever a caller put into the origin, no malformed note leaves here
    return note


def sign_successor(
    previous: TreeHead,
    checkpoint: Checkpoint,
    proof: Sequence[bytes],
    keys: Sequence[SigningKey],
    *,
    at_seconds: int = 0,
) -> bytes:
    """Return `sign_checkpoint` if the proof shows that it extends the last signed one; else raises `ProofError`."""
    check_consistency(previous, checkpoint.head, proof)
    return sign_checkpoint(checkpoint, keys, at_seconds=at_seconds)


def sign_statement(key: SigningKey, text: str) -> NoteSignature:
    """Return a signature line over a statement whose second line is not a number (rule 4)."""
    context = _STATEMENT_CONTEXT if key.kind is KeyKind.ML_DSA_44 else None
    return NoteSignature(key.name, _statement_id(key.verifier), key.raw(text.encode(), context))


def verify_statement(key: VerifierKey, text: str, signature: NoteSignature) -> None:
    """Raise `NoteError` unless `key` signed the statement."""
    by_key = (signature.name, signature.key_id) == (key.name, _statement_id(key))
    if not by_key or not signature_verifies(key, signature.data, text.encode(), _STATEMENT_CONTEXT):
        raise NoteError(f"a statement is not signed by `{key.name}`", name=key.name)


def create_signing_key(path: Path, name: str, kind: KeyKind = KeyKind.ED25519) -> SigningKey:
    """Return a fresh key in a new 0600 file, durable on return; raises `SigningKeyError` if the file exists (rule
    2).
    """
    key = SigningKey.generate(name, kind)
    try:
        write_file(path, _render(key).encode(), exclusive=True)
    except FileExistsError:
        raise _refused(path, "already exists", "use it, or choose another path") from None
    except OSError as problem:
        raise _refused(path, f"cannot be created ({problem.strerror})", "choose a writable folder") from None
    return key


def read_signing_key(path: Path) -> SigningKey:
    """Return the key in a file, checked on the opened descriptor (rule 2); raises `SigningKeyError`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as problem:
        action = "make one" if isinstance(problem, FileNotFoundError) else "give the path of the file itself"
        raise _refused(path, f"cannot be opened ({problem.strerror})", action) from None
    try:
        _check_file(path, os.fstat(descriptor))
        data = os.read(descriptor, _FILE_BYTES_MAX + 1)
    finally:
        os.close(descriptor)
    try:
        return _parse(data)
    except NoteError as problem:
        raise _refused(path, f"is malformed ({problem.message})", "restore it from its backup") from None


def _check_file(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _refused(path, "is not a regular file", "give the path of a key file")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise _refused(path, f"has mode `{mode:04o}`, open to others", "chmod 600 it; rotate the key if it was seen")
    if status.st_uid != os.geteuid():
        raise _refused(path, f"belongs to user `{status.st_uid}`", f"chown it to user {os.geteuid()}")


def _public(kind: KeyKind, seed: bytes) -> bytes:
    if kind is not KeyKind.ML_DSA_44:
        return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
    try:
        from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PrivateKey

        return MLDSA44PrivateKey.from_seed_bytes(seed).public_key().public_bytes_raw()
    except (ImportError, UnsupportedAlgorithm):
        raise NoteError("ML-DSA-44 is not offered by the installed `cryptography`; upgrade it") from None


def _render(key: SigningKey) -> str:
    encoded = base64.b64encode(bytes([key.kind]) + key.seed).decode()
    return f"{_PREFIX}{key.name}+{key.verifier.key_id.hex()}+{encoded}\n"


def _parse(data: bytes) -> SigningKey:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise NoteError("it is not text") from None
    parts = text.removeprefix(_PREFIX).removesuffix("\n").split("+", 2)
    if not text.startswith(_PREFIX) or len(parts) != 3:
        raise NoteError("it is not `PRIVATE+KEY+name+id+base64`")
    secret = decode_base64(parts[2], "signing key")
    if not secret or secret[0] not in PUBLIC_BYTES:
        raise NoteError("its type is not supported")
    key = SigningKey.from_seed(parts[0], KeyKind(secret[0]), secret[1:])
    if _render(key) != text:
        raise NoteError("its id does not match its key")
    return key


def _statement_id(key: VerifierKey) -> bytes:
    return key.key_id if key.kind is KeyKind.ED25519 else key_id(key.name, _STATEMENT_TYPE, key.public)


def _refused(path: Path, problem: str, action: str) -> SigningKeyError:
    message = f"signing key `{path}` {problem}; {action}"
    return SigningKeyError(message, path=path, problem=problem, action=action)
