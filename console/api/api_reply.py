"""The reply to a command, from a control plane or from the ledger."""

from __future__ import annotations

from typing import NamedTuple

import orjson

from kvcustody.errors import ServiceError


class ApiReply(NamedTuple):
    """A reply: its status, media type, `ETag` and bytes."""

    status: int
    media: str
    etag: str
    body: bytes


def refusal(reply: ApiReply) -> ServiceError:
    """Return a problem document as the error that a command prints, with each wrong field."""
    if not reply.media.startswith("application/problem+json"):
        return ServiceError(f"answered {reply.status}", problem="unknown", status=reply.status)
    problem = orjson.loads(reply.body)
    says = problem.get("detail") or problem["title"].lower()
    for item in problem.get("errors", ())[:3]:
        says += f"; `{item['at']}` {item['what']}"
    return ServiceError(says, problem=problem["type"].rpartition(":")[2], status=reply.status)
