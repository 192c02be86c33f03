"""Handing a log over from one signing key to the next, on record.

1. A rotation is a note that the old key and the new key both sign: the old one consents, the new one shows that
   somebody holds it. It names both and the tree at which it happens.
2. From one key that an auditor trusts, the rotations in order give every key and the sizes that it may sign. A
   rotation that does not continue the chain is refused, and so is a checkpoint outside its key's sizes: an old key
   that leaks later signs nothing new.
3. A rotation's text has exactly one form.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import NamedTuple

from kvcustody.audit.tlog.checkpoint import SignedCheckpoint
from kvcustody.audit.tlog.merkle import HASH_BYTES, TreeHead
from kvcustody.audit.tlog.signed_note import (
    KeyKind,
    Note,
    NoteError,
    VerifierKey,
    decode_base64,
    parse_note,
    parse_vkey,
)
from kvcustody.audit.tlog.signing_key import SigningKey, sign_statement, verify_statement

ROTATION = "kvcustody/key-rotation@1"
_FIELDS = ("from", "to", "size", "root", "time")


class KeyRotation(NamedTuple):
    """From the tree of this head on, the new key signs in the place of the old one."""

    old: VerifierKey
    new: VerifierKey
    head: TreeHead
    at_seconds: int


class KeyPeriod(NamedTuple):
    """A key may sign trees of `first_size` up to and with `last_size` leaves (None: no end yet)."""

    key: VerifierKey
    first_size: int
    last_size: int | None


def rotation_record(old: SigningKey, new: SigningKey, head: TreeHead, at_seconds: int) -> bytes:
    """The note by which a log's key hands over to its successor; both sign it."""
    rotation = KeyRotation(old.verifier, new.verifier, head, at_seconds)
    _check_rotation(rotation)
    text = _rotation_text(rotation)
    return Note(text, (sign_statement(old, text), sign_statement(new, text))).to_bytes()


def parse_rotation(data: bytes) -> KeyRotation:
    """A rotation whose two signatures verify; raises `NoteError`. Whether its old key is trusted is not asked."""
    note = parse_note(data)
    lines = note.text.split("\n")
    fields = dict(line.split(" ", 1) for line in lines[1:-1] if " " in line)
    if lines[0] != ROTATION or tuple(fields) != _FIELDS:
        raise NoteError("a note is not a key rotation")
    numbers = (fields["size"], fields["time"])
    if not all(number.isascii() and number.isdigit() and len(number) <= 19 for number in numbers):
        raise NoteError("a key rotation has a malformed size or time")
    rotation = KeyRotation(
        parse_vkey(fields["from"]),
        parse_vkey(fields["to"]),
        TreeHead(int(fields["size"]), decode_base64(fields["root"], "root")),
        int(fields["time"]),
    )
    _check_rotation(rotation)
    if _rotation_text(rotation) != note.text or len(note.signatures) != 2:
        raise NoteError("a key rotation is not in its one form")
    for key, signature in zip((rotation.old, rotation.new), note.signatures, strict=True):
        verify_statement(key, note.text, signature)
    return rotation


def key_periods(first: VerifierKey, rotations: Sequence[bytes]) -> tuple[KeyPeriod, ...]:
    """Every key of a log with the sizes that it may sign, from one trusted key and the notes in order (rule 2)."""
    periods: list[KeyPeriod] = []
    key, since = first, 0
    for data in rotations:
        rotation = parse_rotation(data)
        if rotation.old != key or rotation.head.size < since:
            raise NoteError(f"a rotation of `{key.name}` does not continue the chain", name=key.name)
        periods.append(KeyPeriod(key, since, rotation.head.size))
        key, since = rotation.new, rotation.head.size
    return (*periods, KeyPeriod(key, since, None))


def check_period(signed: SignedCheckpoint, periods: Sequence[KeyPeriod]) -> None:
    """Raise `NoteError` unless every key of the log that signed may sign a tree of this size (rule 2)."""
    size = signed.checkpoint.size
    for line in signed.log:
        if not any(_within(period, line.key, size) for period in periods):
            problem = (
                f"key `{line.key.name}` ({line.key.key_id.hex()}) may not sign a tree of `{size}` leaves"
            )
            raise NoteError(problem, name=line.key.name, size=size)


def _within(period: KeyPeriod, key: VerifierKey, size: int) -> bool:
    ends = period.last_size is None or size <= period.last_size
    return period.key == key and period.first_size <= size and ends


def _rotation_text(rotation: KeyRotation) -> str:
    root = base64.b64encode(rotation.head.root).decode()
    fields = f"from {rotation.old}\nto {rotation.new}\nsize {rotation.head.size}\nroot {root}\n"
    return f"{ROTATION}\n{fields}time {rotation.at_seconds}\n"


def _check_rotation(rotation: KeyRotation) -> None:
    old, new = rotation.old, rotation.new
    if len(rotation.head.root) != HASH_BYTES:
        raise NoteError(f"a rotation of `{old.name}` names no root", name=old.name)
    if old.name != new.name or old == new:
        raise NoteError(
            f"key `{old.name}` cannot hand over to `{new.name}`: one log, two keys", name=old.name
        )
    if KeyKind.COSIGNATURE in (old.kind, new.kind):
        raise NoteError(
            f"`{old.name}` is a witness's key; only a log's own keys are rotated here", name=old.name
        )
