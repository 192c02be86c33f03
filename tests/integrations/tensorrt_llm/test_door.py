"""The HTTP door: what the engine gets in `cache_salt` is derived, whatever the client sent."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvcustody.integrations.tensorrt_llm.middleware import TrtllmScopeMiddleware
from standins.integrations.trtllm_world import TrtllmWorld


class Server:
    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.bodies.append(json.loads((await receive())["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def post(door: TrtllmScopeMiddleware, path: str, body: dict[str, Any], key: str | None, **headers: str) -> int:
    statuses: list[int] = []
    given = {**headers, **({} if key is None else {"authorization": f"Bearer {key}"})}
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 1),
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    asyncio.run(door(scope, receive, send))
    return statuses[0]


@pytest.fixture
def door(world: TrtllmWorld) -> tuple[TrtllmScopeMiddleware, Server]:
    for tenant in ("acme", "beta"):
        world.deployment.api_key(tenant)
    server = Server()
    return TrtllmScopeMiddleware(server, world.custody), server


def test_the_engine_gets_the_derived_salt_alone(world: TrtllmWorld, door: tuple[TrtllmScopeMiddleware, Server]) -> None:
    middleware, server = door
    body = {"model": "stand-in", "prompt": [1, 2, 3]}
    subject = {"x-kvcustody-subject": "s"}
    for tenant in ("acme", "beta"):
        key = world.deployment.api_key(tenant)
        assert post(middleware, "/v1/completions", body, key, **subject) == 200
        assert server.bodies[-1] == {**body, "cache_salt": world.salt(tenant)}
    whole = {**body, "cache_salt": world.salt("acme")}
    assert post(middleware, "/v1/completions", whole, world.deployment.api_key("beta"), **subject) == 400
    forged = {**body, "cache_salt": world.salt("acme")[:64]}
    assert post(middleware, "/v1/completions", forged, world.deployment.api_key("beta"), **subject) == 200
    got = server.bodies[-1]["cache_salt"]
    assert got not in (world.salt("acme"), world.salt("beta")), "the client's own only narrows"
    standing = world.custody.thread.standing(got)
    assert standing is not None and standing.label is not None and standing.label.tenant == "beta"


def test_without_identity_nothing_reaches_the_engine(
    world: TrtllmWorld, door: tuple[TrtllmScopeMiddleware, Server]
) -> None:
    middleware, server = door
    body = {"model": "stand-in", "prompt": [1, 2, 3]}
    assert post(middleware, "/v1/completions", body, None) == 401
    assert post(middleware, "/v1/completions", body, "wrong") == 401
    for path in ("/kv_cache_events", "/metrics", "/_private/anything"):
        assert post(middleware, path, body, world.deployment.api_key("acme")) == 403
    assert server.bodies == []


@pytest.mark.parametrize(
    "field", ["kv_cache_retention_config", "disaggregated_params", "lora_request", "cache_salt_id"]
)
def test_fields_that_reach_past_the_salt_are_refused(
    world: TrtllmWorld, door: tuple[TrtllmScopeMiddleware, Server], field: str
) -> None:
    middleware, server = door
    body = {"model": "stand-in", "prompt": [1, 2, 3], field: {"directory": "/tmp"}}
    assert post(middleware, "/v1/completions", body, world.deployment.api_key("acme")) == 400
    assert server.bodies == []
