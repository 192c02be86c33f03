"""TensorRT-LLM's KV events: read with each block's scope; our events, written in its form.

    feed = EngineEventFeed(publisher, custody.scopes, llm.get_kv_cache_events, …)
    feed.publish_pending()                             # what the engine told, as governed events, scoped or not at all

1. An event of the engine's says hashes, tokens and priorities, and not whose they are. The connector is told the hashes
   of each request's blocks before their events; what it was not told of is refused and counted. That is every store
   under the engine's second cache manager, which tells no hashes.
2. Token ids are not taken over. Blocks are told by our keys, which nobody makes without the domain's secret.
3. A removal is told where the store was. A block that the engine moves off the device is removed, and counted: its host
   pool is refused at start, so there should be none.
4. What is written has the engine's fields, with a 64-bit hash of our key in place of its own, and `kvcustody` beside
   `data`. Its form has no clear: a clear is the removal of all that was told.

Never run on TensorRT-LLM itself: its form is that of `KVCacheEventSerializer`, files of September 2026.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvcustody.governance.edge.erase_epochs import KnownEpochs
from kvcustody.integrations.events.block_event import (
    CLEARED,
    STORED,
    BlockEvent,
    EventScope,
    check_event,
    cleared,
    places_of,
    removed,
    split_keys,
    stored,
)
from kvcustody.integrations.events.custody_field import CustodyField, custody_of
from kvcustody.integrations.events.feed import BlockEventFeed, BlockEventPublisher
from kvcustody.integrations.events.sglang_wire import short_hash
from kvcustody.integrations.tensorrt_llm.derived_salt import Standing

_HASHES_MAX = 1 << 20
_DEVICE_LEVEL = 0
_DEFAULT_PRIORITY = 35
Hash = int | str
NativeEvent = Mapping[str, object]


class ScopedBlock(NamedTuple):
    """One of the engine's blocks: our key of it, and its owner."""

    key: bytes
    scope: EventScope


class EventScopes:
    """The KV events' hashes of blocks, with the blocks' owners. Called on the engine's thread."""

    def __init__(self, block_tokens: int, revision: int = 0) -> None:
        self.block_tokens = block_tokens
        self.revision = revision
        self._blocks: OrderedDict[Hash, ScopedBlock] = OrderedDict()
        self._domains: dict[str, int] = {}

    def learn(self, standing: Standing, hashes: Sequence[Hash], keys: Sequence[bytes]) -> None:
        """Learn a request's blocks, as the scheduler half receives them."""
        label = standing.label
        if label is None or label.spec is None:
            return
        spec = label.spec
        number = self._domains.setdefault(standing.domain, len(self._domains) + 1)
        whose = (label.tenant, label.scope, label.classification)
        scope = EventScope(*whose, number, self.revision, *places_of(spec))
        for hash_, key in zip(hashes, keys, strict=True):
            self._blocks[hash_] = ScopedBlock(key, scope)
            if len(self._blocks) > _HASHES_MAX:
                self._blocks.popitem(last=False)

    def of(self, hash_: Hash) -> ScopedBlock | None:
        """Return a block by the engine's hash."""
        return self._blocks.get(hash_)


class _Token(msgspec.Struct, gc=False):
    pass


class _StoredBlock(msgspec.Struct, gc=False):
    block_hash: Hash
    tokens: list[_Token] = []
    cache_level: int = _DEVICE_LEVEL


class _StoredData(msgspec.Struct, gc=False, tag_field="type", tag="stored"):
    parent_hash: Hash | None
    blocks: list[_StoredBlock]


class _RemovedData(msgspec.Struct, gc=False, tag_field="type", tag="removed"):
    block_hashes: list[Hash]


class _Change(msgspec.Struct, gc=False):
    new_value: int
    old_value: int | None = None


class _UpdatedData(msgspec.Struct, gc=False, tag_field="type", tag="updated"):
    block_hash: Hash
    cache_level: _Change | None = None


class _CreatedData(msgspec.Struct, gc=False, tag_field="type", tag="created"):
    pass


class _NativeEvent(msgspec.Struct, gc=False):
    data: _StoredData | _RemovedData | _UpdatedData | _CreatedData


class EngineEventFeed(BlockEventFeed):
    """The engine's events of one pool, as governed ones."""

    def __init__(
        self,
        publisher: BlockEventPublisher,
        scopes: EventScopes,
        source: Callable[[], Sequence[NativeEvent]],
        may_export: Callable[[str, str], bool],
        close: Callable[[], None] | None = None,
        epochs: Callable[[], KnownEpochs | None] = lambda: None,
    ) -> None:
        """Prepare the feed. `source`: `llm.get_kv_cache_events`, or a stand-in. `epochs`:
        `TransferThread.known_epochs`.
        """
        super().__init__(publisher, lambda: scopes.revision, may_export, close, epochs)
        self._by_hash = scopes
        self._source = source
        self._told_blocks: dict[Hash, ScopedBlock] = {}  # as many as the engine has blocks
        self.counts: Counter[str] = Counter()

    def take_pending(self) -> list[BlockEvent]:
        """Return what the engine reported since the last call, as far as its scope is known."""
        events: list[BlockEvent] = []
        for raw in self._source():
            try:
                event = msgspec.convert(raw, _NativeEvent)
            except msgspec.ValidationError:
                self.counts["malformed"] += 1
                continue
            events += self._of(event.data)
        return events

    def take_last(self) -> list[BlockEvent]:
        """Return the event that none of the reported blocks is there any more."""
        self._told_blocks.clear()
        return [cleared(self._by_hash.revision, "worker stopped")]

    def _of(self, data: _StoredData | _RemovedData | _UpdatedData | _CreatedData) -> list[BlockEvent]:
        match data:
            case _StoredData():
                return self._stored(data)
            case _RemovedData():
                return [event for one in data.block_hashes for event in self._removed(one, "engine")]
            case _UpdatedData():
                if data.cache_level is None or data.cache_level.new_value == _DEVICE_LEVEL:
                    return []
                self.counts["off the device"] += 1
                return self._removed(data.block_hash, "moved off the device")
            case _CreatedData():
                self._told_blocks.clear()
                return [cleared(self._by_hash.revision, "engine started")]

    def _stored(self, data: _StoredData) -> list[BlockEvent]:
        events: list[BlockEvent] = []
        parent = None if data.parent_hash is None else self._by_hash.of(data.parent_hash)
        has_parent = data.parent_hash not in (None, 0)
        for one in data.blocks:
            block = self._by_hash.of(one.block_hash)
            if one.tokens and len(one.tokens) != self._by_hash.block_tokens:
                self.counts["partial"] += 1
                break
            if one.cache_level != _DEVICE_LEVEL:
                self.counts["off the device"] += 1
                break
            if block is None or (has_parent and (parent is None or parent.scope != block.scope)):
                self.counts["unscoped"] += 1
                break  # nothing after it has a parent that was told
            events.append(
                stored(
                    block.scope,
                    block.key,
                    residency=0,
                    parent=parent.key if has_parent and parent is not None else b"",
                    block_tokens=self._by_hash.block_tokens,
                )
            )
            self._told_blocks[one.block_hash] = block
            parent, has_parent = block, True
        return events

    def _removed(self, hash_: Hash, cause: str) -> list[BlockEvent]:
        block = self._told_blocks.pop(hash_, None)
        return [] if block is None else [removed(block.scope, block.key, cause=cause)]


class WrittenToken(msgspec.Struct, gc=False):
    """One token of a block, as the engine writes it."""

    token_id: int
    token_extra_id: int = 0


class WrittenBlock(msgspec.Struct, gc=False):
    """One block of a store."""

    block_hash: int
    tokens: list[WrittenToken]
    cache_level: int = _DEVICE_LEVEL
    priority: int = _DEFAULT_PRIORITY
    type: str = "stored_block"


class WrittenStored(msgspec.Struct, gc=False, tag_field="type", tag="stored"):
    """Blocks of one chain that entered the cache."""

    parent_hash: int | None
    blocks: list[WrittenBlock]


class WrittenRemoved(msgspec.Struct, gc=False, tag_field="type", tag="removed"):
    """Blocks that left the cache."""

    block_hashes: list[int]


class WrittenEvent(msgspec.Struct, gc=False):
    """One event in the engine's form, with its scope."""

    event_id: int
    data: WrittenStored | WrittenRemoved
    window_size: int
    kvcustody: CustodyField


class TensorRtLlmWire:
    """Governed events as `KVCacheEventSerializer` writes the engine's own (rule 4)."""

    def __init__(self, window_size: int, *, tokens_published: bool = False) -> None:
        self._window = window_size
        self._tokens_published = tokens_published
        self._held: dict[bytes, EventScope] = {}  # keys that were told: as many as the engine has blocks
        self._next = 0

    def events_of(self, events: Sequence[BlockEvent], incarnation: str = "") -> list[WrittenEvent]:
        """Return the events, numbered.

        Raises:
            IsolationError: an event has no scope.
        """
        written: list[WrittenEvent] = []
        for event in events:
            check_event(event)
            if event.kind == CLEARED:
                self._clear(event, incarnation, written)
                continue
            keys = split_keys(event.keys)
            custody = custody_of(event, incarnation, with_keys=True)
            if event.kind != STORED:
                gone = [key for key in keys if self._held.pop(key, None) is not None]
                if gone:
                    written.append(self._event(WrittenRemoved([short_hash(key) for key in gone]), custody))
                continue
            self._held.update(dict.fromkeys(keys, event.scope))
            tokens = [WrittenToken(int(one)) for one in event.tokens] if self._tokens_published else []
            size = event.block_tokens
            blocks = [WrittenBlock(short_hash(key), tokens[at * size : (at + 1) * size]) for at, key in enumerate(keys)]
            parent = short_hash(event.parent) if event.parent else None
            written.append(self._event(WrittenStored(parent, blocks), custody))
        return written

    def _clear(self, event: BlockEvent, incarnation: str, written: list[WrittenEvent]) -> None:
        by_scope: dict[EventScope, list[bytes]] = {}
        for key, scope in self._held.items():
            by_scope.setdefault(scope, []).append(key)
        self._held.clear()
        for scope, keys in by_scope.items():
            gone = removed(scope, b"".join(keys), cause=event.cause)
            custody = custody_of(gone, incarnation, with_keys=True)
            written.append(self._event(WrittenRemoved([short_hash(key) for key in keys]), custody))

    def _event(self, data: WrittenStored | WrittenRemoved, custody: CustodyField) -> WrittenEvent:
        self._next += 1
        return WrittenEvent(self._next - 1, data, self._window, custody)
