"""Names of routers that never end, and wires with the book of what was told before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvcustody.clock import VirtualClock
from kvcustody.governance.edge.current_namespaces import CurrentNamespaces
from kvcustody.governance.edge.router_namespace import RouterNamespaces
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.integrations.events.block_event import BlockEvent
from kvcustody.integrations.events.names.told_blocks import ToldBlocks


def lasting_names(secret: bytes) -> CurrentNamespaces:
    """Names under a secret of 32 bytes, which no day ends."""
    with KeyBuffer() as held:
        held.writable()[:] = secret
        return CurrentNamespaces(RouterNamespaces(held), VirtualClock(), days=0)


class NamedWire:
    """A wire as a publisher uses it: behind what says which names blocks are told under."""

    def __init__(self, wire: Any, names: CurrentNamespaces) -> None:
        self._wire = wire
        self.told = ToldBlocks(names)

    def payload_of(self, events: Sequence[BlockEvent], *more: Any, **options: Any) -> bytes:
        made: bytes = self._wire.payload_of(self.told.tell(events), *more, **options)
        return made

    def events(self, *events: BlockEvent, published: bool = True) -> list[dict[str, Any]]:
        """The events of one step as a router decodes them."""
        payload = self.payload_of(list(events), 1.5, 0, "inc", tokens_published=published)
        made: list[dict[str, Any]] = msgspec.msgpack.decode(payload)[1]
        return made
