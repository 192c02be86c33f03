"""The API document, OpenAPI 3.1: what operations have in common stands in it once, as a component.

1. An answer of a problem is a component, named after the types of problems that it tells. A parameter that several
   operations have alike is one, named as the parameter; a second form of a name has a number.
2. A reader of the document follows references (`whole` has none of parameters and answers).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import orjson
from fastapi import FastAPI

from kvcustody.governance.api.http.answer_times import date_schemas
from kvcustody.governance.api.http.parameter_descriptions import describe_parameters
from kvcustody.governance.api.models.problem import ProblemDocument
from kvcustody.governance.service.problem_details import MEDIA_TYPE, TYPES

IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": True,
    "description": "A key of your own for this act; the same again gives the same answer.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 200, "pattern": "^[ -~]+$"},
    "example": "3f6c0c1e-6a4f-4d5e-9a53-0d3c2f8e7b10",
}
_RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "string"}}}
_METHODS = frozenset({"get", "put", "post", "delete", "patch"})


def problem_responses(names: set[str]) -> dict[int | str, dict[str, Any]]:
    """The answers of these types of problems, by status."""
    found: dict[int | str, dict[str, Any]] = {}
    for name in sorted(names):
        kind = TYPES[name]
        entry = found.setdefault(kind.status, {"description": "", "content": {MEDIA_TYPE: {}}})
        entry["description"] = " / ".join(filter(None, (entry["description"], kind.title)))
        content = entry["content"][MEDIA_TYPE]
        content["schema"] = {"$ref": "#/components/schemas/ProblemDocument"}
        example = {"type": kind.uri, "title": kind.title, "status": kind.status}
        content.setdefault("examples", {})[name] = {"value": example}
        if kind.status in (429, 503):
            entry["headers"] = _RETRY_AFTER
    return found


def whole(app: FastAPI) -> dict[str, Any]:
    """The document with every parameter and answer where it is used."""
    made = deepcopy(app.openapi())  # FastAPI keeps its own
    components = made.setdefault("components", {})
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, or a token."},
        "session": {"type": "apiKey", "in": "cookie", "name": "kvcustody"},
    }
    schemas = components.setdefault("schemas", {})
    problem = ProblemDocument.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= problem.pop("$defs", {}) | {"ProblemDocument": problem}
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    describe_parameters(made)
    date_schemas(made)
    return made


def share(document: dict[str, Any]) -> None:
    """Put what operations have in common into components (rule 1)."""
    parameters, responses = _Components(document, "parameters"), _Components(document, "responses")
    used = Counter(_text(one) for each in _operations(document) for one in each.get("parameters", ()))
    for operation in _operations(document):
        given = operation.get("parameters", ())
        operation["parameters"] = [
            parameters.named(one["name"], one) if used[_text(one)] > 1 else one for one in given
        ]
        if not given:
            del operation["parameters"]
        for status, answer in operation["responses"].items():
            told = answer.get("content", {}).get(MEDIA_TYPE, {}).get("examples", {})
            if told:
                operation["responses"][status] = responses.named(".".join(told), answer)


def _operations(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for item in document["paths"].values():
        yield from (each for method, each in item.items() if method in _METHODS)


def _text(part: dict[str, Any]) -> bytes:
    return orjson.dumps(part, option=orjson.OPT_SORT_KEYS)


class _Components:
    """The components of one kind, each under one name."""

    def __init__(self, document: dict[str, Any], kind: str) -> None:
        self._kind = kind
        self._made: dict[str, Any] = document["components"].setdefault(kind, {})
        self._names: dict[bytes, str] = {}
        self._forms: Counter[str] = Counter()

    def named(self, name: str, part: dict[str, Any]) -> dict[str, str]:
        """A reference to the component with this content."""
        text = _text(part)
        if text not in self._names:
            self._forms[name] += 1
            self._names[text] = name if self._forms[name] == 1 else f"{name}-{self._forms[name]}"
            self._made[self._names[text]] = part
        return {"$ref": f"#/components/{self._kind}/{self._names[text]}"}
