"""The ASGI middleware: it authenticates every request and puts a signed scope into what reaches the engine.

1. The application sees a request only after the gate let it pass. An error on the way is a refusal, never a pass.
2. The body is read once, up to a bound, and given to the application once. An answer to a door's
   request names this worker in a header, which the door keeps; else responses are not touched.
3. Websockets are refused: no field of theirs could carry a scope to the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvcustody.governance.observability.attempts import network_of, reason_of_answer
from kvcustody.integrations.identity.authenticate_request import AdmittedRequest
from kvcustody.integrations.identity.refusal import (
    Application,
    Message,
    Receive,
    RequestRefused,
    Scope,
    Send,
)
from kvcustody.integrations.identity.request_gate import RequestGate
from kvcustody.integrations.identity.request_headers import WORKER_HEADER, RequestHeaders
from kvcustody.integrations.identity.routes import route_path
from kvcustody.logger import get_logger

_LOG = get_logger("kvcustody.identity")
_POLICY_VIOLATION: Final = 1008


class IdentityMiddleware:
    """Wraps an ASGI application; `body_bytes_max` bounds the bodies that it reads."""

    def __init__(
        self,
        app: Application,
        gate: RequestGate,
        *,
        body_bytes_max: int = 32 << 20,
        refused: Callable[[str, str], None] | None = None,
    ) -> None:
        """Wrap the application. `refused` is called with the reason and network of each request refused with 401, 403
        or 404.
        """
        self._refused = refused
        self._app = app
        self._gate = gate
        self._body_bytes_max = body_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            self._note(scope, 403, "websockets are not served")
            await refuse_socket(receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope["path"], scope.get("root_path", ""))
        if self._gate.is_open(path):
            await self._app(scope, receive, send)
            return
        try:
            headers = RequestHeaders(scope["headers"])
            admitted = self._gate.authenticate(scope["method"], path, headers)
            body = None if admitted.scoped is None else await self._scoped_body(admitted, headers, receive)
        except RequestRefused as refusal:
            _LOG.warning("request refused", status=refusal.status, reason=refusal.reason)
            self._note(scope, refusal.status, refusal.reason)
            await refusal.send(send)
            return
        except RequestCutError:
            return
        passed = {
            **scope,
            "headers": headers.passed_on(admitted.ids, None if body is None else len(body)),
        }
        if admitted.token is not None and self._gate.worker:
            send = _naming(self._gate.worker, send)
        await self._app(passed, receive if body is None else _Replay(body, receive), send)

    def _note(self, scope: Scope, status: int, said: str) -> None:
        reason = reason_of_answer(status, said)
        if reason is not None and self._refused is not None:
            client = scope.get("client") or ("",)
            self._refused(reason, network_of(client[0]))

    async def _scoped_body(self, admitted: AdmittedRequest, headers: RequestHeaders, receive: Receive) -> bytes:
        """Return the body for the engine, with a scope token in it."""
        return self._gate.scope(admitted, await read_body(headers, receive, self._body_bytes_max))


def _naming(worker: str, send: Send) -> Send:
    """Return a `send` whose answer names its worker."""

    async def named(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = WORKER_HEADER.encode("ascii")
            headers = [(name, value) for name, value in message.get("headers", ()) if name.lower() != own]
            message = {**message, "headers": [*headers, (own, worker.encode())]}
        await send(message)

    return named


async def read_body(headers: RequestHeaders, receive: Receive, body_bytes_max: int) -> bytes:
    """Return a request's whole body.

    Raises:
        RequestRefused: it exceeds the bound (413).
        RequestCutError: the client left.
    """
    too_large = RequestRefused(413, f"body: is larger than {body_bytes_max} bytes", param="body")
    stated = headers.one("content-length")
    if stated is not None and stated.isdigit() and len(stated) < 20 and int(stated) > body_bytes_max:
        raise too_large
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise RequestCutError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > body_bytes_max:
            raise too_large
        more = message.get("more_body", False)
    return b"".join(parts)


class RequestCutError(Exception):
    """The client left before its request was complete."""


class _Replay:
    """A `receive` that returns one whole body, and then the server's messages."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


async def refuse_socket(receive: Receive, send: Send) -> None:
    """Close a websocket, or anything else, before it opens."""
    await receive()
    _LOG.warning("request refused", status=403, reason="websockets are not served")
    await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
