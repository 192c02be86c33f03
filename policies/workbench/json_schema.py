"""The JSON Schema of a policy document, with a description of every field, for completion and checks in editors.

1. Every document that the loader accepts fits the schema; the loader alone checks what a schema cannot say
   (references, sums, order of dates).
2. It is made of the declarations by which the loader reads (`reading.sections`).
"""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from kvcustody.policies.reading.sections import PolicyDocument


def schema() -> dict[str, Any]:
    """Return the whole schema, as JSON data."""
    return {
        "$schema": _Generator.schema_dialect,
        "$id": "https://kvcustody.invalid/schema/policy-1.json",
        "title": "kvcustody policy",
        **PolicyDocument.model_json_schema(schema_generator=_Generator),
    }


class _Generator(GenerateJsonSchema):
    """Fields and sections go by what documents call them; a field that is left out is not written as null."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        found = super().model_schema(schema)
        del found["title"]
        return found
