"""What a publisher has told of and not taken back: what a snapshot is made of.

1. A snapshot never has a block that was taken back. It may lack the oldest, where more are told of than `blocks_max`.
2. It has each chain's blocks after their parents, as they were told.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, NamedTuple

from kvcustody.governance.edge.named_requester import NamedRequester
from kvcustody.integrations.events.block_event import CLEARED, STORED, BlockEvent, split_keys

BLOCKS_MAX: Final = 1 << 18


class _Id(NamedTuple):
    key: bytes
    namespace: str
    medium: str
    group: int | None


class LiveBlocks:
    """Used on one thread."""

    def __init__(self, blocks_max: int = BLOCKS_MAX) -> None:
        self._blocks_max = blocks_max
        self._told: OrderedDict[_Id, BlockEvent] = OrderedDict()  # one block each
        self.let_go = 0

    def __len__(self) -> int:
        return len(self._told)

    def take(self, events: Iterable[BlockEvent]) -> None:
        """These were told, in this order."""
        for event in events:
            if event.kind == CLEARED:
                self._told.clear()
            elif event.kind == STORED:
                self._store(event)
            else:
                for key in split_keys(event.keys):
                    self._told.pop(_Id(key, event.namespace, event.medium, event.group), None)

    def of(self, tenant: NamedRequester) -> list[BlockEvent]:
        """The stored events of a whole tenant's names."""
        return [
            event
            for event in self._told.values()
            if event.place is not None and event.place.whole_tenant == tenant
        ]

    def _store(self, event: BlockEvent) -> None:
        parent, size = event.parent, event.block_tokens
        for at, key in enumerate(split_keys(event.keys)):
            tokens = event.tokens[at * size : (at + 1) * size]
            one = _Id(key, event.namespace, event.medium, event.group)
            self._told[one] = event._replace(keys=key, parent=parent, tokens=tokens)
            parent = key
        while len(self._told) > self._blocks_max:
            self._told.popitem(last=False)
            self.let_go += 1
