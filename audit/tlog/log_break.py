"""A break of the root log, stated by its own key: the lost signed heads, and where the log continues.

A database that failed over, or was restored, to an earlier state loses root leaves that a note covers. Workers hand in
again what they kept, but in another order and under other salts. The resulting root log can never extend the lost note.
So nothing is hidden, and nothing is signed, until an operator confirms the break:

1. The statement names four things:
   - the lost head;
   - the head that the ledger had when the break was confirmed;
   - the newest signed head that is still part of the log, where the next signature begins;
   - the number of leaves that replays have brought back since.
2. It is signed by the log's key, as a statement that cannot pass for a checkpoint, and is a leaf of the system log.
3. It does not excuse the loss. Whoever holds the lost note, or a witness that cosigned it, sees that this log does not
   extend it. The statement shows them who was responsible.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection, select

from kvcustody.audit.kinds import SYSTEM
from kvcustody.audit.leaf.merkle import TreeHead
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.audit.tlog.backend import parse_json
from kvcustody.audit.tlog.signed_note import Note, NoteError, VerifierKey, decode_base64, parse_note
from kvcustody.audit.tlog.signing_key import SigningKey, sign_statement, verify_statement

BREAK = "kvcustody/log-break@1"
LOG_BROKEN_KIND = "log-broken"
_BREAK_FIELDS = ("origin", "lost", "found", "base", "replayed", "time")


class LogBreak(NamedTuple):
    """The heads of the root log before and after a break (rule 1)."""

    origin: str
    lost: TreeHead
    found: TreeHead
    base: TreeHead
    replayed: int
    at_seconds: int


class RecordedBreak(NamedTuple):
    """A break as recorded in a leaf, and who confirmed it."""

    idx: int
    note: bytes
    actor: str
    reason: str


def break_record(key: SigningKey, what: LogBreak) -> bytes:
    """Return the statement as a note of the log's key."""
    text = _break_text(what)
    return Note(text, (sign_statement(key, text),)).to_bytes()


def parse_break(data: bytes, keys: Sequence[VerifierKey] = ()) -> LogBreak:
    """Return the break in a note, signed by one of `keys` if any are given; raises `NoteError`."""
    note = parse_note(data)
    lines = note.text.split("\n")
    fields = dict(line.split(" ", 1) for line in lines[1:-1] if " " in line)
    if lines[0] != BREAK or tuple(fields) != _BREAK_FIELDS:
        raise NoteError("a note does not record a break of a log")
    try:
        log_break = LogBreak(
            fields["origin"],
            _break_head(fields["lost"]),
            _break_head(fields["found"]),
            _break_head(fields["base"]),
            int(fields["replayed"]),
            int(fields["time"]),
        )
    except ValueError:
        raise NoteError("a break of a log has a malformed number") from None
    if _break_text(log_break) != note.text or len(note.signatures) != 1:
        raise NoteError("a break of a log is not in canonical form")
    problems = []
    for key in keys:
        try:
            verify_statement(key, note.text, note.signatures[0])
        except NoteError as problem:
            problems.append(problem)
    if keys and len(problems) == len(keys):
        raise problems[0]
    return log_break


def recorded_breaks(connection: Connection) -> list[RecordedBreak]:
    """Return every break in the system log, in order; raises `NoteError` if a leaf of one is malformed."""
    query = (
        select(events.c.idx, events.c.leaf)
        .join(logs, logs.c.id == events.c.log)
        .where(logs.c.name == SYSTEM, events.c.kind == LOG_BROKEN_KIND, has_leaf(events))
        .order_by(events.c.idx)
    )
    found = []
    for row in connection.execute(query):
        body = parse_json(bytes(row.leaf))
        found.append(RecordedBreak(row.idx, break_note(bytes(row.leaf)), body["actor"], body["reason"]))
    return found


def break_note(leaf: bytes) -> bytes:
    """Return the note in the leaf of a break; raises `NoteError`."""
    try:
        return base64.b64decode(parse_json(leaf)["record"], validate=True)
    except (binascii.Error, KeyError, TypeError, ValueError):
        raise NoteError("the leaf of a break is malformed") from None


def _break_text(what: LogBreak) -> str:
    heads = zip(("lost", "found", "base"), (what.lost, what.found, what.base), strict=True)
    lines = [f"{name} {head.size} {base64.b64encode(head.root).decode()}" for name, head in heads]
    numbers = [f"replayed {what.replayed}", f"time {what.at_seconds}"]
    return "\n".join((BREAK, f"origin {what.origin}", *lines, *numbers)) + "\n"


def _break_head(text: str) -> TreeHead:
    size, _, root = text.partition(" ")
    return TreeHead(int(size), decode_base64(root, "root"))
