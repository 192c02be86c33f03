"""Block events of the engine without a model, with token ids of prompts, for routers that compute hashes of their own.

1. A block that a prompt filled is told with its tokens; one that an answer filled is told without, and so are those
   behind it.
2. Whether token ids leave is what `kv_events_tokens` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.prefix.hash_index import IndexChange
from kvcustody.allocator.prefix.node import KEY_BYTES
from kvcustody.governance.governor.governor import Governor
from kvcustody.integrations.events.block_event import (
    REMOVED,
    BlockEvent,
    EventScope,
    split_keys,
    stored,
)
from kvcustody.integrations.events.feed import BlockEventPublisher
from kvcustody.integrations.transformers.batching.kv_events import BatchingBlockEvents


class PromptBlockEvents(BatchingBlockEvents):
    """Used on the engine's thread; `publish_prompt` right after a prompt was committed, before anything else is."""

    def __init__(
        self, governor: Governor, publisher: BlockEventPublisher, close: Callable[[], None] | None = None
    ) -> None:
        super().__init__(governor, publisher, close)
        self._prompt: Sequence[int] | NDArray[np.int32] = ()
        self._numbers: dict[bytes, int] = {}  # of blocks in their chains, by key

    def publish_prompt(self, tokens: NDArray[np.int32]) -> None:
        """Publish what the commit of this prompt stored."""
        self._prompt = tokens
        try:
            self.publish_pending()
        finally:
            self._prompt = ()

    def take_pending(self) -> list[BlockEvent]:
        """See `BlockEventFeed`."""
        events = super().take_pending()
        for event in events:
            if event.kind == REMOVED:
                for key in split_keys(event.keys):
                    self._numbers.pop(key, None)
        return events

    def _stored(self, scope: EventScope, change: IndexChange) -> BlockEvent:
        size, keys = self._governor.block_tokens, split_keys(change.keys)
        first = self._numbers.get(change.parent, -1) + 1 if change.parent else 0
        end = (first + len(change.keys) // KEY_BYTES) * size
        is_known = (not change.parent or change.parent in self._numbers) and end <= len(self._prompt)
        if not is_known:
            return super()._stored(scope, change)
        self._numbers.update(zip(keys, range(first, first + len(keys)), strict=True))
        return stored(
            scope,
            change.keys,
            residency=change.residency,
            parent=change.parent,
            block_tokens=size,
            tokens=[int(token) for token in self._prompt[first * size : end]],
        )
