"""What all models of the API share."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any

from fastapi import Query
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, field_validator

from kvcustody.tenants import NAME_CHARACTERS_MAX
from kvcustody.times import moment_us

LARGE = 1 << 53

Name = Annotated[str, Field(min_length=1, max_length=128)]
TenantName = Annotated[str, Field(min_length=1, max_length=NAME_CHARACTERS_MAX)]
Whole = Annotated[int, Field(strict=True, ge=0, lt=LARGE)]
Measure = Annotated[float, Field(gt=-LARGE, lt=LARGE, allow_inf_nan=False)]
"""A number that stays one when it is multiplied, and when all workers' are added up."""
Utc = Annotated[int, Field(strict=True, ge=0, lt=LARGE, description="UTC in microseconds since 1970.")]

Cursor = Annotated[
    str | None, Query(max_length=1024, pattern=r"^[A-Za-z0-9_-]+$", description="`next` of the page before.")
]
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


class Model(BaseModel):
    """A model that refuses what it does not know, and text that no database takes."""

    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _storable(cls, value: Any) -> Any:
        if _has_nul(value):
            raise ValueError("has the character U+0000")
        return value


def _has_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any(_has_nul(key) or _has_nul(each) for key, each in value.items())
    return isinstance(value, (list, tuple)) and any(map(_has_nul, value))


def example(value: dict[str, Any], **schema: Any) -> ConfigDict:
    """The configuration of a model with an example, and what else its schema says."""
    return ConfigDict(extra="forbid", json_schema_extra={"examples": [value], **schema})
