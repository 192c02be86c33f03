"""Writes the parts of the API document that commands need to `commands.json`, because reading the document takes a
second.

The build runs `python -m kvcustody.console.api.generate_commands` (packaging/build_backend.py); `make setup` does too.
Run it after a change of the API; without the file the commands are made from the document each time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from kvcustody.console.api.command_parts import FILE, Command, Part
from kvcustody.files import READABLE, write_file
from kvcustody.governance.api.declarations import every_operation
from kvcustody.governance.api.operation_function import DeclaredOperation

_KEPT = ("type", "enum", "items", "format", "pattern", "minimum", "maximum")
_WORDS = re.compile(r"\^\(([a-z|-]+)\)\$")  # a pattern that lists what it fits


def generated() -> bytes:
    """Return the file's content: one line for each operation."""
    from kvcustody.governance.api.openapi_document import whole_document

    every = every_operation().by_name
    made = commands(whole_document(), every)
    lines = (orjson.dumps({**one._asdict(), "parts": [part._asdict() for part in one.parts]}) for one in made)
    return b"[\n" + b",\n".join(lines) + b"\n]\n"


def commands(document: dict[str, Any], declared: Mapping[str, DeclaredOperation]) -> Iterator[Command]:
    """Yield the command of every operation of an API document; `declared`: the operations by name."""
    for path, item in document["paths"].items():
        for method, operation in item.items():
            declaration = declared[operation["operationId"]]
            parts = [*_given(document, operation), *_of_body(document, operation)]
            given = {item["name"] for item in operation.get("parameters", ())}
            media = list(operation.get("requestBody", {}).get("content", {}))
            answers = str(operation["responses"].get("202", {}).get("content", ""))
            yield Command(
                declaration.operation.command,
                operation["operationId"],
                method.upper(),
                path,
                operation["description"],
                "Idempotency-Key" in given,
                "cursor" in given and operation["operationId"] != "streamEvents",
                "schemas/Job" in answers,
                media[0] if media and media[0] != "application/json" else "",
                declaration.reads,
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
    """Return a schema with its reference resolved, and without the null that means "left out"."""
    for option in schema.get("anyOf", ()):
        if option.get("type") != "null":
            return _resolved(document, option)
    if "$ref" in schema:
        found: dict[str, Any] = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return found
    return schema


def _kept(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a schema that decide an option's type and check its value before the call."""
    resolved = _resolved(document, schema)
    kept_fields = {name: resolved[name] for name in _KEPT if name in resolved}
    if "items" in kept_fields:
        kept_fields["items"] = _kept(document, kept_fields["items"])
    words = _WORDS.fullmatch(kept_fields.get("pattern", ""))
    if words is not None:
        del kept_fields["pattern"]
        kept_fields["enum"] = words[1].split("|")
    return kept_fields


def _here(name: str) -> str:
    return "in_" + re.sub(r"[^a-z0-9]", "_", name.lower())


if __name__ == "__main__":
    write_file(Path(__file__).parent / FILE, generated(), mode=READABLE)
