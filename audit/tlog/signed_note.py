"""C2SP signed notes and their keys: their bytes, without any trust.

1. What is read is untrusted: bounded in size, refused with the exact reason where a byte is out of place, and never
   repaired. Base64 has one spelling, so that a note that was read is written back byte for byte.

Format: c2sp.org/signed-note. Signature types: 0x01 Ed25519; 0x04 Ed25519 cosignature with a time; 0x06
ML-DSA-44 cosignature with a time.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

from kvcustody.errors import LedgerError

NOTE_BYTES_MAX = 256 << 10  # sixteen post-quantum signatures, which every reader must accept, are about 110 KiB
SIGNATURES_MAX = 64
NAME_BYTES_MAX = 255  # the length field of an ML-DSA-44 cosigned message
VKEY_CHARS_MAX = 4096
_LINE = "— "
_KEY_ID = re.compile(r"[0-9a-f]{8}")


class NoteError(LedgerError):
    """A note or key is malformed, or no trusted key signed it."""

    code = "KVC622"


class CannotCheckError(LedgerError):
    """A package needed for this check is not installed: there is no verdict."""

    code = "KVC625"


DEFAULT_ORIGIN = "kvcustody.example/ledger"  # the name of a ledger that no setting names
SigningKind = Literal["ed25519", "ml-dsa-44"]
"""What settings and commands call the kinds of key that may sign a ledger."""


class KeyKind(IntEnum):
    """The signature type byte of a key, as assigned by signed-note."""

    ED25519 = 0x01
    COSIGNATURE = 0x04
    ML_DSA_44 = 0x06

    @classmethod
    def named(cls, name: SigningKind) -> KeyKind:
        """Return the kind of key with a name from settings or commands."""
        return {"ed25519": cls.ED25519, "ml-dsa-44": cls.ML_DSA_44}[name]


PUBLIC_BYTES = {KeyKind.ED25519: 32, KeyKind.COSIGNATURE: 32, KeyKind.ML_DSA_44: 1312}


@dataclass(frozen=True, slots=True)
class VerifierKey:
    """A named public key. `str()` gives the vkey: `name+id+base64(type ‖ key)`."""

    name: str
    kind: KeyKind
    public: bytes

    def __post_init__(self) -> None:
        check_name(self.name)
        if len(self.public) != PUBLIC_BYTES[self.kind]:
            raise NoteError(f"key `{self.name}` has `{len(self.public)}` bytes, not {PUBLIC_BYTES[self.kind]}")

    @property
    def key_id(self) -> bytes:
        """Four bytes that distinguish keys of one name; no security by themselves."""
        return key_id(self.name, bytes([self.kind]), self.public)

    def __str__(self) -> str:
        encoded = base64.b64encode(bytes([self.kind]) + self.public).decode()
        return f"{self.name}+{self.key_id.hex()}+{encoded}"


class NoteSignature(NamedTuple):
    """One signature line: the claimed signer, and the bytes after the key id."""

    name: str
    key_id: bytes
    data: bytes

    def line(self) -> str:
        """Return the line as in a note, newline included."""
        return f"{_LINE}{self.name} {base64.b64encode(self.key_id + self.data).decode()}\n"


class Note(NamedTuple):
    """A text and its signature lines, unchecked."""

    text: str
    signatures: tuple[NoteSignature, ...]

    def to_bytes(self) -> bytes:
        """Return the note as stored and sent."""
        return (self.text + "\n" + "".join(signature.line() for signature in self.signatures)).encode()


def key_id(name: str, kind: bytes, public: bytes) -> bytes:
    """Return the id that signed-note recommends: the start of SHA-256(name ‖ newline ‖ type ‖ key)."""
    return hashlib.sha256(name.encode() + b"\n" + kind + public).digest()[:4]


def check_name(name: str) -> None:
    """Raise `NoteError` unless this is a key name: not empty, no space or plus, at most 255 bytes of UTF-8."""
    plain = name and "+" not in name and not any(char.isspace() or char < " " for char in name)
    if not plain or not _encodable(name) or len(name.encode()) > NAME_BYTES_MAX:
        raise NoteError(f"key name `{name[:64]!r}` is empty, too long, or has a space, plus or control character")


def parse_vkey(text: str) -> VerifierKey:
    """Return a key from its vkey; raises `NoteError`."""
    parts = text.split("+", 2) if len(text) <= VKEY_CHARS_MAX else []
    if len(parts) != 3 or not _KEY_ID.fullmatch(parts[1]):
        raise NoteError("a verifier key is not `name+id+base64`")
    name, stated, encoded = parts
    data = decode_base64(encoded, "verifier key")
    if not data or data[0] not in PUBLIC_BYTES:
        raise NoteError(f"verifier key `{name[:64]!r}` has an unsupported type")
    key = VerifierKey(name, KeyKind(data[0]), data[1:])
    if key.key_id.hex() != stated:
        raise NoteError(f"verifier key `{name}` does not have the id `{stated}`", name=name, key_id=stated)
    return key


def parse_note(data: bytes) -> Note:
    """Return the text and signature lines of a note; raises `NoteError` for anything that is not exactly one (rule
    1).
    """
    if len(data) > NOTE_BYTES_MAX:
        raise NoteError(f"a note of `{len(data)}` bytes is longer than {NOTE_BYTES_MAX}", bytes=len(data))
    try:
        whole = data.decode()
    except UnicodeDecodeError:
        raise NoteError("a note is not UTF-8") from None
    if any(char < " " and char != "\n" for char in whole):
        raise NoteError("a note has a control character")
    text, found, lines = whole.rpartition("\n\n")
    if not found or not lines.endswith("\n"):
        raise NoteError("a note has no signature lines under an empty line")
    each = lines[:-1].split("\n")
    if len(each) > SIGNATURES_MAX:
        raise NoteError(f"a note has `{len(each)}` signature lines, more than {SIGNATURES_MAX}", lines=len(each))
    return Note(text + "\n", tuple(_parse_line(line) for line in each))


def parse_signatures(data: bytes) -> tuple[NoteSignature, ...]:
    """Return bare signature lines, as a witness sends them; raises `NoteError`."""
    note = parse_note(b"\n\n" + data)
    if note.text != "\n":
        raise NoteError("signature lines have an empty line among them")
    return note.signatures


def decode_base64(text: str, what: str) -> bytes:
    """Return bytes from their canonical base64 spelling; raises `NoteError`."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if base64.b64encode(data).decode() != text:
        raise NoteError(f"the base64 of a {what} is malformed")
    return data


def _parse_line(line: str) -> NoteSignature:
    parts = line.removeprefix(_LINE).split(" ")
    if not line.startswith(_LINE) or len(parts) != 2:
        raise NoteError("a signature line is not `— name base64`")
    check_name(parts[0])
    data = decode_base64(parts[1], "signature")
    if len(data) < 5:
        raise NoteError(f"the signature of `{parts[0]}` is empty", name=parts[0])
    return NoteSignature(parts[0], data[:4], data[4:])


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
