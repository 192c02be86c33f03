"""Names under which routers and indexers know a requester and its blocks: only the deployment's processes can make
them.

1. The door puts it where a router takes its namespace from, and the engine into the events that the router's index is
   made of. It is equal in every process with the scope token secret; nobody else can make one, or tell whose it is.
2. It is a place to look in, never an authority: what an engine may reuse, the engine decides.
3. It ends with each erase epoch of its scope (`erase_epochs`), and after `days`, so that no name lives on. Names of one
   deployment change on different days.
4. Where an index expects equal blocks to have one hash at every worker, a block has a hash under its name. The hash is
   equal in every process with the secret, for equal tokens behind equal blocks. It differs under each name, and so
   after each epoch.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvcustody.governance.credentials.scope_token_secret import keyed_state
from kvcustody.governance.identity import tlv
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.times import DAY_US

NAMESPACE_HEADER: Final = "x-tenant-id"
_NAMESPACE_BYTES: Final = 16
_HASH_BYTES: Final = 32


class NamespaceAge(NamedTuple):
    """What ends a name: the epochs of its scope, and its period of `days` (0: none)."""

    epochs: tuple[int, ...] = ()
    at_utc_us: int = 0
    days: int = 0


_AGELESS = NamespaceAge()


class RouterNamespaces:
    """Namespaces under one scope token secret."""

    def __init__(self, secret: KeyBuffer) -> None:
        self._state = keyed_state(secret, "router-namespace", _NAMESPACE_BYTES)
        self._blocks = keyed_state(secret, "told-block", _HASH_BYTES)

    def of(
        self,
        issuer: str,
        tenant: str,
        subject: str | None = None,
        session: str | None = None,
        age: NamespaceAge = _AGELESS,
    ) -> str:
        """Return the namespace of a tenant, or of a subject or session in it: 32 lower-case hexadecimal digits.

        Equal ids of two issuers have two, and a subject has another than a session of its name.
        """
        fields: dict[int, tlv.Value] = {1: issuer, 2: tenant}
        if subject is not None or session is not None:
            fields |= {3: subject, 4: session}
        state = self._state.copy()
        state.update(tlv.encode("kvcustody/router-namespace", 1, fields))
        if age.days:
            phase_us = int.from_bytes(state.digest()[:8], "big") % (age.days * DAY_US)
            state.update(tlv.encode("period", 1, {1: (age.at_utc_us + phase_us) // (age.days * DAY_US)}))
        if any(age.epochs):
            state.update(tlv.encode("epochs", 1, dict(enumerate(age.epochs, 1))))
        return state.hexdigest()

    def block_hash(self, namespace: str, before: bytes, tokens: Sequence[int], lora_name: str | None = None) -> bytes:
        """Return every worker's hash of a block in a namespace, after the block with hash `before` (rule 4)."""
        content = struct.pack(f"<{len(tokens)}q", *tokens)
        state = self._blocks.copy()
        state.update(tlv.encode("kvcustody/told-block", 1, {1: namespace, 2: before, 3: lora_name, 4: content}))
        return state.digest()
