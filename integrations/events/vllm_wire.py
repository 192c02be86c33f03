"""vLLM's KV events, written as its encoder writes them (0.32.0).

1. A batch is an array [time, events, data-parallel rank]; an event is a map with its class name under `type`. Fields
   keep vLLM's order, and those at their default are left out.
2. The events (`BlockStored`, `BlockRemoved`, `AllBlocksCleared`) have the bytes that vLLM's encoder: tested. The
   governed ones add one field at the end. They are separate classes because the encoder sizes a map's header by the
   fields that a class has. One more field would change the bytes of an event that does not use it.
3. Frames: (topic, sequence as 8 bytes big-endian, payload). A replay request is (empty, first sequence) to the ROUTER;
   answers are (empty, topic, sequence, payload), and (empty, empty, -1, empty) ends them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvcustody.integrations.events.block_event import CLEARED, STORED, BlockEvent, split_keys
from kvcustody.integrations.events.custody_field import CustodyField, custody_of

Hash = bytes | int


class VllmBlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag="BlockStored"):
    """Full blocks of one chain that entered the prefix cache.

    `extra_keys` has an entry for each block: the namespace in a chain's first.
    """

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class VllmBlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag="BlockRemoved"):
    """Blocks that left the prefix cache."""

    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class VllmAllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag="AllBlocksCleared"):
    """A reset prefix cache."""


class GovernedStored(VllmBlockStored, omit_defaults=True, gc=False, tag="BlockStored"):
    """Blocks that entered, with their owner."""

    kvcustody: CustodyField | None = None


class GovernedRemoved(VllmBlockRemoved, omit_defaults=True, gc=False, tag="BlockRemoved"):
    """Blocks that left, with their owner."""

    kvcustody: CustodyField | None = None


class GovernedCleared(VllmAllBlocksCleared, omit_defaults=True, gc=False, tag="AllBlocksCleared"):
    """A cleared cache, with the worker's scope."""

    kvcustody: CustodyField | None = None


Event = GovernedStored | GovernedRemoved | GovernedCleared


class VllmEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of one step. `ts`: UTC seconds."""

    ts: float
    events: Sequence[VllmBlockStored | VllmBlockRemoved | VllmAllBlocksCleared]
    data_parallel_rank: int | None = None


class GovernedBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A batch with or without scopes: vLLM's own decodes to it too."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(GovernedBatch)


def encode(batch: VllmEventBatch | GovernedBatch) -> bytes:
    """Return the payload of one batch."""
    return _encoder.encode(batch)


def decode(payload: bytes) -> GovernedBatch:
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
    return _encoder.encode(GovernedBatch(ts_seconds, made, rank))


def replay_frames(topic: bytes, sequence: bytes, payload: bytes) -> tuple[bytes, ...]:
    """Return one replayed batch, after the client's identity and the empty delimiter."""
    return (topic, sequence, payload)


def _event(event: BlockEvent, incarnation: str, tokens_published: bool) -> Event:
    custody = custody_of(event, incarnation)
    if event.kind == CLEARED:
        return GovernedCleared(custody)
    keys: list[Hash] = [*split_keys(event.keys)]
    if event.kind != STORED:
        return GovernedRemoved(keys, event.medium, event.group, kvcustody=custody)
    extra: list[tuple[Any, ...] | None] | None = None
    tokens: list[int] = []
    if tokens_published:
        tokens = [int(token) for token in event.tokens]
        salt = event.namespace or event.salt
        if salt and not event.parent:
            extra = [(salt,), *(None for _ in keys[1:])]
    return GovernedStored(
        keys,
        event.parent or None,
        tokens,
        event.block_tokens,
        None,
        event.medium,
        event.lora_name,
        extra,
        event.group,
        kvcustody=custody,
    )
