"""The parameters that operations of the API share: pages, a tenant, a period, a checkpoint."""

from __future__ import annotations

from contextlib import suppress
from enum import StrEnum
from typing import Annotated, Any

from fastapi import Query
from pydantic import BeforeValidator, WithJsonSchema

from kvcustody.governance.api.models.base import LARGE
from kvcustody.tenants import NAME_CHARACTERS_MAX
from kvcustody.times import moment_us

Cursor = Annotated[
    str | None, Query(max_length=1024, pattern=r"^[A-Za-z0-9_-]+$", description="`next` of the page before.")
]


class PageOrder(StrEnum):
    """The order of a list."""

    NEWEST = "newest"
    OLDEST = "oldest"


Order = Annotated[PageOrder, Query(description="`newest` first, or `oldest` first.")]
Limit = Annotated[int, Query(ge=1, le=1000, description="Most items of a page.")]
Tenant = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=NAME_CHARACTERS_MAX,
        description="One tenant, as `id^issuer` where there are several issuers; your own where you have one.",
    ),
]
AsOf = Annotated[
    int | None,
    Query(ge=1, lt=LARGE, description="Size of a root checkpoint: answer as the ledger was then."),
]


def _microseconds(given: Any) -> Any:
    """UTC microseconds of a moment in ISO 8601; whatever else it is stays for the type to judge."""
    if isinstance(given, str) and not given.isdigit():
        with suppress(ValueError, OverflowError):
            return moment_us(given)
    return given


MOMENT = BeforeValidator(_microseconds)
MOMENT_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            {"type": "string", "format": "date-time"},
            {"type": "integer", "minimum": 0, "exclusiveMaximum": LARGE},
            {"type": "null"},
        ]
    }
)
Since = Annotated[
    int | None,
    MOMENT,
    MOMENT_SCHEMA,
    Query(ge=0, lt=LARGE, description="From this UTC microsecond, or ISO 8601, on."),
]
Until = Annotated[
    int | None,
    MOMENT,
    MOMENT_SCHEMA,
    Query(ge=0, lt=LARGE, description="Before this UTC microsecond, or ISO 8601."),
]
