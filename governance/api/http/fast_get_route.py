"""The way of a GET through the framework: its query and path are read by one validator, made when the route is.

The framework's own way looks at every parameter of every request anew, which took a quarter of what a query costs.
1. What is taken, refused and said of a refusal is what the framework's own way takes, refuses and says.
2. A route with anything but query, path, service and caller goes the framework's own way.
3. What `read` is asked of its own, past the framework's router and the layers around it, it answers the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi._compat import ModelField
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model
from starlette.concurrency import run_in_threadpool

Given = Callable[[Request], Any]
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class ReadRoute(APIRoute):
    """A route of an operation. `given` are the dependencies that may be answered from the request alone."""

    given: dict[Callable[..., Any], Given] = {}  # noqa: RUF012 - of a subclass, set once
    read: Handler | None = (
        None  # what answers by itself, without anything of the framework around it (rule 3)
    )

    def get_route_handler(self) -> Handler:
        """What answers a request that fits the route."""
        call, ways = self.dependant.call, self._ways()
        if ways is None or call is None:
            return super().get_route_handler()
        query = _model("Query", self.dependant.query_params)
        path = _model("Path", self.dependant.path_params)
        answers = None if self.response_model is None else TypeAdapter(self.response_model)
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
            body = answers.dump_json(answers.validate_python(found), by_alias=True)
            return Response(body, status, media_type="application/json")

        self.read = handle
        return handle

    def _ways(self) -> dict[str, Given] | None:
        """How each dependency is answered; None where something else is asked for (rule 2)."""
        asked: Dependant = self.dependant
        others = (asked.header_params, asked.cookie_params, asked.body_params)
        names = (asked.request_param_name, asked.response_param_name, asked.background_tasks_param_name)
        if self.methods != {"GET"} or any(others) or any(names):
            return None
        found = {item.name or "": self.given.get(item.call) for item in asked.dependencies if item.call}
        ways = {name: way for name, way in found.items() if way is not None}
        return ways if len(ways) == len(asked.dependencies) else None


def _model(name: str, fields: list[ModelField]) -> type[BaseModel]:
    """One model of all parameters of a place, each under its alias."""
    made: dict[str, Any] = {field.name: (field.field_info.annotation, field.field_info) for field in fields}
    return create_model(name, __config__=ConfigDict(arbitrary_types_allowed=True), **made)


def _read(model: type[BaseModel], given: Any, place: str, values: dict[str, Any]) -> list[Any]:
    """Read a place into `values`; what is wrong with it."""
    try:
        found = model.__pydantic_validator__.validate_python(given)
    except ValidationError as error:
        return [{**item, "loc": (place, *item["loc"])} for item in error.errors(include_url=False)]
    values.update(found.__dict__)
    return []
