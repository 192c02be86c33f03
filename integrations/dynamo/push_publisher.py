"""Hands block events to Dynamo's own `KvEventPublisher`, for a worker that registers with Dynamo itself.

    feed = BatchingBlockEvents(governor, PushPublisher(kv_event_publisher, namespaces))

1. A store carries its namespace as `cache_salt`, in every call: without one, Dynamo keeps it for everybody.
2. Dynamo's publisher knows no clear and no medium: a clear is the removal of all that was told, and only blocks on the
   device are told, of the first layer group.
3. What Dynamo refuses is counted and never raised into the engine's step: its index lacks blocks, which costs a hit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvcustody.governance.edge.current_namespaces import CurrentNamespaces
from kvcustody.governance.edge.erase_epochs import KnownEpochs
from kvcustody.integrations.events.block_event import BlockEvent, check_event
from kvcustody.integrations.events.dynamo_wire import DynamoRemoved, DynamoStored, DynamoWire
from kvcustody.integrations.events.names.told_blocks import ToldBlocks
from kvcustody.logger import get_logger

Told = Mapping[str, object]
_DEVICE = "GPU"
_log = get_logger(__name__)


class KvEventSink(Protocol):
    """The used part of `dynamo.llm.KvEventPublisher`."""

    def publish_batch(self, events: Sequence[Told], /) -> None:
        """Check the whole list and send it in order."""


class PushPublisher:
    """A `BlockEventPublisher` into Dynamo. Called on the engine's thread; the caller closes the sink."""

    def __init__(self, sink: KvEventSink, namespaces: CurrentNamespaces) -> None:
        self._sink = sink
        self._wire = DynamoWire(tokens_published=True)
        self._named = ToldBlocks(namespaces, fleet_hashes=True)
        self._held: set[int] = set()  # as many as the engine has blocks in its index
        self._batches = self.refused_batches = 0

    def publish(self, events: Sequence[BlockEvent], /) -> int:
        """Hand over the events of one step and return their number.

        Raises:
            IsolationError: an event has no scope.
        """
        for event in events:
            check_event(event)
        self._push(self._named.tell(events))
        self._batches += 1
        return self._batches - 1

    def take_epochs(self, known: KnownEpochs, /) -> None:
        """Name requesters by these erase epochs from now on, and publish at once what they end."""
        self._push(self._named.take_epochs(known))

    def figures(self) -> dict[str, float]:
        """Return the figures for a worker's report."""
        return {
            "events_told_blocks.dynamo": len(self._held),
            "events_sent.dynamo": self._batches,
            "events_lost.dynamo": self.refused_batches,
            "events_connected.dynamo": 1,
        }

    def _push(self, events: Sequence[BlockEvent]) -> None:
        made = [told for event in events for told in self._told(event)]
        if made:
            try:
                self._sink.publish_batch(made)
            except Exception as error:
                self.refused_batches += 1
                _log.warning("Dynamo refused block events", cause=type(error).__name__)

    def _told(self, event: BlockEvent) -> list[Told]:
        form = self._wire.event_of(event, "")
        if form is None:
            return []
        if isinstance(form, DynamoStored | DynamoRemoved) and (form.medium != _DEVICE or form.group_idx):
            return []
        if isinstance(form, DynamoStored):
            self._held.update(form.block_hashes)
            return [_stored(form)]
        gone = (
            [one for one in form.block_hashes if one in self._held]
            if isinstance(form, DynamoRemoved)
            else sorted(self._held)
        )
        self._held.difference_update(gone)
        return [{"type": "removed", "block_hashes": gone}] if gone else []


def _stored(form: DynamoStored) -> Told:
    return {
        "type": "stored",
        "token_ids": form.token_ids,
        "num_block_tokens": [form.block_size] * len(form.block_hashes),
        "block_hashes": form.block_hashes,
        "parent_hash": form.parent_block_hash,
        "lora_name": form.lora_name,
        "cache_salt": form.cache_salt,
    }
