"""The door as a small reverse proxy without Envoy: it authenticates, filters fields, signs, and forwards.

1. A request reaches the router only after the gate let it pass, once: nothing is ever sent a second time.
2. An answer is passed on chunk by chunk, and the next is read when the client has taken the last. A client that leaves
   ends its request at the router.
3. A router that cannot be reached is a 502. One that fails after its first byte ends the client's connection: a stream
   that was cut never looks complete.
4. Bytes of bodies that are under way are bounded: beyond it a request is answered 503.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import httpx

from kvcustody.integrations.door.edge_gate import EdgeGate, Forwarded
from kvcustody.integrations.door.route_receipts import OpenReceipt
from kvcustody.integrations.identity.middleware import RequestCutError, read_body, refuse_socket
from kvcustody.integrations.identity.refusal import Receive, RequestRefused, Scope, Send
from kvcustody.integrations.identity.request_headers import RequestHeaders
from kvcustody.logger import get_logger

_LOG = get_logger("kvcustody.door")


class ReverseProxy:
    """An ASGI application in front of one router."""

    def __init__(
        self,
        gate: EdgeGate,
        client: httpx.AsyncClient,
        *,
        body_bytes_max: int,
        under_way_bytes_max: int,
        routers: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare the proxy. `client`: its base URL is the router's; it follows no redirect and sends nothing twice.

        `routers`: the URL of each placement group's router.
        """
        self._gate = gate
        self._routers = {group: httpx.URL(url) for group, url in (routers or {}).items()}
        self._client = client
        self._metrics = gate.metrics
        self._body_bytes_max = body_bytes_max
        self._under_way_bytes_max = under_way_bytes_max
        self._under_way_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] != "lifespan":
            await refuse_socket(receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, taken = RequestHeaders(scope["headers"]), 0
        try:
            forwarded, taken = await self._decide(scope, headers, receive)
            await self._pass_on(scope, forwarded, receive, send)
        except RequestRefused as refused:
            _LOG.warning("request refused", status=refused.status, reason=refused.reason)
            self._metrics.refused(refused.status)
            await refused.send(send)
        except RequestCutError:
            return
        finally:
            self._under_way_bytes -= taken

    async def _decide(self, scope: Scope, headers: RequestHeaders, receive: Receive) -> tuple[Forwarded, int]:
        """Return the forwarded parts of a request, and its size in bytes; raises as the gate does."""
        path, method = scope["path"], scope["method"]
        admitted = None if self._gate.is_open(path) else self._gate.authenticate(method, path, headers)
        data = await read_body(headers, receive, self._body_bytes_max)
        if self._under_way_bytes + len(data) > self._under_way_bytes_max:
            raise RequestRefused(503, "the door is busy; try again")
        if admitted is None:
            forwarded = Forwarded({}, data)
        elif admitted.scoped is None:
            forwarded = self._gate.plain(admitted)._replace(body=data)
        else:
            forwarded = self._gate.scope(admitted, data)
        self._under_way_bytes += len(data)
        return forwarded, len(data)

    async def _pass_on(self, scope: Scope, forwarded: Forwarded, receive: Receive, send: Send) -> None:
        """Send the request to the router, and its answer to the client, until either ends."""
        kept = [(name, value) for name, value in scope["headers"] if self._gate.passes(name.decode("latin-1"))]
        own = [(name.encode(), value.encode()) for name, value in forwarded.headers.items()]
        query = scope.get("query_string", b"")
        path = scope.get("raw_path") or scope["path"].encode()
        router = self._routers[forwarded.group] if forwarded.group else self._client.base_url
        url = router.copy_with(raw_path=path + (b"?" + query if query else b""))
        request = self._client.build_request(scope["method"], url, headers=[*kept, *own], content=forwarded.body)
        passing = asyncio.ensure_future(self._answer(request, forwarded.receipt, send))
        leaving = asyncio.ensure_future(_client_left(receive))
        try:
            await asyncio.wait({passing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not passing.done():
                self._metrics.left()
                raise RequestCutError
            await passing
        finally:
            await _cancelled(passing)
            await _cancelled(leaving)
            if forwarded.receipt is not None:
                forwarded.receipt.close()

    async def _answer(self, request: httpx.Request, receipt: OpenReceipt | None, send: Send) -> None:
        try:
            response = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            _LOG.error("the router cannot be reached", error=type(error).__name__)
            raise RequestRefused(502, "the router cannot be reached; try again") from None
        try:
            self._metrics.passed()
            came = [(name.lower().decode("latin-1"), value) for name, value in response.headers.raw]
            if receipt is not None:
                receipt.answered(response.status_code, came)
            headers = [(name.encode("latin-1"), value) for name, value in came if self._gate.is_returned(name)]
            status = response.status_code
            await send({"type": "http.response.start", "status": status, "headers": headers})
            async for chunk in response.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await response.aclose()


async def _client_left(receive: Receive) -> None:
    """Wait until the client closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(task: asyncio.Future[None]) -> None:
    """Cancel a running task and wait until it has ended."""
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
