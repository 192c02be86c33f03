"""Decide what a witness signs (C2SP tlog-witness, `add-checkpoint`).

1. It signs a checkpoint of a log that it trusts, signed by that log's key, which extends the newest one that it
   signed; and nothing else. The time that it states is its own.
2. Before a signature leaves, the head is on disk (`WitnessMemory`, rule 1 of `state`).
3. What is refused changes nothing, and is answered with the specification's own status code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvcustody.audit.tlog.checkpoint import open_checkpoint, parse_checkpoint
from kvcustody.audit.tlog.proofs import ProofError, check_consistency
from kvcustody.audit.tlog.signed_note import KeyKind, NoteError, parse_note
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.tlog.witness.request import SIZE_TYPE, parse_request
from kvcustody.audit.tlog.witness.state import WitnessError, WitnessMemory


class CosignReply(NamedTuple):
    """An HTTP answer."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


class Witness:
    """One witness: a key, a memory and a clock. Many threads may call it at once."""

    def __init__(self, key: SigningKey, memory: WitnessMemory, now_seconds: Callable[[], int]) -> None:
        if key.kind is KeyKind.ED25519:
            raise WitnessError(f"key `{key.name}` is a log's key; a witness signs with a time in the line")
        self.key = key
        self._memory = memory
        self._now_seconds = now_seconds

    def add_checkpoint(self, data: bytes) -> CosignReply:
        """Answer one request (rules 1–3)."""
        try:
            request = parse_request(data)
            checkpoint = parse_checkpoint(parse_note(request.note).text)
        except NoteError as problem:
            return _refused(400, problem.message)
        keys = self._memory.keys(checkpoint.origin)
        if not keys:
            return _refused(404, f"log `{checkpoint.origin}` is not witnessed here")
        try:
            open_checkpoint(request.note, keys)
        except NoteError as problem:
            return _refused(403, problem.message)
        if request.old_size > checkpoint.size:
            return _refused(400, f"`old` is `{request.old_size}`, past the checkpoint's {checkpoint.size}")
        held = self._memory.head(checkpoint.origin)
        if request.old_size != held.size:
            return _conflict(held.size)
        if held.size == checkpoint.size and held.root != checkpoint.root:
            return _conflict(held.size)
        try:
            check_consistency(held, checkpoint.head, request.path)
        except ProofError as problem:
            return _refused(422, problem.message)
        if not self._memory.advance(checkpoint.origin, held, checkpoint.head):
            return _conflict(self._memory.head(checkpoint.origin).size)
        line = self.key.sign(checkpoint.text(), at_seconds=self._now_seconds()).line()
        return CosignReply(200, line.encode())


def _refused(status: int, problem: str) -> CosignReply:
    return CosignReply(status, problem.encode() + b"\n")


def _conflict(size: int) -> CosignReply:
    return CosignReply(409, b"%d\n" % size, SIZE_TYPE)
