"""Hand-over tickets: the prefill engine names the one worker that may fetch a request's sealed blocks, once.

1. The prefill worker signs with its own Ed25519 key. Others have its public key alone, so none can make its tickets.
2. A ticket is for one decode worker by name, of one life of the prefill worker, and ends at its deadline.
3. It names the blocks by a digest over their keys, which are keyed by the domain. So it fits no other prompt, tenant,
   subject, model or epoch, and reveals none of them to a reader.
4. It opens nothing: what is fetched is sealed, and opens only for who has the domain's keys.

    ticket := "kvh1." base64url(record, signature)
    record := version, key id, blocks, deadline (ms), issued (ms), nonce, domain, chain, life, worker, peer
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from kvcustody.audit.tlog.signed_note import VerifierKey
from kvcustody.clock import Clock
from kvcustody.governance.credentials.scope_token import FUTURE_MS_MAX
from kvcustody.governance.credentials.scope_token_bytes import decoded, encoded, read_text, write_text

PREFIX: Final = "kvh1."
LEASE_SECONDS: Final = 30
DIGEST_BYTES: Final = 32
_VERSION = b"\x01"
_HEAD = struct.Struct(">c4sIQQ16s32s32s16s")
_SIGNATURE_BYTES: Final = 64
_TEXT_MAX: Final = 1024
_SIGNED: Final = b"kvcustody/handover-ticket/1\x00"

Reason: TypeAlias = Literal[
    "malformed",
    "other-key",  # no peer that this worker trusts has this key
    "forged",
    "expired",
    "future-dated",
    "other-peer",  # another decode worker's
    "other-blocks",  # of another prompt, domain or model
    "other-life",  # the prefill worker has started anew since
    "used",
    "unknown",  # the prefill worker has no such offer
    "gone",  # what was offered has ended
]


class Ticket(NamedTuple):
    """An authentic ticket. `life`: the incarnation of `worker`. `chain` and `domain` are digests. Times are UTC ms."""

    worker: str
    life: str
    peer: str
    nonce: bytes
    domain: bytes
    chain: bytes
    blocks: int
    issued_ms: int
    deadline_ms: int


class RefusedTicket(NamedTuple):
    """A ticket for which nothing is fetched or given."""

    reason: Reason


def chain_digest(keys: bytes) -> bytes:
    """Return a ticket's name for a run of blocks: a digest over their keys, 32 bytes each."""
    return hashlib.blake2b(keys, digest_size=DIGEST_BYTES).digest()


def issue(ticket: Ticket, key_id: bytes, sign: Callable[[bytes], bytes]) -> str:
    """Return the ticket's text; an empty `nonce` is replaced by a new one."""
    record = _HEAD.pack(
        _VERSION,
        key_id,
        ticket.blocks,
        ticket.deadline_ms,
        ticket.issued_ms,
        ticket.nonce or os.urandom(16),
        ticket.domain,
        ticket.chain,
        bytes.fromhex(ticket.life),
    )
    record += write_text(ticket.worker) + write_text(ticket.peer)
    return PREFIX + encoded(record + sign(_SIGNED + record))


def read_ticket(text: str, keys: Mapping[str, VerifierKey], clock: Clock) -> Ticket | RefusedTicket:
    """Parse a ticket that one of these workers signed and that is in time. The caller checks whom it is for.

    keys: of the workers that are trusted, by name.
    """
    if not text.startswith(PREFIX) or len(text) > _TEXT_MAX:
        return RefusedTicket("malformed")
    data = decoded(text.removeprefix(PREFIX))
    if data is None or len(data) < _HEAD.size + _SIGNATURE_BYTES or data[:1] != _VERSION:
        return RefusedTicket("malformed")
    record, signature = data[:-_SIGNATURE_BYTES], data[-_SIGNATURE_BYTES:]
    signer = next((name for name, key in keys.items() if key.key_id == record[1:5]), None)
    if signer is None:
        return RefusedTicket("other-key")
    try:
        Ed25519PublicKey.from_public_bytes(keys[signer].public).verify(signature, _SIGNED + record)
    except InvalidSignature:
        return RefusedTicket("forged")
    _, _, blocks, deadline_ms, issued_ms, nonce, domain, chain, life = _HEAD.unpack_from(record)
    try:
        worker, at = read_text(record, _HEAD.size)
        peer, at = read_text(record, at)
    except (IndexError, ValueError):
        return RefusedTicket("malformed")
    if at != len(record) or not blocks:  # it is authentic, and its signer may be hostile all the same
        return RefusedTicket("malformed")
    if worker != signer:
        return RefusedTicket("forged")
    now_ms = clock.utc_us() // 1000
    if now_ms >= deadline_ms:
        return RefusedTicket("expired")
    if issued_ms > now_ms + FUTURE_MS_MAX:
        return RefusedTicket("future-dated")
    return Ticket(worker, life.hex(), peer, nonce, domain, chain, blocks, issued_ms, deadline_ms)
