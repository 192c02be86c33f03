"""What routers are told of a governed engine: one batch of block events a step, nothing where nobody listens.

T1  Stored minus removed is what the Governor's index holds, each time that something was told: the Governor says what
    was published and what ended, in order, and every way out of the index is among it.
T2  Every event has the scope of its blocks' domain and the revision of the policy that is active when it is told.
T3  Token ids and salts are not known here: no setting makes them leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Protocol
from weakref import WeakKeyDictionary

from kvcustody.allocator.pool.accounting import Domain
from kvcustody.allocator.prefix.hash_index import IndexChange
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.settings import Settings
from kvcustody.governance.worker.worker import Worker
from kvcustody.integrations.events.block_event import (
    BlockEvent,
    EventScope,
    cleared,
    removed,
    scope_of,
    stored,
)


class BatchPublisher(Protocol):
    """Takes the events of one step; an `EventPublisher`, or whatever a deployment puts in its place."""

    def publish(self, events: Sequence[BlockEvent], /) -> int:
        """Hand over; never waits."""


class BatchingBlockEvents:
    """Turns one Governor's index changes into events. Used in the Governor's turn."""

    def __init__(
        self, governor: Governor, publisher: BatchPublisher, close: Callable[[], None] | None = None
    ) -> None:
        self._governor = governor
        self._publisher = publisher
        self._close = close  # where the publisher is ours
        self._scopes: WeakKeyDictionary[Domain, EventScope] = WeakKeyDictionary()
        self._revision = governor.table.revision
        governor.index_changes()  # recorded from here on

    def tell(self) -> None:
        """Publish what has happened since the last call."""
        changes = self._governor.index_changes()
        if not changes:
            return
        revision = self._governor.table.revision
        if revision != self._revision:
            self._scopes.clear()
            self._revision = revision
        events: list[BlockEvent] = []
        for (domain, cause), run in groupby(changes, key=_kind):
            scope = self._scope(domain)
            if cause:
                events.append(removed(scope, b"".join([change.keys for change in run]), cause=cause))
            else:
                events += [self._stored(scope, change) for change in run]
        self._publisher.publish(events)

    def end(self) -> None:
        """Custody has ended: everything that was stored is gone."""
        self._governor.index_changes()
        self._publisher.publish([cleared(self._governor.table.revision, "shutdown")])
        if self._close is not None:
            self._close()

    def _stored(self, scope: EventScope, change: IndexChange) -> BlockEvent:
        return stored(
            scope,
            change.keys,
            residency=change.residency,
            parent=change.parent,
            block_tokens=self._governor.block_tokens,
        )

    def _scope(self, domain: Domain) -> EventScope:
        scope = self._scopes.get(domain)
        if scope is None:
            scope = self._scopes[domain] = scope_of(domain, self._revision)
        return scope


def open_events(
    publisher: BatchPublisher | None, governor: Governor, worker: Worker | None, settings: object
) -> BatchingBlockEvents | None:
    """Events to `publisher`, or to one that the settings of a worker ask for; None where nobody listens.

    Raises `ConfigError` where `kv_events_endpoint` cannot be bound.
    """
    if publisher is not None:
        return BatchingBlockEvents(governor, publisher)
    if worker is None or not isinstance(settings, Settings) or not settings.kv_events_endpoint:
        return None
    from kvcustody.integrations.events.publisher import open_publisher  # pyzmq only where it is asked for

    own = open_publisher(settings, revision=governor.table.revision, incarnation=worker.writer.incarnation)
    assert own is not None, "an endpoint is set"
    return BatchingBlockEvents(governor, own, own.close)


def _kind(change: IndexChange) -> tuple[Domain, str]:
    return change.domain, change.cause
