"""The arguments of an operation's function, read from the texts of a call by one validator a place.

Requests and local calls read them here: what is taken, what is refused and what is said of a refusal is the same.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fastapi import Request, Response, params
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model

from kvcustody.governance.api.http.json_body import check_json
from kvcustody.governance.service.problem_details import ProblemError

_PLACES = {
    params.Query: "query",
    params.Path: "path",
    params.Header: "header",
    params.Depends: "given",
    params.Param: "other",
}
_ERRORS_SHOWN = 20


class Parameter(NamedTuple):
    """One parameter of an operation: whence its value comes, and its type with all that is said of it."""

    name: str
    place: str  # `query`, `path`, `header`, `body`, `given` (a dependency) or `other`
    annotation: Any
    default: Any  # `...`: required
    given: Callable[..., Any] | None = None

    @property
    def alias(self) -> str:
        """What requests call it."""
        stated = (getattr(item, "alias", None) for item in getattr(self.annotation, "__metadata__", ()))
        shown = self.name.replace("_", "-") if self.place == "header" else self.name
        return next(filter(None, stated), shown)


def parameters_of(endpoint: Callable[..., Any], path: str) -> list[Parameter]:
    """The parameters of the function that answers `path`."""
    found = []
    for name, parameter in inspect.signature(endpoint, eval_str=True).parameters.items():
        default = ... if parameter.default is parameter.empty else parameter.default
        annotation = parameter.annotation
        said = next(
            (item for item in getattr(annotation, "__metadata__", ()) if isinstance(item, tuple(_PLACES))),
            None,
        )
        if said is not None:
            place = next(place for kind, place in _PLACES.items() if isinstance(said, kind))
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            place = "body"
        elif isinstance(annotation, type) and issubclass(annotation, Request | Response):
            place = "other"
        else:
            place = "path" if f"{{{name}}}" in path else "query"
        given = said.dependency if isinstance(said, params.Depends) else None
        found.append(Parameter(name, place, annotation, default, given))
    return found


def model_of(place: str, asked: list[Parameter]) -> type[BaseModel]:
    """One model of all parameters of a place, each under its alias."""
    made: dict[str, Any] = {
        item.name: (item.annotation, item.default) for item in asked if item.place == place
    }
    return create_model(place.title(), __config__=ConfigDict(arbitrary_types_allowed=True), **made)


def read_place(model: type[BaseModel], given: Any, place: str, values: dict[str, Any]) -> list[Any]:
    """Read a place into `values`; what is wrong with it."""
    try:
        found = model.model_validate(given)
    except ValidationError as error:
        return [{**item, "loc": (place, *item["loc"])} for item in error.errors(include_url=False)]
    values.update(found.__dict__)
    return []


class Texts(NamedTuple):
    """What a call says, as it came: each parameter by its name, and the body."""

    path: Mapping[str, str]
    query: Mapping[str, str]
    headers: Mapping[str, str]  # by their names in lower case
    body: bytes


class Arguments:
    """Reads the arguments of one operation's function."""

    def __init__(self, asked: Sequence[Parameter]) -> None:
        assert all(one.place != "other" for one in asked), "an operation sees no request"
        self._asked = list(asked)
        self._path, self._query = model_of("path", self._asked), model_of("query", self._asked)
        self._headers = [(one, TypeAdapter(one.annotation)) for one in self._asked if one.place == "header"]
        self._body = [(one, TypeAdapter(one.annotation)) for one in self._asked if one.place == "body"]

    def read(self, said: Texts, given: Mapping[Callable[..., Any], Any]) -> dict[str, Any]:
        """Every argument by its name.

        Args:
            said: The texts of the call.
            given: What each dependency stands for.

        Raises:
            ProblemError: `invalid`, with each text that is wrong.
        """
        values: dict[str, Any] = {one.name: given[one.given] for one in self._asked if one.given is not None}
        errors = read_place(self._path, dict(said.path), "path", values)
        errors += read_place(self._query, dict(said.query), "query", values)
        for one, adapter in self._headers:
            if one.alias in said.headers:
                errors += _read_one(adapter, said.headers[one.alias], ("header", one.alias), one.name, values)
            else:
                values[one.name] = one.default
        for one, adapter in self._body:
            errors += _read_body(adapter, said.body, one.name, values)
        if errors:
            raise invalid_arguments(errors)
        return values


def _read_body(adapter: TypeAdapter[Any], body: bytes, name: str, values: dict[str, Any]) -> list[Any]:
    if not body:
        return [{"loc": ("body",), "msg": "Field required"}]
    check_json(body, "application/json")
    try:
        content = json.loads(body)
    except json.JSONDecodeError as error:
        return [{"loc": ("body", error.pos), "msg": "JSON decode error"}]
    return _read_one(adapter, content, ("body",), name, values)


def _read_one(
    adapter: TypeAdapter[Any], value: Any, place: tuple[str, ...], name: str, values: dict[str, Any]
) -> list[Any]:
    try:
        values[name] = adapter.validate_python(value)
    except ValidationError as error:
        return [{**item, "loc": (*place, *item["loc"])} for item in error.errors(include_url=False)]
    return []


def invalid_arguments(errors: Sequence[Any]) -> ProblemError:
    """The problem of texts that a call's models refuse: where and what, never the value."""
    found = [
        {"at": ".".join(str(part) for part in item["loc"])[:200], "what": str(item["msg"])[:200]}
        for item in errors[:_ERRORS_SHOWN]
    ]
    return ProblemError("invalid", errors=found)
