"""Block events of governed continuous batching for routers: one batch per step, nothing without a publisher.

1. Stored minus removed is what the Governor's index holds, after each `publish_pending`: the Governor says what was
   published and what ended, in order, and every way out of the index is among it.
2. Every event has the scope of its blocks' domain and the revision of the policy that is active when it is published.
3. Token ids and salts are not known here: no setting makes them leave.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import TypeVar

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
    stored,
)
from kvcustody.integrations.events.feed import BlockEventFeed, BlockEventPublisher


class BatchingBlockEvents(BlockEventFeed):
    """Turns one Governor's index changes into events. Used in the Governor's turn."""

    def __init__(
        self, governor: Governor, publisher: BlockEventPublisher, close: Callable[[], None] | None = None
    ) -> None:
        super().__init__(
            publisher,
            lambda: governor.table.revision,
            governor.may_export,
            close,
            lambda: governor.epochs.known,
            lambda: governor.table.names_by_tenant,
        )
        self._governor = governor
        governor.event_figures = self.figures
        governor.index_changes()  # recorded from here on

    def take_pending(self) -> list[BlockEvent]:
        """See `BlockEventFeed`."""
        events: list[BlockEvent] = []
        for (domain, cause), run in groupby(self._governor.index_changes(), key=_kind):
            scope = self._scope(domain)
            if cause:
                events.append(removed(scope, b"".join([change.keys for change in run]), cause=cause))
            else:
                events += [self._stored(scope, change) for change in run]
        return events

    def take_last(self) -> list[BlockEvent]:
        """See `BlockEventFeed`. Blocks that ended since the last step are among those that are gone."""
        self._governor.index_changes()
        return [cleared(self._governor.table.revision, "shutdown")]

    def _stored(self, scope: EventScope, change: IndexChange) -> BlockEvent:
        return stored(
            scope,
            change.keys,
            residency=change.residency,
            parent=change.parent,
            block_tokens=self._governor.block_tokens,
        )


Feed = TypeVar("Feed", bound=BatchingBlockEvents)


def open_events(
    publisher: BlockEventPublisher | None,
    governor: Governor,
    worker: Worker | None,
    settings: object,
    feed: type[Feed] = BatchingBlockEvents,  # type: ignore[assignment]
) -> Feed | None:
    """Return events to `publisher`, or to the one in a worker's settings; None where there is none.

    Raises `ConfigError` where `kv_events_endpoint` cannot be bound.
    """
    if publisher is not None:
        return feed(governor, publisher)
    if worker is None or not isinstance(settings, Settings) or not settings.publishes_kv_events:
        return None
    from kvcustody.integrations.events.publisher import open_publisher  # pyzmq only where it is asked for

    own = open_publisher(settings, revision=governor.table.revision, incarnation=worker.writer.incarnation)
    assert own is not None, "somebody is told"
    return feed(governor, own, own.close)


def _kind(change: IndexChange) -> tuple[Domain, str]:
    return change.domain, change.cause
