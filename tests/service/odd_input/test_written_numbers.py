"""A number in a query or a path is written in one way: whatever else reads as one is refused, with its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvcustody.governance.api.openapi_document import whole_document
from standins.service.service_world import who_may

WRONG = ("1_0", "%2B1", "010", "1.0", "%201", "1%20", "1e1", "%D9%A1", "0x1", "-0", "")
OTHERS = {"incarnation": "ab" * 16, "name": "siem", "order": "cd" * 16, "worker": "gpu-0"}


def numbers(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Every method, path, operation and parameter of a query or path that is a whole number, or may be one."""
    for path, item in document["paths"].items():
        for method, operation in item.items():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] in ("query", "path") and '"integer"' in json.dumps(parameter["schema"]):
                    yield method.upper(), path, operation, parameter


@pytest.fixture(scope="module")
def every() -> list[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    return list(numbers(whole_document()))


def test_every_number_of_a_query_or_path_is_written_in_one_way(
    client: Any, people: Any, every: list[tuple[str, str, dict[str, Any], dict[str, Any]]]
) -> None:
    assert len(every) > 60
    for method, path, operation, parameter in every:
        who = who_may(people, operation["x-kvcustody-action"])
        name, place = parameter["name"], parameter["in"]
        for wrong in WRONG:
            if place == "path" and not wrong:
                continue  # another path
            answer = client(method, _target(path, operation, name, wrong), who)
            where = (method, path, name, wrong, answer.text)
            assert answer.status_code == 422, where
            assert f"{place}.{name}" in [error["at"] for error in answer.json()["errors"]], where


def test_control_a_number_that_is_written_so_is_taken(
    client: Any, people: Any, every: list[tuple[str, str, dict[str, Any], dict[str, Any]]]
) -> None:
    for method, path, operation, parameter in every:
        who = who_may(people, operation["x-kvcustody-action"])
        answer = client(method, _target(path, operation, parameter["name"], "1"), who)
        found = [error["at"] for error in answer.json().get("errors", ())] if answer.status_code == 422 else []
        assert f"{parameter['in']}.{parameter['name']}" not in found, (path, parameter["name"], answer.text)


def _target(path: str, operation: dict[str, Any], name: str, value: str) -> str:
    """A path and query of an operation with this value, and some for whatever else it needs."""
    query = []
    for each in operation["parameters"]:
        is_number = '"integer"' in json.dumps(each["schema"])
        other = value if each["name"] == name else "1" if is_number else OTHERS.get(each["name"], "acme")
        if each["in"] == "path":
            path = path.replace(f"{{{each['name']}}}", other)
        elif each["in"] == "query" and (each["name"] == name or each.get("required")):
            query.append(f"{each['name']}={other}")
    return path + ("?" + "&".join(query) if query else "")
