"""A control plane that can be ended and begun again, people with keys of both kinds, and real workers.

It is served by a thread of the test, or, to be killed, by `kvcustody serve` in a process of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcustody.allocator.pool.memory_protocol import UnbackedMemory
from kvcustody.audit.tlog.signing_key import create_signing_key
from kvcustody.clock import Clock, SystemClock
from kvcustody.errors import ServiceError
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.api.http.server import serve
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.control_plane.consents import OwnerConsents
from kvcustody.governance.control_plane.release_store import WorkflowReleaseStore
from kvcustody.governance.identity.principal import identify
from kvcustody.governance.ledger_protocol import CountingLedger
from kvcustody.governance.release.release_desk import ReleaseWorkflow
from kvcustody.governance.release.signer import FileSigner
from kvcustody.governance.release.trust import read_trust, write_trust
from kvcustody.governance.service.access.local_administration import open_administration
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.service import Service, open_service
from kvcustody.governance.service.settings import ServiceSettings
from kvcustody.governance.settings import Settings, load_settings
from kvcustody.governance.worker.worker import MemoryPlan, Worker, open_worker
from kvcustody.testkit.tiny_model import tiny_model

POLICY = """\
schema: kvcustody/policy@1
name: released
profile: shared
scope: tenant
classifications: [low, high]
classify:
  - {tenant: "*", as: low}
tenants:
  holder: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}
  reader: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}
GRANTSrules:
  - {id: own, effect: permit, action: reuse, when: {reader: owner}}
retention:
  low: {idle: 1h, absolute: 8h, active_max: 2h}
  high: {idle: 1h, absolute: 8h, active_max: 2h}
scrub:
  default: {within: 1s, verify: none}
offload: {low: never, high: never}
audit:
  on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}
"""
_GRANT = "grants:\n  - {id: reads, owner: holder, reader: reader, at_most: low, until: 2099-01-01, reason: test}\n"
READS, APART = POLICY.replace("GRANTS", _GRANT), POLICY.replace("GRANTS", "")
MODEL = tiny_model(kv_dtype="bf16", attention={"heads": 8})
PROMPT = [*range(1, 65), 7]
_PEOPLE: dict[str, tuple[Role, str | None, str]] = {  # role, tenant, role of the signing key
    "ada": (Role.AUTHOR, None, "author"),
    "grace": (Role.APPROVER, None, "approver"),
    "holger": (Role.TENANT_ADMIN, "holder", "owner"),
}
_MACHINES = {"gpu-0": Role.WORKER, "gpu-1": Role.WORKER, "dora": Role.DPO, "olive": Role.OPERATOR}


class ControlPlane:
    """A control plane in a folder: its principals' keys are in `keys`, a file of each in `NAME.key`."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.folder = folder
        self.address = f"unix:{folder}/api.sock"
        self.keys: dict[str, str] = {}
        self.signers: dict[str, FileSigner] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._service: Service | None = None
        self._thread: threading.Thread | None = None
        self._fields = {
            "database_url": f"sqlite:///{folder}/ledger.db",
            "state_path": str(folder / "state"),
            "listen": self.address,
            "signing_key_path": str(folder / "signing.key"),
            "checkpoint_seconds": 0.05,
            "root_interval_seconds": 0.2,
            "policy_trust": str(folder / "trust.toml"),
            "order_key_path": str(self.signing_file("orders")),
            "log_level": "error",
            "console": "false",
            "shutdown_seconds": 3,
            "worker_clock_seconds": 86_400,  # workers' clocks are moved, to see leases and grants end
        } | more
        self._enrol()
        self.start()

    def _enrol(self) -> None:
        with open_administration(ServiceSettings(**self._fields)) as (principals, by):
            listed = {name: (role, tenant) for name, (role, tenant, _) in _PEOPLE.items()}
            for name, (role, tenant) in (listed | {name: (role, None) for name, role in _MACHINES.items()}).items():
                principals.enrol(name, [role], tenant=tenant, by=by)
                self.keys[name] = principals.issue_key(name, days=1, by=by).key
                self.key_file(name).write_text(self.keys[name])
                self.key_file(name).chmod(0o600)
        made = {name: create_signing_key(self.signing_file(name), name) for name in _PEOPLE}
        self.signers = {name: FileSigner(key) for name, key in made.items()}
        rows = [(str(made[name].verifier), role, tenant) for name, (_, tenant, role) in _PEOPLE.items()]
        own = create_signing_key(self.signing_file("orders"), "orders")
        rows.append((str(own.verifier), "orders", None))
        (self.folder / "trust.toml").write_text(write_trust("prod", rows))

    def command(self, who: str, *words: str) -> list[str]:
        """A command of somebody's at this control plane, for a process of its own."""
        program = str(Path(sys.executable).with_name("kvcustody"))
        return [program, *words, "--server", self.address, "--api-key-file", str(self.key_file(who))]

    def key_file(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def signing_file(self, name: str) -> Path:
        return self.folder / f"{name}.signing"

    def connect(self, name: str) -> ControlPlaneConnection:
        return ControlPlaneConnection(self.address, self.keys[name])

    def start(self) -> None:
        """Serve by a thread; returns when requests are answered."""
        self._service = open_service(ServiceSettings(**self._fields))
        ready = threading.Event()
        self._thread = threading.Thread(target=serve, args=(self._service,), kwargs={"ready": ready.set})
        self._thread.start()
        assert ready.wait(60)

    def start_process(self) -> None:
        """Serve by `kvcustody serve`; returns when requests are answered."""
        command = [str(Path(sys.executable).with_name("kvcustody")), "serve"]
        self._process = subprocess.Popen(command, env=self.environment())
        while True:
            try:
                with self.connect("olive") as connection:
                    connection.get("/v1/whoami")
                return
            except ServiceError:
                assert self._process.poll() is None, "kvcustody serve has ended"
                time.sleep(0.2)

    def environment(self) -> dict[str, str]:
        """The environment of a command on this control plane's ledger."""
        variables = {f"KVCUSTODY_SERVICE_{name.upper()}": str(value) for name, value in self._fields.items()}
        others = {name: value for name, value in os.environ.items() if not name.startswith("KVCUSTODY_")}
        return others | variables

    def end(self) -> None:
        """End in order."""
        if self._service is not None and self._thread is not None:
            self._service.stopping.set()
            self._thread.join()
            self._service.close()
            self._service = self._thread = None
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)
            self._process = None

    def kill(self) -> None:
        """End the process as a power cut does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(30)
        self._process = None

    # -- people -----------------------------------------------------------------------------------------------

    def release(self, document: str, *, seconds: int = 86_400) -> int:
        """Propose, consent, approve and activate over the API, each with a key of their own; the revision."""
        trust = read_trust(self.folder / "trust.toml")
        desks = {}
        for name in _PEOPLE:
            store = WorkflowReleaseStore(self.connect(name))
            desks[name] = ReleaseWorkflow(store, trust, clock=SystemClock(), ledger=CountingLedger())
        sign = self.signers
        revision = desks["ada"].propose(document, sign["ada"], note="test", seconds=seconds).revision
        review = desks["grace"].review(revision)
        if review.change.consents:
            OwnerConsents(self.connect("holger"), "prod", SystemClock()).consent(revision, "reads", sign["holger"])
        desks["grace"].approve(revision, sign["grace"], cells=review.cells)
        desks["grace"].activate(revision, sign["grace"])
        return revision

    def revoke(self, source: str) -> None:
        """Take a grant back for good, over the API."""
        store = WorkflowReleaseStore(self.connect("grace"))
        trust = read_trust(self.folder / "trust.toml")
        desk = ReleaseWorkflow(store, trust, clock=SystemClock(), ledger=CountingLedger())
        desk.revoke([source], self.signers["grace"], reason="test")

    # -- workers ----------------------------------------------------------------------------------------------

    def settings(self, name: str = "gpu-0", **more: Any) -> Settings:
        home = self.folder / name
        home.mkdir(exist_ok=True)
        given = {
            "worker_name": name,
            "control_plane": self.address,
            "control_plane_key_path": self.key_file(name),
            "policy_trust": str(self.folder / "trust.toml"),
            "policy_release": "control-plane",
            "policy_mark_path": home / "mark",
            "spill_path": home / "spill",
            "root_key_path": home / "root.key",
            "keyring_path": home / "keys.json",
            "erasure_poll_ms": 10,
        }
        return load_settings(**(given | more))

    def worker(self, name: str = "gpu-0", *, clock: Clock | None = None, **more: Any) -> Worker:
        return opened(self.settings(name, **more), clock)


def opened(settings: Settings, clock: Clock | None = None) -> Worker:
    clock = clock or SystemClock()
    plan = MemoryPlan(lambda blocks: UnbackedMemory(blocks, 1, clock=clock), 128, 1, 1024)
    return open_worker(settings, plan, clock=clock)


class MovedClock(SystemClock):
    """The machine's clocks, moved forward by `ahead_us`."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead_us = 0

    def now_us(self) -> int:
        return super().now_us() + self.ahead_us

    def utc_us(self) -> int:
        return super().utc_us() + self.ahead_us


def ask(worker: Worker, tenant: str, subject: str | None = None) -> int:
    """A whole request of the one prompt; its hit tokens."""
    governor = worker.governor
    person = identify(issuer="idp", tenant=tenant, verified={} if subject is None else {"subject": subject})
    answer = governor.admit(person, MODEL, PROMPT)
    assert isinstance(answer, Admission), answer
    governor.commit([answer.request_id], [len(PROMPT)])
    governor.release(answer.request_id)
    governor.step()
    return int(answer.hit_tokens)


def glance(worker: Worker) -> int:
    """The reader's hit tokens past a first use, leaving nothing of its own behind."""
    hits = 0
    for _ in range(2):
        answer = worker.governor.admit(identify(issuer="idp", tenant="reader"), MODEL, PROMPT)
        assert isinstance(answer, Admission), answer
        hits = int(answer.hit_tokens)
        worker.governor.abort(answer.request_id)
        worker.governor.settle()
        worker.governor.step()
    return hits


def known(plane: ControlPlane, incarnation: str) -> dict[str, Any]:
    """What the control plane knows of a process."""
    with plane.connect("olive") as operator:
        items = operator.get("/v1/workers", limit=1000)["items"]
    [found] = [item for item in items if item["incarnation"] == incarnation]
    return dict(found)


def until(holds: Callable[[], bool], worker: Worker | None = None, seconds: float = 90.0) -> None:
    """Wait, stepping the engine, until something holds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never held"
        if worker is not None:
            worker.governor.step()
        time.sleep(0.05)
