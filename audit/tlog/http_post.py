"""One POST to somebody else's server, over within its deadline whatever the other side does.

1. A socket's own timeout begins anew with every byte, so a server that trickles could be waited for for ever: when
   the time is up the socket is shut down, be it in the handshake, the headers or the body. (Names are resolved
   before, within the resolver's own bounds.)
2. Of an answer no more than so many bytes are read. Redirects are not followed.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple
from urllib.parse import urlsplit


class HttpReply(NamedTuple):
    """What came back: status, media type (empty: none), body."""

    status: int
    kind: str
    body: bytes


class _Secure(http.client.HTTPSConnection):
    """Over TLS, with a handshake that can be cut off: the socket is known before it begins."""

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        context = ssl.create_default_context()
        self.sock = context.wrap_socket(self.sock, server_hostname=self.host, do_handshake_on_connect=False)
        self.sock.do_handshake()


def post(
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    deadline_seconds: float,
    bytes_max: int,
    opened: socket.socket | None = None,
) -> HttpReply:
    """POST to an `http:` or `https:` address, or over a socket that is open already (then `url` is a path).

    Raises `OSError` (`TimeoutError` past the deadline) or `http.client.HTTPException`, and `ValueError` for an address
    that is none.
    """
    parts = urlsplit(url)
    secure = _Secure if parts.scheme == "https" else http.client.HTTPConnection
    connection = secure(parts.hostname or "localhost", parts.port, timeout=deadline_seconds)
    connection.sock = opened
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        with _within(connection, deadline_seconds) as held:
            if opened is None:
                connection.connect()
            held.append(connection.sock)  # the connection lets go of it before the body is read
            connection.request("POST", target, body, dict(headers))
            answer = connection.getresponse()
            data = answer.read(bytes_max + 1)
    finally:
        connection.close()
    if len(data) > bytes_max:
        raise OSError(f"the answer is longer than {bytes_max} bytes")
    return HttpReply(answer.status, answer.headers.get_content_type() or "", data)


def reason_of(problem: BaseException) -> str:
    """Why an exchange failed, in a few words."""
    return getattr(problem, "strerror", None) or str(problem) or type(problem).__name__


@contextmanager
def _within(connection: http.client.HTTPConnection, seconds: float) -> Iterator[list[socket.socket | None]]:
    """Shut the socket down when the time is up (rule 1): the one in the list, else the connection's.

    Whatever comes of that is a `TimeoutError`.
    """
    held: list[socket.socket | None] = []
    late, done = threading.Event(), threading.Event()

    def cut() -> None:
        late.set()
        while not done.wait(0.01):  # again, where the socket was being made
            sock = held[0] if held else connection.sock
            if sock is not None:
                with suppress(OSError):
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield held
    except TimeoutError:  # of the socket, which was as quick
        late.set()
    except (OSError, http.client.HTTPException):
        if not late.is_set():
            raise
    finally:
        done.set()
        timer.cancel()
    if late.is_set():
        raise TimeoutError("no answer within the deadline")
