"""Client connections with limits on bytes, headers, seconds and their number.

1. A request's head has a limit in bytes, in headers and in time. A longer one is answered 431; a slower one is closed.
2. A request's body has a limit in time. Bytes that come after the answer are read up to a limit, so that the client can
   read the answer, and no further.
3. When the number of connections is at its limit, one without a request in work gives way to a new one. So half a
   request does not take the place of a whole one. The first to go are connections that never sent a whole request, then
   idle ones, the longest idle first. Each address has its own limit, within which its own connections give way. Trusted
   proxies and the Unix socket are exempt, because many clients are behind them. Once its request was authenticated, a
   connection counts for its party (a principal, or a tenant as a whole), and not for its address. Many workers behind
   one address are not one caller.
4. A limit costs no more than what it limits: only a head's bytes are kept, and no thread waits for a client.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvcustody.governance.api.http.exchange import (
    KNOWN,
    Message,
    Receive,
    Scope,
    Send,
    client_address,
)
from kvcustody.governance.service.operations.answer import problem_answer
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.settings import ServiceSettings

_DISCARDED_MAX = 2  # bodies that may come after an answer, in the largest that is taken


class KnownParty(NamedTuple):
    """The authenticated party of a connection (`Caller.party`), in a form that no address has."""

    name: str


class Connections:
    """The connections of one listener: how many there are, from which address, and which are idle."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self.trusted = settings.proxies
        self._all = _Group(settings.connections_max)
        self._of_one: dict[str | KnownParty, _Group] = {}  # by address, or by party

    def opened(self, connection: BoundedProtocol) -> bool:
        """Count a new connection; False where every connection that it could replace has a request in work (rule 3)."""
        for group in self._groups(connection):
            while group.count >= group.most and group.waiting:
                group.waiting.abort()
            if group.count >= group.most:
                self._forget_empty(connection)
                return False
        for group in self._groups(connection):  # anew: who gave way may have been the last of this address
            group.count += 1
            group.begun[connection] = None
        return True

    def closed(self, connection: BoundedProtocol) -> None:
        """Stop counting a connection."""
        for group in self._groups(connection):
            group.forget(connection)
        self._forget_empty(connection)

    def known(self, connection: BoundedProtocol, name: str) -> None:
        """Count the connection for this party: one of its requests was authenticated.

        Where that has as many as it may, one that waits gives way, or this one where none does.
        """
        before, party = connection.counts_for, KnownParty(name)
        if before is None or before == party:
            return
        self._group(before).forget(connection)
        self._forget_empty(connection)
        connection.counts_for = party
        group = self._group(party)
        while group.count >= group.most and group.waiting:
            group.waiting.abort()
        group = self._group(party)  # anew: who gave way may have been its last
        group.count += 1
        if group.count > group.most:
            connection.abort()

    def works(self, connection: BoundedProtocol) -> None:
        """Mark the connection as busy: no other may replace it."""
        for group in self._groups(connection):
            group.begun.pop(connection, None)
            group.idle.pop(connection, None)

    def waits(self, connection: BoundedProtocol) -> None:
        """Mark the connection as idle after a complete request."""
        for group in self._groups(connection):
            group.idle[connection] = None

    def _groups(self, connection: BoundedProtocol) -> tuple[_Group, ...]:
        """Those that the connection counts for, its address's or party's first."""
        whose = connection.counts_for
        return (self._all,) if whose is None else (self._group(whose), self._all)

    def _group(self, whose: str | KnownParty) -> _Group:
        group = self._of_one.get(whose)
        if group is None:
            group = self._of_one[whose] = _Group(self.settings.address_connections_max)
        return group

    def _forget_empty(self, connection: BoundedProtocol) -> None:
        whose = connection.counts_for
        if whose in self._of_one and not self._of_one[whose].count:
            del self._of_one[whose]


class _Group:
    """Connections under one bound, and which of them wait: `begun` never sent a whole request, `idle` have."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0
        self.begun: dict[BoundedProtocol, None] = {}
        self.idle: dict[BoundedProtocol, None] = {}

    def forget(self, connection: BoundedProtocol) -> None:
        """It counts for this group no more."""
        self.count -= 1
        self.begun.pop(connection, None)
        self.idle.pop(connection, None)

    @property
    def waiting(self) -> BoundedProtocol | None:
        """Which gives way next."""
        for kind in (self.begun, self.idle):
            for connection in kind:
                return connection
        return None


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with the limits of the settings; each listener's class has its own `limits`."""

    limits: Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, and start the time limit of the first request head."""
        super().connection_made(transport)
        self.counts_for: str | KnownParty | None = self._countable()
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._discarded = 0
        self._in_head = True
        self._counted = self.limits.opened(self)
        if self._counted:
            self._arm(self.limits.settings.header_seconds)
        else:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._uncount()
        super().connection_lost(exc)

    def abort(self) -> None:
        """End the connection at once."""
        self._uncount()
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read on, within the limits of a head and of bytes after an answer."""
        if self.transport.is_closing() or not self._counted:
            return
        if self._timer is None and self._in_head:  # bytes that begin no request count as one that was begun
            self._arm(self.limits.settings.header_seconds)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.limits.settings.header_bytes_max + len(data):
                self._refuse_unread(ProblemError("headers-too-large"))
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Note that a request begins."""
        super().on_message_begin()
        self._in_head = True
        if self._timer is None:
            self._arm(self.limits.settings.header_seconds)

    def on_headers_complete(self) -> None:
        """Serve the request whose head is complete, or refuse it."""
        self._arm(self.limits.settings.body_seconds)
        self._in_head, self._head_bytes, self._discarded = False, 0, 0
        self.limits.works(self)
        refused = self._too_large()
        if refused is None:
            super().on_headers_complete()
            self.scope[KNOWN] = self._known  # type: ignore[literal-required]
            return
        served, self.app = self.app, _Refused(refused)
        super().on_headers_complete()
        self.app = served
        self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Take a part of a body; after the answer it is discarded, up to a limit (rule 2)."""
        if self.cycle.response_complete:
            self._discarded += len(body)
            settings = self.limits.settings
            if self._discarded > _DISCARDED_MAX * max(settings.body_bytes_max, settings.batch_bytes_max):
                self.abort()
                return
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the request is complete."""
        self._disarm()
        self._in_head = True
        super().on_message_complete()
        if self.cycle.response_complete:
            self.limits.waits(self)

    def on_response_complete(self) -> None:
        """Note that the answer is complete."""
        super().on_response_complete()
        if self._counted and self._in_head and not self.pipeline:
            self.limits.waits(self)

    def _known(self, name: str) -> None:
        """On the loop: a request of this connection was authenticated."""
        if self._counted:
            self.limits.known(self, name)

    def _countable(self) -> str | None:
        """The address that the connection counts for; None where many are behind it."""
        if not self.client or client_address(self.client[0], [], self.limits.trusted) == "":
            return None
        return self.client[0]

    def _too_large(self) -> ProblemError | None:
        settings = self.limits.settings
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > settings.header_bytes_max or len(self.headers) > settings.headers_max:
            return ProblemError("headers-too-large")
        return None

    def _refuse_unread(self, problem: ProblemError) -> None:
        """Answer a head that is not whole, and close."""
        status, headers, body = problem_answer(problem)
        lines = [b"HTTP/1.1 %d %s" % (status, problem.type.title.encode())]
        lines += [name + b": " + value for name, value in headers]
        lines += [b"content-length: %d" % len(body), b"connection: close", b"", body]
        self.transport.write(b"\r\n".join(lines))
        self.transport.close()

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self.abort)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _uncount(self) -> None:
        self._disarm()
        if self._counted:
            self._counted = False
            self.limits.closed(self)


class _Refused:
    """Stands in for the application where a request's head is refused."""

    def __init__(self, problem: ProblemError) -> None:
        self._problem = problem

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, headers, body = problem_answer(self._problem)
        headers = [*headers, (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
        start: Message = {"type": "http.response.start", "status": status, "headers": headers}
        await send(start)
        await send({"type": "http.response.body", "body": body})


def bounded(protocol: type[BoundedProtocol], connections: Connections) -> type[Any]:
    """The protocol for one listener."""
    return type(protocol.__name__, (protocol,), {"limits": connections})
