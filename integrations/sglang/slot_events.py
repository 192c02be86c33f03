"""Block events of a governed SGLang for routers: one batch per step, nothing without a publisher.

`SlotCustody` calls `after_insert` with whatever it inserts, and `publish_pending` once a step. It calls `cleared` where
SGLang drops its cache.

1. The tree is watched, not its callers. A page's key is stored when its node enters, and removed when the node is taken
   out, for whatever reason. After each `publish_pending`, stored minus removed equals the tree.
2. Every event has the scope of its pages' domain; a node that entered without a request of ours is refused.
3. A page's key is a digest of its tokens and the key of the page before it. The digest is keyed with the name of the
   page's namespace, which only readers of its domain are given. So the key does not depend on where nodes begin.
4. Pages that a client narrowed (`extra_key`) are not for every request of its tenant. Routers that index by tenant get
   no events about them.
5. Token ids are read only where the setting publishes them. Without a publisher none of this exists.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from kvcustody.allocator.pool.accounting import Domain
from kvcustody.allocator.prefix.node import KEY_BYTES
from kvcustody.errors import IsolationError
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.integrations.events.block_event import (
    BlockEvent,
    EventScope,
    cleared,
    removed,
    stored,
)
from kvcustody.integrations.events.feed import BlockEventFeed, BlockEventPublisher
from kvcustody.integrations.sglang.page_tree import PageNode, Pages, PageTree
from kvcustody.integrations.sglang.slot_request import SlotRequest

ENDED = "ended"  # by a decision of the port; which one is in the ledger
_PERSON = b"kvcustody-events"


class StoredRun(NamedTuple):
    """The keys of one node's pages, their owner and their residency."""

    scope: EventScope
    residency: int
    keys: bytes


class WatchedTree(PageTree):
    """A tree that reports which nodes enter it and which keys leave it."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        super().__init__(pages, page_tokens)
        self.entered: list[PageNode] = []  # of which nobody has said yet whose they are
        self.runs: dict[int, StoredRun] = {}  # by the node's number
        self.on_left: Callable[[StoredRun], None] | None = None

    def insert(
        self, node: PageNode | None, name: str, tokens: array[int], pages: Pages, first: int, last: int
    ) -> PageNode:
        """See `PageTree`."""
        made = super().insert(node, name, tokens, pages, first, last)
        if first < last:
            self.entered.append(made)
        return made

    def _split(self, node: PageNode, at: int) -> PageNode:
        upper = super()._split(node, at)
        run = self.runs.get(node.number)
        if run is not None:
            cut = at * KEY_BYTES
            self.runs[upper.number] = run._replace(keys=run.keys[:cut])
            self.runs[node.number] = run._replace(keys=run.keys[cut:])
        return upper

    def _cut_off(self, node: PageNode) -> list[Pages]:
        run = self.runs.pop(node.number, None)
        if run is not None and self.on_left is not None:
            self.on_left(run)
        return super()._cut_off(node)


class SlotBlockEvents(BlockEventFeed):
    """Turns what enters and leaves one tree into events. Used on the scheduler's thread."""

    def __init__(
        self,
        tree: PageTree,
        port: EnginePort,
        publisher: BlockEventPublisher,
        *,
        with_tokens: bool = False,
        close: Callable[[], None] | None = None,
    ) -> None:
        """Watch the tree.

        Raises:
            IsolationError: `tree` is not watched, or is not empty.
        """
        super().__init__(
            publisher,
            lambda: port.table.revision,
            port.may_export,
            close,
            lambda: port.epochs.known,
            lambda: port.table.names_by_tenant,
        )
        if not isinstance(tree, WatchedTree) or np.any(tree.indexed()):
            raise IsolationError("block events begin with an empty, watched tree")
        self._cause = ENDED  # of what leaves now
        self._tree = tree
        self._port = port
        self._with_tokens = with_tokens
        self._events: list[BlockEvent] = []
        tree.on_left = self._left

    # -- what happens -------------------------------------------------------------------------------------------------

    def after_insert(self, request: SlotRequest, domain: Domain) -> None:
        """Attribute what has entered the tree since the last call to the request, in `domain`."""
        entered, self._tree.entered = self._tree.entered, []
        scope = self._scope(domain)
        requester = self._scope(request.residency.domain).asker
        if request.narrowed_by:
            scope = scope._replace(owner=None, wide=None)
        for node in entered:
            parent = node.parent
            before = b""
            if parent is not None and parent.parent is not None:
                before = self._tree.runs[parent.number].keys[-KEY_BYTES:]
            run = StoredRun(scope, request.residency.id, page_keys(node, before))
            self._tree.runs[node.number] = run
            self._events.append(
                stored(
                    scope,
                    run.keys,
                    residency=run.residency,
                    parent=before,
                    block_tokens=self._tree.page_tokens,
                    tokens=node.tokens if self._with_tokens else (),
                    requester=requester,
                )
            )

    def _left(self, run: StoredRun) -> None:
        self._events.append(removed(run.scope, run.keys, cause=self._cause, residency=run.residency))

    @contextmanager
    def because(self, cause: str) -> Iterator[None]:
        """Set the cause of pages leaving while the block runs."""
        before, self._cause = self._cause, cause
        try:
            yield
        finally:
            self._cause = before

    def cleared(self, cause: str) -> None:
        """Take note that the engine is about to drop its whole tree."""
        self._tree.runs.clear()
        self._events.append(cleared(self._port.table.revision, cause))

    # -- steps --------------------------------------------------------------------------------------------------------

    def take_pending(self) -> list[BlockEvent]:
        """See `BlockEventFeed`."""
        if self._tree.entered:
            raise IsolationError(
                f"`{len(self._tree.entered)}` nodes without a known owner entered the tree",
                nodes=len(self._tree.entered),
            )
        events, self._events = self._events, []
        return events

    def take_last(self) -> list[BlockEvent]:
        """See `BlockEventFeed`."""
        self._events.append(cleared(self._port.table.revision, "shutdown"))
        return self.take_pending()


def page_keys(node: PageNode, before: bytes) -> bytes:
    """Return the keys of a node's pages, behind the page with key `before` (rule 3)."""
    secret = hashlib.blake2b(node.name.encode(), digest_size=KEY_BYTES, person=_PERSON).digest()
    data = np.asarray(node.tokens).astype("<i4").tobytes()
    size = len(data) // len(node.pages)
    keys = bytearray()
    for at in range(0, len(data), size):
        before = hashlib.blake2b(
            before + data[at : at + size], digest_size=KEY_BYTES, key=secret, person=_PERSON
        ).digest()
        keys += before
    return bytes(keys)
