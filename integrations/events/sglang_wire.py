"""SGLang's KV events (0.5.23: maps, 64-bit hashes), and the hash chain behind them.

1. A batch is an array [time, events, attention data-parallel rank]; an event is a map with its class name under
   `type`. Hashes are signed 64-bit integers: the first eight bytes of a digest, big-endian.
2. Our keys do not fit, so the first eight bytes stand for them and the full keys are in `kvcustody`. A consumer that
   compares 64 bits can confuse two blocks; they are keyed, so nobody can aim at that.
3. Frames as vLLM's, but a replayed batch and the end marker come without a topic: (empty, sequence, payload).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from kvcustody.integrations.events.block_event import CLEARED, STORED, BlockEvent, split_keys
from kvcustody.integrations.events.custody_field import SHORT_KEY_BYTES, CustodyField, custody_of

SALT_LABEL = b"sglang-cache-salt-v1\0"
_MEDIUM = {"GPU": "GPU", "CPU": "CPU_PINNED", "STORAGE": "DISK"}
_OTHER_MEDIUM = "EXTERNAL"


class SglangBlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag="BlockStored"):
    """Pages of one chain that entered the radix cache."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None
    kvcustody: CustodyField | None = None


class SglangBlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag="BlockRemoved"):
    """Pages that left the radix cache, or one of its tiers."""

    block_hashes: list[int]
    medium: str | None = None
    kvcustody: CustodyField | None = None


class SglangAllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag="AllBlocksCleared"):
    """A flushed radix cache."""

    kvcustody: CustodyField | None = None


Event = SglangBlockStored | SglangBlockRemoved | SglangAllBlocksCleared


class SglangEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of one step. `ts`: UTC seconds."""

    ts: float
    events: list[Event]
    attn_dp_rank: int | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SglangEventBatch)


def encode(batch: SglangEventBatch) -> bytes:
    """Return the payload of one batch."""
    return _encoder.encode(batch)


def decode(payload: bytes) -> SglangEventBatch:
    """Return a batch in the current form, typed.

    Raises:
        msgspec.MsgspecError: it is malformed.
    """
    return _decoder.decode(payload)


def payload_of(
    events: Sequence[BlockEvent], ts_seconds: float, rank: int, incarnation: str, *, tokens_published: bool
) -> bytes:
    """Return governed block events as one payload."""
    made = [_event(event, incarnation, tokens_published) for event in events]
    return _encoder.encode(SglangEventBatch(ts_seconds, made, rank))


def replay_frames(topic: bytes, sequence: bytes, payload: bytes) -> tuple[bytes, ...]:
    """Return one replayed batch, after the client's identity and the empty delimiter."""
    return (sequence, payload)


def short_hash(digest: bytes) -> int:
    """Return SGLang's published form of a digest: its first eight bytes as a signed integer."""
    return int.from_bytes(digest[:SHORT_KEY_BYTES], "big", signed=True)


def medium_of(medium: str) -> str:
    """Return SGLang's word for the medium of blocks."""
    return _MEDIUM.get(medium, _OTHER_MEDIUM)


def chain(tokens: Sequence[int], page_tokens: int, salt: str | None = None) -> list[int]:
    """Return SGLang's own hashes for a prompt's whole pages, seeded by the cache salt.

    For checking a foreign stream; ours never uses it: SHA-256 of guessable tokens tells who has the same ones.
    """
    before = b"" if salt is None else hashlib.sha256(SALT_LABEL + salt.encode()).digest()
    made = []
    for start in range(0, len(tokens) - page_tokens + 1, page_tokens):
        page = b"".join(int(token).to_bytes(4, "little") for token in tokens[start : start + page_tokens])
        before = hashlib.sha256(before + page).digest()
        made.append(short_hash(before))
    return made


def _event(event: BlockEvent, incarnation: str, tokens_published: bool) -> Event:
    if event.kind == CLEARED:
        return SglangAllBlocksCleared(custody_of(event, incarnation))
    custody = custody_of(event, incarnation, with_keys=True)
    hashes = [short_hash(key) for key in split_keys(event.keys)]
    medium = medium_of(event.medium)
    if event.kind != STORED:
        return SglangBlockRemoved(hashes, medium, custody)
    tokens = [int(token) for token in event.tokens] if tokens_published else []
    return SglangBlockStored(
        hashes,
        short_hash(event.parent) if event.parent else None,
        tokens,
        event.block_tokens,
        None,
        medium,
        (event.namespace or event.salt) if tokens_published else None,
        lora_name=event.lora_name,
        kvcustody=custody,
    )
