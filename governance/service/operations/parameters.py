"""Parameters that operations share: pages, a tenant, a period, a checkpoint, a process. Independent of HTTP."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from kvcustody.tenants import NAME_CHARACTERS_MAX
from kvcustody.times import WHOLE_NUMBER, moment_us


class RequestPart(FieldInfo):  # type: ignore[misc]  # as frameworks do; it is final for type checkers alone
    """A parameter's place in a request, and its description."""

    def __init__(self, name: str, **said: Any) -> None:
        """`name`: `path`, `query` or `header`; `said`: as pydantic's `Field`."""
        alias = said.get("alias")
        super().__init__(**said, validation_alias=alias, serialization_alias=alias)
        self.name = name
        self.said = said


Path, Query, Header = (
    partial(RequestPart, "path"),
    partial(RequestPart, "query"),
    partial(RequestPart, "header"),
)
LARGE = 1 << 53  # above every number of a parameter: JSON readers keep whole numbers below it exactly


def _digits(given: Any) -> Any:
    """A whole number as it is written in one way: digits of ASCII, without a sign, spaces or zeros before it."""
    if isinstance(given, str) and WHOLE_NUMBER.fullmatch(given) is None:
        raise PydanticCustomError("whole_number", "is not a whole number in decimal digits")
    return given


def _microseconds(given: Any) -> Any:
    """UTC microseconds of a moment in ISO 8601; a number stays for the type to judge."""
    if isinstance(given, str) and WHOLE_NUMBER.fullmatch(given) is None:
        try:
            return moment_us(given)
        except (ValueError, OverflowError):
            raise PydanticCustomError(
                "moment", "is neither a whole number in decimal digits nor a moment in ISO 8601"
            ) from None
    return given


NUMBER = BeforeValidator(_digits)
MOMENT = BeforeValidator(_microseconds)
Cursor = Annotated[
    str | None, Query(max_length=1024, pattern=r"^[A-Za-z0-9_-]+$", description="`next` of the previous page.")
]


class PageOrder(StrEnum):
    """The order of a list."""

    NEWEST = "newest"
    OLDEST = "oldest"


Order = Annotated[PageOrder, Query(description="`newest` first, or `oldest` first.")]
Limit = Annotated[int, Query(ge=1, le=1000, description="Maximum number of items per page."), NUMBER]
Tenant = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=NAME_CHARACTERS_MAX,
        description=(
            "One tenant, written `id^issuer` where there are several issuers. Default for tenant roles: your own."
        ),
    ),
]
AsOf = Annotated[
    int | None,
    Query(ge=1, lt=LARGE, description="Answer from the ledger as of the root checkpoint of this size."),
    NUMBER,
]


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
    Query(ge=0, lt=LARGE, description="From this time on, in UTC microseconds or ISO 8601."),
]
Until = Annotated[
    int | None,
    MOMENT,
    MOMENT_SCHEMA,
    Query(ge=0, lt=LARGE, description="Before this time, in UTC microseconds or ISO 8601."),
]
Incarnation = Annotated[
    str | None, Query(pattern=r"^[0-9a-f]{32}$", description="Only this process: 32 hexadecimal digits.")
]
