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
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter
from starlette.concurrency import run_in_threadpool

from kvcustody.governance.api.arguments import model_of, parameters_of, read_place
from kvcustody.governance.api.http.answer_times import answer_bytes, times_of

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
        call, asked = self.endpoint, parameters_of(self.endpoint, self.path)
        ways = {item.name: self.given[item.given] for item in asked if item.given in self.given}
        if self.methods != {"GET"} or any(
            item.place not in ("query", "path") and item.name not in ways for item in asked
        ):
            return super().get_route_handler()  # rule 2
        query, path = model_of("query", asked), model_of("path", asked)
        answer = None if self.response_model is None else model_bytes(self.response_model)
        status, waits = self.status_code or 200, inspect.iscoroutinefunction(call)

        async def handle(request: Request) -> Response:
            values = {name: way(request) for name, way in ways.items()}
            errors = read_place(path, request.path_params, "path", values)
            errors += read_place(query, dict(request.query_params), "query", values)
            if errors:
                raise RequestValidationError(errors)
            found = await call(**values) if waits else await run_in_threadpool(call, **values)
            if isinstance(found, Response):
                return found
            assert answer is not None
            return Response(answer(found), status, media_type="application/json")

        self.read = handle
        return handle


def model_bytes(model: type[BaseModel]) -> Callable[[Any], bytes]:
    """What makes the bytes of an answer of this model."""
    answers, times = TypeAdapter(model), times_of(model)

    def made(found: Any) -> bytes:
        valid = answers.validate_python(found)
        if times is None:
            return answers.dump_json(valid, by_alias=True)
        return answer_bytes(model, answers.dump_python(valid, mode="json", by_alias=True))

    return made
