"""The only field that we add to a foreign event: `kvcustody`, a map with the blocks' owner.

1. Decoders with named fields skip an unknown map key, so a consumer of the engine's own events reads ours unchanged. An
   event's encoding is the engine's, byte for byte, only where the field is absent.
2. It holds no subject, session, salt, token id or key material; block keys appear in it only where the format has no
   room for their full width.
"""

from __future__ import annotations

import msgspec

from kvcustody.allocator.prefix.node import KEY_BYTES
from kvcustody.integrations.events.block_event import BlockEvent, split_keys

SHORT_KEY_BYTES = 8
assert SHORT_KEY_BYTES < KEY_BYTES


class CustodyField(msgspec.Struct, omit_defaults=True, gc=False):
    """An event's typed scope on the wire; fields with their default are omitted.

    `residency` and `incarnation` find the leaf in the ledger; `keys` are full block keys where the format's own
    hashes are 64 bits.
    """

    tenant: str
    scope: str
    classification: str
    domain: int
    revision: int
    residency: int = 0
    incarnation: str = ""
    cause: str = ""
    keys: list[bytes] | None = None


def custody_of(event: BlockEvent, incarnation: str, *, with_keys: bool = False) -> CustodyField:
    """Return the wire form of an event's scope."""
    scope = event.scope
    return CustodyField(
        scope.tenant,
        scope.scope,
        scope.classification,
        scope.domain,
        scope.revision,
        event.residency,
        incarnation,
        event.cause,
        split_keys(event.keys) if with_keys else None,
    )
