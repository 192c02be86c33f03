"""The client certificate of a connection, read from its TLS session: never from anything that a request says.

1. It is there where the listener demands certificates and TLS has verified one; elsewhere there is none.
2. What is known of it is its thumbprint: SHA-256 over its DER, base64url without padding (`x5t#S256`, RFC 8705).
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from kvcustody.governance.api.http.bounded_protocol import BoundedProtocol
from kvcustody.governance.api.http.exchange import CERTIFICATE, Receive, Scope, Send
from kvcustody.governance.credentials.certificate_thumbprint import thumbprint_of


class CertifiedProtocol(BoundedProtocol):
    """The bounded protocol, whose requests carry the thumbprint of their connection's certificate."""

    app: Any

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Read the certificate once: it is the connection's, whatever is asked over it."""
        super().connection_made(transport)
        self.app = _Certified(self.app, _thumbprint(transport))


class _Certified:
    def __init__(self, app: Any, thumbprint: str | None) -> None:
        self._app = app
        self._thumbprint = thumbprint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[CERTIFICATE] = self._thumbprint
        await self._app(scope, receive, send)


def _thumbprint(transport: asyncio.Transport) -> str | None:
    """Of the verified certificate; None where the connection has none (rule 1)."""
    connection = transport.get_extra_info("ssl_object")
    if not isinstance(connection, (ssl.SSLObject, ssl.SSLSocket)):
        return None
    if connection.context.verify_mode is not ssl.CERT_REQUIRED:
        return None
    der = connection.getpeercert(binary_form=True)
    return None if der is None else thumbprint_of(der)
