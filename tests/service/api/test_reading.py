"""GETs read by one validator: the same taken, refused and said as by the framework's own way, for every operation."""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote, urlencode

import httpx
import pytest
from anyio.to_thread import run_sync
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError

from kvcustody.errors import CustodyError
from kvcustody.governance.api import openapi_document
from kvcustody.governance.api.declarations import Declarations, every_operation
from kvcustody.governance.api.given import Wire
from kvcustody.governance.api.http.answer_times import answer_bytes
from kvcustody.governance.api.http.exchange import Exchange
from kvcustody.governance.api.operation_function import DeclaredOperation, invalid_arguments, parameters_of
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.operations.answer import Answer, Content, problem_answer
from kvcustody.governance.service.operations.run import problem_of
from kvcustody.governance.service.problem_details import ProblemError

VALUES = ("", "1", "-1", "1001", "9007199254740992", "1.0", "true", "a" * 2000, "ü")
AUDITOR = Caller("auditor", frozenset({Role.AUDITOR}), None, "key")


def response(answer: Answer) -> Response:
    headers = {name.decode(): value.decode("latin-1") for name, value in answer.headers}
    return Response(answer.body, answer.status, headers)


def problem_response(error: Exception) -> Response:
    problem = problem_of(error)
    assert problem is not None
    return response(problem_answer(problem))


def by_framework(declared: Declarations, service: Any) -> FastAPI:
    """The same operations, whose arguments FastAPI reads, as it is told of them in the API document."""
    app = FastAPI(redirect_slashes=False)
    for one in declared.by_name.values():
        app.add_api_route(
            one.operation.path,
            endpoint(one, service),
            methods=[one.operation.method],
            status_code=one.status,
            response_model=one.answers,
        )

    def malformed(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return problem_response(invalid_arguments(error.errors()))

    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(CustodyError, lambda request, error: problem_response(error))
    return app


def endpoint(declared: DeclaredOperation, service: Any) -> Callable[..., Any]:
    """The function of an operation, whose parameters are stated as the document's are."""
    parts = {"desk": service, "service": service, "caller": AUDITOR, "wire": Wire({}, {}, {}, b"")}
    asked = parameters_of(declared.function, declared.operation.path)
    given = {part.name: parts[part.given] for part in asked if part.given is not None}

    async def called(**values: Any) -> Any:
        found = declared.function(**values | given)
        found = await found if inspect.isawaitable(found) else found
        return response(found.answer()) if isinstance(found, Content) else found

    called.__signature__ = inspect.signature(openapi_document._as_fastapi_says(declared.function))  # type: ignore[attr-defined]
    return called


class Ours:
    """Calls of the operations as the gate makes them, past the gate."""

    def __init__(self, declared: Declarations, service: Any) -> None:
        self.declared, self.service = declared, service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send, tls=False)
        operation = self.declared.operations.find(exchange.method, exchange.path)
        assert operation is not None
        await exchange.read(1 << 20)
        query = dict(httpx.QueryParams(scope["query_string"].decode()))
        wire = Wire(operation.parameters(exchange.path), query, exchange.texts(), exchange.body)
        function = self.declared.functions[operation.name]
        try:
            answer = response(await function.call(self.service, AUDITOR, wire, run_sync))  # type: ignore[arg-type]
        except CustodyError as error:
            answer = problem_response(error)
        await answer(scope, exchange.replay(), send)


def asking(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x")


def echo(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that asks for the same, and answers with what it was given."""

    @functools.wraps(function)
    async def told(**given: Any) -> Content:
        shown = {name: value for name, value in given.items() if not isinstance(value, Wire)}
        return Content(repr(sorted(shown.items(), key=lambda item: item[0])).encode())

    return told


def echoing() -> Declarations:
    """Every operation, with a function that says what it was given."""
    made = Declarations()
    for one in every_operation().by_name.values():
        made.add(one.operation, echo(one.function))
    return made


def _paths(declared: Declarations) -> Iterator[str]:
    for name, one in declared.by_name.items():
        if one.operation.method == "GET":
            for value in VALUES:
                yield re.sub(r"\{[a-z_]+\}", quote(value or "0", safe=""), one.operation.path)
                for query in sorted(declared.functions[name].queries):
                    yield f"{re.sub(r'{[a-z_]+}', '1' * 32, one.operation.path)}?{urlencode({query: value})}"


@pytest.mark.system("a function's arguments are read or refused otherwise than the framework would")
def test_what_is_read_and_refused_is_the_frameworks(service: Any) -> None:
    declared = echoing()

    async def asked() -> Counter[int]:
        statuses: Counter[int] = Counter()
        framework, ours = asking(by_framework(declared, service)), asking(Ours(declared, service))
        for path in dict.fromkeys(_paths(declared)):
            theirs, mine = await framework.get(path), await ours.get(path)
            assert (mine.status_code, mine.content) == (theirs.status_code, theirs.content), path
            statuses[theirs.status_code] += 1
        return statuses

    found = asyncio.run(asked())
    assert found[200] > 300 and found[422] > 300, found


BODIES = (
    (b"", "application/json"),
    (b"null", "application/json"),
    (b"[]", "application/json"),
    (b'"text"', "application/json; charset=utf-8"),
    (b"{}", "application/json"),
    (b'{"roles": 1, "zz": 2}', "application/merge-patch+json"),
    (b'{"name": "a", "reason": "b", "tenant": "acme", "subject": "c"}', "APPLICATION/JSON"),
    (b"{", "application/json"),
    (b"{}", "text/plain"),
    (b"{}", ""),
    (b"{}", "application/octet-stream"),
)


def test_bodies_are_read_and_refused_as_the_framework_does(service: Any) -> None:
    declared = echoing()

    async def asked() -> Counter[int]:
        statuses: Counter[int] = Counter()
        framework, ours = asking(by_framework(declared, service)), asking(Ours(declared, service))
        for one in declared.by_name.values():
            if one.operation.method == "GET":
                continue
            path = re.sub(r"\{[a-z_]+\}", "1" * 32, one.operation.path)
            for body, kind in BODIES:
                headers = {"If-Match": "x"} | ({"Content-Type": kind} if kind else {})
                both = [
                    await ask.request(one.operation.method, path, content=body, headers=headers)
                    for ask in (framework, ours)
                ]
                theirs, mine = ((answer.status_code, answer.content) for answer in both)
                assert mine == theirs, (one.operation.name, body, kind)
                statuses[mine[0]] += 1
        return statuses

    found = asyncio.run(asked())
    assert found[200] > 20 and found[422] > 200, found


def test_an_answer_is_written_as_the_framework_writes_it(client, people, service) -> None:
    framework = asking(by_framework(every_operation(), service))
    for name in ("version", "listFrameworks", "whoami", "listTotals"):
        one = every_operation().by_name[name]
        mine, theirs = (
            client("GET", one.operation.path, people["auditor"]),
            asyncio.run(framework.get(one.operation.path)),
        )
        assert mine.content == answer_bytes(one.answers, theirs.json()), name
        assert mine.headers["content-type"] == theirs.headers["content-type"], name


def test_a_function_that_asks_for_its_caller_is_not_called_without_one(service) -> None:
    wire, function = Wire({}, {}, {}, b""), every_operation().functions["whoami"]
    assert asyncio.run(function.call(service, AUDITOR, wire, run_sync)).status == 200, "control"
    with pytest.raises(ProblemError, match="no valid credential"):
        asyncio.run(function.call(service, None, wire, run_sync))
