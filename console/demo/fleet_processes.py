"""The processes of `kvcustody demo fleet`: workers, a router over them, and doors in front.

1. Each worker is a governed pool behind its own door, without a model, in a process of its own behind the control
   plane; its identity document trusts doors alone. `ungoverned` ones have neither custody nor a door: the router sends
   to them as well, so a fleet can have its doors first.
2. A door is `kvcustody door proxy`; where Envoy is there, Envoy with `kvcustody door serve` as its external processor.
   Each door has a key of its own.
3. Without a router each worker is a placement group by itself: the doors spread tenants over them.
4. With NATS, workers tell their blocks there as well, the keeper keeps the stream, and doors hear hints of epochs.
5. A door's key is replaced as docs/how-to/fleet/run-a-door.md says: workers trust the new one first, the
   door takes it, and the old one ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvcustody.audit.tlog.signing_key import create_signing_key, read_signing_key
from kvcustody.console.up.place import key_file, worker_settings
from kvcustody.console.up.vllm_worker import make_model, processor_build, vllm_command, vllm_variables
from kvcustody.errors import ConfigError
from kvcustody.files import write_file
from kvcustody.governance.credentials.api_key_file import add_key
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.settings import Settings
from kvcustody.lab.fleet.local_processes import LocalProcesses, free_ports
from kvcustody.lab.fleet.router_programs import DYNAMO, RETRIES, dynamo_command, router_command
from kvcustody.lab.replay.workload.tenant_assignment import ISSUER

NO_ROUTER: Final = "none"
KEEPER: Final = "keeper"
READER: Final = "reader"
TOKEN_SECONDS: Final = 15
SUBJECT, SESSION = "X-KVCustody-Subject", "X-KVCustody-Session"
_HOST: Final = "127.0.0.1"
MODEL: Final = "toy"  # what requests call it
_VLLM_SECONDS: Final = 600.0
_NOTICED_SECONDS: Final = 2.5  # within a second of a change a process reads a file again
_BLOCKS: Final = 2048
_HANGS_EVERY: Final = 70
_POOL_HOST_BYTES: Final = 32 << 20
_SERVER: Final = "kvcustody.integrations.fleet_worker.server"


class FleetPlan(NamedTuple):
    """The parts of the fleet.

    `router`: a name of `ROUTERS`, `dynamo` or `none`; `router_program` of `dynamo` is its Python. `envoy` and `nats`:
    their programs, None without them. `engine_python`: a Python that has vLLM, which workers then are; None: they have
    no model.
    """

    router: str
    router_program: Path | None
    workers: int
    ungoverned: int = 0
    doors: int = 2
    envoy: Path | None = None
    nats: Path | None = None
    engine_python: Path | None = None

    @property
    def worker_names(self) -> list[str]:
        """The governed workers' names, which are also their principals'."""
        return [f"worker-{number}" for number in range(1, self.workers + 1)]

    @property
    def ungoverned_names(self) -> list[str]:
        """The names of the workers without custody."""
        return [f"plain-{number}" for number in range(1, self.ungoverned + 1)]

    @property
    def door_names(self) -> list[str]:
        """The doors' names, which are also their principals'."""
        return [f"door-{number}" for number in range(1, self.doors + 1)]

    @property
    def machines(self) -> dict[str, frozenset[Role]]:
        """The principals of the processes, with their roles."""
        workers = dict.fromkeys(self.worker_names, frozenset({Role.WORKER}))
        doors = [*self.door_names, *([KEEPER] if self.nats is not None else [])]
        return workers | dict.fromkeys(doors, frozenset({Role.DOOR}))


class LocalFleet:
    """The running processes; closing `processes` ends them. `folder` is the demo's own."""

    def __init__(self, plan: FleetPlan, folder: Path, listen: str, processes: LocalProcesses) -> None:
        self.plan, self.processes = plan, processes
        self._folder, self._listen = folder, listen
        self._fleet = folder / "fleet"
        self._fleet.mkdir(mode=0o700, exist_ok=True)
        self.workers: dict[str, str] = {}
        self.router_url = self.nats_url = self.keeper_url = ""
        self.reader_file: Path | None = None
        self._events_of: dict[str, str] = {}  # where a worker tells its blocks, by its URL
        self.doors: dict[str, str] = {}
        self.client_keys: dict[str, str] = {}

    # -- workers and router -------------------------------------------------------------------------------------------

    def start_workers(self, stop: threading.Event) -> None:
        """Start every worker and wait until all serve."""
        self._make_door_keys()
        names = [*self.plan.worker_names, *self.plan.ungoverned_names]
        ports = free_ports(2 * len(names))
        for name, port, told_at in zip(names, ports[::2], ports[1::2], strict=True):
            self.workers[name] = f"http://{_HOST}:{port}"
            self._events_of[self.workers[name]] = f"tcp://{_HOST}:{told_at}"
            command = [sys.executable, "-m", _SERVER, "--port", str(port)]
            if name in self.plan.ungoverned_names:
                self.processes.start(name, [*command, "--ungoverned", name])
                continue
            settings = worker_settings(self._folder, self._listen, name, home=f"fleet/{name}")
            engine = ["--blocks", str(_BLOCKS), "--hangs-every", str(_HANGS_EVERY)]
            home = self._fleet / name
            self._write_identity(home, name)
            environment = self._environment(
                settings,
                identity_path=home / "identity.yaml",
                host_tier_bytes=_POOL_HOST_BYTES,
                **self._told_by(name),
            )
            if self.plan.engine_python is None:
                self.processes.start(name, [*command, *engine], environment=environment, folder=home)
            else:
                self._start_vllm(name, port, environment)
        seconds = 120.0 if self.plan.engine_python is None else _VLLM_SECONDS
        for name, url in self.workers.items():
            self.processes.wait_for(name, f"{url}/health", stop=stop, seconds=seconds)

    def _start_vllm(self, name: str, port: int, environment: Mapping[str, str]) -> None:
        """Start a real engine with a model of random weights, which all engines share."""
        python = str(self.plan.engine_python)
        model = make_model(python, self._fleet)
        variables = vllm_variables(self._fleet, processor_build(python))
        command = [*vllm_command(python, model, port=port, name=MODEL), "--enable-prompt-tokens-details"]
        self.processes.start(name, command, environment={**environment, **variables}, folder=self._fleet / name)

    def _told_by(self, name: str) -> dict[str, Any]:
        """Return the settings by which a worker publishes its blocks; none where nothing listens."""
        told = dict[str, Any]()
        if self.plan.router == DYNAMO:  # its index is of token ids, which stay on this machine
            told |= {"kv_events_endpoint": self._events_of[self.workers[name]], "kv_events_format": DYNAMO}
            told |= {"kv_events_tokens": "published"}
        return told | self._nats_of(name, "worker")

    def _nats_of(self, name: str, role: str) -> dict[str, Any]:
        """Return the settings by which a process reaches NATS, with its own credentials; none without NATS."""
        if self.plan.nats is None:
            return {}
        file = self._fleet / "nats" / f"{name}.creds"
        _done("events", "credentials", role, name, "--folder", str(file.parent), "--out", str(file))
        return {"nats": self.nats_url, "nats_credentials_path": file}

    # -- events -------------------------------------------------------------------------------------------------------

    def start_events(self, stop: threading.Event) -> None:
        """Start NATS and its stream's keeper where the plan has them, and wait until the stream exists."""
        if self.plan.nats is None:
            return
        folder = self._fleet / "nats"
        port, monitor, about = free_ports(3)
        self.nats_url = f"nats://{_HOST}:{port}"
        places = ("--listen", f"{_HOST}:{port}", "--monitor", f"{_HOST}:{monitor}")
        _done("events", "nats-config", "--folder", str(folder), *places)
        file = folder / "nats-server.conf"
        # It makes a folder for streams on disk, of which its account allows none, where temporary files go.
        here = {**os.environ, "TMPDIR": str(folder)}
        self.processes.start("nats", [str(self.plan.nats), "-c", str(file)], environment=here, folder=folder)
        self.processes.wait_for("nats", f"http://{_HOST}:{monitor}/healthz", stop=stop)
        settings = worker_settings(self._folder, self._listen, KEEPER, home=f"fleet/{KEEPER}")
        environment = self._environment(settings, **self._nats_of(KEEPER, "keeper"))
        self.keeper_url = f"http://{_HOST}:{about}"
        command = _ours("events", "keep", "--about", f"{_HOST}:{about}")
        self.processes.start(KEEPER, command, environment=environment, folder=self._fleet / KEEPER)
        self.processes.wait_for(KEEPER, f"{self.keeper_url}/ready", stop=stop)
        self.reader_file = self._nats_of(READER, "reader")["nats_credentials_path"]

    # -- routers ------------------------------------------------------------------------------------------------------

    def _write_identity(self, home: Path, name: str) -> None:
        group = f", group: {name}" if self.plan.router == NO_ROUTER else ""
        text = f"schema: kvcustody/identity@1\ndoors: {{keys: doors.vkeys{group}}}\n"
        if self.plan.engine_python is not None:  # a router asks an engine which model it has
            text += "open_paths: [/health, /ping, /version, /v1/models]\n"
        write_file(home / "identity.yaml", text.encode())
        self._trust_at(home)

    def start_router(self, stop: threading.Event) -> None:
        """Start the router over all workers and wait until it serves."""
        plan = self.plan
        if plan.router == NO_ROUTER:
            groups = "".join(
                f"  {name}: {{router: '{self._placed(self.workers[name])}', workers: [{name}]}}\n"
                for name in plan.worker_names
            )
            write_file(self._fleet / "placement.yaml", f"schema: kvcustody/placement@1\ngroups:\n{groups}".encode())
            return
        assert plan.router_program is not None
        port, metrics = free_ports(2)
        self.router_url = f"http://{_HOST}:{port}"
        if plan.router == DYNAMO:
            command = dynamo_command(plan.router_program, self._events_of, port=port)
        else:
            command = router_command(
                plan.router,
                plan.router_program,
                [*self.workers.values()],
                port=port,
                metrics_port=metrics,
                is_bounded=True,
            )
        self.processes.start(plan.router, command)
        self.processes.wait_for(plan.router, f"{self.router_url}/v1/models", stop=stop)

    def _placed(self, url: str) -> str:
        """Return a router's address in the form that this kind of door reads."""
        return url.removeprefix("http://") if self.plan.envoy is not None else url

    # -- doors --------------------------------------------------------------------------------------------------------

    def start_doors(self, tenants: list[str], stop: threading.Event) -> None:
        """Give each tenant a key, start the doors and wait until they are open."""
        identity = self._fleet / "doors-identity.yaml"
        text = "schema: kvcustody/identity@1\napi_keys: {path: clients.yaml, asserted: "
        write_file(identity, f"{text}{{subject: {SUBJECT}, session: {SESSION}}}}}\n".encode())
        (self._fleet / "clients.yaml").unlink(missing_ok=True)
        for tenant in tenants:
            entry: dict[str, object] = {"name": tenant, "tenant": tenant, "issuer": ISSUER}
            self.client_keys[tenant] = add_key(self._fleet / "clients.yaml", entry)
        ports = iter(free_ports(3 * self.plan.doors))
        abouts = {}
        for name in self.plan.door_names:
            listen, about, processor = (f"{_HOST}:{next(ports)}" for _ in range(3))
            self.doors[name], abouts[name] = f"http://{listen}", about
            self._start_door(name, listen, about, processor)
        for name, about in abouts.items():
            # A door that lacks what it needs to find anything says so, and is waited for.
            self.processes.wait_for(
                name,
                f"http://{about}/ready",
                stop=stop,
                is_ready=lambda answer: answer.status_code == 200 and "lacks" not in answer.text,
            )
        if self.plan.envoy is not None:
            for name, url in self.doors.items():
                self.processes.wait_for(
                    f"envoy-{name}", url, stop=stop, is_ready=lambda answer: answer.status_code != 503
                )

    def _start_door(self, name: str, listen: str, about: str, processor: str) -> None:
        home = self._fleet / name
        settings = worker_settings(self._folder, self._listen, name, home=f"fleet/{name}")
        environment = self._environment(
            settings,
            identity_path=self._fleet / "doors-identity.yaml",
            **self._nats_of(name, "door"),
        )
        tokens = ["--key", str(self._key(name)), "--token-seconds", str(TOKEN_SECONDS)]
        tokens += ["--retries", str(RETRIES), "--about", about]
        if self.plan.router == NO_ROUTER:
            to = ["--placement", str(self._fleet / "placement.yaml")]
        else:
            to = ["--router", self._placed(self.router_url)]
        placement = to if self.plan.router == NO_ROUTER else []
        if self.plan.envoy is None:
            serve = ["proxy", "--listen", listen, *to, *tokens]
        else:
            made = _done("door", "envoy", "--listen", listen, "--ext-proc", processor, *to)
            write_file(home / "envoy.yaml", made)
            serve = ["serve", "--ext-proc", processor, *placement, *tokens]
        self.processes.start(name, _ours("door", *serve), environment=environment, folder=home)
        if self.plan.envoy is not None:
            command = [str(self.plan.envoy), "-c", str(home / "envoy.yaml"), "--log-level", "error"]
            self.processes.start(
                f"envoy-{name}", [*command, "--use-dynamic-base-id", "--concurrency", "1"], folder=home
            )

    def replace_key(self, name: str, stop: threading.Event) -> bool:
        """Give a door a new key while requests run (rule 5); return False where a stop was requested meanwhile."""
        file = self._key(name)
        new = file.with_suffix(".new")
        create_signing_key(new, f"{name}.example")
        old = str(read_signing_key(file).verifier)
        self._trusted.append(str(read_signing_key(new).verifier))
        self._trust()
        if stop.wait(_NOTICED_SECONDS):
            return False
        os.replace(new, file)  # noqa: PTH105 - the door's file, which it reads again
        if stop.wait(_NOTICED_SECONDS + TOKEN_SECONDS):
            return False
        self._trusted.remove(old)
        self._trust()
        return True

    def _make_door_keys(self) -> None:
        for name in self.plan.door_names:
            (self._fleet / name).mkdir(mode=0o700, exist_ok=True)
            if not self._key(name).exists():
                create_signing_key(self._key(name), f"{name}.example")
        names = self.plan.door_names
        self._trusted = [str(read_signing_key(self._key(name)).verifier) for name in names]

    def _key(self, name: str) -> Path:
        return self._fleet / name / "door.key"

    def _trust(self) -> None:
        for name in self.plan.worker_names:
            self._trust_at(self._fleet / name)

    def _trust_at(self, home: Path) -> None:
        write_file(home / "doors.vkeys", "".join(f"{key}\n" for key in self._trusted).encode())

    def _environment(self, settings: Settings, **more: Any) -> Mapping[str, str]:
        """Return this process's environment, with these settings in place of its own."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVCUSTODY_")}
        stated: dict[str, Any] = settings.model_dump(include=settings.model_fields_set)
        stated |= {"scope_token_key_path": self._folder / "worker" / "scope.key", "log_level": "error"}
        stated |= {"control_plane_key_path": key_file(self._folder, settings.worker_name)} | more
        return kept | {f"KVCUSTODY_{name.upper()}": str(value) for name, value in stated.items()}


def _ours(*words: str) -> list[str]:
    return [sys.executable, "-m", "kvcustody.console.main", *words]


def _done(*words: str) -> bytes:
    """Return the output of one of our commands, run without this process's settings.

    Raises:
        ConfigError: it fails.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVCUSTODY_")}
    done = subprocess.run(_ours(*words), env=kept, capture_output=True, check=False)  # noqa: S603 - ours
    if done.returncode:
        raise ConfigError(f"`kvcustody {' '.join(words[:2])}`: {done.stderr.decode().strip()[-300:]}")
    return done.stdout
