"""A refusal as an RFC 9457 problem document."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ErrorAt(BaseModel):
    """One error, and its place."""

    at: str
    what: str


class ProblemDocument(BaseModel):
    """A problem document; `type` is stable, and other fields may be added by type."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"type": "urn:kvcustody:problem:not-found", "title": "Nothing here", "status": 404}]
        }
    )

    type: str
    title: str
    status: int
    detail: str = ""
    errors: list[ErrorAt] = []
    leaf: int | None = None
