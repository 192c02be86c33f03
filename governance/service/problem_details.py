"""Every refusal of the service, as problem details (RFC 9457) with stable types.

1. A type's URI and status never change; docs/reference/problems.md explains each and is written from this table.
2. What is absent, foreign, expired or hidden is one problem with one body: `not-found`.
3. A problem never quotes a credential, a cursor, a body or anything of another tenant.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

from kvcustody.errors import ServiceError

URI = "urn:kvcustody:problem:"
MEDIA_TYPE = "application/problem+json"


class ProblemType(NamedTuple):
    """One type: its name, status, title and remedy."""

    name: str
    status: int
    title: str
    advice: str

    @property
    def uri(self) -> str:
        """The stable URI of the type."""
        return URI + self.name


_TYPES = (
    ("unauthenticated", 401, "No valid credential", "Send one key or token as `Authorization: Bearer …`."),
    ("forbidden", 403, "Not allowed for these roles", "Ask a person whose role allows it."),
    (
        "csrf",
        403,
        "Not from a page of this service",
        "Send the session's `X-CSRF-Token` from the same origin.",
    ),
    (
        "not-found",
        404,
        "Nothing here",
        "It does not exist, or you may not see it. Both give the same answer.",
    ),
    ("method-not-allowed", 405, "Method not allowed", "Use one of the methods in the `Allow` header."),
    ("not-acceptable", 406, "Format not available", "Request one of the media types in the API document."),
    ("conflict", 409, "The state does not allow it", "Read the resource again, then decide whether to repeat."),
    (
        "in-flight",
        409,
        "The first request is still running",
        "Wait for `Retry-After`, then repeat with the same key.",
    ),
    ("changed", 412, "The resource changed", "Read it again, and send its `ETag` in `If-Match`."),
    ("too-large", 413, "Body too large", "Send less in one request."),
    ("unsupported-media-type", 415, "Media type not supported", "Send one of the types in the API document."),
    ("invalid", 422, "The request is malformed", "Correct the fields listed in `errors`."),
    (
        "policy-too-costly",
        422,
        "The policy is too costly to work on here",
        "`detail` names the limit. Reduce the number of grants, or run the same `kvcustody policy` command on your "
        "own machine.",
    ),
    ("key-reused", 422, "Idempotency key used for another request", "Use a new `Idempotency-Key`."),
    (
        "refused-leaf",
        422,
        "A ledger leaf was refused",
        "`leaf` is its position in the batch. Record a gap and continue.",
    ),
    (
        "worker-protocol",
        426,
        "The worker is older than this control plane",
        "Upgrade the worker to protocol version `protocol`. Its batch stays in its spill until then.",
    ),
    (
        "if-match-required",
        428,
        "`If-Match` is required",
        "Read the resource and send its `ETag` in `If-Match`.",
    ),
    ("headers-too-large", 431, "Headers too large", "Send fewer or shorter headers, or a shorter path."),
    ("too-many-requests", 429, "Too many requests", "Wait the seconds in `Retry-After`, then repeat."),
    (
        "cursor-invalid",
        400,
        "The cursor does not match this query",
        "Start again without a cursor, with the same filters.",
    ),
    (
        "idempotency-key-required",
        400,
        "`Idempotency-Key` is required",
        "Send a new unique key with each action.",
    ),
    ("malformed", 400, "The request cannot be read", "Send well-formed HTTP and JSON."),
    (
        "internal",
        500,
        "The service failed",
        "Repeat with the same `Idempotency-Key`. If it fails again, report the request id to the operator.",
    ),
    (
        "ledger-schema",
        503,
        "The ledger has another schema than this program",
        "Restart the control plane with the version that upgraded the ledger. Batches wait in the workers' spills.",
    ),
    (
        "unavailable",
        503,
        "Temporarily unavailable",
        "The ledger cannot record now, or the service is shutting down. Repeat later.",
    ),
)
TYPES: dict[str, ProblemType] = {row[0]: ProblemType(*row) for row in _TYPES}


class ProblemError(ServiceError):
    """A refusal: raised anywhere below the API, answered as problem details."""

    def __init__(self, name: str, detail: str = "", *, headers: dict[str, str] | None = None, **extra: Any) -> None:
        self.type = TYPES[name]
        super().__init__(detail or self.type.title.lower(), problem=name)
        self.detail = detail
        self.extra = extra
        self.headers = headers or {}

    def body(self) -> bytes:
        """The problem document; it depends neither on the time nor on the caller."""
        document = {"type": self.type.uri, "title": self.type.title, "status": self.type.status}
        if self.detail:
            document["detail"] = self.detail
        return orjson.dumps({**document, **self.extra})


def not_found() -> ProblemError:
    """Return the refusal for absent, foreign, expired or hidden things (rule 2)."""
    return ProblemError("not-found")


def problems_table() -> str:
    """Return the table of the problems page."""
    rows = ["| type | status | meaning | what to do |", "|---|---|---|---|"]
    ordered = sorted(TYPES.values(), key=lambda item: (item.status, item.name))
    rows += [f"| `{item.uri}` | {item.status} | {item.title} | {item.advice} |" for item in ordered]
    return "\n".join(rows) + "\n"
