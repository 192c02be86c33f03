"""Shared code of the adapters' block events: their publisher, a domain's scope, and the end.

An adapter derives from `BlockEventFeed` and says which events there are (`take_pending`, `take_last`); it calls
`publish_pending` once a step, and `close` when custody has ended.

An event leaves where the policy permits its tenant `export` of its classification. What was told of a tenant's blocks
while that was permitted is taken back when they end, whatever the policy says by then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from kvcustody.allocator.pool.accounting import Domain
from kvcustody.governance.edge.erase_epochs import KnownEpochs
from kvcustody.integrations.events.block_event import EVERY_TENANT, REMOVED, BlockEvent, EventScope, scope_of

MayExport = Callable[[str, str], bool]  # of a tenant and a classification
_TOLD_MAX = 1 << 16


def _nobody(_tenant: str) -> bool:
    """Return no tenant: no tenant's requests share one name."""
    return False


class BlockEventPublisher(Protocol):
    """Takes the events of each step; an `EventPublisher`, or a deployment's replacement."""

    def publish(self, events: Sequence[BlockEvent], /) -> int:
        """Hand over events without waiting."""


@runtime_checkable
class CountingPublisher(BlockEventPublisher, Protocol):
    """A publisher with counters of its events."""

    def figures(self) -> dict[str, float]:
        """Return names and numbers, as workers report them. Any thread."""


@runtime_checkable
class NamedBlocksPublisher(BlockEventPublisher, Protocol):
    """A publisher that names requesters, so that erasures end names."""

    def take_epochs(self, known: KnownEpochs, /) -> None:
        """Name by these epochs from now on, and publish at once what they end."""


class BlockEventFeed(ABC):
    """One engine's events. revision: the active policy's; close: ends a publisher that is ours.

    may_export: `Authority.may_export`. epochs: the erase epochs that the engine's thread acts by; None: it knows none.
    by_tenant: whether all of a tenant's requests have one name.
    """

    def __init__(
        self,
        publisher: BlockEventPublisher,
        revision: Callable[[], int],
        may_export: MayExport,
        close: Callable[[], None] | None = None,
        epochs: Callable[[], KnownEpochs | None] = lambda: None,
        by_tenant: Callable[[], Callable[[str], bool]] = lambda: _nobody,
    ) -> None:
        self._publisher = publisher
        self._epochs = epochs
        self._by_tenant = by_tenant
        self._named_by: KnownEpochs | None = None
        self._revision = revision
        self._may_export = may_export
        self._told: set[tuple[str, str]] = set()  # tenants and classifications of which something was published
        self._close = close
        self._scopes: WeakKeyDictionary[Domain, EventScope] = WeakKeyDictionary()
        self._scopes_revision = revision()

    @abstractmethod
    def take_pending(self) -> list[BlockEvent]:
        """Return what has happened since the last call, in order."""

    @abstractmethod
    def take_last(self) -> list[BlockEvent]:
        """Return the last batch, which says that all stored blocks are gone."""

    def publish_pending(self) -> None:
        """Publish what has happened since the last call, once per step."""
        known = self._epochs()
        if known is not None and known is not self._named_by:
            self._named_by = known
            self.take_epochs(known)
        events = [event for event in self.take_pending() if self._may_leave(event)]
        if events:
            self._publisher.publish(events)

    def _may_leave(self, event: BlockEvent) -> bool:
        scope = event.scope
        if scope is None or scope.tenant == EVERY_TENANT:  # the publisher refuses what has none; the pool is nobody's
            return True
        who = (scope.tenant, scope.classification)
        if not self._may_export(*who):
            return event.kind == REMOVED and who in self._told
        if who not in self._told:
            if len(self._told) >= _TOLD_MAX:
                self._told.clear()
            self._told.add(who)
        return True

    def take_epochs(self, known: KnownEpochs) -> None:
        """Apply these erase epochs: blocks under names that they end are withdrawn from routers at once."""
        if isinstance(self._publisher, NamedBlocksPublisher):
            self._publisher.take_epochs(known)

    def figures(self) -> dict[str, float]:
        """Return the publisher's figures; nothing where it has no counters."""
        return self._publisher.figures() if isinstance(self._publisher, CountingPublisher) else {}

    def close(self) -> None:
        """Publish that custody has ended."""
        self._publisher.publish(self.take_last())
        if self._close is not None:
            self._close()

    def _scope(self, domain: Domain) -> EventScope:
        """Return the scope of `domain` under the active revision."""
        revision = self._revision()
        if revision != self._scopes_revision:
            self._scopes.clear()
            self._scopes_revision = revision
        scope = self._scopes.get(domain)
        if scope is None:
            scope = self._scopes[domain] = scope_of(domain, revision, self._by_tenant())
        return scope
