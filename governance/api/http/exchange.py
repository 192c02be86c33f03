"""One request and its answer: what is read once, and the headers that every answer carries.

1. A body is read whole, up to a bound, before anything runs.
2. Every answer says that it is not to be framed, sniffed, stored or scripted; a page may replace the policy of its
   own.
3. An answer that is given in one piece has an `ETag`; asked for again unchanged, it is not sent again.
4. `X-Forwarded-For` and `X-Forwarded-Proto` are believed of the proxies that the settings name, from the right, and of
   nobody else. An address may have a port: proxies write `192.0.2.1:443` and `[2001:db8::1]:443`.
5. HEAD of an operation is GET without the body of its answer.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any
from urllib.parse import unquote_to_bytes

import anyio
import anyio.from_thread

from kvcustody.governance.identity.w3c_trace import TRACEPARENT, trace_of
from kvcustody.governance.service.operations.answer import Answer, Headers, etag_of, problem_answer
from kvcustody.governance.service.problem_details import ProblemError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

REQUEST_ID = "x-request-id"
CERTIFICATE = "kvcustody.certificate"  # in a scope: the thumbprint of the connection's client certificate
_SAFE = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (
        b"content-security-policy",
        b"default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    ),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
    (b"cache-control", b"no-store"),
)
_HSTS = (b"strict-transport-security", b"max-age=31536000")


UNIX = "unix"
HTTPS = "https"
Networks = tuple[ipaddress.IPv4Network | ipaddress.IPv6Network | None, ...]  # None: the Unix socket
_WITH_PORT = re.compile(r"\[(?P<v6>[^\[\]]*)\](?::[0-9]{1,5})?|(?P<v4>[0-9.]+):[0-9]{1,5}")
_HOST = re.compile(rb"[A-Za-z0-9._~%-]{1,255}(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]{2,64}\](:[0-9]{1,5})?")


def client_address(peer: str, forwarded: Sequence[str], proxies: Networks) -> str:
    """The last address that is not a trusted proxy's; empty where all of them are."""
    for address in (peer, *reversed(forwarded)):
        text = _without_port(address.strip())
        if text == UNIX:
            trusted = None in proxies and address is peer
        else:
            try:
                found = ipaddress.ip_address(text)
            except ValueError:
                return ""
            mapped = getattr(found, "ipv4_mapped", None) or found
            trusted = any(network is not None and mapped in network for network in proxies)
        if not trusted:
            return text
    return ""


def _without_port(address: str) -> str:
    match = _WITH_PORT.fullmatch(address)
    return address if match is None else match["v6"] or match["v4"] or ""


def is_tls(scope: Scope) -> bool:
    """Whether the client of a request speaks TLS (`Exchange.tls`)."""
    return bool(scope["scheme"] == HTTPS)


class ClientGoneError(Exception):
    """The client left before its request was complete."""


KNOWN = "kvcustody.known"  # in a scope: what is told the party that asks


class Exchange:
    """A request, and the one answer to it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, tls: bool, proxies: Networks = ()) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.request_id = secrets.token_hex(10)
        self.status = 0
        self.body = b""
        self.more: Headers = []
        self.headers = _once(scope["headers"])
        self._receive = receive
        self._send = send
        self._proxies = proxies
        self._held: Message | None = None
        self._without_body = False
        if tls or self._forwarded_by_tls():
            self.scope["scheme"] = HTTPS

    def tell_known(self, party: str) -> None:
        """Count the request's connection for the party that was authenticated."""
        count_for = self.scope.get(KNOWN)
        if count_for is not None:
            count_for(party)

    def header(self, name: str) -> str | None:
        """A header of the request; raises `malformed` where it came twice."""
        values = self.headers.get(name.encode())
        if values is None:
            return None
        if len(values) > 1:
            raise ProblemError("malformed", f"header `{name}` came {len(values)} times")
        return values[0].decode("latin-1")

    def texts(self) -> dict[str, str]:
        """The headers of the request by name; of a repeated header the first."""
        return {name.decode("latin-1"): values[0].decode("latin-1") for name, values in self.headers.items()}

    @property
    def trace(self) -> str:
        """The request's trace id; empty where it has none, a malformed one or two."""
        values = self.headers.get(TRACEPARENT.encode(), ())
        return trace_of(values[0].decode("latin-1")) if len(values) == 1 else ""

    @property
    def address(self) -> str:
        """The client's address, from the connection or from a trusted proxy (rule 4).

        One place for all that use the Unix socket.
        """
        forwarded = [value.decode("latin-1") for value in self.headers.get(b"x-forwarded-for", ())]
        return client_address(self._peer, ",".join(forwarded).split(","), self._proxies) or self._peer

    def answer_head_as_get(self) -> None:
        """Answer a HEAD as a GET, without the body (rule 5); any other method as it is."""
        if self.method == "HEAD":
            self._without_body = True
            self.scope = {**self.scope, "method": "GET"}
            self.method = "GET"

    @property
    def tls(self) -> bool:
        """Whether the client speaks TLS: to this service, or to a trusted proxy that says so (rule 4)."""
        return is_tls(self.scope)

    @property
    def _peer(self) -> str:
        client = self.scope.get("client")
        return str(client[0]) if client else UNIX

    def _forwarded_by_tls(self) -> bool:
        schemes = self.headers.get(b"x-forwarded-proto") or []
        trusted = bool(schemes) and not client_address(self._peer, (), self._proxies)
        return trusted and schemes[-1].rpartition(b",")[2].strip().lower() == HTTPS.encode()

    def check_host(self) -> None:
        """Raise `malformed` unless the request has exactly one `Host`."""
        values = self.headers.get(b"host", [])
        if len(values) != 1 or _HOST.fullmatch(values[0]) is None:
            raise ProblemError("malformed", "a request must have exactly one `Host`")

    def check_text(self, *, query: bool) -> None:
        """Raise `malformed` for U+0000 in path, headers or (where `query` says so) the query: no database stores it.

        A body is text where its operation says so; its model refuses the character there.
        """
        asked = unquote_to_bytes(self.scope.get("query_string", b"")) if query else b""
        parts = (
            self.path.encode("utf-8", "surrogateescape"),
            asked,
            *chain.from_iterable(self.headers.values()),
        )
        if any(b"\0" in part for part in parts):
            raise ProblemError("malformed", "path, query or headers contain the character U+0000")

    @property
    def certificate(self) -> str | None:
        """The thumbprint of the client certificate that TLS verified on this connection; None without one."""
        found = self.scope.get(CERTIFICATE)
        return found if isinstance(found, str) else None

    async def read(self, bytes_max: int) -> None:
        """Read the body (rule 1); raises `too-large`."""
        stated = self.header("content-length")
        if stated is not None and (not stated.isdecimal() or len(stated) > 15):
            raise ProblemError("malformed", "`Content-Length` is not a number")
        if stated is not None and int(stated) > bytes_max:
            raise ProblemError("too-large", f"a body may have {bytes_max} bytes")
        parts, size, more = [], 0, True
        while more:
            message = await self._receive()
            if message["type"] != "http.request":
                raise ClientGoneError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > bytes_max:
                raise ProblemError("too-large", f"a body may have {bytes_max} bytes")
            more = message.get("more_body", False)
        self.body = b"".join(parts)

    def replay(self) -> Receive:
        """Return a `receive` that gives the body once, then the server's further messages."""
        given = False

        async def receive() -> Message:
            nonlocal given
            if given:
                return await self._receive()
            given = True
            return {"type": "http.request", "body": self.body, "more_body": False}

        return receive

    def has_gone(self) -> bool:
        """Whether the client has left; may be called from a thread while the request is in work."""
        try:
            return bool(anyio.from_thread.run(self._gone))
        except RuntimeError:  # not on a thread of the request, or the loop ends
            return False

    async def _gone(self) -> bool:
        message: Message = {}
        with anyio.CancelScope() as scope:
            scope.cancel()
            message = await self._receive()
        return message.get("type") == "http.disconnect"

    async def send(self, message: Message) -> None:
        """Send an answer's messages, with the headers that every answer carries and an `ETag` where one applies."""
        if message["type"] == "http.response.start":
            self._held = message
            return
        start = self._held
        if start is not None:
            self._held = None
            whole = not message.get("more_body", False)
            if whole and self.method == "GET" and start["status"] == 200:
                message = self._tag(start, message)
            self.status = start["status"]
            start["headers"] = self._completed(start.get("headers", []))
            await self._send(start)
        await self._send(message if not self._without_body else {**message, "body": b""})

    async def answer(self, answer: Answer) -> None:
        """Send a complete answer."""
        headers = [*answer.headers, (b"content-length", str(len(answer.body)).encode())]
        await self.send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": answer.body})

    async def refuse(self, problem: ProblemError) -> None:
        """Answer with a problem, unless an answer has begun."""
        if self.status:
            return
        self._held = None
        await self.answer(problem_answer(problem))

    def _tag(self, start: Message, message: Message) -> Message:
        body = message.get("body", b"")
        given = [value for name, value in start["headers"] if name.lower() == b"etag"]
        tag = given[0] if given else etag_of(body).encode()
        headers = [(name, value) for name, value in start["headers"] if name.lower() != b"etag"]
        known = self.headers.get(b"if-none-match", [])
        if tag in [item.strip().removeprefix(b"W/") for value in known for item in value.split(b",")]:
            start["status"] = 304
            headers = [pair for pair in headers if pair[0].lower() not in (b"content-length", b"content-type")]
            message = {**message, "body": b""}
        start["headers"] = [*headers, (b"etag", tag)]
        return message

    def _completed(self, headers: Headers) -> Headers:
        mine = {name.lower() for name, _ in headers}
        added = [pair for pair in _SAFE if pair[0] not in mine]
        if self.tls:
            added.append(_HSTS)
        return [*headers, *added, *self.more, (REQUEST_ID.encode(), self.request_id.encode())]


def _once(headers: Headers) -> Mapping[bytes, list[bytes]]:
    found: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        found.setdefault(name.lower(), []).append(value)
    return found
