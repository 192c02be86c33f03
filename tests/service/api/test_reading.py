"""GETs read by one validator: the same taken, refused and said as by the framework's own way, for every operation."""

from __future__ import annotations

import asyncio
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote, urlencode

import httpx
import pytest
from fastapi import Response

from kvcustody.governance.api import app
from kvcustody.governance.api.app import create_api
from kvcustody.governance.api.http import route_builder as builder
from kvcustody.governance.api.http.gate import CALLER
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Role

VALUES = ("", "1", "-1", "1001", "9007199254740992", "1.0", "true", "a" * 2000, "ü")


class Ask:
    """A request to the operations of one application, past the gate."""

    def __init__(self, api: Any) -> None:
        self.app = api.app
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=self), base_url="http://x")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope[CALLER] = Caller("auditor", frozenset({Role.AUDITOR}), None, "key")
        await self.app(scope, receive, send)


class AskAlone(Ask):
    """The same past the framework too, as the gate asks for what is read."""

    def __init__(self, api: Any) -> None:
        super().__init__(api)
        self.operations, self.reads = api.operations, api.reads()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        operation = self.operations.find(scope["method"], scope["path"])
        if operation is None:  # no path of ours: the gate refuses it
            await super().__call__(scope, receive, send)
            return
        scope[CALLER] = Caller("auditor", frozenset({Role.AUDITOR}), None, "key")
        answer = await self.reads[operation.name](scope, operation.parameters(scope["path"]))
        assert "path_params" not in scope and "app" not in scope, "what others are given stays as it is"
        await answer(scope, receive, send)


def echo(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """An endpoint that asks for the same, and answers with what it was given."""

    @functools.wraps(endpoint)
    async def told(**given: Any) -> Response:
        return Response(repr(sorted(given.items(), key=lambda item: item[0])))

    return told


def declared_anew(service: Any) -> Any:
    """The application of operations that are declared once more, as patched."""
    app._declared.cache_clear()
    try:
        return create_api(service)
    finally:
        app._declared.cache_clear()


def made(service: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    add = builder.Api.add
    with monkeypatch.context() as patch:
        patch.setattr(
            builder.Api, "add", lambda api, one, endpoint, **how: add(api, one, echo(endpoint), **how)
        )
        return declared_anew(service)


def _paths(api: Any) -> Iterator[str]:
    for route in api.app.routes:
        if route.methods == {"GET"}:
            for value in VALUES:
                yield re.sub(r"\{[a-z_]+\}", quote(value or "0", safe=""), route.path)
                for name in sorted(api.queries()[route.operation_id]):
                    yield f"{re.sub(r'{[a-z_]+}', '1' * 32, route.path)}?{urlencode({name: value})}"


@pytest.mark.system("a route reads or refuses a parameter otherwise than the framework would")
def test_what_is_read_and_refused_is_the_frameworks(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = made(service, monkeypatch)
    gets = [route for route in quick.app.routes if route.methods == {"GET"}]
    assert len(gets) > 45 and all(route.read is not None for route in gets)
    with monkeypatch.context() as patch:
        patch.setattr(builder._Route, "given", {})  # every route goes the framework's own way
        slow = made(service, monkeypatch)

    async def asked() -> Counter[int]:
        found: Counter[int] = Counter()
        asks = [ask.http for ask in (Ask(slow), Ask(quick), AskAlone(quick))]
        for path in dict.fromkeys(_paths(quick)):
            theirs, *mine = [await ask.get(path) for ask in asks]
            for answer in mine:
                assert (answer.status_code, answer.content) == (theirs.status_code, theirs.content), path
            found[theirs.status_code] += 1
        return found

    found = asyncio.run(asked())
    assert found[200] > 300 and found[422] > 300, found


def test_an_answer_is_written_as_the_framework_writes_it(client, people, service) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder._Route, "given", {})
        slow = Ask(declared_anew(service)).http
    for path in ("/v1/version", "/v1/reports/frameworks", "/v1/whoami", "/v1/custody/totals"):
        mine, theirs = client("GET", path, people["auditor"]), asyncio.run(slow.get(path))
        assert (mine.content, mine.headers["content-type"]) == (
            theirs.content,
            theirs.headers["content-type"],
        ), path
