"""The door as a process: TLS, who may connect, health, draining, and what it says where it cannot open."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as service
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from typer.testing import CliRunner

from kvcustody.errors import ConfigError
from kvcustody.integrations.door.command import app
from kvcustody.integrations.door.envoy_configuration import ListenPlace
from kvcustody.integrations.door.server import DoorBounds, DoorProcess, DoorTls, EnvoyDoor, ProxyDoor, served
from standins.certificates import Authority, Pair
from standins.integrations.door_world import Signers, make_signers
from standins.integrations.fleet_edge import FleetEdge

SECONDS = 20
BOUNDS = DoorBounds(1 << 16, 1 << 20, 5.0)


@pytest.fixture(scope="module")
def signers() -> Signers:
    return make_signers()


@pytest.fixture
def fleet(tmp_path: Path, signers: Signers) -> FleetEdge:
    return FleetEdge(tmp_path, signers)


def free_places(count: int) -> list[ListenPlace]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [ListenPlace("127.0.0.1", each.getsockname()[1]) for each in held]


@contextlib.asynccontextmanager
async def running(door: DoorProcess, about: ListenPlace) -> AsyncIterator[httpx.AsyncClient]:
    """The door while it runs, and a client of its health; it ends with the block."""
    task = asyncio.create_task(door.run())
    async with httpx.AsyncClient(base_url=f"http://{about}", timeout=SECONDS) as client:
        while not task.done():
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get("/ready")).status_code == 200:
                    break
            await asyncio.sleep(0.02)
        try:
            yield client
        finally:
            door.end()
            await task


class SlowRouter:
    """It answers a completion when `go` is set."""

    def __init__(self) -> None:
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def answer(self, _: Request) -> Response:
        self.asked.set()
        await self.go.wait()
        return PlainTextResponse("done")


def bearer(fleet: FleetEdge) -> dict[str, str]:
    return {"authorization": f"Bearer {fleet.clients.acme}"}


async def _ask_proxy(place: ListenPlace, authority: Path, pair: Pair | None, headers: dict[str, str]) -> int:
    """The status that a client with this certificate gets; raises `httpx.HTTPError` where TLS refuses it."""
    context = ssl.create_default_context(cafile=str(authority))
    if pair is not None:
        context.load_cert_chain(pair.certificate, pair.key)
    async with httpx.AsyncClient(verify=context, timeout=SECONDS) as client:
        return (await client.get(f"https://{place}/v1/models", headers=headers)).status_code


@pytest.mark.parametrize(("shown", "is_served"), [("ours", True), ("none", False), ("others", False), ("ended", False)])
def test_a_proxy_serves_those_alone_who_show_a_certificate_of_its_authority(
    fleet: FleetEdge, shown: str, is_served: bool
) -> None:
    ours, others = Authority(fleet.folder, "ours"), Authority(fleet.folder, "others")
    server = ours.issue("server", server=True)
    pairs = {
        "ours": ours.issue("client"),
        "none": None,
        "others": others.issue("client-x"),
        "ended": ours.issue("client-old", ended=True),
    }

    async def run() -> None:
        place, about, router = free_places(3)
        tls = DoorTls(server.certificate, server.key, ours.pem)
        upstream = Starlette(routes=[Route("/v1/models", lambda _: PlainTextResponse("models"))])
        async with served(upstream, router):
            door = ProxyDoor(fleet.edge, place, about, BOUNDS, tls, router=f"http://{router}")
            async with running(door, about):
                asking = _ask_proxy(place, ours.pem, pairs[shown], bearer(fleet))
                if is_served:
                    assert await asking == 200
                else:
                    with pytest.raises(httpx.HTTPError):
                        await asking

    asyncio.run(asyncio.wait_for(run(), SECONDS))


@pytest.mark.parametrize(("shown", "is_served"), [("ours", True), ("none", False), ("others", False)])
def test_an_external_processor_serves_those_alone_too(fleet: FleetEdge, shown: str, is_served: bool) -> None:
    ours, others = Authority(fleet.folder, "ours"), Authority(fleet.folder, "others")
    server = ours.issue("server", server=True)
    pairs = {"ours": ours.issue("envoy"), "none": None, "others": others.issue("envoy-x")}

    async def run() -> None:
        place, about = free_places(2)
        door = EnvoyDoor(fleet.edge, place, about, BOUNDS, DoorTls(server.certificate, server.key, ours.pem))
        pair = pairs[shown]
        own = (None, None) if pair is None else (pair.key.read_bytes(), pair.certificate.read_bytes())
        credentials = grpc.ssl_channel_credentials(ours.pem.read_bytes(), *own)
        async with running(door, about), grpc.aio.secure_channel(str(place), credentials) as channel:
            call = service.ExternalProcessorStub(channel).Process(timeout=3)
            if is_served:
                await call.wait_for_connection()
                await call.done_writing()
                assert await call.read() is grpc.aio.EOF
            else:
                with pytest.raises(grpc.aio.AioRpcError):
                    await call.wait_for_connection()

    asyncio.run(asyncio.wait_for(run(), SECONDS))


def test_a_door_that_ends_says_so_and_answers_what_runs(fleet: FleetEdge) -> None:
    async def run() -> None:
        place, about, router = free_places(3)
        slow = SlowRouter()
        upstream = Starlette(routes=[Route("/v1/completions", slow.answer, methods=["POST"])])
        async with served(upstream, router):
            door = ProxyDoor(fleet.edge, place, about, BOUNDS, None, router=f"http://{router}")
            async with running(door, about) as health, httpx.AsyncClient(timeout=SECONDS) as client:
                url = f"http://{place}/v1/completions"
                asked = asyncio.create_task(client.post(url, json={"prompt": "p"}, headers=bearer(fleet)))
                await slow.asked.wait()
                door.end()
                while (await health.get("/ready")).status_code != 503:
                    await asyncio.sleep(0.02)
                assert (await health.get("/live")).status_code == 200
                slow.go.set()
                assert (await asked).text == "done"

    asyncio.run(asyncio.wait_for(run(), SECONDS))


@pytest.mark.parametrize("kind", [EnvoyDoor, ProxyDoor])
def test_a_taken_place_is_named(fleet: FleetEdge, kind: Callable[..., DoorProcess]) -> None:
    more: dict[str, Any] = {"router": "http://127.0.0.1:1"} if kind is ProxyDoor else {}

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            place = ListenPlace("127.0.0.1", taken.getsockname()[1])
            (about,) = free_places(1)
            with pytest.raises(ConfigError, match=str(place.port)):
                await kind(fleet.edge, place, about, BOUNDS, None, **more).run()

    asyncio.run(asyncio.wait_for(run(), SECONDS))


def test_a_file_of_tls_that_is_not_there_is_named(fleet: FleetEdge) -> None:
    (place, about), gone = free_places(2), fleet.folder / "gone.pem"
    with pytest.raises(ConfigError, match=r"gone\.pem"):
        EnvoyDoor(fleet.edge, place, about, BOUNDS, DoorTls(gone, gone))


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--ext-proc", "nowhere"],
        ["serve", "--tls-certificate", "a.pem"],
        ["proxy", "--router", "127.0.0.1:1"],
        ["envoy", "--router", "127.0.0.1:99999"],
        ["key", "a name with spaces"],
    ],
)
def test_a_wrong_argument_is_refused_before_anything_opens(
    arguments: list[str], fleet: FleetEdge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(fleet.folder)
    monkeypatch.setenv("KVCUSTODY_IDENTITY_PATH", str(fleet.folder / "identity.yaml"))
    CliRunner().invoke(app, ["key", "door-1.example"])
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code != 0 and found.exception is not None


@pytest.mark.parametrize(
    ("router", "seconds", "is_refused"),
    [
        ("http://router.example:30000", 600, True),
        ("http://router.example:30000", 0, False),
        ("http://127.0.0.1:30000", 600, False),
        ("https://router.example:30000", 600, False),
    ],
)
def test_windowed_tokens_go_to_no_other_machine_in_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, router: str, seconds: int, is_refused: bool
) -> None:
    """What is not refused for that is for the key that is not there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVCUSTODY_WINDOWED_TOKEN_SECONDS", str(seconds))
    found = CliRunner().invoke(app, ["proxy", "--router", router])
    said = f"{found.exception} {found.output}"
    assert found.exit_code != 0 and ("unencrypted" in said) == is_refused
    assert ("kvcustody-door.key" in said) != is_refused


def test_a_key_is_printed_again_and_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = CliRunner().invoke(app, ["key", "door-1.example"]).stdout
    assert first == CliRunner().invoke(app, ["key", "door-1.example"]).stdout and first.startswith("door-1.example+")
    assert CliRunner().invoke(app, ["key", "door-2.example"]).exit_code != 0, "the file is another door's"
