"""What other servers answer: read up to a bound, within a deadline, whatever the other side does.

1. A timeout of a socket begins anew with every byte, so a server that trickles could be waited for for ever. The
   deadline is of the whole exchange, be it in the handshake, the headers or the body.
2. Of an answer no more than so many bytes are read. Redirects are not followed; no proxy of the environment is used.
3. No answer is unpacked: its few bytes could become any number. We ask for none that is packed, and refuse one that is.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import ssl
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import httpx

UNIX = "unix:"
Fact = TypeVar("Fact")
UNPACKED = {"Accept-Encoding": "identity"}
_PORT_MAX = 65_535
_SHORTEST_SECONDS = 0.001  # of a socket 0 would mean: does not wait
_ENDS: ContextVar[float] = ContextVar("kvcustody_exchange_ends", default=math.inf)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`; a name other than `localhost` may be anybody's."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def host_and_port(text: str) -> tuple[str, int]:
    """The parts of `HOST:PORT`, an IPv6 address without its brackets; raises `ValueError`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or int(port) > _PORT_MAX:
        raise ValueError(f"`{text}` is not HOST:PORT")
    return host.strip("[]"), int(port)


class HttpReply(NamedTuple):
    """What came back: status, media type (empty: none), body."""

    status: int
    kind: str
    body: bytes


def exchange(
    method: str,
    url: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    *,
    deadline_seconds: float,
    bytes_max: int,
    socket_path: str | None = None,
) -> HttpReply:
    """Ask an `http:` or `https:` address, or the server behind a Unix socket (of `url` then only the path counts).

    Raises `OSError` with a reason in a few words (`TimeoutError` past the deadline), and `ValueError` for an address
    that is none. Not for a thread that runs an event loop.
    """
    import httpx

    async def ask() -> HttpReply:
        transport = httpx.AsyncHTTPTransport(
            verify=ssl.create_default_context() if url.startswith("https:") else False, uds=socket_path
        )
        async with (
            asyncio.timeout(deadline_seconds),
            httpx.AsyncClient(transport=transport, timeout=None, trust_env=False) as client,  # noqa: S113 - rule 1
            client.stream(method, url, content=body, headers={**(headers or {}), **UNPACKED}) as answer,
        ):
            check_unpacked(answer)
            received = bytearray()
            async for chunk in answer.aiter_raw():
                add_bounded(received, chunk, bytes_max)
            kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
            return HttpReply(answer.status_code, kind, bytes(received))

    try:
        return asyncio.run(ask())
    except TimeoutError:
        raise TimeoutError("no answer within the deadline") from None
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ValueError(f"`{url}` is no address: {error}") from None
    except httpx.HTTPError as error:
        raise OSError(_reason(error)) from None


def read_bounded(
    client: httpx.Client,
    request: httpx.Request,
    *,
    deadline_seconds: float,
    bytes_max: int,
) -> httpx.Response:
    """Send a request over a client that keeps its connections; the answer has its body, and was not unpacked.

    Raises `httpx.HTTPError`, also for an answer that is packed, too long, or not whole within the deadline. Headers too
    are read within the deadline where the client's transport is a `deadline_transport`.
    """
    import httpx

    request.headers.update(UNPACKED)
    ends = time.monotonic() + deadline_seconds
    received = bytearray()
    outer = _ENDS.set(ends)
    try:
        answer = client.send(request, stream=True)
        try:
            check_unpacked(answer)
            for chunk in answer.iter_raw():
                add_bounded(received, chunk, bytes_max)
                if time.monotonic() >= ends:
                    raise httpx.ReadTimeout("no answer within the deadline", request=request)
        finally:
            answer.close()
    except OSError as error:
        raise httpx.DecodingError(str(error), request=request) from None
    finally:
        _ENDS.reset(outer)
    return httpx.Response(answer.status_code, headers=answer.headers, content=bytes(received), request=request)


def deadline_transport(**how: Any) -> httpx.HTTPTransport:
    """httpx's transport, over which no part of an exchange lasts past the deadline of `read_bounded` (rule 1)."""
    import httpx

    transport = httpx.HTTPTransport(**how)
    pool: Any = transport._pool
    pool._network_backend = _DeadlineBackend(pool._network_backend)
    return transport


class _DeadlineBackend:
    """Opens connections of which each read and write ends with the exchange."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def connect_tcp(self, host: str, port: int, timeout: float | None = None, **how: Any) -> _DeadlineStream:
        return _DeadlineStream(self._backend.connect_tcp(host, port, timeout=_left(timeout), **how))

    def connect_unix_socket(self, path: str, timeout: float | None = None, **how: Any) -> _DeadlineStream:
        return _DeadlineStream(self._backend.connect_unix_socket(path, timeout=_left(timeout), **how))

    def sleep(self, seconds: float) -> None:
        self._backend.sleep(seconds)


class _DeadlineStream:
    """One connection; it may serve many exchanges, each with a deadline of its own."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        found: bytes = self._stream.read(max_bytes, timeout=_left(timeout))
        return found

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, timeout=_left(timeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(self, *given: Any, timeout: float | None = None, **how: Any) -> _DeadlineStream:
        return _DeadlineStream(self._stream.start_tls(*given, timeout=_left(timeout), **how))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _left(timeout: float | None) -> float | None:
    """How long a part may take: its own timeout, or what is left of the exchange, and never no time at all."""
    left = max(_ENDS.get() - time.monotonic(), _SHORTEST_SECONDS)
    return min(left, math.inf if timeout is None else timeout) if left < math.inf else timeout


def check_unpacked(answer: httpx.Response) -> None:
    """Raise `OSError` for an answer that says that it is packed (rule 3)."""
    packed = answer.headers.get("content-encoding", "").strip().lower()
    if packed not in ("", "identity"):
        raise OSError("the answer is packed, though none was asked for that is")


def add_bounded(received: bytearray, chunk: bytes, bytes_max: int) -> None:
    """Add a part of an answer; raises `OSError` past the bound."""
    received += chunk
    if len(received) > bytes_max:
        raise OSError(f"the answer is longer than {bytes_max} bytes")


def _reason(error: BaseException) -> str:
    """Why an exchange failed, in a few words: the operating system's where it said any."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


def fact_of(kind: Callable[..., Fact], answer: Mapping[str, Any]) -> Fact:
    """The named tuple `kind` of what an answer says; other fields of the answer are not read."""
    return kind(*(answer[name] for name in kind._fields))  # type: ignore[attr-defined]
