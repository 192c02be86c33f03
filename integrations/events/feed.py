"""What the adapters' block events have in common: whom they are published to, the scope of a domain, the end.

An adapter derives from `BlockEventFeed` and says which events there are (`take_pending`, `take_last`); it calls
`publish_pending` once a step, and `close` when custody has ended.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from kvcustody.allocator.pool.accounting import Domain
from kvcustody.integrations.events.block_event import BlockEvent, EventScope, scope_of


class BlockEventPublisher(Protocol):
    """Takes the events of one step; an `EventPublisher`, or whatever a deployment puts in its place."""

    def publish(self, events: Sequence[BlockEvent], /) -> int:
        """Hand over; never waits."""


class BlockEventFeed(ABC):
    """The events of one engine. revision: the policy's that is active now; close: ends a publisher that is ours."""

    def __init__(
        self,
        publisher: BlockEventPublisher,
        revision: Callable[[], int],
        close: Callable[[], None] | None = None,
    ) -> None:
        self._publisher = publisher
        self._revision = revision
        self._close = close
        self._scopes: WeakKeyDictionary[Domain, EventScope] = WeakKeyDictionary()
        self._scopes_revision = revision()

    @abstractmethod
    def take_pending(self) -> list[BlockEvent]:
        """What has happened since the last call, in order."""

    @abstractmethod
    def take_last(self) -> list[BlockEvent]:
        """The last batch, which says that everything that was stored is gone."""

    def publish_pending(self) -> None:
        """Publish what has happened since the last call: once a step."""
        events = self.take_pending()
        if events:
            self._publisher.publish(events)

    def close(self) -> None:
        """Custody has ended."""
        self._publisher.publish(self.take_last())
        if self._close is not None:
            self._close()

    def _scope(self, domain: Domain) -> EventScope:
        """The scope of `domain` under the revision that is active now."""
        revision = self._revision()
        if revision != self._scopes_revision:
            self._scopes.clear()
            self._scopes_revision = revision
        scope = self._scopes.get(domain)
        if scope is None:
            scope = self._scopes[domain] = scope_of(domain, revision)
        return scope
