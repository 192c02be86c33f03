"""Builds the application from operations: every one declared with its action, its answers and its problems.

1. An operation is served exactly as it is declared; the API document is written from the same declarations.
2. Query parameters that an operation does not declare are refused: a filter that is misspelled filters nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import orjson
import structlog
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException

from kvcustody._version import __version__
from kvcustody.errors import CustodyError
from kvcustody.governance.api.arguments import Arguments, Texts, invalid_arguments, parameters_of
from kvcustody.governance.api.http.answer_times import answer_bytes
from kvcustody.governance.api.http.exchange import CERTIFICATE, Scope, is_tls
from kvcustody.governance.api.http.fast_get_route import Handler, ReadRoute, model_bytes
from kvcustody.governance.api.http.gate import CALLER, Read
from kvcustody.governance.api.openapi_document import IDEMPOTENCY_KEY, problem_responses, share, whole
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.operations.answer import problem_answer
from kvcustody.governance.service.operations.operation import Operation, Operations
from kvcustody.governance.service.operations.run import problem_of
from kvcustody.governance.service.problem_details import ProblemError, not_found
from kvcustody.governance.service.service import Service

_log = structlog.get_logger(__name__)

DESCRIPTION = """Custody of KV caches: who may reuse a block, for how long it may exist, and proof that it is gone.

Send one API key or OpenID Connect token as `Authorization: Bearer …`. What you may see follows from it alone: what is
absent and what is somebody else's are answered alike. Refusals are problem details (RFC 9457); their types are stable.
Pages are read with `cursor`, which fits the same filters only; `as_of` repeats a page as it was at a checkpoint."""
TAGS = {
    "self": "Your own principal, keys and session.",
    "principals": "Who may ask: enrolled with the bootstrap key, ended by a key custodian.",
    "keys": "The keys behind the ledger: its signing key, subjects' keys, tenants' keys on every worker.",
    "custody": "What is held, for whom, until when, and how it ended.",
    "audit": "The ledger: its events, its checkpoints and proofs.",
    "erasures": "Requests to end custody, and their certificates.",
    "cases": "Requests of people about their data, from receipt to the letter.",
    "evidence": "Reports for auditors, and checks of the whole ledger: long work, as jobs.",
    "policies": "From a draft to an active revision.",
    "operations": "Workers, quotas and capacity, scans, webhooks, health.",
    "jobs": "Long work: exports, checks.",
    "worker": "What a worker does: policies in, ledger batches out, erasures done.",
}
_ALWAYS = (
    "unauthenticated",
    "forbidden",
    "too-many-requests",
    "malformed",
    "invalid",
    "internal",
    "unavailable",
)
Endpoint = Callable[..., Any]


class Api:
    """The application of operations of one service; `app` is what the gate wraps."""

    def __init__(self, service: Service | None, declared: Api | None = None) -> None:
        """`service` None: for the document alone; nothing can be served then. `declared`: whose operations it has."""
        self.operations: Operations = Operations() if declared is None else declared.operations
        self.app = FastAPI(
            title="kvcustody",
            version=__version__,
            summary="Custody of KV caches, under policy and on record.",
            description=DESCRIPTION,
            openapi_url=None,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            openapi_tags=[{"name": name, "description": text} for name, text in TAGS.items()],
        )
        self.app.router.route_class = _Route
        self.app.state.service = service
        if declared is not None:
            self.app.router.routes.extend(declared.app.routes)
        self._declared = declared
        self._document: bytes | None = None
        for kind, handler in _HANDLERS.items():
            self.app.add_exception_handler(kind, handler)

    def add(
        self,
        operation: Operation,
        endpoint: Endpoint,
        *,
        answers: type[BaseModel] | None = None,
        status: int = 200,
        problems: Sequence[str] = (),
        media: str = "application/json",
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Serve an operation: `answers` is the model of its success, `problems` the types that it may give besides."""
        self.operations.add(operation)
        names = {
            *(_ALWAYS if operation.action is not None else ("internal", "unavailable", "malformed")),
            *problems,
        }
        if operation.keyed:
            names |= {"idempotency-key-required", "in-flight", "key-reused", "conflict", "too-large"}
        if operation.method in ("PUT", "POST", "DELETE"):
            names |= {"too-large", "csrf"}
        extra: dict[str, Any] = {"x-kvcustody-action": operation.action and operation.action.value}
        extra |= {"x-kvcustody-recorded": operation.recorded, "x-kvcustody-exports": operation.exports}
        extra |= dict(more or {})
        if operation.action is not None:
            extra["security"] = [{"bearer": []}, {"session": []}]
        if operation.keyed:
            extra["parameters"] = [*extra.get("parameters", ()), IDEMPOTENCY_KEY]
        responses: dict[int | str, dict[str, Any]] = {}
        if answers is None:
            content = {media: {"schema": {"type": "string"}}} if status != 204 else {}
            responses[status] = {
                "description": "Done." if status == 204 else "The content.",
                "content": content,
            }
        self.app.add_api_route(
            operation.path,
            endpoint,
            methods=[operation.method],
            operation_id=operation.name,
            status_code=status,
            response_model=answers,
            response_class=_json_of(answers) if answers is not None else Response,
            responses=responses | problem_responses(names),
            tags=[operation.tag],
            openapi_extra=extra,
        )

    def reads(self) -> dict[str, Read]:
        """The GETs that need nothing of the framework, by the names of their operations."""
        routes = (route for route in self.app.routes if isinstance(route, ReadRoute))
        return {
            route.operation_id or "": partial(self._answer, route.read)
            for route in routes
            if route.read is not None
        }

    def functions(self) -> dict[str, Endpoint]:
        """The function that answers each operation, by its name."""
        routes = (route for route in self.app.routes if isinstance(route, APIRoute))
        return {route.operation_id or "": route.endpoint for route in routes}

    def bound(self, name: str) -> BoundOperation:
        """The function of the operation of this name."""
        routes = (route for route in self.app.routes if isinstance(route, APIRoute))
        return BoundOperation(next(route for route in routes if route.operation_id == name))

    async def _answer(self, read: Handler, scope: Scope, path: dict[str, str]) -> Response:
        """What a GET answers, a problem included; `path` are the parameters in its path."""
        request = Request({**scope, "app": self.app, "path_params": path})
        try:
            return await read(request)
        except Exception as error:
            for kind in type(error).__mro__:
                if kind in _HANDLERS:
                    return _HANDLERS[kind](request, error)
            raise

    def document(self) -> bytes:
        """The API document, OpenAPI 3.1."""
        if self._declared is not None:
            return self._declared.document()
        if self._document is None:
            made = self.whole_document()
            share(made)
            self._document = orjson.dumps(made, option=orjson.OPT_SORT_KEYS)
        return self._document

    def whole_document(self) -> dict[str, Any]:
        """The API document without references to parameters and answers."""
        return whole(self.app)

    def queries(self) -> dict[str, frozenset[str]]:
        """The query parameters of every operation, by its name: from the routes, as the document costs a second."""
        routes = (route for route in self.app.routes if isinstance(route, APIRoute))
        return {
            route.operation_id or "": frozenset(
                item.alias for item in parameters_of(route.endpoint, route.path) if item.place == "query"
            )
            for route in routes
        }


@cache
def _json_of(model: type[BaseModel]) -> type[Response]:
    """What writes the answers of a model."""

    class Json(JSONResponse):
        def render(self, content: Any) -> bytes:
            return answer_bytes(model, content)

    return Json


def _service_of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


def _caller_of(request: Request) -> Caller:
    caller = request.scope.get(CALLER)
    if not isinstance(caller, Caller):  # the gate was not passed: nothing is answered
        raise ProblemError("unauthenticated")
    return caller


async def _serving(request: Request) -> Service:  # not sync: that would cost a hop to a thread
    return _service_of(request)


async def _asking(request: Request) -> Caller:
    return _caller_of(request)


class _Route(ReadRoute):
    given = {_serving: _service_of, _asking: _caller_of}  # noqa: RUF012


class Wire(NamedTuple):
    """What an operation may see of how it was asked; a call without HTTP has none of it."""

    tls: bool = False
    certificate: str | None = None  # the thumbprint of the connection's client certificate
    headers: Mapping[str, str] = MappingProxyType({})
    body: bytes = b""


async def _wire(request: Request) -> Wire:
    certificate = request.scope.get(CERTIFICATE)
    return Wire(is_tls(request.scope), certificate, request.headers, await request.body())


ServiceDep = Annotated[Service, Depends(_serving)]
CallerDep = Annotated[Caller, Depends(_asking)]
WireDep = Annotated[Wire, Depends(_wire)]


class BoundOperation:
    """The function of an operation, called with the texts of a call that has passed the gate."""

    def __init__(self, route: APIRoute) -> None:
        self._function = route.endpoint
        self._arguments = Arguments(parameters_of(route.endpoint, route.path))
        self._status = route.status_code or 200
        model = route.response_model
        self._bytes = None if model is None else model_bytes(model)

    async def call(self, service: Service, caller: Caller, said: Texts) -> Response:
        """Answer as the operation's route does."""
        given = {_serving: service, _asking: caller, _wire: Wire(headers=said.headers, body=said.body)}
        values = self._arguments.read(said, given)
        found = self._function(**values)
        if inspect.isawaitable(found):
            found = await found
        if isinstance(found, Response):
            return found
        assert self._bytes is not None
        return Response(self._bytes(found), self._status, media_type="application/json")


def _problem(problem: ProblemError) -> Response:
    status, headers, body = problem_answer(problem)
    return Response(body, status, {name.decode(): value.decode("latin-1") for name, value in headers})


def _custody(request: Request, error: Exception) -> Response:
    """Our own errors: the caller's mistakes with their message, everything else without."""
    assert isinstance(error, CustodyError)
    problem = problem_of(error)
    if problem is None:
        raise error
    return _problem(problem)


def _malformed(request: Request, error: Exception) -> Response:
    """What the models refuse: where and what, never the value."""
    assert isinstance(error, RequestValidationError)
    return _problem(invalid_arguments(error.errors()))


def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        return _problem(ProblemError("method-not-allowed", headers=dict(error.headers or {})))
    if error.status_code == 404:
        return _problem(not_found())
    return _problem(ProblemError("malformed"))


def _database(request: Request, error: Exception) -> Response:
    """The database failed: told as not now, without its words."""
    _log.error("database failed", exc_info=error)
    return _problem(ProblemError("unavailable", headers={"Retry-After": "2"}))


_HANDLERS: dict[Any, Callable[[Request, Exception], Response]] = {
    CustodyError: _custody,
    SQLAlchemyError: _database,
    RequestValidationError: _malformed,
    HTTPException: _http,
}
