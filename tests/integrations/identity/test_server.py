"""The middleware as vLLM loads it, before a real Starlette application behind uvicorn on loopback."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from kvcustody.errors import CustodyError
from kvcustody.governance.credentials.scope_token import VerifiedToken
from kvcustody.governance.credentials.scope_token_secret import open_scope_key
from kvcustody.governance.settings import load_settings
from kvcustody.integrations.identity.from_settings import open_verifier
from kvcustody.integrations.vllm.middleware import ScopeMiddleware
from standins.integrations.door_world import Deployment

CHUNKS = [
    b'data: {"text": "\xc3\xa9"}\n\n',
    b"data: \xff\x00raw\n\n",
    b": keep-alive\n\n",
    b"data: [DONE]\n\n",
]


async def completions(request: Request) -> Any:
    body = await request.json()
    if body.get("stream"):

        async def chunks() -> Any:
            for chunk in CHUNKS:
                yield chunk

        return StreamingResponse(chunks(), media_type="text/event-stream", headers={"X-Engine": "e"})
    return JSONResponse({"got": body, "headers": dict(request.headers)})


async def health(_: Request) -> Any:
    return JSONResponse({})


def routes() -> list[Any]:
    return [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/health", health),
        Route("/reset_prefix_cache", health, methods=["POST"]),
    ]


@contextlib.contextmanager
def serve(app: Starlette) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture
def configured(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployment]:
    monkeypatch.setenv("KVCUSTODY_IDENTITY_PATH", str(deployment.directory / "identity.yaml"))
    monkeypatch.setenv("KVCUSTODY_SCOPE_TOKEN_KEY_PATH", str(deployment.directory / "scope.key"))
    monkeypatch.setenv("KVCUSTODY_CLOCK_PATH", str(deployment.directory / "clock.json"))
    monkeypatch.setenv("KVCUSTODY_REQUEST_BYTES_MAX", "1MiB")
    yield deployment
    structlog.reset_defaults()


@pytest.fixture
def plain() -> Iterator[str]:
    with serve(Starlette(routes=routes())) as address:
        yield address


@pytest.fixture
def governed(configured: Deployment) -> Iterator[str]:
    with serve(Starlette(routes=routes(), middleware=[Middleware(ScopeMiddleware)])) as address:
        yield address


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_the_engines_verifier_believes_what_the_server_let_in(configured: Deployment, governed: str) -> None:
    verifier = open_verifier(load_settings())
    body = {"prompt": ["a", "b"], "cache_salt": "mine"}
    got = httpx.post(f"{governed}/v1/completions", json=body, headers=bearer(configured.acme)).json()["got"]
    for _ in range(2):
        outcome = verifier.verify(got["cache_salt"])
        assert isinstance(outcome, VerifiedToken) and outcome.principal.tenant == "acme"
        assert outcome.hints.salt is not None
    assert not isinstance(verifier.verify(got["cache_salt"]), VerifiedToken)
    assert got["prompt"] == ["a", "b"]


def test_streams_are_unchanged_byte_for_byte(configured: Deployment, governed: str, plain: str) -> None:
    body = {"prompt": "p", "stream": True}
    found = []
    for address in (plain, governed):
        with httpx.stream("POST", f"{address}/v1/completions", json=body, headers=bearer(configured.acme)) as reply:
            headers = {name: value for name, value in reply.headers.items() if name != "date"}
            found.append((reply.status_code, headers, b"".join(reply.iter_raw())))
    assert found[0] == found[1] and found[1][2] == b"".join(CHUNKS)


def test_a_request_with_and_without_a_length_arrives_once(configured: Deployment, governed: str) -> None:
    data = json.dumps({"prompt": "p" * 100_000}).encode()
    chunked = (data[at : at + 7_000] for at in range(0, len(data), 7_000))
    for content in (data, chunked):
        reply = httpx.post(f"{governed}/v1/completions", content=content, headers=bearer(configured.acme))
        found = reply.json()
        assert found["got"]["prompt"] == "p" * 100_000
        assert "transfer-encoding" not in found["headers"]


def test_the_door_of_a_running_server(configured: Deployment, governed: str, plain: str) -> None:
    client = httpx.Client(base_url=governed)
    assert client.get("/health").status_code == 200
    nobody, wrong = (
        client.post("/v1/completions", json={}),
        client.post("/v1/completions", headers=bearer("x" * 40)),
    )
    assert nobody.status_code == wrong.status_code == 401 and nobody.content == wrong.content
    assert client.post("/reset_prefix_cache", headers=bearer(configured.acme)).status_code == 403
    assert client.post("/reset_prefix_cache", headers=bearer(configured.operator)).status_code == 200
    large = client.post("/v1/completions", content=b"x" * ((1 << 20) + 1), headers=bearer(configured.acme))
    assert large.status_code == 413
    assert httpx.post(f"{plain}/reset_prefix_cache").status_code == 200  # the control: nothing else refuses it


def test_a_wrong_deployment_serves_nothing(configured: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_scope_key(configured.directory / "scope.key"):
        (configured.directory / "scope.key").chmod(0o644)
    with pytest.raises(CustodyError, match="has mode `0644`"):
        ScopeMiddleware(Starlette())
    with serve(Starlette(routes=routes(), middleware=[Middleware(ScopeMiddleware)])) as address:
        for path in ("/health", "/v1/completions"):
            assert httpx.post(f"{address}{path}", headers=bearer(configured.acme)).status_code == 500
