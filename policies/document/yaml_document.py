"""YAML documents other than the policy, as plain values or a typed model. One strict reader reads them all
(`yaml_nodes`).

1. As in a policy, these are refused: what YAML 1.1 and 1.2 read differently (`off`, `010`, `1:30`), a repeated key, an
   anchor, an alias, a merge key and a tag.
2. All problems of a document are reported at once, each with file, line and column, and a way to fix it.
3. A refused value is never quoted, because documents hold material that keys are derived from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from kvcustody.errors import ConfigError
from kvcustody.policies.document.problems import PolicyRejected, Problems, SourceMark
from kvcustody.policies.document.yaml_nodes import (
    BYTES_MAX,
    NODES_MAX,
    Broken,
    MappingNode,
    Node,
    Place,
    Scalar,
    SequenceNode,
    mark_at,
    parse,
)

DIGITS_MAX = 18  # Python refuses to read a few thousand, and no field takes as many as these

Model = TypeVar("Model", bound="YamlModel")


class YamlModel(BaseModel):
    """Base of every part of a typed document."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class YamlValues(NamedTuple):
    """A document's plain values, and the nodes that they were read from."""

    name: str
    value: Any
    root: Node

    def place(self, at: Place) -> str:
        """Return file, line and column of the key of a value."""
        mark = mark_at(self.root, at, key=True)
        return f"{self.name}:{mark.line}:{mark.column}"


def read_values(content: bytes, name: str, *, bytes_max: int = BYTES_MAX, nodes_max: int = NODES_MAX) -> YamlValues:
    """Return the document as dictionaries, lists, texts and numbers; raises `PolicyRejected` with every problem."""
    problems = Problems(name)
    root = parse(content, problems, floats=True, bytes_max=bytes_max, nodes_max=nodes_max)
    value = None if root is None else _plain(root, problems)
    problems.raise_if_any()
    assert root is not None, "a document without a root has a problem"
    return YamlValues(name, value, root)


def read_model(model: type[Model], path: Path) -> Model:
    """Return the document in a file; raises `ConfigError` with one line for each problem."""
    try:
        with path.open("rb") as file:
            content = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check its path and mode") from None
    return parse_model(model, content, str(path))


def parse_model(model: type[Model], content: bytes, name: str) -> Model:
    """Return the document in `content`; problems refer to it as `name`."""
    problems = Problems(name)
    root = parse(content, problems)
    try:
        problems.raise_if_any()
    except PolicyRejected as error:
        raise ConfigError(document_problems(error)) from None
    assert root is not None, "a document without a root has a problem"
    mistakes: list[tuple[SourceMark, str]] = []

    def value(scalar: Scalar) -> str | int | float | bool | None:
        try:
            return _scalar_value(scalar)
        except ValueError as error:
            mistakes.append((scalar.mark, str(error)))
            return 0

    document: Model | None = None
    try:
        document = model.model_validate_json(json.dumps(root, default=value), strict=True)
    except ValidationError as error:
        mistakes += [(mark_at(root, problem["loc"], key=True), _says(problem)) for problem in error.errors()]
    if document is None or mistakes:
        raise ConfigError("\n".join(f"{name}:{mark.line}:{mark.column}: {text}" for mark, text in sorted(mistakes)))
    return document


def document_problems(error: PolicyRejected) -> str:
    """Return the problems of a document that is not a policy, one line each."""
    return error.message.replace("the policy", "the document").replace("a policy", "a document")


def _scalar_value(scalar: Scalar) -> str | int | float | bool | None:
    """What a scalar means; raises `ValueError` for a number that is too long."""
    if scalar.kind == "integer":
        digits = len(scalar.text.lstrip("+-"))
        if digits > DIGITS_MAX:
            raise ValueError(f"a number of {digits} digits, over {DIGITS_MAX}")
        return int(scalar.text)
    if scalar.kind == "float":
        return float(scalar.text)
    if scalar.kind == "boolean":
        return scalar.text.lower() == "true"
    return None if scalar.kind == "null" else scalar.text


def _plain(node: Node, problems: Problems) -> Any:
    if isinstance(node, MappingNode):
        return {name: _plain(value, problems) for name, value in node.items()}
    if isinstance(node, SequenceNode):
        return [_plain(item, problems) for item in node]
    if isinstance(node, Broken):  # its problem is on record
        return None
    try:
        return _scalar_value(node)
    except ValueError as error:
        problems.add(node.mark, "KVP204", str(error), "write a smaller number, or quote it")
        return None


def _says(problem: Any) -> str:
    field = ".".join(str(part) for part in problem["loc"])
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        message = "unknown field; remove it"
    elif problem["type"] == "missing":
        message = "is missing; add it"
    return f"`{field}` {message[:1].lower()}{message[1:]}" if field else message
