"""The door behind a real Envoy, with the configuration that `kvcustody door envoy` prints; Envoy comes from pip."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import httpx
import pytest

from standins.integrations.door_world import Signers, make_signers, secret
from standins.integrations.fleet_edge import FleetEdge

ROOT = Path(__file__).resolve().parents[3]
BODY_MAX = 64 << 10
pytestmark = pytest.mark.system("what the door answers is no answer that a real Envoy acts on")


class Upstream(BaseHTTPRequestHandler):
    """What stands where the router does: it keeps the last request."""

    last: ClassVar[dict[str, Any]] = {}
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Keep the request and answer."""
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        Upstream.last = {
            "port": self.server.server_port,
            "path": self.path,
            "headers": dict(self.headers.items()),
            "body": body,
        }
        self.send_response(200)
        self.send_header("x-smg-routed-worker-id", "w1")
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class Edge(NamedTuple):
    """A running edge: clients' address, the door's process, and the fleet's keys."""

    url: str
    about: str
    door: subprocess.Popen[bytes]
    fleet: FleetEdge
    client: httpx.Client
    routers: list[int]

    def ask(self, key: str | None, body: bytes = b'{"prompt":"p"}', path: str = "/v1/completions", **more: str) -> Any:
        Upstream.last = {}
        given = more | ({} if key is None else {"authorization": f"Bearer {key}"})
        return self.client.post(f"{self.url}{path}", content=body, headers=given)


@pytest.fixture(scope="module")
def signers() -> Signers:
    return make_signers()


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory, signers: Signers) -> Iterator[Edge]:
    made = subprocess.run(
        [str(ROOT / "benchmarks/routers_env.sh"), "envoy"], stdout=subprocess.PIPE, cwd=ROOT, check=False
    )
    if made.returncode:
        pytest.skip("Envoy cannot be installed here")
    program = ROOT / made.stdout.decode().strip() / "bin/envoy"
    folder = tmp_path_factory.mktemp("edge")
    fleet = FleetEdge(folder, signers)
    with secret() as held:
        (folder / "scope.key").write_bytes(bytes(held.view()))
    (folder / "scope.key").chmod(0o600)
    listen, door, about, *routers = _free_ports(5)
    groups = "".join(f"  g{port}: {{router: 127.0.0.1:{port}}}\n" for port in routers)
    (folder / "placement.yaml").write_text(f"schema: kvcustody/placement@1\ngroups:\n{groups}")
    environment = os.environ | {
        "KVCUSTODY_IDENTITY_PATH": str(folder / "identity.yaml"),
        "KVCUSTODY_SCOPE_TOKEN_KEY_PATH": str(folder / "scope.key"),
        "KVCUSTODY_REQUEST_BYTES_MAX": str(BODY_MAX),
    }
    ours = [sys.executable, "-m", "kvcustody.console.main", "door"]

    def said(*given: str) -> str:
        return subprocess.run(
            [*ours, *given], env=environment, cwd=folder, check=True, capture_output=True
        ).stdout.decode()

    assert said("key", "door-1.example").startswith("door-1.example+")
    configuration = said(
        "envoy",
        "--listen",
        f"127.0.0.1:{listen}",
        "--placement",
        "placement.yaml",
        "--ext-proc",
        f"127.0.0.1:{door}",
    )
    (folder / "envoy.yaml").write_text(configuration)
    with contextlib.ExitStack() as stack:
        for router in routers:
            upstream = ThreadingHTTPServer(("127.0.0.1", router), Upstream)
            stack.callback(upstream.shutdown)
            threading.Thread(target=upstream.serve_forever, daemon=True).start()
        places = ["--placement", "placement.yaml"]
        places += ["--ext-proc", f"127.0.0.1:{door}", "--about", f"127.0.0.1:{about}"]
        process = subprocess.Popen([*ours, "serve", *places], env=environment, cwd=folder)
        stack.callback(_stop, process)
        envoy = subprocess.Popen(
            [program, "-c", str(folder / "envoy.yaml"), "--log-level", "error", "--use-dynamic-base-id"],
            cwd=folder,
        )
        stack.callback(_stop, envoy)
        client = stack.enter_context(httpx.Client(timeout=30))
        found = Edge(f"http://127.0.0.1:{listen}", f"http://127.0.0.1:{about}", process, fleet, client, routers)
        _wait(client, f"{found.about}/ready")
        _wait(client, f"{found.url}/health")
        yield found


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in held:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in held]


def _wait(client: httpx.Client, url: str) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with contextlib.suppress(httpx.HTTPError):
            if client.get(url).status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"{url} does not answer")


def test_a_request_arrives_with_namespace_and_token(edge: Edge) -> None:
    forged = {"prompt": "p", "cache_salt": "s", "nvext": {}, "user": "ann"}
    answer = edge.ask(
        edge.fleet.clients.alice,
        json.dumps(forged).encode(),
        **{"x-tenant-id": "victim", "x-smg-target-worker": "0", "X-Session-ID": "s"},
    )
    assert answer.status_code == 200 and "x-smg-routed-worker-id" not in answer.headers
    got, headers = json.loads(Upstream.last["body"]), Upstream.last["headers"]
    assert set(got) == {"prompt", "cache_salt"} and len(got["cache_salt"]) == 32
    assert headers["authorization"].startswith("Bearer kvd1.")
    assert not {"x-tenant-id", "x-smg-target-worker", "x-session-id"} & {name.lower() for name in headers}


def test_a_request_goes_to_its_groups_router_whatever_the_client_says(edge: Edge) -> None:
    seen = dict[str, set[int]]()
    for key in (edge.fleet.clients.acme, edge.fleet.clients.alice, edge.fleet.clients.globex):
        for forged in ({}, *({"x-kvcustody-placement": f"g{port}"} for port in (1, *edge.routers))):
            assert edge.ask(key, **forged).status_code == 200
            headers = {name.lower(): value for name, value in Upstream.last["headers"].items()}
            assert headers["x-kvcustody-placement"] == f"g{Upstream.last['port']}"
            seen.setdefault(key, set()).add(Upstream.last["port"])
    assert all(len(ports) == 1 for ports in seen.values())
    assert seen[edge.fleet.clients.acme] == seen[edge.fleet.clients.alice], "of one tenant"
    for port in (1, *edge.routers):
        opened = edge.client.get(f"{edge.url}/health", headers={"x-kvcustody-placement": f"g{port}"})
        assert opened.status_code == 200 and Upstream.last["port"] == edge.routers[0]


@pytest.mark.parametrize(
    ("key", "path", "status"), [(False, "/v1/completions", 401), (True, "/v1/load_lora_adapter", 403)]
)
def test_what_may_not_pass_reaches_nobody(edge: Edge, key: bool, path: str, status: int) -> None:
    answer = edge.ask(edge.fleet.clients.acme if key else None, path=path)
    assert answer.status_code == status and Upstream.last == {}
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("more", "status"), [(-1, 200), (0, 200), (1, 413)])
def test_the_largest_body_is_the_doors(edge: Edge, more: int, status: int) -> None:
    body = b'{"prompt":"' + b"p" * (BODY_MAX + more - 13) + b'"}'
    assert len(body) == BODY_MAX + more
    answer = edge.ask(edge.fleet.clients.acme, body)
    assert answer.status_code == status and bool(Upstream.last) == (status == 200)


@pytest.mark.parametrize("name", ["x_tenant_id", "X_KVCUSTODY_SUBJECT"])
def test_a_header_that_a_server_may_read_otherwise_goes_no_further(edge: Edge, name: str) -> None:
    assert edge.ask(edge.fleet.clients.acme, **{name: "victim"}).status_code == 200
    assert name.lower() not in {each.lower() for each in Upstream.last["headers"]}


def test_metrics_are_shown(edge: Edge) -> None:
    assert "kvcustody_door_passed_total" in edge.client.get(f"{edge.about}/metrics").text


def test_nothing_passes_without_the_door(edge: Edge) -> None:
    """The last test: the door ends, answers what runs, and Envoy passes nothing more."""
    assert edge.ask(edge.fleet.clients.acme).status_code == 200
    edge.door.send_signal(signal.SIGTERM)
    assert edge.door.wait(40) == 0
    answer = edge.ask(edge.fleet.clients.acme)
    assert answer.status_code >= 500 and Upstream.last == {}
