"""The addresses at which events are published and read: ZeroMQ, loopback unless a setting says otherwise.

1. A publisher binds to loopback, a local socket or this process. Any other address needs `kv_events_remote`, because
   the stream has no authentication and no encryption, and says whose blocks come and go.
2. A data-parallel rank is added to the port, or to the name of a local socket, as vLLM does.
"""

from __future__ import annotations

from kvcustody.errors import ConfigError
from kvcustody.http_exchange import is_loopback

_PORT_MAX = 65_535


def check_bind(endpoint: str, *, remote_allowed: bool) -> str:
    """Return the endpoint, if a publisher may bind to it.

    Raises:
        ConfigError: it may not; the message names the setting.
    """
    check_endpoint(endpoint)
    if not remote_allowed and endpoint.startswith("tcp://") and not is_loopback(_host(endpoint)):
        raise ConfigError(
            f"KV events at `{endpoint}` would be open to other machines; bind to 127.0.0.1, or put an "
            "authenticated proxy or network policy in front and allow it (`kv_events_remote`; `--remote` of the relay)",
            endpoint=endpoint,
        )
    return endpoint


def check_endpoint(endpoint: str) -> str:
    """Return the endpoint, if ZeroMQ can use it here.

    Raises:
        ConfigError: it cannot.
    """
    if endpoint.startswith("tcp://"):
        port = endpoint.rsplit(":", 1)[1]
        if _host(endpoint) and (port == "*" or (port.isascii() and port.isdigit() and int(port) <= _PORT_MAX)):
            return endpoint
    elif endpoint.startswith(("ipc://", "inproc://")) and len(endpoint.split("://", 1)[1]) > 0:
        return endpoint
    raise ConfigError(
        f"`{endpoint}` is no endpoint; write `tcp://HOST:PORT`, `ipc://PATH` or `inproc://NAME`",
        endpoint=endpoint,
    )


def at_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of one data-parallel rank (rule 2)."""
    if rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    base, port = endpoint.rsplit(":", 1)
    if not (port.isascii() and port.isdigit()) or int(port) == 0:
        return endpoint
    return f"{base}:{int(port) + rank}"


def _host(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rsplit(":", 1)[0]
