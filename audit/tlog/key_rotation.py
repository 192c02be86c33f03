"""Hand a log over from one signing key to the next, on record.

1. A rotation is a note that the old key and the new key both sign: the old one consents, the new one shows that
   somebody holds it. It names both and the tree at which it happens.
2. From one key that an auditor trusts, the rotations in order give every key and the sizes that it may sign. A
   rotation that does not continue the chain is refused, and so is a checkpoint outside its key's sizes: an old key
   that leaks later signs nothing new.
3. A rotation's text has exactly one form.
4. A rotation is a *handover* where it is a leaf of the system log: who trusts one key of a ledger needs no other. It
   vouches for the tree it names, which has to be the beginning of what the next key signs.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection, select

from kvcustody.audit.kinds import SYSTEM
from kvcustody.audit.leaf.merkle import HASH_BYTES, TreeHead
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.audit.tlog.backend import parse_json
from kvcustody.audit.tlog.checkpoint import SignedCheckpoint
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
SIGNING_KEY_KIND = "signing-key"
_FIELDS = ("from", "to", "size", "root", "time")


class KeyRotation(NamedTuple):
    """A handover: from the tree of this head on, the new key signs instead of the old one."""

    old: VerifierKey
    new: VerifierKey
    head: TreeHead
    at_seconds: int


class KeyPeriod(NamedTuple):
    """A key's validity: trees from `first_size` up to and including `last_size` leaves (None: no end yet)."""

    key: VerifierKey
    first_size: int
    last_size: int | None


def rotation_record(old: SigningKey, new: SigningKey, head: TreeHead, at_seconds: int) -> bytes:
    """Return the note by which a log's key hands over to its successor; both sign it."""
    rotation = KeyRotation(old.verifier, new.verifier, head, at_seconds)
    _check_rotation(rotation)
    text = _rotation_text(rotation)
    return Note(text, (sign_statement(old, text), sign_statement(new, text))).to_bytes()


def parse_rotation(data: bytes) -> KeyRotation:
    """Return a rotation whose two signatures verify; raises `NoteError`. It does not check whether the old key is
    trusted.
    """
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
        raise NoteError("a key rotation is not in canonical form")
    for key, signature in zip((rotation.old, rotation.new), note.signatures, strict=True):
        verify_statement(key, note.text, signature)
    return rotation


def key_periods(first: VerifierKey, rotations: Sequence[bytes]) -> tuple[KeyPeriod, ...]:
    """Return every key of a log with its valid sizes, from one trusted key and the notes in order (rule 2)."""
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
            problem = f"key `{line.key.name}` ({line.key.key_id.hex()}) may not sign a tree of `{size}` leaves"
            raise NoteError(problem, name=line.key.name, size=size)


def handover_note(leaf: bytes) -> bytes | None:
    """Return the note of two keys in a leaf; None for any other leaf, including a first key's. Raises `NoteError`."""
    try:
        body = parse_json(leaf)
        return base64.b64decode(body["record"], validate=True) or None if body["kind"] == SIGNING_KEY_KIND else None
    except (binascii.Error, KeyError, TypeError, ValueError):
        raise NoteError("the leaf of a signing key is malformed") from None


def handover_leaves(connection: Connection, below: int | None = None) -> list[tuple[int, bytes]]:
    """Return (idx, leaf) of every handover among the first `below` leaves of the system log, in order."""
    query = (
        select(events.c.idx, events.c.leaf)
        .join(logs, logs.c.id == events.c.log)
        .where(logs.c.name == SYSTEM, events.c.kind == SIGNING_KEY_KIND, has_leaf(events))
        .order_by(events.c.idx)
    )
    if below is not None:
        query = query.where(events.c.idx < below)
    found = [(row.idx, bytes(row.leaf)) for row in connection.execute(query)]
    return [(idx, leaf) for idx, leaf in found if handover_note(leaf) is not None]


def follow_handovers(trusted: Sequence[VerifierKey], leaves: Sequence[bytes]) -> tuple[KeyPeriod, ...]:
    """Return every key reached from the trusted ones, with its valid sizes (rule 4); `NoteError` for a broken chain."""
    notes = [note for note in map(handover_note, leaves) if note is not None]
    olds = [parse_rotation(note).old for note in notes]
    periods: dict[KeyPeriod, None] = {}
    for key in trusted:
        start = olds.index(key) if key in olds else len(notes)
        periods |= dict.fromkeys(key_periods(key, notes[start:]))
    return tuple(periods)


def parse_handover_leaf(leaf: bytes) -> KeyRotation:
    """Return the content of a handover's leaf; raises `NoteError` if it is not one."""
    note = handover_note(leaf)
    if note is None:
        raise NoteError("a leaf is not a handover of the signing key")
    return parse_rotation(note)


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
        raise NoteError(f"key `{old.name}` cannot hand over to `{new.name}`: one log, two keys", name=old.name)
    if KeyKind.COSIGNATURE in (old.kind, new.kind):
        raise NoteError(f"`{old.name}` is a witness's key; only a log's own keys are rotated here", name=old.name)
