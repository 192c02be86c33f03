"""From the keys that a reader trusts to those that signed later, by the handovers that are leaves of the ledger.

1. A handover counts when both keys signed it and it goes on from a key that is trusted already: who trusts one key of
   a ledger needs no other.
2. A key that was handed over signs nothing past the tree at which that happened.
3. A handover vouches for the tree it names: that tree has to be the beginning of what the next key signs.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

import orjson
from sqlalchemy import Connection, select

from kvcustody.audit.events import SYSTEM
from kvcustody.audit.schema.ledger import events, logs
from kvcustody.audit.tlog.key_rotation import KeyPeriod, KeyRotation, key_periods, parse_rotation
from kvcustody.audit.tlog.signed_note import NoteError, VerifierKey

KIND = "signing-key"


def handover_note(leaf: bytes) -> bytes | None:
    """The note of two keys in a leaf; None for any other leaf, a first key's among them. Raises `NoteError`."""
    try:
        body = orjson.loads(leaf)
        return base64.b64decode(body["record"], validate=True) or None if body["kind"] == KIND else None
    except (binascii.Error, KeyError, TypeError, ValueError):
        raise NoteError("the leaf of a signing key is malformed") from None


def handover_leaves(connection: Connection, below: int | None = None) -> list[tuple[int, bytes]]:
    """(idx, leaf) of every handover among the first `below` leaves of the system log, in order."""
    query = (
        select(events.c.idx, events.c.leaf)
        .join(logs, logs.c.id == events.c.log)
        .where(logs.c.name == SYSTEM, events.c.kind == KIND)
        .order_by(events.c.idx)
    )
    if below is not None:
        query = query.where(events.c.idx < below)
    found = [(row.idx, bytes(row.leaf)) for row in connection.execute(query)]
    return [(idx, leaf) for idx, leaf in found if handover_note(leaf) is not None]


def follow_handovers(trusted: Sequence[VerifierKey], leaves: Sequence[bytes]) -> tuple[KeyPeriod, ...]:
    """Every key that the trusted ones lead to, with the sizes it may sign (rule 1); `NoteError` for a broken chain."""
    notes = [note for note in map(handover_note, leaves) if note is not None]
    olds = [parse_rotation(note).old for note in notes]
    periods: dict[KeyPeriod, None] = {}
    for key in trusted:
        start = olds.index(key) if key in olds else len(notes)
        periods |= dict.fromkeys(key_periods(key, notes[start:]))
    return tuple(periods)


def parse_handover_leaf(leaf: bytes) -> KeyRotation:
    """What a handover's leaf says; raises `NoteError` where it is none."""
    note = handover_note(leaf)
    if note is None:
        raise NoteError("a leaf is not a handover of the signing key")
    return parse_rotation(note)
