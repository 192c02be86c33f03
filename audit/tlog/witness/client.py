"""Request one witness's signature on one checkpoint, and accept only what its key signed.

1. Every call ends within its deadline, whatever the other side does: it is an operator's, not ours.
2. An answer counts when the line in it verifies under the key that the operator configured, over the very checkpoint
   that was sent. Everything else is a `WitnessError`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvcustody.audit.tlog.checkpoint import verify
from kvcustody.audit.tlog.signed_note import (
    KeyKind,
    NoteError,
    NoteSignature,
    VerifierKey,
    parse_note,
    parse_signatures,
    parse_vkey,
)
from kvcustody.audit.tlog.witness.request import SIZE_TYPE, AddCheckpoint
from kvcustody.audit.tlog.witness.server import ADD_CHECKPOINT
from kvcustody.audit.tlog.witness.state import WitnessError
from kvcustody.files import read_words
from kvcustody.http_exchange import UNIX, HttpReply, exchange

_ANSWER_BYTES_MAX = 1 << 16
_TRIES = 3
Proof = Callable[[int, int], list[bytes]]  # old size, new size -> consistency path


@dataclass(frozen=True, slots=True)
class WitnessAddress:
    """A witness's address (`http://…`, `https://…` or `unix:/path`) and the key that verifies its lines."""

    url: str
    key: VerifierKey

    def __post_init__(self) -> None:
        if self.key.kind is KeyKind.ED25519:
            raise WitnessError(f"`{self.key.name}` is a log's key, not a witness's", name=self.key.name)
        if not self.url.startswith(("http://", "https://", "unix:/")):
            raise WitnessError(f"witness `{self.key.name}` has the address `{self.url}`; use https:// or unix:/")


def read_addresses(path: Path) -> tuple[WitnessAddress, ...]:
    """Return witnesses from a file: a line `URL VKEY` for each, `#` begins a comment. Raises `WitnessError`."""
    try:
        lines = read_words(path).splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise WitnessError(f"witness file `{path}` cannot be read: {problem}", path=path) from None
    addresses = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if words and not line.startswith("#"):
            if len(words) != 2:
                raise WitnessError(f"`{path}` line {number} is not `URL VKEY`", path=path, line=number)
            addresses.append(WitnessAddress(words[0], parse_vkey(words[1])))
    return tuple(addresses)


class Cosigned(NamedTuple):
    """A witness's line, and its stated POSIX time."""

    line: NoteSignature
    at_seconds: int


def cosign(
    address: WitnessAddress, note: bytes, size: int, seen: int, prove: Proof, *, timeout_seconds: float = 5.0
) -> Cosigned:
    """Request a witness's signature on a checkpoint of `size` root leaves; it last saw `seen`. Raises `WitnessError`.

    A witness that remembers another size says so, and is asked again from there.
    """
    until = time.monotonic() + timeout_seconds
    for _ in range(_TRIES):
        if seen > size:
            raise WitnessError(f"witness `{address.key.name}` has seen `{seen}` root leaves; this is {size}", seen=seen)
        body = AddCheckpoint(seen, tuple(prove(seen, size)) if 0 < seen < size else (), note).to_bytes()
        status, kind, answer = _post(address, body, until)
        if status == 200:
            return _checked(address, note, answer)
        if status != 409 or kind != SIZE_TYPE or not answer.strip().isdigit() or int(answer) == seen:
            reason = answer[:200].decode(errors="replace").strip()
            problem = f"witness `{address.key.name}` refused ({status}): {reason}"
            raise WitnessError(problem, name=address.key.name, status=status)
        seen = int(answer)
    raise WitnessError(f"witness `{address.key.name}` reports a different size on every attempt", name=address.key.name)


def _checked(address: WitnessAddress, note: bytes, answer: bytes) -> Cosigned:
    key = address.key
    try:
        for line in parse_signatures(answer):
            if (line.name, line.key_id) == (key.name, key.key_id):
                return Cosigned(line, verify(key, parse_note(note).text, line).at_seconds)
    except NoteError as problem:
        raise WitnessError(f"the answer of witness `{key.name}` is not valid: {problem.message}") from None
    raise WitnessError(f"the answer of witness `{key.name}` has no line signed by its key", name=key.name)


def _post(address: WitnessAddress, body: bytes, until: float) -> HttpReply:
    over_socket = address.url.startswith(UNIX)
    try:
        return exchange(
            "POST",
            ("http://witness" if over_socket else address.url.rstrip("/")) + ADD_CHECKPOINT,
            body,
            {"Content-Type": "text/plain", "Connection": "close"},
            deadline_seconds=max(0.01, until - time.monotonic()),
            bytes_max=_ANSWER_BYTES_MAX,
            socket_path=address.url.removeprefix(UNIX) if over_socket else None,
        )
    except OSError as problem:
        raise WitnessError(
            f"witness `{address.key.name}` cannot be reached: {problem}", name=address.key.name
        ) from None
