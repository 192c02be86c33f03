"""Base classes of all models of the API. They are read without HTTP too."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvcustody.governance.service.operations.parameters import LARGE
from kvcustody.tenants import NAME_CHARACTERS_MAX

Name = Annotated[str, Field(min_length=1, max_length=128)]
TenantName = Annotated[str, Field(min_length=1, max_length=NAME_CHARACTERS_MAX)]
Whole = Annotated[int, Field(strict=True, ge=0, lt=LARGE)]
Measure = Annotated[float, Field(gt=-LARGE, lt=LARGE, allow_inf_nan=False)]
"""A number that stays one when it is multiplied, and when all workers' are added up."""
Unread = Annotated[
    str,
    Field(description="Table, row and columns that cannot be read: what is shown for those says nothing."),
]
Utc = Annotated[int, Field(strict=True, ge=0, lt=LARGE, description="UTC in microseconds since 1970.")]


class Model(BaseModel):
    """A model that refuses unknown fields, and text that no database stores."""

    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _storable(cls, value: Any) -> Any:
        if _has_nul(value):
            raise ValueError("contains the character U+0000")
        return value


def _has_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any(_has_nul(key) or _has_nul(each) for key, each in value.items())
    return isinstance(value, (list, tuple)) and any(map(_has_nul, value))


def example(value: dict[str, Any], **schema: Any) -> ConfigDict:
    """A model configuration with an example and further parts of its schema."""
    return ConfigDict(extra="forbid", json_schema_extra={"examples": [value], **schema})
