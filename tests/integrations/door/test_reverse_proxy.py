"""The door as a reverse proxy, between a real client and a real server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvcustody.governance.credentials.scope_token import VerifiedToken
from kvcustody.integrations.door.door_metrics import DoorMetrics
from kvcustody.integrations.door.edge_gate import EdgeGate, Forwarded
from kvcustody.integrations.door.reverse_proxy import ReverseProxy
from standins.integrations.door_world import Signers, make_signers
from standins.integrations.fleet_edge import FleetEdge

BODY_MAX = 4096
SECONDS = 20


@pytest.fixture(scope="module")
def signers() -> Signers:
    return make_signers()


@pytest.fixture
def fleet(tmp_path: Path, signers: Signers) -> FleetEdge:
    return FleetEdge(tmp_path, signers)


class StandInRouter:
    """What stands where the router does: it keeps requests, streams without end, or fails in the middle."""

    def __init__(self) -> None:
        self.received: list[tuple[dict[str, str], bytes]] = []
        self.sent_chunks = 0
        self.ended = asyncio.Event()

    def application(self) -> Starlette:
        """Its paths: a completion, a stream, a stream that fails, and a health check."""
        return Starlette(
            routes=[
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/chat/completions", self._stream, methods=["POST"]),
                Route("/v1/responses", self._broken, methods=["POST"]),
                Route("/v1/models", self._complete),
                Route("/health", self._complete),
            ]
        )

    async def _complete(self, request: Request) -> Response:
        self.received.append((dict(request.headers), await request.body()))
        return JSONResponse(
            {"query": request.url.query},
            headers={"x-smg-routed-worker-id": "w1", "x-kept": "1", "retry-after": "1"},
        )

    async def _stream(self, request: Request) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            try:
                while True:
                    self.sent_chunks += 1
                    await asyncio.sleep(0)
                    yield b"data: " + b"x" * 65536 + b"\n\n"
            finally:
                self.ended.set()

        return StreamingResponse(chunks(), media_type="text/event-stream")

    async def _broken(self, request: Request) -> Response:
        self.received.append((dict(request.headers), await request.body()))

        async def chunks() -> AsyncIterator[bytes]:
            yield b"first"
            raise RuntimeError("the worker died")

        return StreamingResponse(chunks())


class World(NamedTuple):
    """A running proxy: its client, the router behind it, and the metrics of the door."""

    client: httpx.AsyncClient
    router: StandInRouter
    metrics: DoorMetrics


@contextlib.asynccontextmanager
async def _served(application: Any) -> AsyncIterator[int]:
    server = uvicorn.Server(uvicorn.Config(application, host="127.0.0.1", port=0, log_level="critical"))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await task


def through(
    gate: EdgeGate,
    call: Callable[[World], Awaitable[None]],
    *,
    under_way_bytes_max: int = 1 << 20,
    router_port: int | None = None,
) -> None:
    """Run `call` against a proxy before a router; `router_port`: of another router than the one that runs."""

    async def run() -> None:
        router = StandInRouter()
        async with _served(router.application()) as port:
            behind = httpx.AsyncClient(base_url=f"http://127.0.0.1:{router_port or port}", timeout=SECONDS)
            async with behind:
                proxy = ReverseProxy(gate, behind, body_bytes_max=BODY_MAX, under_way_bytes_max=under_way_bytes_max)
                async with _served(proxy) as door:
                    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{door}", timeout=SECONDS)
                    async with client:
                        await asyncio.wait_for(call(World(client, router, gate.metrics)), SECONDS)

    asyncio.run(run())


def bearer(key: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **more}


def test_a_request_goes_on_with_namespace_and_token(fleet: FleetEdge) -> None:
    arrived = list[Forwarded]()

    async def call(world: World) -> None:
        sent = {"prompt": "p", "cache_salt": "s", "nvext": {}, "user": "ann"}
        headers = bearer(fleet.clients.alice, **{"x-tenant-id": "victim", "accept": "a/b", "te": "trailers"})
        answer = await world.client.post("/v1/completions?q=%2F1", json=sent, headers=headers)
        assert answer.json() == {"query": "q=%2F1"} and answer.headers["retry-after"] == "1"
        assert answer.headers.keys().isdisjoint({"x-smg-routed-worker-id", "x-kept"})
        received, body = world.router.received[0]
        assert received["accept"] == "a/b" and not {"x-tenant-id", "te"} & received.keys()
        assert json.loads(body).keys() == {"prompt", "cache_salt"}
        arrived.append(Forwarded({"authorization": received["authorization"]}, body))

    through(fleet.edge, call)
    got = fleet.workers[0].verify(fleet.workers[0].ask(arrived[0]).passed.json)
    assert isinstance(got, VerifiedToken) and got.principal.subject == "alice"


@pytest.mark.parametrize(
    ("key", "path", "size", "status"),
    [
        (False, "/v1/completions", 20, 401),
        (True, "/v1/load_lora_adapter", 20, 403),
        (True, "/v1/completions", BODY_MAX, 200),
        (True, "/v1/completions", BODY_MAX + 1, 413),
    ],
)
def test_what_may_not_pass_reaches_nobody(fleet: FleetEdge, key: bool, path: str, size: int, status: int) -> None:
    async def call(world: World) -> None:
        body = b'{"prompt":"' + b"p" * (size - 13) + b'"}'
        headers = bearer(fleet.clients.acme) if key else {}
        answer = await world.client.post(path, content=body, headers=headers)
        assert answer.status_code == status and len(world.router.received) == (status == 200)

    through(fleet.edge, call)


def test_a_chunked_body_is_bounded_too(fleet: FleetEdge) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(BODY_MAX // 1024 + 1):
            yield b" " * 1024

    async def call(world: World) -> None:
        answer = await world.client.post("/v1/completions", content=parts(), headers=bearer(fleet.clients.acme))
        assert answer.status_code == 413 and not world.router.received

    through(fleet.edge, call)


def test_a_busy_door_says_so(fleet: FleetEdge) -> None:
    async def call(world: World) -> None:
        for size, status in ((100, 200), (200, 503), (100, 200)):
            body = {"prompt": "p" * size}
            answer = await world.client.post("/v1/completions", json=body, headers=bearer(fleet.clients.acme))
            assert answer.status_code == status

    through(fleet.edge, call, under_way_bytes_max=150)


def test_a_client_that_leaves_ends_its_request_at_the_router(fleet: FleetEdge) -> None:
    """Back-pressure first: a client that does not read stops the router's stream. Then it leaves."""

    async def call(world: World) -> None:
        body = {"messages": [], "stream": True}
        asked = world.client.stream("POST", "/v1/chat/completions", json=body, headers=bearer(fleet.clients.acme))
        async with asked as answer:
            chunks = answer.aiter_raw()
            assert (await anext(chunks)).startswith(b"data: ")
            sent = -1
            while sent != world.router.sent_chunks:
                sent = world.router.sent_chunks
                await asyncio.sleep(0.5)
            assert sent < 1000, "64 MB would be under way"
            assert not world.router.ended.is_set()
        await world.router.ended.wait()
        assert world.metrics.registry.get_sample_value("kvcustody_door_left_total") == 1

    through(fleet.edge, call)


def test_a_stream_that_was_cut_does_not_look_complete_and_is_not_asked_for_again(fleet: FleetEdge) -> None:
    async def call(world: World) -> None:
        with pytest.raises(httpx.RemoteProtocolError):
            await world.client.post("/v1/responses", json={"input": "p"}, headers=bearer(fleet.clients.acme))
        assert len(world.router.received) == 1

    through(fleet.edge, call)


def test_a_router_that_is_away_is_a_502(fleet: FleetEdge) -> None:
    async def call(world: World) -> None:
        answer = await world.client.post("/v1/completions", json={"prompt": "p"}, headers=bearer(fleet.clients.acme))
        assert answer.status_code == 502 and answer.json()["error"]["message"].startswith("the router")

    through(fleet.edge, call, router_port=1)


def test_an_open_path_needs_nothing_and_passes_no_credential_on(fleet: FleetEdge) -> None:
    async def call(world: World) -> None:
        answer = await world.client.get("/health", headers=bearer(fleet.clients.acme))
        assert answer.status_code == 200 and "authorization" not in world.router.received[0][0]

    through(fleet.edge, call)


def test_a_plain_path_goes_on_with_a_token(fleet: FleetEdge) -> None:
    async def call(world: World) -> None:
        assert (await world.client.get("/v1/models", headers=bearer(fleet.clients.acme))).status_code == 200
        assert world.router.received[0][0]["authorization"].startswith("Bearer kvd1.")

    through(fleet.edge, call)
