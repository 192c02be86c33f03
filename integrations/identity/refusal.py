"""The middleware's own replies, in the shape of OpenAI's errors.

1. Every missing or bad credential gets the same 401, byte for byte. The reason is for the log.
2. No reply quotes anything that the request held.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from kvcustody.errors import IdentityError

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


_CODES = {401: "invalid_api_key", 403: "path_not_served", 404: "not_found", 413: "body_too_large"}


class RequestRefused(IdentityError):  # noqa: N818, a verdict, as in the tree's `LedgerUnavailable`
    """A request that is refused: `status` and `message` for the caller, `reason` for the log."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        reason: str | None = None,
        code: str | None = None,
    ) -> None:
        """Describe the refusal. `code`: what clients read; the status's own where it is omitted."""
        super().__init__(message, status=status, param=param, reason=reason or message)
        self.status = status
        self.client_code = _CODES.get(status) if code is None else code
        self.param = param
        self.reason = reason or message

    def body(self) -> bytes:
        """Return the reply's JSON body."""
        error = {
            "message": self.message,
            "type": "invalid_request_error",
            "param": self.param,
            "code": self.client_code,
        }
        return json.dumps({"error": error}).encode()

    async def send(self, send: Send) -> None:
        """Send the whole reply."""
        body = self.body()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def unauthenticated(reason: str) -> RequestRefused:
    """Return the one 401 (rule 1)."""
    return RequestRefused(401, "a valid API key or token is required", reason=reason)


def malformed(param: str, problem: str) -> RequestRefused:
    """Return a 400 about one field or header."""
    return RequestRefused(400, f"{param}: {problem}", param=param)


def not_found() -> RequestRefused:
    """Return a 404 about a stored response: an absent one and another owner's look alike."""
    return RequestRefused(404, "response not found", param="response_id")


def misplaced(*, is_known: bool = True) -> RequestRefused:
    """Return the refusal for a request that no worker here may serve, or whose policy is not known yet."""
    if is_known:
        return RequestRefused(403, "the policy permits no worker here to serve this request", code="placement_unmet")
    return RequestRefused(503, "the policy for this request is not loaded yet; try again", code="placement_unknown")
