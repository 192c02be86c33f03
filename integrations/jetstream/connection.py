"""A connection to the fleet's NATS server: one address, one user's credentials, lost messages instead of waits.

1. It is made again by itself for as long as it is wanted; what is published meanwhile is kept up to a bound, then lost.
2. Without TLS only this machine is talked to.
"""

from __future__ import annotations

import base64
import ssl
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

from kvcustody.errors import ConfigError
from kvcustody.http_exchange import is_loopback
from kvcustody.integrations.jetstream.accounts import Credentials, read_credentials
from kvcustody.integrations.jetstream.subjects import inbox, name_in_subject
from kvcustody.logger import get_logger

if TYPE_CHECKING:
    from nats.aio.client import Client

PENDING_BYTES: Final = 8 << 20
_CONNECT_SECONDS, _RECONNECT_SECONDS, _PING_SECONDS = 5, 0.5, 5
_log = get_logger(__name__)


class NatsPlace(NamedTuple):
    """The server's address and the credentials for it. `authority`: PEM of its certificate's CA."""

    url: str
    credentials: Path
    authority: Path | None = None

    def check(self) -> Credentials:
        """Return the credentials.

        Raises:
            ConfigError: the address is invalid, or unencrypted and on another machine.
        """
        try:
            parts = urlsplit(self.url)
            name = parts.hostname
        except ValueError:
            raise ConfigError(f"`{self.url}` is no NATS server: its address is malformed") from None
        if parts.scheme not in ("nats", "tls") or not name:
            raise ConfigError(f"`{self.url}` is no NATS server; write `nats://HOST:PORT` or `tls://HOST:PORT`")
        if parts.scheme == "nats" and not is_loopback(name):
            raise ConfigError(f"`{self.url}` would be used unencrypted over a network; write `tls://`")
        return read_credentials(self.credentials)


class _Shown:
    """The credentials for each new connection: the file's current ones, or the last ones where it is unreadable."""

    def __init__(self, place: NatsPlace) -> None:
        self._path, self.last = place.credentials, place.check()

    def sign(self, nonce: str) -> bytes:
        """Return the server's nonce, signed; the client calls this before `token`."""
        with suppress(ConfigError):
            self.last = read_credentials(self._path)
        return base64.b64encode(self.last.key.sign(nonce.encode()))

    def token(self) -> bytes:
        """Return the JWT."""
        return self.last.token.encode()


async def open_connection(place: NatsPlace) -> Client:
    """Return a connection.

    Raises:
        ConfigError: nats-py is not installed.
        OSError: the server cannot be reached; errors of nats otherwise.

    With `tls://` the handshake comes before the server says anything: nobody in between can talk it away.
    """
    try:
        import nats
    except ImportError:
        raise ConfigError("nats-py is not installed; pip install 'kvcustody[nats]'") from None
    shown = _Shown(place)
    tls = ssl.create_default_context(cafile=place.authority) if place.url.startswith("tls:") else None
    said: list[str] = []

    async def say(error: Exception) -> None:
        problem = f"{type(error).__name__}: {error}"[:200]
        if problem not in said[-1:]:
            said[:] = [problem]
            _log.info("NATS", problem=problem)

    client = await nats.connect(
        place.url,
        name=shown.last.name,
        user_jwt_cb=shown.token,
        signature_cb=shown.sign,
        inbox_prefix=inbox(name_in_subject(shown.last.name)),
        tls=tls,
        tls_handshake_first=tls is not None,
        error_cb=say,
        connect_timeout=_CONNECT_SECONDS,
        reconnect_time_wait=_RECONNECT_SECONDS,
        max_reconnect_attempts=1,  # a first connection that tries for ever cannot be cancelled
        pending_size=PENDING_BYTES,
        ping_interval=_PING_SECONDS,
    )
    client.options["max_reconnect_attempts"] = -1
    return client
