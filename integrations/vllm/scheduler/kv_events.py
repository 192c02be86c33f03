"""Block events of a governed vLLM for routers: one batch per step, nothing without a publisher.

The pool calls `after_insert`, the scheduler's side `publish_pending` once a step and `close` at the end.

1. vLLM's own index is watched, not the callers of it: a key is stored when the first block with it enters, and
   removed when the last one leaves, in whatever way. Stored minus removed is the index after each `publish_pending`.
2. Every event has the scope of its blocks' domain; a key that entered without a request of ours is refused.
3. Token ids are read only where the setting publishes them. Callers' salts are not known here.
4. Without a publisher none of this exists, and vLLM's index is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool

from kvcustody.errors import IsolationError
from kvcustody.integrations.events.block_event import (
    BlockEvent,
    EventScope,
    cleared,
    removed,
    stored,
)
from kvcustody.integrations.events.feed import BlockEventFeed, BlockEventPublisher

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from kvcustody.governance.external.engine_port import EnginePort
    from kvcustody.integrations.vllm.scheduler.governed_request import GovernedRequest

ENDED = "ended"  # by a decision of the port; which one is in the ledger
_GROUP_BYTES = 4  # of a layer group's number, behind the key, in vLLM's index


class WatchedIndex(BlockHashToBlockMap):  # type: ignore[misc]
    """vLLM's index, which reports the keys that enter and leave it."""

    def __init__(self, on_removed: Callable[[bytes], None]) -> None:
        super().__init__()
        self.inserted: set[bytes] = set()  # in the call of vLLM's that runs now
        self._on_removed = on_removed

    def insert(self, key: Any, block: KVCacheBlock) -> None:
        """See vLLM's."""
        if self.get_one_block(key) is None:
            self.inserted.add(key)
        super().insert(key, block)

    def pop(self, key: Any, block_id: int) -> KVCacheBlock | None:
        """See vLLM's."""
        block: KVCacheBlock | None = super().pop(key, block_id)
        if block is not None and self.get_one_block(key) is None:
            self._on_removed(key)
        return block


class _StoredKey(NamedTuple):
    """The owner of a key that was published as stored."""

    scope: EventScope
    residency: int


class SchedulerBlockEvents(BlockEventFeed):
    """Turns what enters and leaves one pool's index into events. Used on the engine's thread."""

    def __init__(
        self,
        pool: BlockPool,
        port: EnginePort,
        publisher: BlockEventPublisher,
        *,
        with_tokens: bool = False,
        groups: int = 1,
        close: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(
            publisher,
            lambda: port.table.revision,
            port.may_export,
            close,
            lambda: port.epochs.known,
            lambda: port.table.names_by_tenant,
        )
        self.cause = ENDED  # of what leaves now
        self._pool = pool
        self._port = port
        self._with_tokens = with_tokens
        self._groups = groups
        self._stored_keys: dict[bytes, _StoredKey] = {}
        self._events: list[BlockEvent] = []
        self._removals: list[tuple[EventScope, int, str, int, bytes]] = []
        self.index: WatchedIndex
        self._watch()

    def _watch(self) -> None:
        if len(self._pool.cached_block_hash_to_block):
            raise IsolationError("block events begin with an empty index; attach the publisher before any request")
        self.index = self._pool.cached_block_hash_to_block = WatchedIndex(self._on_removed)

    # -- what happens -------------------------------------------------------------------------------------------------

    def after_insert(
        self,
        governed: GovernedRequest,
        group: int,
        blocks: Sequence[KVCacheBlock],
        first: int,
        block_tokens: int,
    ) -> None:
        """Report `blocks`, from position `first` in the request's table on, as indexed under its keys."""
        new, self.index.inserted = self.index.inserted, set()
        if not new:
            return
        self._append_removals()
        per_block = block_tokens // self._pool.hash_block_size
        run: list[int] = []
        for place, block in enumerate(blocks, first):
            key = block.block_hash
            if key in new and (not run or run[-1] == place - 1):
                run.append(place)
                continue
            self._stored(governed, group, run, block_tokens, per_block)
            run = [place] if key in new else []
        self._stored(governed, group, run, block_tokens, per_block)

    def _stored(self, governed: GovernedRequest, group: int, run: list[int], block_tokens: int, per_block: int) -> None:
        """Add one event for the run's part in a segment, and one for the rest."""
        residency = governed.residency
        assert residency is not None
        boundary = residency.segment_blocks
        asker = self._scope(residency.domain).asker
        for domain, places in (
            (residency.segment_domain, [place for place in run if place < boundary]),
            (residency.domain, [place for place in run if place >= boundary]),
        ):
            if not places:
                continue
            assert domain is not None
            scope = self._scope(domain)
            hashes = governed.request.block_hashes
            keys = [hashes[(place + 1) * per_block - 1] for place in places]
            stored_key = _StoredKey(scope, residency.id)
            number = group.to_bytes(_GROUP_BYTES, "big")
            for key in keys:
                self._stored_keys[key + number] = stored_key
            begin, end = places[0] * block_tokens, (places[-1] + 1) * block_tokens
            adapter = governed.request.lora_request
            self._events.append(
                stored(
                    scope,
                    b"".join(keys),
                    residency=residency.id,
                    parent=hashes[places[0] * per_block - 1] if places[0] else b"",
                    block_tokens=block_tokens,
                    tokens=governed.request._all_token_ids[begin:end] if self._with_tokens else (),
                    group=group if self._groups > 1 else None,
                    lora_name=adapter.lora_name if adapter is not None else None,
                    requester=asker,
                )
            )

    def _on_removed(self, key: bytes) -> None:
        known = self._stored_keys.pop(key, None)
        if known is None:
            self.index.inserted.discard(key)
            return
        group = int.from_bytes(key[-_GROUP_BYTES:], "big")
        self._removals.append((known.scope, known.residency, self.cause, group, key[:-_GROUP_BYTES]))

    def cleared(self, cause: str) -> None:
        """Report that vLLM has dropped its whole index and begun another."""
        self._append_removals()
        self._stored_keys.clear()
        self._events.append(cleared(self._port.table.revision, cause))
        self._watch()

    # -- steps --------------------------------------------------------------------------------------------------------

    def take_pending(self) -> list[BlockEvent]:
        """See `BlockEventFeed`."""
        self._append_removals()
        if self.index.inserted:
            raise IsolationError(f"`{len(self.index.inserted)}` keys without a known owner entered vllm's index")
        events, self._events = self._events, []
        return events

    def take_last(self) -> list[BlockEvent]:
        """See `BlockEventFeed`."""
        self._events.append(cleared(self._port.table.revision, "shutdown"))
        return self.take_pending()

    def _append_removals(self) -> None:
        """Add removals since the last call, in order among the stores: one event per run of one scope and cause."""
        if not self._removals:
            return
        removals, self._removals = self._removals, []
        for (scope, residency, cause, group), run in groupby(removals, key=lambda one: one[:4]):
            self._events.append(
                removed(
                    scope,
                    b"".join([one[4] for one in run]),
                    cause=cause,
                    residency=residency,
                    group=group if self._groups > 1 else None,
                )
            )
