"""What routers and their indexers know a requester by: a name that only the deployment's own processes can make.

The door puts it into the header that a router takes its namespace from, and the engine into the events that the
router's index is made of. Equal for the same tenant in every process with the scope token secret; nobody else can make
one, or tell whose it is. It is a place to look in, never an authority: what an engine may reuse, the engine decides.
"""

from __future__ import annotations

from typing import Final

from kvcustody.governance.credentials.scope_token_secret import keyed_state
from kvcustody.governance.identity import tlv
from kvcustody.governance.keys.locked_buffer import KeyBuffer

NAMESPACE_HEADER: Final = "x-tenant-id"
_NAMESPACE_BYTES: Final = 16


class RouterNamespaces:
    """Namespaces under one scope token secret."""

    def __init__(self, secret: KeyBuffer) -> None:
        self._state = keyed_state(secret, "router-namespace", _NAMESPACE_BYTES)

    def of(self, issuer: str, tenant: str, subject: str | None = None, session: str | None = None) -> str:
        """The namespace of a tenant, or of a subject or session in it: 32 lower-case hexadecimal digits.

        Equal ids of two issuers have two, and a subject has another than a session of its name.
        """
        fields: dict[int, tlv.Value] = {1: issuer, 2: tenant}
        if subject is not None or session is not None:
            fields |= {3: subject, 4: session}
        state = self._state.copy()
        state.update(tlv.encode("kvcustody/router-namespace", 1, fields))
        return state.hexdigest()
