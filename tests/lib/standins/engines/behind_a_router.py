"""Two governed servers of one engine behind a real router (SMG), with the door before it, and what must hold of them.

A test module of an engine makes the fixture `edge` by `opened` and imports the checks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import httpx
import pytest

from standins.engines.vllm.deployment import Deployment
from standins.engines.vllm.http_server import MODEL, Reply
from standins.engines.vllm.tiny_model import words

ROOT = Path(__file__).resolve().parents[4]
BLOCK, BLOCKS_ASKED = 32, 3
_IDENTITY = """\
schema: kvcustody/identity@1
doors: {keys: doors.vkeys}
open_paths: [%s]
"""


class RoutedServer(Protocol):
    """A server process in a process group of its own, which has its id."""

    port: int
    process: subprocess.Popen[bytes]

    def post(self, path: str, body: dict[str, Any], **headers: str) -> Any: ...


class Edge(NamedTuple):
    """What clients see: the door's address, and keys by tenant; behind it the router and two servers."""

    url: str
    keys: dict[str, str]
    servers: Sequence[RoutedServer]
    client: httpx.Client

    def ask(self, tenant: str, tokens: list[int], **more: object) -> Reply:
        """One completion through door and router."""
        body = {"model": MODEL, "prompt": words(tokens), "max_tokens": 4, "temperature": 0, **more}
        headers = {"authorization": f"Bearer {self.keys[tenant]}", "x-kvcustody-subject": "s"}
        got = self.client.post(f"{self.url}/v1/completions", json=body, headers=headers)
        return Reply(got.status_code, got.text)


@contextlib.contextmanager
def opened(
    new_deployment: Callable[..., Deployment],
    folder: Path,
    start: Callable[[contextlib.ExitStack, list[Deployment]], Sequence[RoutedServer]],
    open_paths: str,
) -> Iterator[Edge]:
    """Door, SMG and two servers. `start` starts one for each deployment, until they serve; the stack ends them."""
    made = subprocess.run(
        [str(ROOT / "benchmarks/routers_env.sh"), "smg"], stdout=subprocess.PIPE, cwd=ROOT, check=False
    )
    if made.returncode:
        pytest.skip("SMG cannot be installed here")
    router = ROOT / made.stdout.decode().strip() / "bin/smg"
    clients = new_deployment()
    keys = {tenant: clients.api_key(tenant) for tenant in ("alpha", "beta")}
    ours = [sys.executable, "-m", "kvcustody.console.main", "door"]
    environment = os.environ | clients.environment()
    said = subprocess.check_output([*ours, "key", "door-1.example", "--key", str(folder / "door.key")], env=environment)
    deployments = [new_deployment(identity=_IDENTITY % open_paths) for _ in range(2)]
    for deployment in deployments:
        (deployment.folder / "doors.vkeys").write_bytes(said)
    with contextlib.ExitStack() as stack:
        servers = start(stack, deployments)
        door, about, behind, metrics = _free_ports(4)
        urls = [f"http://127.0.0.1:{server.port}" for server in servers]
        places = ["--host", "127.0.0.1", "--port", str(behind), "--prometheus-port", str(metrics)]
        _start(stack, [str(router), "launch", "--worker-urls", *urls, "--policy", "cache_aware", *places], folder)
        proxy = ["--router", f"http://127.0.0.1:{behind}", "--listen", f"127.0.0.1:{door}", "--retries", "4"]
        more = ["--about", f"127.0.0.1:{about}", "--key", str(folder / "door.key")]
        more += ["--policy", str(clients.folder / "policy.yaml")]
        _start(stack, [*ours, "proxy", *proxy, *more], folder, environment)
        client = stack.enter_context(httpx.Client(timeout=180))
        edge = Edge(f"http://127.0.0.1:{door}", keys, servers, client)
        until = time.monotonic() + 120
        while time.monotonic() < until:
            with contextlib.suppress(httpx.HTTPError):
                if edge.ask("alpha", [20, 21]).status == 200:
                    break
            time.sleep(0.5)
        else:
            raise AssertionError((folder / "log").read_text()[-4000:])
        yield edge


def _start(
    stack: contextlib.ExitStack, command: list[str], folder: Path, variables: dict[str, str] | None = None
) -> None:
    log = stack.enter_context((folder / "log").open("ab"))
    process = subprocess.Popen(command, stdout=log, stderr=log, env=variables, cwd=folder)
    stack.callback(process.wait, 30)
    stack.callback(process.terminate)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in held]


def _status(answer: Any) -> int:
    return int(answer.status_code if isinstance(answer, httpx.Response) else answer.status)


def prompt(number: int) -> list[int]:
    """A prompt of three whole blocks and a token, which shares no block with another number's."""
    return [(number * 37 + at * (number % 7 + 1)) % 450 + 30 for at in range(BLOCKS_ASKED * BLOCK + 1)]


def test_ones_own_conversation_returns_to_its_cache(edge: Edge) -> None:
    for number in range(6):
        assert edge.ask("alpha", prompt(number)).cached_tokens == 0
    found = [edge.ask("alpha", prompt(number)).cached_tokens for number in range(6)]
    assert found == [BLOCKS_ASKED * BLOCK] * 6


def test_a_foreign_tenant_finds_nothing_whatever_it_sends(edge: Edge) -> None:
    for number, more in enumerate(({}, {"cache_salt": "s"}), 20):
        tokens = prompt(number)
        assert [edge.ask("alpha", tokens).cached_tokens for _ in range(2)] == [0, BLOCKS_ASKED * BLOCK]
        foreign = edge.ask("beta", tokens, **more)
        assert (foreign.status, foreign.cached_tokens) == (200, 0)
    refused = edge.ask("beta", prompt(20), kv_transfer_params={"kvcustody": "x"})
    assert refused.status == 400 and "kv_transfer_params" in refused.text


def test_a_worker_takes_nobody_without_a_token_of_the_door(edge: Edge) -> None:
    body = {"prompt": words(prompt(30)), "max_tokens": 1}
    for server in edge.servers:
        for headers in ({}, {"authorization": f"Bearer {edge.keys['alpha']}"}):
            assert _status(server.post("/v1/completions", body, **headers)) == 401


def test_where_a_worker_dies_the_other_serves(edge: Edge) -> None:
    """The last test: kill -9 of the first server's processes."""
    os.killpg(edge.servers[0].process.pid, signal.SIGKILL)
    until, statuses = time.monotonic() + 120, list[int]()
    while time.monotonic() < until and statuses[-4:] != [200] * 4:
        statuses.append(edge.ask("alpha", prompt(40 + len(statuses))).status)
    assert statuses[-4:] == [200] * 4
    number = 40 + len(statuses) - 1
    assert edge.ask("alpha", prompt(number)).cached_tokens == BLOCKS_ASKED * BLOCK
    assert edge.ask("beta", prompt(number)).cached_tokens == 0
