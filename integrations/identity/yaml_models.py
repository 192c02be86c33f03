"""YAML documents as typed models: everything wrong with one is reported, each with file, line and column.

1. Reading is strict: no unknown or repeated field, no anchor, tag or ambiguous scalar, no value of another type.
2. A message names the place and the reason and never quotes a value: documents hold what keys are made of.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from kvcustody.errors import ConfigError, IdentityError
from kvcustody.governance.identity.principal import check_identifier
from kvcustody.policies.document.problems import PolicyRejected, Problems, SourceMark
from kvcustody.policies.document.yaml_nodes import Scalar, mark_at, parse
from kvcustody.policies.document.yaml_values import scalar_value

BYTES_MAX = 1 << 20

Model = TypeVar("Model", bound="IdentityDocumentPart")


class IdentityDocumentPart(BaseModel):
    """Base of every part of a document."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _identifier(value: str) -> str:
    try:
        return check_identifier("it", value)
    except IdentityError as error:
        raise ValueError(error.operands["reason"]) from None


def _route(value: str) -> str:
    if not _identifier(value).startswith("/"):
        raise ValueError("must begin with `/`")
    return value


Identifier = Annotated[str, AfterValidator(_identifier)]
RouteName = Annotated[str, AfterValidator(_route)]


def read_document(model: type[Model], path: Path) -> Model:
    """The document in `path`; `ConfigError` with one line for each problem."""
    try:
        with path.open("rb") as file:
            content = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check its path and mode") from None
    return parse_document(model, content, str(path))


def parse_document(model: type[Model], content: bytes, name: str) -> Model:
    """The document that `content` holds; `name` is how problems call it."""
    problems = Problems(name)
    root = parse(content, problems)
    try:
        problems.raise_if_any()
    except PolicyRejected as error:
        raise ConfigError(error.message.replace("the policy", "the document")) from None
    assert root is not None
    found: list[tuple[SourceMark, str]] = []

    def value(scalar: Scalar) -> str | int | float | bool | None:
        try:
            return scalar_value(scalar)
        except ValueError as error:
            found.append((scalar.mark, str(error)))
            return 0

    document: Model | None = None
    try:
        document = model.model_validate_json(json.dumps(root, default=value), strict=True)
    except ValidationError as error:
        found += [(mark_at(root, problem["loc"], key=True), _says(problem)) for problem in error.errors()]
    if document is None or found:
        raise ConfigError(
            "\n".join(f"{name}:{mark.line}:{mark.column}: {text}" for mark, text in sorted(found))
        )
    return document


def _says(problem: Any) -> str:
    field = ".".join(str(part) for part in problem["loc"])
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        message = "unknown field"
    elif problem["type"] == "missing":
        message = "is missing"
    return f"`{field}` {message[:1].lower()}{message[1:]}" if field else message
