"""The API document says once what operations have in common, and says the same as with everything in its place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvcustody.governance.api.openapi_document import document, share, whole_document

BYTES_MAX = 430_000


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return whole_document()


@pytest.fixture(scope="module")
def served() -> bytes:
    return document()


def test_it_is_served_small(served: bytes, whole: dict[str, Any]) -> None:
    assert len(served) <= BYTES_MAX < len(json.dumps(whole, separators=(",", ":")))


def test_it_says_the_same_as_with_everything_in_its_place(served: bytes, whole: dict[str, Any]) -> None:
    document = json.loads(served)
    given = json.loads(json.dumps(whole))
    assert _in_place(document, document["paths"]) == given["paths"]
    assert document["components"]["schemas"] == given["components"]["schemas"]


def test_no_reference_is_open_and_no_shared_part_is_without_use(served: bytes) -> None:
    document = json.loads(served)
    for kind in ("parameters", "responses"):
        used = set(_references(document["paths"], f"#/components/{kind}/"))
        assert used == set(document["components"][kind]) and len(used) > 20


def test_two_forms_of_a_name_are_two_components() -> None:
    limit = {"name": "limit", "in": "query", "schema": {"type": "integer"}}
    other = {**limit, "description": "Most items."}
    pairs = {"/a": limit, "/b": limit, "/c": other, "/d": other, "/e": {**limit, "required": True}}
    document: dict[str, Any] = {
        "components": {},
        "paths": {path: {"get": {"parameters": [one], "responses": {}}} for path, one in pairs.items()},
    }
    share(document)
    assert document["components"]["parameters"] == {"limit": limit, "limit-2": other}
    given = {path: item["get"]["parameters"] for path, item in document["paths"].items()}
    assert given["/a"] == given["/b"] == [{"$ref": "#/components/parameters/limit"}]
    assert given["/c"] == given["/d"] == [{"$ref": "#/components/parameters/limit-2"}]
    assert given["/e"] == [pairs["/e"]], "what one operation has alone stays there"


def _in_place(document: dict[str, Any], part: Any) -> Any:
    if isinstance(part, list):
        return [_in_place(document, one) for one in part]
    if not isinstance(part, dict):
        return part
    kind, _, name = str(part.get("$ref", "")).removeprefix("#/components/").partition("/")
    if kind in ("parameters", "responses"):
        return document["components"][kind][name]
    return {key: _in_place(document, value) for key, value in part.items()}


def _references(part: Any, beginning: str) -> list[str]:
    if isinstance(part, list):
        return [name for one in part for name in _references(one, beginning)]
    if not isinstance(part, dict):
        return []
    ref = part.get("$ref", "")
    own = [ref.removeprefix(beginning)] if ref.startswith(beginning) else []
    return own + [name for value in part.values() for name in _references(value, beginning)]
