"""A log's request to a witness: its earlier size, a consistency proof, and its new signed checkpoint.

1. There is one form, and anything else is refused: bounded, canonical numbers and base64, at most 63 hashes.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import NamedTuple

from kvcustody.audit.leaf.merkle import HASH_BYTES, SIZE_MAX
from kvcustody.audit.tlog.signed_note import NOTE_BYTES_MAX, NoteError, decode_base64

PATH_MAX = 63
REQUEST_BYTES_MAX = NOTE_BYTES_MAX + 4096
SIZE_TYPE = "text/x.tlog.size"
_OLD = re.compile(r"old (0|[1-9][0-9]{0,18})")


class AddCheckpoint(NamedTuple):
    """The body of `add-checkpoint`."""

    old_size: int
    path: tuple[bytes, ...]
    note: bytes

    def to_bytes(self) -> bytes:
        """Return the body to send."""
        lines = [f"old {self.old_size}", *(base64.b64encode(node).decode() for node in self.path), "", ""]
        return "\n".join(lines).encode() + self.note


def parse_request(data: bytes) -> AddCheckpoint:
    """Return the request in a body; raises `NoteError` for anything else (rule 1)."""
    if len(data) > REQUEST_BYTES_MAX:
        raise NoteError(f"a request of `{len(data)}` bytes is longer than {REQUEST_BYTES_MAX}")
    head, found, note = data.partition(b"\n\n")
    if not found or not head.isascii():
        raise NoteError("a request is not lines, an empty line and a checkpoint")
    first, *lines = head.decode("ascii").split("\n")
    match = _OLD.fullmatch(first)
    if match is None or int(match[1]) > SIZE_MAX:
        raise NoteError("a request does not begin with `old` and a size")
    return AddCheckpoint(int(match[1]), _path(lines), note)


def _path(lines: Sequence[str]) -> tuple[bytes, ...]:
    if len(lines) > PATH_MAX:
        raise NoteError(f"a consistency proof has `{len(lines)}` hashes, more than {PATH_MAX}")
    path = tuple(decode_base64(line, "consistency proof") for line in lines)
    if any(len(node) != HASH_BYTES for node in path):
        raise NoteError(f"a hash of a consistency proof is not {HASH_BYTES} bytes long")
    return path
