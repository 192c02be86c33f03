"""A router in front of recording workers, with our door before it or without, all on loopback, each a process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from kvcustody.governance.credentials.api_key_file import add_key
from kvcustody.lab.fleet.local_processes import free_ports
from kvcustody.lab.fleet.router_programs import ROUTERS, router_command

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[2]
CHAT = "/v1/chat/completions"
TENANTS = ("a", "b")
START_SECONDS = 60
NO_ROUTER = "none"
POLICY = """\
schema: kvcustody/policy@1
name: probed
profile: shared
scope: {scope}
affinity: {affinity}
classifications: [low, high]
classify: [{{tenant: "*", as: low}}]
tenants: {{default: {{}}{listed}}}
retention:
  low: {{idle: 1h, absolute: 8h, active_max: 2h}}
  high: {{idle: 1h, absolute: 8h, active_max: 2h}}
scrub: {{default: {{within: 1s, verify: none}}}}
offload: {{low: never, high: never}}
audit:
  on_outage: {{decisions: deny, lifecycle: spill, own_hits: aggregate}}
"""


class RecordedRequest(NamedTuple):
    """A request as a worker received it: header names are lower-case, in the order of the wire."""

    worker: str
    path: str
    body: str
    headers: tuple[tuple[str, str], ...]

    def header(self, name: str) -> str | None:
        """The value of a header, None where it did not arrive."""
        return next((value for found, value in self.headers if found == name), None)

    def field(self, name: str) -> Any:
        """A field of the JSON body, None where it did not arrive."""
        return json.loads(self.body).get(name)


class Answer(NamedTuple):
    """What the client got. A worker says its name in the message; `worker` is empty where none answered.

    `shown` is all that the client can see, but for dates, ids and workers' names.
    """

    status: int
    worker: str
    headers: tuple[str, ...]
    shown: str


class Router(NamedTuple):
    """A running router: its workers by name, the process that holds its memory, and tenants' credentials.

    `url` is the door's, where one stands before the router; `doors` are all of them.
    """

    name: str
    version: str
    url: str
    process: int
    workers: Mapping[str, str]
    credentials: Mapping[str, str]
    client: httpx.Client
    doors: tuple[str, ...] = ()

    def ask(self, body: Mapping[str, Any], headers: Mapping[str, str] | None = None, *, tenant: str = "a") -> Answer:
        """Send one chat completion of a tenant through the router."""
        given = {"authorization": f"Bearer {self.credentials[tenant]}", **(headers or {})}
        reply = self.client.post(f"{self.url}{CHAT}", json=body, headers=given)
        said = reply.json()["choices"][0]["message"]["content"] if reply.status_code == 200 else ""
        return Answer(reply.status_code, said, tuple(reply.headers), _shown(reply))

    def recorded(self) -> list[RecordedRequest]:
        """Every request that reached a worker since the last call, without the router's own health checks."""
        requests: list[RecordedRequest] = []
        for name, url in self.workers.items():
            for item in self.client.get(f"{url}/recorded").json():
                headers = tuple((each[0].lower(), each[1]) for each in item["headers"])
                if "completions" in item["path"]:
                    requests.append(RecordedRequest(name, item["path"], item["body"], headers))
        return requests

    def fail(self, count: int) -> None:
        """Make the next `count` completions at each worker fail with 503."""
        for url in self.workers.values():
            self.client.post(f"{url}/fail/{count}")


_MOMENTARY = re.compile(r'(?i)("(id|created)": *)("[^"]*"|[0-9]+)|^((date|x-request-id): ).*$', re.MULTILINE)
_WORKER = re.compile(r"\bw[0-9]+\b")


def _shown(reply: httpx.Response) -> str:
    """Status, headers and body as text, without dates, ids and workers' names."""
    headers = "\n".join(f"{name}: {value}" for name, value in sorted(reply.headers.items()))
    text = f"{reply.status_code}\n{headers}\n\n{reply.text}"
    return _WORKER.sub("WORKER", _MOMENTARY.sub(r"\1\4", text))


def environment_of(name: str) -> Path:
    """The folder of the router's environment; `SystemExit` 69 where it cannot be made."""
    made = subprocess.run([str(ROOT / "benchmarks/routers_env.sh"), name], stdout=subprocess.PIPE, check=False)
    if made.returncode:
        raise SystemExit(made.returncode)
    folder = Path(made.stdout.decode().strip())
    return folder if folder.is_absolute() else ROOT / folder


def version_of(environment: Path, package: str) -> str:
    """The version of a package in an environment."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.check_output([environment / "bin" / "python", "-c", code], text=True).strip()


@contextlib.contextmanager
def running(
    name: str,
    worker_count: int = 2,
    *,
    with_door: str = "",
    policy: str = "cache_aware",
    group_workers: int = 0,
    tenants: Sequence[str] = TENANTS,
    demands: str = "",
    doors: int = 1,
    scope: str = "subject",
) -> Iterator[Router]:
    """Start recording workers, the router over them and, if asked, our door before it, as a reverse proxy.

    `with_door`: the `affinity` of the door's policy, or empty for no door. `policy`: the router's own word for how it
    places requests. `group_workers`: how many workers a placement group has, each group with a router of its own, of
    which the first is the one that is returned; 0: there is one router over all. Group `g0` has the first worker, `g1`
    the second, and so on. `demands`: the `placement` section of the doors' policy, and `scope` its scope. `doors`: how
    many, over one secret. `name` `none`: no router, and the door goes to the one worker of each group.

    Raises `RuntimeError` where one does not start.
    """
    environment = None if name == NO_ROUTER else environment_of(name)
    groups = worker_count // group_workers if group_workers else 1
    ports = free_ports(worker_count + 2 * groups + 2 * doors)
    behind, fronts = ports[2 * groups : -2 * doors], ports[-2 * doors :]
    workers = {f"w{place}": f"http://127.0.0.1:{port}" for place, port in enumerate(behind, 1)}
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile())
        client = stack.enter_context(httpx.Client(timeout=30))

        def start(command: Sequence[str], variables: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=variables)
            stack.callback(_stop, process)
            return process

        for worker, url in workers.items():
            start([sys.executable, str(FOLDER / "recording_worker.py"), worker, url.rpartition(":")[2]])
        for url in workers.values():
            _wait(client, f"{url}/health", log)
        routers = ports[:groups]
        process = None
        if environment is None:
            routers = behind
        for place, port in enumerate(routers if environment is not None else ()):
            own = [*workers.values()][place::groups]
            assert environment is not None
            program = environment / "bin" / ROUTERS[name].program
            metrics = ports[groups + place]
            started = start(router_command(name, program, own, port=port, metrics_port=metrics, policy=policy))
            process = process or started
            _wait(client, f"http://127.0.0.1:{port}/v1/models", log)
        base = f"http://127.0.0.1:{routers[0]}"
        credentials = dict.fromkeys(tenants, "client-credential")
        if with_door:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            urls = [f"http://127.0.0.1:{port}" for port in routers]
            listed = "".join(f", {tenant}: {{}}" for tenant in tenants)
            document = POLICY.format(affinity=with_door, scope=scope, listed=listed) + demands
            credentials = _start_doors(start, folder, urls, fronts, document, tenants)
            base = f"http://127.0.0.1:{fronts[0]}"
            for about in fronts[1::2]:
                _wait(client, f"http://127.0.0.1:{about}/ready", log)
        version = "" if environment is None else version_of(environment, name)
        number = 0 if process is None else process.pid
        every = tuple(f"http://127.0.0.1:{port}" for port in fronts[::2]) if with_door else ()
        made = Router(name, version, base, number, workers, credentials, client, every)
        _wait_until_served(made, tenants[0])
        yield made


def _start_doors(
    start: Callable[..., object],
    folder: Path,
    routers: Sequence[str],
    ports: Sequence[int],
    policy: str,
    tenants: Sequence[str],
) -> dict[str, str]:
    """Start doors as proxies, each with a port of its own and one for its health; a client's key for each tenant."""
    keys = {tenant: add_key(folder / "keys.yaml", {"name": tenant, "tenant": tenant}) for tenant in tenants}
    (folder / "identity.yaml").write_text(
        "schema: kvcustody/identity@1\napi_keys: {path: keys.yaml, asserted: {subject: X-KVCustody-Subject}}\n"
    )
    environment = os.environ | {
        "KVCUSTODY_IDENTITY_PATH": str(folder / "identity.yaml"),
        "KVCUSTODY_SCOPE_TOKEN_KEY_PATH": str(folder / "scope.key"),
        "KVCUSTODY_LOG_LEVEL": "error",
    }
    (folder / "policy.yaml").write_text(policy)
    to = ["--router", routers[0]]
    if len(routers) > 1:
        groups = "".join(f"  g{place}: {{router: '{url}'}}\n" for place, url in enumerate(routers))
        (folder / "placement.yaml").write_text(f"schema: kvcustody/placement@1\ngroups:\n{groups}")
        to = ["--placement", str(folder / "placement.yaml")]
    ours = [sys.executable, "-m", "kvcustody.console.main", "door"]
    for number in range(len(ports) // 2):
        key = str(folder / f"door-{number}.key")
        made = [*ours, "key", f"door-{number}.example", "--key", key]
        subprocess.run(made, env=environment, check=True, stdout=subprocess.DEVNULL)
        places = [f"127.0.0.1:{port}" for port in ports[2 * number : 2 * number + 2]]
        command = [*ours, "proxy", "--listen", places[0], "--about", places[1], "--key", key, *to]
        start([*command, "--policy", str(folder / "policy.yaml")], environment)
    return keys


def _wait_until_served(router: Router, tenant: str) -> None:
    """Return once a worker answers through the router; raises `RuntimeError` after a minute."""
    until = time.monotonic() + START_SECONDS
    message = {"role": "user", "content": "the first request"}
    while router.ask({"model": "toy", "messages": [message], "max_tokens": 1}, tenant=tenant).status != 200:
        if time.monotonic() > until:
            raise RuntimeError(f"no worker answers through {router.name} within {START_SECONDS} s")
        time.sleep(0.2)
    router.recorded()


def _wait(client: httpx.Client, url: str, log: Any) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(httpx.HTTPError):
            if client.get(url).status_code == 200:
                return
        time.sleep(0.1)
    log.seek(0)
    said = log.read()[-2000:].decode(errors="replace")
    raise RuntimeError(f"{url} does not answer within {START_SECONDS} s: {said}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
