"""Each part of a fleet killed, stopped and cut off on real servers: what is lost, reused too late, seconds to recover.

    python benchmarks/fleet/faults.py --json benchmarks/results/faults-cpu.json          # faults of 10 s
    python benchmarks/fleet/faults.py --seconds 60 --json …

PostgreSQL, `kvcustody serve`, NATS with its keeper, a door (`kvcustody door proxy`), a router and two governed workers
without a model are processes of their own. Clients ask all the time. In each fault a subject is erased, and its prompt
is asked for from then on. Exit status 1 where an acknowledged leaf is missing, or a worker found what was erased longer
ago than its lease. The control is a long lease (`--lease 86400 --part 'door and worker'`): a door that hears of an
erasure says so in its tokens, so a worker finds what was erased for as long as both are cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "routers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "lib"))

from bench import Bench
from cut_line import CutLine
from running_router import environment_of, version_of
from sqlalchemy import func, select

from kvcustody.audit.evidence.processes.sequence_gaps import gaps
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.leaf_tables import erasures
from kvcustody.audit.store.schema.ledger import events, incarnations
from kvcustody.errors import ServiceError
from kvcustody.governance.credentials.api_key_file import add_key
from kvcustody.governance.service.access.local_administration import open_administration
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.settings import ServiceSettings
from kvcustody.integrations.jetstream.subjects import door_permissions
from kvcustody.lab.fleet.local_processes import free_ports
from kvcustody.lab.fleet.router_programs import ROUTERS, router_command
from standins.integrations.jetstream.nats_server import NatsServer
from standins.postgres import durable_server
from standins.service.control_plane_world import ControlPlane

FOLDER = Path(__file__).resolve().parent
CHAT = "/v1/chat/completions"
TENANT = "holder"
POLICY = """\
schema: kvcustody/policy@1
name: faults
profile: shared
scope: subject
classifications: [low]
classify: [{tenant: "*", as: low}]
issuers: [api-keys]
tenants: {holder: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}}
rules:
  - {id: own, effect: permit, action: reuse, when: {reader: owner}}
  - {id: told, effect: permit, action: export, when: {reader: owner}}
retention: {low: {idle: 1h, absolute: 8h, active_max: 2h}}
scrub: {default: {within: 1s, verify: none}}
offload: {low: never}
audit:
  on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}
"""
PARTS, FAULTS = (
    ("nats", "postgresql", "router", "door", "worker", "door and worker"),
    ("killed", "stopped", "cut off"),
)
ASK_SECONDS, ANSWER_SECONDS, BACK_SECONDS = 0.1, 3.0, 60.0
_SLOW_SECONDS = 0.7  # that an answer is told of, with FAULTS_VERBOSE
DOWN_SECONDS = 2.0  # that a killed part is away
SPREAD = 1.2  # of a lease around its length


class Answer(NamedTuple):
    """One request of one subject; `how` it failed, where it had no answer."""

    asked: float
    answered: float
    subject: str
    status: int
    worker: str
    hits: int
    how: str = ""


class _Stalls:
    """How long the clients' own process did not run: what is no fault of the fleet's."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.05)
            self.longest = max(self.longest, time.monotonic() - before - 0.05)


class Program:
    """A process that can be begun again as it was."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Any) -> None:
        self._command, self._environment, self._log = command, environment, log
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, env=self._environment, stdout=self._log, stderr=self._log)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()


class Postgres:
    """The server's processes."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def _pids(self) -> list[int]:
        first = int((Path(self._server.pgdata) / "postmaster.pid").read_text().split()[0])
        found = [first]
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                if int(stat.read_text().rpartition(")")[2].split()[1]) == first:
                    found.append(int(stat.parent.name))
        return found

    def signal(self, number: signal.Signals) -> None:
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        pids = self._pids()
        self.signal(signal.SIGKILL)
        end = time.monotonic() + 30
        while any(_runs(pid) for pid in pids) and time.monotonic() < end:
            time.sleep(0.02)

    def start(self) -> None:
        run = [
            self._server.bin_path / "pg_ctl",
            "-D",
            self._server.pgdata,
            "-w",
            "-o",
            f"-k {self._server.pgdata} -c listen_addresses=",
            "start",
        ]
        with Path(f"{self._server.pgdata}.log").open("a") as log:
            subprocess.run(run, stdout=log, stderr=log, timeout=60, user=self._server.system_user, check=True)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class DoorPlane(ControlPlane):
    """A control plane that knows a door, too."""

    def _enrol(self) -> None:
        super()._enrol()
        with open_administration(ServiceSettings(**self._fields)) as (principals, by):
            for name in ("door-1", "keeper"):
                principals.enrol(name, [Role.DOOR], by=by)
                self.keys[name] = principals.issue_key(name, days=1, by=by).key
                self.key_file(name).write_text(self.keys[name])
                self.key_file(name).chmod(0o600)

    @property
    def socket(self) -> str:
        return self.address.removeprefix("unix:")


class FaultWorld:
    """Everything, and a client that asks all the time. Leave its block to end it."""

    def __init__(self, folder: Path, server: Any, router: str, lease: int, stack: contextlib.ExitStack) -> None:
        self.folder, self.lease, self._stack = folder, lease, stack
        self.log = stack.enter_context((folder / "log").open("ab"))
        self.postgres = Postgres(server)
        pg = Path(tempfile.mkdtemp(prefix="pg-", dir=folder))
        self.to_postgres = CutLine(str(pg / ".s.PGSQL.5432"), f"{server.pgdata}/.s.PGSQL.5432")
        stack.callback(self.to_postgres.close)
        self.database = server.get_uri()
        uri = self.database.replace(str(server.pgdata), str(pg))
        self.plane = DoorPlane(folder, database_url=uri, subject_keys_url=f"sqlite:///{folder}/subjects.db")
        self.plane.release(POLICY)
        self.plane.end()
        self.plane.start_process()
        stack.callback(self.plane.end)
        (folder / "nats").mkdir()
        self.nats = NatsServer(folder / "nats")
        stack.callback(self.nats.close)
        ports = free_ports(8)
        self.to_nats = CutLine(f"127.0.0.1:{ports[0]}", f"127.0.0.1:{self.nats.port}")
        self.door_to_plane = CutLine(f"{folder}/door.sock", self.plane.socket)
        self.worker_to_plane = {
            name: CutLine(f"{folder}/{name}.sock", self.plane.socket) for name in ("gpu-0", "gpu-1")
        }
        self.door_to_router = CutLine(f"127.0.0.1:{ports[1]}", f"127.0.0.1:{ports[2]}")
        for line in (self.to_nats, self.door_to_plane, *self.worker_to_plane.values(), self.door_to_router):
            stack.callback(line.close)
        self._files()
        self.programs: dict[str, Any] = {"nats": self.nats, "postgresql": self.postgres}
        places = {"gpu-0": ports[3], "gpu-1": ports[4]}
        for name, port in places.items():
            self.programs[name] = self._worker(name, port, ports[0])
        for port in places.values():
            self._wait(f"http://127.0.0.1:{port}/health")
        urls = [f"http://127.0.0.1:{port}" for port in places.values()]
        if router:
            program = environment_of(router) / "bin" / ROUTERS[router].program
            command = router_command(router, program, urls, port=ports[2], metrics_port=ports[5])
            self.programs["router"] = self._program(command, dict(os.environ))
        else:  # none: the door is before one worker
            between = CutLine(f"127.0.0.1:{ports[2]}", f"127.0.0.1:{places['gpu-0']}")
            stack.callback(between.close)
        self.programs["keeper"] = self._kvcustody(
            "keeper", ports[0], "events", "keep", "--about", f"127.0.0.1:{ports[7]}"
        )
        self.url = f"http://127.0.0.1:{ports[6]}"
        about = free_ports(1)[0]
        self.programs["door"] = self._kvcustody(
            "door-1", ports[0], "door", "proxy", "--listen", f"127.0.0.1:{ports[6]}", "--about", f"127.0.0.1:{about}",
            "--router", f"http://127.0.0.1:{ports[1]}", "--key", str(folder / "door.key"),
        )  # fmt: skip
        self._wait(f"http://127.0.0.1:{about}/ready")
        self.lines: dict[str, list[CutLine]] = {
            "nats": [self.to_nats],
            "postgresql": [self.to_postgres],
            "router": [self.door_to_router],
            "door": [self.door_to_plane],
            **{name: [line] for name, line in self.worker_to_plane.items()},
        }
        self.answers: list[Answer] = []
        self.erased: list[str] = []

    def _files(self) -> None:
        folder = self.folder
        self.client_key = add_key(folder / "keys.yaml", {"name": "client", "tenant": TENANT})
        (folder / "identity.yaml").write_text(
            "schema: kvcustody/identity@1\napi_keys: {path: keys.yaml, asserted: {subject: X-KVCustody-Subject}}\n"
        )
        (folder / "worker.yaml").write_text("schema: kvcustody/identity@1\ndoors: {keys: doors.vkeys}\n")
        command = [
            sys.executable,
            "-m",
            "kvcustody.console.main",
            "door",
            "key",
            "door-1.example",
            "--key",
            str(folder / "door.key"),
        ]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=self._environment())
        (folder / "doors.vkeys").write_text(said.stdout)

    def _environment(self, **more: str) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith("KVCUSTODY_")}
        ours = {f"KVCUSTODY_{name.upper()}": value for name, value in more.items()}
        return own | {"PYTHONUNBUFFERED": "1"} | ours

    def _worker(self, name: str, port: int, nats_port: int) -> Program:
        given = self.plane.settings(
            name,
            custody_lease_seconds=self.lease,
            log_level="error",
            identity_path=self.folder / "worker.yaml",
            scope_token_key_path=self.folder / "scope.key",
            nats=f"nats://127.0.0.1:{nats_port}",
            nats_credentials_path=self.nats.worker(name).credentials,
            control_plane=f"unix:{self.folder}/{name}.sock",
        ).model_dump_json(exclude_unset=True)
        command = [sys.executable, str(FOLDER / "fault_worker.py"), str(port), given]
        return self._program(command, self._environment())

    def _kvcustody(self, name: str, nats_port: int, *words: str) -> Program:
        home = self.folder / name
        home.mkdir(exist_ok=True)
        place = self.nats.keeper() if name == "keeper" else self.nats.place(name, door_permissions())
        plane = f"unix:{self.folder}/door.sock" if name == "door-1" else self.plane.address
        environment = self._environment(
            worker_name=name,
            control_plane=plane,
            control_plane_key_path=str(self.plane.key_file(name)),
            identity_path=str(self.folder / "identity.yaml"),
            scope_token_key_path=str(self.folder / "scope.key"),
            spill_path=str(home / "spill"),
            root_key_path=str(home / "root.key"),
            keyring_path=str(home / "keys.json"),
            custody_lease_seconds=str(self.lease),
            nats=f"nats://127.0.0.1:{nats_port}",
            nats_credentials_path=str(place.credentials),
            log_level="error",
        )
        return self._program([sys.executable, "-m", "kvcustody.console.main", *words], environment)

    def _program(self, command: list[str], environment: dict[str, str]) -> Program:
        made = Program(command, environment, self.log)
        self._stack.callback(made.end)
        return made

    def _wait(self, url: str) -> None:
        end = time.monotonic() + BACK_SECONDS
        while time.monotonic() < end:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(url).status_code == 200:
                    return
            time.sleep(0.1)
        self.log.flush()
        raise SystemExit(f"{url} does not answer: {(self.folder / 'log').read_text()[-3000:]}")

    # -- clients -------------------------------------------------------------------------------------------------------

    async def ask(self, client: httpx.AsyncClient, subject: str) -> Answer:
        """One request of a subject's one prompt."""
        asked, status, worker, hits, how = time.monotonic(), 0, "", 0, ""
        headers = {"authorization": f"Bearer {self.client_key}", "x-kvcustody-subject": subject}
        text = (f"{subject} asks this. " * 12)[:160]
        body = {"model": "toy", "messages": [{"role": "user", "content": text}], "max_tokens": 1}
        try:
            reply = await client.post(f"{self.url}{CHAT}", json=body, headers=headers)
            status = reply.status_code
            if status == 200:
                said = reply.json()
                worker = said["choices"][0]["message"]["content"]
                hits = int(said["usage"]["completion_tokens"])
        except (httpx.HTTPError, ValueError, KeyError) as error:
            how = type(error).__name__
        made = Answer(asked, time.monotonic(), subject, status, worker, hits, how)
        self.answers.append(made)
        return made

    async def erase(self, subject: str) -> tuple[float, float]:
        """Ask for an erasure until it is acknowledged; when it was first asked for, and when that came."""
        asked = time.monotonic()

        def post() -> str:
            with self.plane.connect("dora") as dora:
                body = {"tenant": TENANT, "subject": subject, "deadline_seconds": 3600}
                return str(dora.post("/v1/erasures", body, key=f"erase-{subject}")["erasure"])

        while True:
            try:
                made = await asyncio.wait_for(asyncio.to_thread(post), 120)
                self.erased.append(made)
                return asked, time.monotonic()
            except ServiceError as error:
                if os.environ.get("FAULTS_VERBOSE"):
                    print("erasure:", error.message, flush=True)
                await asyncio.sleep(0.2)


async def one_fault(world: FaultWorld, part: str, fault: str, seconds: float) -> dict[str, Any]:
    """What came of one part's fault."""
    name = f"{part}-{fault}".replace(" ", "-")
    subject, bystander = f"ann-{name}", f"bob-{name}"
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(timeout=ANSWER_SECONDS, limits=limits) as client:

        async def until_reused(who: str, since: float) -> float:
            while True:
                answer = await world.ask(client, who)
                if answer.status == 200 and answer.hits:
                    return answer.answered - since
                if time.monotonic() - since > BACK_SECONDS:
                    raise SystemExit(f"{part} {fault}: `{who}` finds nothing {BACK_SECONDS:g} s later")
                await asyncio.sleep(ASK_SECONDS)

        target, number = part, 0
        await until_reused(bystander, time.monotonic())  # the control: what is there is found
        await until_reused(subject, time.monotonic())
        if part.endswith("worker"):  # the one that serves both
            target = (await world.ask(client, bystander)).worker
            while (await world.ask(client, subject)).worker != target:
                number += 1
                subject = f"ann-{name}-{number}"
                await until_reused(subject, time.monotonic())
        for who in (subject, bystander) * 3:
            await world.ask(client, who)
        over = asyncio.Event()

        async def asks(who: str) -> None:
            pending: set[asyncio.Task[Answer]] = set()
            while not over.is_set():
                pending.add(asyncio.ensure_future(world.ask(client, who)))
                pending = {each for each in pending if not each.done()}
                await asyncio.sleep(ASK_SECONDS)
            await asyncio.gather(*pending)

        asking = asyncio.ensure_future(asks(bystander))
        stalls = _Stalls()
        watching = asyncio.ensure_future(stalls.watch())
        began = time.monotonic()
        program = world.programs.get(target)  # a line that is cut may have none behind it
        lines = [*world.lines[target], *(world.lines["door"] if part == "door and worker" else ())]
        if fault == "killed":
            await asyncio.to_thread(program.kill)
        elif fault == "stopped":
            program.signal(signal.SIGSTOP)
        else:
            for line in lines:
                line.cut()
        erasing = asyncio.ensure_future(world.erase(subject))

        async def asks_once_erased() -> None:
            await erasing
            await asks(subject)

        later = asyncio.ensure_future(asks_once_erased())
        if fault == "killed":
            await asyncio.sleep(DOWN_SECONDS)
            await asyncio.to_thread(program.start)
            healed = time.monotonic()
        else:
            await asyncio.sleep(seconds)
            if fault == "stopped":
                program.signal(signal.SIGCONT)
            else:
                for line in lines:
                    line.heal()
            healed = time.monotonic()
        recovered = await until_reused(bystander, healed)
        asked, acknowledged = await erasing
        await asyncio.sleep(min(SPREAD * world.lease + 1.0, 30.0))  # past the lease, however late it was acknowledged
        over.set()
        await asyncio.gather(asking, later)
        watching.cancel()
    of_fault = [one for one in world.answers if one.subject == bystander and one.asked >= began]
    good = sorted(one.answered for one in of_fault if one.status == 200)
    gap = max((b - a for a, b in zip([began, *good], [*good, good[-1]], strict=True)), default=0.0) if good else None
    if os.environ.get("FAULTS_VERBOSE"):
        slow = [one for one in of_fault if one.status != 200 or one.answered - one.asked > _SLOW_SECONDS]
        for one in slow:
            said = one.how or one.status
            print(f"asked at {one.asked - began:.1f}: {said} after {one.answered - one.asked:.2f}", flush=True)
    reuses = _reuses(world, subject, acknowledged)
    bound = SPREAD * world.lease
    return {
        "part": part,
        "fault": fault,
        "seconds": round(healed - began, 2),
        "requests": len(of_fault),
        "failed": sum(one.status != 200 for one in of_fault),
        "failed_how": dict(Counter(one.how or str(one.status) for one in of_fault if one.status != 200)),
        "client_stalled_seconds": round(stalls.longest, 2),
        "slowest_answer_seconds": round(max(one.answered - one.asked for one in of_fault), 2),
        "found_nothing": sum(one.status == 200 and not one.hits for one in of_fault),
        "longest_without_answer_seconds": None if gap is None else round(gap, 2),
        "recovered_after_seconds": round(recovered, 2),
        "erasure_acknowledged_after_seconds": round(acknowledged - asked, 2),
        "asked_after_erasure": sum(
            one.subject == subject and one.asked > acknowledged and one.status == 200 for one in world.answers
        ),
        "reused_within_lease": sum(after <= bound for after in reuses),
        "reused_past_lease": sum(after > bound for after in reuses),
        "last_reuse_after_erasure_seconds": round(max(reuses, default=0.0), 2),
    }


def _reuses(world: FaultWorld, subject: str, acknowledged: float) -> list[float]:
    """Seconds after the erasure's acknowledgement at which a worker found what it had before, as workers say.

    What a worker found after it had once found nothing is what it wrote itself since.
    """
    reuses: list[float] = []
    for name in ("gpu-0", "gpu-1"):
        for line in (world.folder / name / "found").read_text().splitlines():
            at, who, hits = line.split()
            if who == subject and float(at) >= acknowledged:
                if not int(hits):
                    break
                reuses.append(float(at) - acknowledged)
    return reuses


def lost_leaves(world: FaultWorld) -> dict[str, Any]:
    """What workers knew to be durable, and erasures that were acknowledged, against the ledger."""
    store = open_store(world.database)
    with store.connect() as connection:
        known = dict(connection.execute(select(incarnations.c.uuid, incarnations.c.id)).all())
        lacking = durable = 0
        for name in ("gpu-0", "gpu-1"):
            last: dict[str, int] = {}
            for line in (world.folder / name / "durable").read_text().splitlines():
                life, sequence = line.split()
                last[life] = max(last.get(life, 0), int(sequence))
            for life, sequence in last.items():
                there = set(
                    connection.scalars(select(events.c.sequence).where(events.c.incarnation == known.get(life, -1)))
                )
                durable += sequence
                lacking += sum(number not in there for number in range(1, sequence + 1))
        lost = [tuple(gap) for gap in gaps(connection)]
        there = set(connection.scalars(select(erasures.c.erasure)))
        leaves = int(connection.scalar(select(func.count()).select_from(events)) or 0)
    store.dispose()
    return {
        "leaves": leaves,
        "durable_leaves_of_workers": durable,
        "durable_leaves_lost": lacking,
        "gaps": [list(map(str, gap)) for gap in lost],
        "erasures_acknowledged": len(world.erased),
        "erasures_lost": sum(one not in there for one in world.erased),
    }


@contextlib.contextmanager
def fault_world(router: str, lease: int) -> Iterator[FaultWorld]:
    """The fleet, in a folder of its own."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvc-")))
        server = stack.enter_context(durable_server())
        yield FaultWorld(folder, server, router, lease, stack)


def run(
    router: str, seconds: float, lease: int, wanted: Callable[[str, str], bool]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row for each fault, and what was lost in all."""
    rows = []
    with fault_world(router, lease) as world:
        for part in PARTS:
            for fault in FAULTS:
                if not wanted(part, fault) or (
                    fault != "cut off" and (part == "door and worker" or (part == "router" and not router))
                ):
                    continue
                rows.append(asyncio.run(one_fault(world, part, fault, seconds)))
                print("  ".join(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
        for name in ("gpu-0", "gpu-1"):  # in order: everything reaches the ledger
            world.programs[name].end()
        time.sleep(2)
        lost = lost_leaves(world)
    return rows, lost


def main() -> None:
    """Measure, print and keep."""
    bench = Bench(__doc__, "sqlalchemy", "starlette", "nats-py")
    bench.add("--router", choices=("smg", "vllm-router", "none"), default="smg")
    bench.add("--seconds", type=float, default=10.0, help="how long a part is stopped or cut off")
    bench.add("--lease", type=int, default=4, help="the custody lease of workers and door, in seconds")
    bench.add("--part", choices=PARTS, action="append", help="that part alone; may be given again")
    bench.add("--fault", choices=FAULTS, action="append", help="that fault alone; may be given again")
    options = bench.parse()
    router = "" if options.router == "none" else options.router
    rows, lost = run(
        router,
        options.seconds,
        options.lease,
        lambda part, fault: part in (options.part or PARTS) and fault in (options.fault or FAULTS),
    )
    print(json.dumps(lost), flush=True)
    version = version_of(environment_of(router), router) if router else ""
    bench.keep(
        {
            "router": router,
            "router_version": version,
            "fault_seconds": options.seconds,
            "lease_seconds": options.lease,
            "faults": rows,
            "lost": lost,
        }
    )
    bad = sum(row["reused_past_lease"] for row in rows) + lost["durable_leaves_lost"] + lost["erasures_lost"]
    is_void = not lost["durable_leaves_of_workers"] or lost["erasures_acknowledged"] != len(rows)
    if is_void:
        raise SystemExit("void: no leaf was durable, or an erasure was not acknowledged")
    if bad or lost["gaps"]:
        raise SystemExit("something acknowledged was lost, or reused past a lease")


if __name__ == "__main__":
    main()
