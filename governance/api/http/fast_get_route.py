"""The way of a GET through the framework: its query and path are read by one validator, made when the route is.

The framework's own way looks at every parameter of every request anew, which took a quarter of what a query costs.
1. What is taken, refused and said of a refusal is what the framework's own way takes, refuses and says.
2. A route with anything but query, path, service and caller goes the framework's own way.
3. What `read` is asked of its own, past the framework's router and the layers around it, it answers the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from fastapi import Request, Response, params
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model
from starlette.concurrency import run_in_threadpool

from kvcustody.governance.api.http.answer_times import answer_bytes, times_of

Given = Callable[[Request], Any]
Handler = Callable[[Request], Coroutine[Any, Any, Response]]
_PLACES = {params.Query: "query", params.Path: "path", params.Depends: "given", params.Param: "other"}


class Parameter(NamedTuple):
    """One parameter of an operation: whence its value comes, and its type with all that is said of it."""

    name: str
    place: str  # `query`, `path`, `given` (a dependency) or `other`
    annotation: Any
    default: Any  # `...`: required
    given: Callable[..., Any] | None = None

    @property
    def alias(self) -> str:
        """What requests call it."""
        stated = (getattr(item, "alias", None) for item in getattr(self.annotation, "__metadata__", ()))
        return next(filter(None, stated), self.name)


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
        elif isinstance(annotation, type) and issubclass(annotation, Request | Response | BaseModel):
            place = "other"
        else:
            place = "path" if f"{{{name}}}" in path else "query"
        given = said.dependency if isinstance(said, params.Depends) else None
        found.append(Parameter(name, place, annotation, default, given))
    return found


class ReadRoute(APIRoute):
    """A route of an operation. `given` are the dependencies that may be answered from the request alone."""

    given: dict[Callable[..., Any], Given] = {}  # noqa: RUF012 - of a subclass, set once
    read: Handler | None = (
        None  # what answers by itself, without anything of the framework around it (rule 3)
    )

    def get_route_handler(self) -> Handler:
        """What answers a request that fits the route."""
        call, asked = self.endpoint, parameters_of(self.endpoint, self.path)
        ways = {item.name: self.given[item.given] for item in asked if item.given in self.given}
        if self.methods != {"GET"} or any(
            item.place not in ("query", "path") and item.name not in ways for item in asked
        ):
            return super().get_route_handler()  # rule 2
        query, path = _model("query", asked), _model("path", asked)
        answers = None if self.response_model is None else TypeAdapter(self.response_model)
        times = None if self.response_model is None else times_of(self.response_model)
        status, waits = self.status_code or 200, inspect.iscoroutinefunction(call)

        async def handle(request: Request) -> Response:
            values = {name: way(request) for name, way in ways.items()}
            errors = _read(path, request.path_params, "path", values)
            errors += _read(query, dict(request.query_params), "query", values)
            if errors:
                raise RequestValidationError(errors)
            found = await call(**values) if waits else await run_in_threadpool(call, **values)
            if isinstance(found, Response):
                return found
            assert answers is not None
            valid = answers.validate_python(found)
            if times is None:
                body = answers.dump_json(valid, by_alias=True)
            else:
                body = answer_bytes(
                    self.response_model, answers.dump_python(valid, mode="json", by_alias=True)
                )
            return Response(body, status, media_type="application/json")

        self.read = handle
        return handle


def _model(place: str, asked: list[Parameter]) -> type[BaseModel]:
    """One model of all parameters of a place, each under its alias."""
    made: dict[str, Any] = {
        item.name: (item.annotation, item.default) for item in asked if item.place == place
    }
    return create_model(place.title(), __config__=ConfigDict(arbitrary_types_allowed=True), **made)


def _read(model: type[BaseModel], given: Any, place: str, values: dict[str, Any]) -> list[Any]:
    """Read a place into `values`; what is wrong with it."""
    try:
        found = model.model_validate(given)
    except ValidationError as error:
        return [{**item, "loc": (place, *item["loc"])} for item in error.errors(include_url=False)]
    values.update(found.__dict__)
    return []
