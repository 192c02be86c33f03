"""KV events in the form that Dynamo's indexer and `KvEventPublisher` relay read (1.6.1), each in its namespace.

1. An event is a map, and a store names its namespace in `cache_salt`. Dynamo mixes that field, and no other, into its
   hashes: a salt in `extra_keys`, of a map or of an array, is skipped, and such blocks are found by every tenant.
   So nothing else is written here, and `screen` lets nothing else through.
2. Only blocks with a namespace are told (`names.told_blocks`): a router has one for a request, and what is lent would
   be an answer to requests that cannot use it.
3. Dynamo recomputes hashes from token ids; without them there is nothing to tell. Ours travel as 64 bits and serve
   removals and parents. Dynamo takes equal blocks to have one of ours at every worker, so they are fleet hashes
   (`names.told_blocks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvcustody.errors import ConfigError
from kvcustody.integrations.events.block_event import CLEARED, STORED, BlockEvent, split_keys
from kvcustody.integrations.events.custody_field import CustodyField, custody_of
from kvcustody.integrations.events.sglang_wire import medium_of, short_hash


class DynamoStored(msgspec.Struct, omit_defaults=True, gc=False, tag="BlockStored"):
    """Blocks of one chain entered a worker's cache, in one namespace."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    cache_salt: str
    medium: str | None = None
    lora_name: str | None = None
    group_idx: int | None = None
    kvcustody: CustodyField | None = None


class DynamoRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag="BlockRemoved"):
    """Blocks left a worker's cache."""

    block_hashes: list[int]
    medium: str | None = None
    group_idx: int | None = None
    kvcustody: CustodyField | None = None


class DynamoCleared(msgspec.Struct, omit_defaults=True, gc=False, tag="AllBlocksCleared"):
    """A worker's cache was emptied."""

    kvcustody: CustodyField | None = None


Event = DynamoStored | DynamoRemoved | DynamoCleared


class DynamoBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of one step. `ts`: UTC seconds."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class DynamoWire:
    """Governed events in Dynamo's form."""

    def __init__(self, *, tokens_published: bool) -> None:
        """Raises `ConfigError` where token ids are withheld (rule 3)."""
        if not tokens_published:
            raise ConfigError(
                "setting `kv_events_format`: Dynamo indexes token ids, which are withheld; set `kv_events_tokens` to "
                "`published`, or publish in another format"
            )
        self._encoder = msgspec.msgpack.Encoder()

    def payload_of(
        self,
        events: Sequence[BlockEvent],
        ts_seconds: float,
        rank: int,
        incarnation: str,
        *,
        tokens_published: bool,
    ) -> bytes:
        """Return the events that a router may see, as one payload."""
        found = [self.event_of(event, incarnation) for event in events] if tokens_published else []
        return self._encoder.encode(DynamoBatch(ts_seconds, [event for event in found if event is not None], rank))

    def replay_frames(self, topic: bytes, sequence: bytes, payload: bytes) -> tuple[bytes, ...]:
        """Return one replayed batch, as vLLM sends it."""
        return (topic, sequence, payload)

    def event_of(self, event: BlockEvent, incarnation: str) -> Event | None:
        """Return the event in Dynamo's form; None where a router must not see it (rules 2 and 3)."""
        if event.kind == CLEARED:
            return DynamoCleared(custody_of(event, incarnation))
        if not event.namespace or (event.kind == STORED and not event.tokens):
            return None
        custody = custody_of(event, incarnation)
        hashes = [short_hash(key) for key in split_keys(event.keys)]
        medium = medium_of(event.medium)
        if event.kind != STORED:
            return DynamoRemoved(hashes, medium, event.group, custody)
        return DynamoStored(
            hashes,
            short_hash(event.parent) if event.parent else None,
            [int(token) for token in event.tokens],
            event.block_tokens,
            event.namespace,
            medium,
            event.lora_name,
            event.group,
            custody,
        )


class Screened(NamedTuple):
    """Raw events that a router may see, and the number of refused stores."""

    events: tuple[msgspec.Raw, ...]
    refused: int


class _AnyStored(msgspec.Struct, gc=False, tag="BlockStored"):
    cache_salt: str | None = None


class _AnyRemoved(msgspec.Struct, gc=False, tag="BlockRemoved"):
    pass


class _AnyCleared(msgspec.Struct, gc=False, tag="AllBlocksCleared"):
    pass


class _AnyArray(msgspec.Struct, array_like=True, gc=False):
    kind: str


class _AnyBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]


_batch = msgspec.msgpack.Decoder(_AnyBatch)
_map = msgspec.msgpack.Decoder(_AnyStored | _AnyRemoved | _AnyCleared)
_array = msgspec.msgpack.Decoder(_AnyArray)
_WITHOUT_SCOPE = frozenset({"BlockRemoved", "AllBlocksCleared"})
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError, MemoryError, OverflowError)


def screen(payload: bytes) -> Screened:
    """Return the events in any engine's payload that Dynamo would store in a namespace, and the ends of all that it
    stores.

    A store that is an array, that names no `cache_salt` or an empty one, or that cannot be read is refused.
    """
    try:
        batch = _batch.decode(payload)
    except _UNREADABLE:
        return Screened((), 1)
    passed = tuple(event for event in batch.events if _is_scoped(event))
    return Screened(passed, len(batch.events) - len(passed))


def _is_scoped(raw: msgspec.Raw) -> bool:
    try:
        event = _map.decode(raw)
    except _UNREADABLE:
        return _ends_blocks(raw)
    return not isinstance(event, _AnyStored) or bool(event.cache_salt)


def _ends_blocks(raw: msgspec.Raw) -> bool:
    """Return whether an array is a removal or a clear, which name no content."""
    try:
        return _array.decode(raw).kind in _WITHOUT_SCOPE
    except _UNREADABLE:
        return False
