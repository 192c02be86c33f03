"""What a publisher has told of and not taken back: what a snapshot is made of.

1. A snapshot never has a block that was taken back. It may lack the oldest, where more are told of than `blocks_max`.
2. It has each chain's blocks after their parents, as they were told.
3. A tenant's snapshot costs as much as the tenant's own blocks, however many others have.
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
        self._told: OrderedDict[_Id, NamedRequester | None] = OrderedDict()  # each block's tenant; None: of no name
        self._of: dict[NamedRequester | None, dict[_Id, BlockEvent]] = {}  # one block each
        self.let_go = 0

    def __len__(self) -> int:
        return len(self._told)

    def take(self, events: Iterable[BlockEvent]) -> None:
        """These were told, in this order."""
        for event in events:
            if event.kind == CLEARED:
                self._told.clear()
                self._of.clear()
            elif event.kind == STORED:
                self._store(event)
            else:
                for key in split_keys(event.keys):
                    self._drop(_Id(key, event.namespace, event.medium, event.group))

    def of(self, tenant: NamedRequester) -> list[BlockEvent]:
        """The stored events of a whole tenant's names."""
        return [*self._of.get(tenant, {}).values()]

    def has(self, tenant: NamedRequester) -> bool:
        """Whether any block of a whole tenant's names is told of."""
        return tenant in self._of

    def _drop(self, one: _Id) -> None:
        if one in self._told:
            tenant = self._told.pop(one)
            blocks = self._of[tenant]
            del blocks[one]
            if not blocks:
                del self._of[tenant]

    def _store(self, event: BlockEvent) -> None:
        parent, size = event.parent, event.block_tokens
        tenant = None if event.place is None else event.place.whole_tenant
        for at, key in enumerate(split_keys(event.keys)):
            tokens = event.tokens[at * size : (at + 1) * size]
            one = _Id(key, event.namespace, event.medium, event.group)
            if self._told.setdefault(one, tenant) != tenant:
                self._drop(one)
                self._told[one] = tenant
            self._of.setdefault(tenant, {})[one] = event._replace(keys=key, parent=parent, tokens=tokens)
            parent = key
        while len(self._told) > self._blocks_max:
            self._drop(next(iter(self._told)))
            self.let_go += 1
