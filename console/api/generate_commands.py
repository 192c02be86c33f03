"""Writes what `kvcustody api` needs of the API document into `commands.json`: reading the document would cost a second.

The build runs `python -m kvcustody.console.api.generate_commands` (packaging/build_backend.py); `make setup` does too.
Run it after a change of the API; without the file the commands are made from the document each time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from kvcustody.console.api.api_commands import FILE, Command, Part
from kvcustody.files import READABLE, write_file


def generated() -> bytes:
    """The file's content: one line for each operation."""
    from kvcustody.governance.api.app import create_api

    made = commands(create_api(None).whole_document())
    lines = (orjson.dumps({**one._asdict(), "parts": [part._asdict() for part in one.parts]}) for one in made)
    return b"[\n" + b",\n".join(lines) + b"\n]\n"


def command_name(operation: str) -> str:
    """`listEvents` is `list-events`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", operation).lower()


def commands(document: dict[str, Any]) -> Iterator[Command]:
    """The command of every operation of an API document."""
    for path, item in document["paths"].items():
        for method, operation in item.items():
            parts = [*_given(document, operation), *_of_body(document, operation)]
            names = {given["name"] for given in operation.get("parameters", ())}
            media = list(operation.get("requestBody", {}).get("content", {}))
            answers = str(operation["responses"].get("202", {}).get("content", ""))
            yield Command(
                command_name(operation["operationId"]),
                operation["operationId"],
                method.upper(),
                path,
                operation["description"],
                "Idempotency-Key" in names,
                "cursor" in names and operation["operationId"] != "streamEvents",
                "schemas/Job" in answers,
                media[0] if media and media[0] != "application/json" else "",
                tuple(parts),
            )


def _given(document: dict[str, Any], operation: dict[str, Any]) -> Iterator[Part]:
    for item in operation.get("parameters", ()):
        name = item["name"]
        if name != "Idempotency-Key":
            says = item.get("description", "")
            schema = _kept(document, item["schema"])
            yield Part(name, _here(name), item["in"], schema, item.get("required", False), says)


def _of_body(document: dict[str, Any], operation: dict[str, Any]) -> Iterator[Part]:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None:
        return
    schema = _resolved(document, content["schema"])
    for name, what in schema.get("properties", {}).items():
        required = name in schema.get("required", ())
        yield Part(name, _here(name), "body", _kept(document, what), required, what.get("description", ""))


def _resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without its reference, and without the null that stands for left out."""
    for option in schema.get("anyOf", ()):
        if option.get("type") != "null":
            return _resolved(document, option)
    if "$ref" in schema:
        found: dict[str, Any] = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return found
    return schema


def _kept(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """What an option's type follows from."""
    found = {
        name: value
        for name, value in _resolved(document, schema).items()
        if name in ("type", "enum", "items")
    }
    if "items" in found:
        found["items"] = _kept(document, found["items"])
    return found


def _here(name: str) -> str:
    return "in_" + re.sub(r"[^a-z0-9]", "_", name.lower())


if __name__ == "__main__":
    write_file(Path(__file__).parent / FILE, generated(), mode=READABLE)
