"""KV events in the standard form of Mooncake's indexer (RFC 1527, as documented in August 2026), read and written.

1. A batch is an array [time in milliseconds, events, rank]; an event is a map with `event_type` (`stored`, `removed`,
   `cleared`) and an envelope that names its tenant. Frames are vLLM's.
2. The aliases that Mooncake's master adds for consumers of vLLM's events (`type`, `block_hashes`) are not written: who
   reads those reads no tenant, and would keep every tenant's blocks in one index.
3. `tenant_id` and `additional_salt` are the namespace. Only blocks with one are told (`names.told_blocks`), and none of
   an adapter: a removal would not say which.
4. A stream is a namespace's blocks in one medium. It begins with a clear and numbers its events from 0: what an earlier
   process said of that namespace is gone.
5. What is read names blocks by tenant and hash, or by tenant and object key: two tenants' equal hashes are two blocks.
   Token ids are not decoded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from kvcustody.integrations.events.block_event import CLEARED, STORED, BlockEvent, split_keys
from kvcustody.integrations.events.custody_field import SHORT_KEY_BYTES, CustodyField, custody_of

_MEDIUM = {"GPU": "gpu", "CPU": "cpu", "STORAGE": "disk"}
_STREAMS_MAX = 1 << 16
_MILLISECONDS = 1000
_PLACE_BYTES = 16


class MooncakeEvent(msgspec.Struct, gc=False, tag_field="event_type"):
    """The envelope of every event. `timestamp`: UTC milliseconds."""

    event_id: int
    timestamp: int | None
    model_name: str | None
    block_size: int | None
    additional_salt: str | None
    lora_name: str | None
    tenant_id: str
    backend_id: str
    medium: str | None
    dp_rank: int | None


class MooncakeStored(MooncakeEvent, gc=False, tag="stored"):
    """Consecutive blocks that were committed."""

    seq_hashes: list[int]
    base_block_idx: int | None
    parent_hash: int | None
    token_ids: list[int] | None
    kvcustody: CustodyField | None


class MooncakeRemoved(MooncakeEvent, gc=False, tag="removed"):
    """Blocks that are gone."""

    seq_hashes: list[int]
    base_block_idx: int | None
    kvcustody: CustodyField | None


class MooncakeCleared(MooncakeEvent, gc=False, tag="cleared"):
    """A stream whose blocks are all gone."""

    kvcustody: CustodyField | None


class MooncakeBatch(msgspec.Struct, array_like=True, gc=False):
    """The events of one step."""

    ts_ms: int
    events: list[MooncakeStored | MooncakeRemoved | MooncakeCleared]
    dp_rank: int = 0


class MooncakeWire:
    """Governed events in the standard form, for one cache owner. Used by one thread."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._next: dict[tuple[str, str], int] = {}  # by namespace and medium
        self._block_tokens: int | None = None
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
        """Return the events that an indexer may see, as one payload."""
        ts_ms = int(ts_seconds * _MILLISECONDS)
        messages: list[MooncakeStored | MooncakeRemoved | MooncakeCleared] = []
        for event in events:
            if event.kind == CLEARED:
                custody = custody_of(event, incarnation)
                messages += [MooncakeCleared(*self._envelope(stream, ts_ms, rank), custody) for stream in self._next]
            elif event.namespace and event.lora_name is None:
                messages += self._told(event, ts_ms, rank, incarnation, tokens_published)
        return self._encoder.encode(MooncakeBatch(ts_ms, messages, rank))

    def replay_frames(self, topic: bytes, sequence: bytes, payload: bytes) -> tuple[bytes, ...]:
        """Return one replayed batch, as vLLM sends it."""
        return (topic, sequence, payload)

    def _told(
        self,
        event: BlockEvent,
        ts_ms: int,
        rank: int,
        incarnation: str,
        tokens_published: bool,
    ) -> list[MooncakeStored | MooncakeRemoved | MooncakeCleared]:
        custody = custody_of(event, incarnation)
        medium = _MEDIUM.get(event.medium, event.medium.lower())
        stream = (event.namespace, medium)
        messages: list[MooncakeStored | MooncakeRemoved | MooncakeCleared] = []
        if event.kind == STORED:
            self._block_tokens = event.block_tokens
        if stream not in self._next:
            if len(self._next) >= _STREAMS_MAX:
                self._next.clear()
            self._next[stream] = 0
            messages.append(
                MooncakeCleared(
                    *self._envelope(stream, ts_ms, rank),
                    msgspec.structs.replace(custody, cause="start", residency=0),
                )
            )
        hashes = [_unsigned(key) for key in split_keys(event.keys)]
        if event.kind != STORED:
            messages.append(MooncakeRemoved(*self._envelope(stream, ts_ms, rank), hashes, None, custody))
            return messages
        tokens = [int(token) for token in event.tokens] if tokens_published and event.tokens else None
        parent = _unsigned(event.parent) if event.parent else None
        depth = None if event.parent else 0
        messages.append(MooncakeStored(*self._envelope(stream, ts_ms, rank), hashes, depth, parent, tokens, custody))
        return messages

    def _envelope(
        self, stream: tuple[str, str], ts_ms: int, rank: int
    ) -> tuple[int, int, None, int | None, str, None, str, str, str, int]:
        """Return the leading fields of the stream's next event."""
        namespace, medium = stream
        number = self._next[stream]
        self._next[stream] = number + 1
        whose = (namespace, None, namespace, self._backend)
        return (number, ts_ms, None, self._block_tokens, *whose, medium, rank)


def _unsigned(key: bytes) -> int:
    return int.from_bytes(key[:SHORT_KEY_BYTES], "big")


# -- reading ----------------------------------------------------------------------------------------------------------


class ReadStored(msgspec.Struct, gc=False, tag_field="event_type", tag="stored"):
    """The fields of a store that an observer reads."""

    tenant_id: str
    medium: str | None = None
    seq_hashes: list[int] = []
    parent_hash: int | None = None
    object_key: str | None = None
    kvcustody: CustodyField | None = None


class ReadRemoved(msgspec.Struct, gc=False, tag_field="event_type", tag="removed"):
    """The fields of a removal that an observer reads."""

    tenant_id: str
    medium: str | None = None
    seq_hashes: list[int] = []
    object_key: str | None = None


class ReadCleared(msgspec.Struct, gc=False, tag_field="event_type", tag="cleared"):
    """The fields of a clear that an observer reads."""

    tenant_id: str
    medium: str | None = None
    kvcustody: CustodyField | None = None


MooncakeRead = ReadStored | ReadRemoved | ReadCleared
_decoder: msgspec.msgpack.Decoder[MooncakeRead] = msgspec.msgpack.Decoder(MooncakeRead)


def read_event(raw: msgspec.Raw) -> MooncakeRead:
    """Return an event in the standard form, with or without the master's aliases.

    Raises:
        msgspec.MsgspecError: it is malformed.
    """
    return _decoder.decode(raw)


def places_of(event: ReadStored | ReadRemoved) -> list[bytes]:
    """Return names for the event's blocks that no other tenant's blocks have (rule 5)."""
    if event.seq_hashes:
        return [place_of(event.tenant_id, one) for one in event.seq_hashes]
    return [] if event.object_key is None else [place_of(event.tenant_id, event.object_key)]


def place_of(tenant_id: str, block: int | str) -> bytes:
    """Return the name of one tenant's block: a digest, whatever the stream sent."""
    said = msgspec.msgpack.encode((tenant_id, block))
    return hashlib.blake2b(said, digest_size=_PLACE_BYTES, person=b"kvc-mooncake").digest()
