"""TLS for hand-overs: both sides present a certificate of the fleet's own authority, so that no other party can read.

    tls = handover_tls(settings)              # None: names, sizes and tickets go in clear
    connection = tls.client.wrap_socket(connection)

Who a peer is, the keys of tickets say, not the names in certificates: addresses are those of the peers' document. Files
are read once, at the start.
"""

from __future__ import annotations

import ssl
from typing import NamedTuple

from kvcustody.errors import ConfigError
from kvcustody.governance.settings import Settings


class HandoverTls(NamedTuple):
    """The TLS contexts with which this worker answers and asks."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def handover_tls(settings: Settings) -> HandoverTls | None:
    """Return the TLS of the settings; None without. Raises `ConfigError` for files that cannot be used."""
    certificate, key = settings.handover_certificate_path, settings.handover_certificate_key_path
    if certificate is None:
        return None
    contexts = HandoverTls(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    try:
        for context in contexts:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_verify_locations(settings.handover_ca_path)
            context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"setting `handover_certificate_path`: TLS files cannot be used ({error.strerror or type(error).__name__})"
        ) from None
    return contexts
