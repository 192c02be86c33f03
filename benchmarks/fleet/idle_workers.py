"""What workers that have nothing to do cost a control plane, and what it takes when all of them start again at once.

    python benchmarks/fleet/idle_workers.py [--workers 40,300] [--ended 20000] [--seconds 30] [--json FILE]

Real: PostgreSQL (its commits on disk) and one control plane, each a process of its own, and HTTP on loopback.
Simulated: workers, in a process of their own. Each holds the three questions of an agent open (erasures, steps of the
policy, scans; ten seconds each, then again) and reports its status every ten seconds. `--ended` processes of these
workers started and ended before.

The control plane looks once at the sequences of every process that ever ended (`first_look_seconds`, from the second
herd on). The idle time begins after that.
CPU is that of the control plane and of all of PostgreSQL, the workers apart. `live_ms` is `/health/live` meanwhile, and
`waits_ms` what an answer came later than its wait.
In a herd the control plane has just been started anew, and every worker registers a new process and hands in its start,
at once; its predecessor did not end in order. `register_ms` is one registration, its retries apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import random
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import psycopg
from sqlalchemy import Engine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench import Bench
from fleet_load import cpu_seconds, percentile
from ledger_stores import fresh_store, postgres_server
from simulated_fleet import Plane

from kvcustody.audit.evidence.subjects.pseudonym_directory import SubjectDirectory
from kvcustody.audit.kinds import Event, WorkerStarted, WorkerStopped
from kvcustody.audit.leaf import Context
from kvcustody.audit.leaf.batch_encoder import BatchEncoder
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.service import service_workers
from kvcustody.audit.write.append_leaves import Appender, register
from kvcustody.governance.service.ingest.check_leaves import write_batch

_WAIT_SECONDS = 10
_QUESTIONS = (
    f"/v1/worker/erasures?wait={_WAIT_SECONDS}&keys=0&enforcement=-1",
    f"/v1/worker/policy/records?wait={_WAIT_SECONDS}&after=0",
    f"/v1/worker/scans?wait={_WAIT_SECONDS}",
)
_REPORT = orjson.dumps({"policy_revision": 1, "status": {"ledger.backlog": 0.0}})
_TOGETHER = 250
_FIRST_LOOK_SECONDS_MAX = 600.0
_OFFSET_US = time.time_ns() // 1000 - time.monotonic_ns() // 1000
GOALS = {"idle_cores": 0.5, "live_ms_p99": 100, "refusals": 0}


def encoded(incarnation: str, events: Sequence[Event]) -> Any:
    """A process's first leaves."""
    context = Context(incarnation, _OFFSET_US, SubjectDirectory(clear_names=True))
    return BatchEncoder(context).encode(list(enumerate(events, 1))).batch


def started(worker: str) -> WorkerStarted:
    """That a process has memory now."""
    return WorkerStarted(_now_us(), worker, 1 << 10, 1, 65_536, "cpu", "bench")


def fill(engine: Engine, workers: Sequence[str], ended: int) -> None:
    """So many processes that started and ended, of these workers in turn."""
    from sqlalchemy import insert

    appender = Appender()
    for first in range(0, ended, _TOGETHER):
        batches, rows = [], []
        with engine.connect().execution_options(**WRITE) as connection, connection.begin():
            for number in range(first, min(ended, first + _TOGETHER)):
                worker, life = workers[number % len(workers)], uuid.uuid4().hex
                register(connection, life, worker, _OFFSET_US, time.time_ns() // 1000)
                rows.append(
                    {
                        "incarnation": life,
                        "worker": worker,
                        "seen_us": time.time_ns() // 1000,
                        "received_sequence": 2,
                        "policy_revision": 1,
                        "status": "{}",
                    }
                )
                stopped = WorkerStopped(_now_us() + 1, worker, "stopped", 0, (0,))
                batches.append(encoded(life, [started(worker), stopped]))
            connection.execute(insert(service_workers), rows)
            appender.append_all(connection, batches)


class Wire:
    """One connection of a worker: a request after the other."""

    def __init__(self, address: str, key: str) -> None:
        parts = urlsplit(address)
        self._place = parts.hostname, parts.port
        self._key = key
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, body: bytes = b"", media: str = "application/json") -> int:
        """The status of the answer; 0 where the connection broke."""
        try:
            if self._open is None:
                self._open = await asyncio.open_connection(*self._place)
            reader, writer = self._open
            head = (
                f"{method} {path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {self._key}\r\n"
                f"Content-Type: {media}\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(answer.partition("content-length:")[2].split("\r\n", 1)[0])
            await reader.readexactly(length)
            return int(answer.split(" ", 2)[1])
        except (OSError, asyncio.IncompleteReadError):
            self.close()
            return 0

    def close(self) -> None:
        """End the connection."""
        if self._open is not None:
            self._open[1].close()
            self._open = None


class Workers:
    """The simulated workers, on one loop."""

    def __init__(self, address: str, keys: dict[str, str]) -> None:
        self._address, self._keys = address, keys
        self._lives: dict[str, str] = {}
        self.statuses: Counter[int] = Counter()
        self.times_ms: list[float] = []
        self.late_ms: list[float] = []

    async def herd(self) -> float:
        """Everybody starts a new process at once; the seconds until all are there."""
        began = time.perf_counter()
        await asyncio.gather(*(self._start(name) for name in self._keys))
        return time.perf_counter() - began

    async def _start(self, name: str) -> None:
        wire, life = Wire(self._address, self._keys[name]), uuid.uuid4().hex
        path = f"/v1/worker/incarnations/{life}"
        register_body = orjson.dumps({"offset_us": _OFFSET_US, "utc_us": time.time_ns() // 1000})
        batch = write_batch([], encoded(life, [started(name)]).data)
        for what, body, media in (
            (path, register_body, "application/json"),
            (f"{path}/batches/1", batch, "application/x-ndjson"),
        ):
            while True:
                began = time.perf_counter()
                status = await wire.ask("PUT", what, body, media)
                if what == path:
                    self.times_ms.append(1e3 * (time.perf_counter() - began))
                self.statuses[status] += 1
                if status == 200:
                    break
                if 400 <= status < 500 and status != 429:
                    raise SystemExit(f"{what}: {status}")
                await asyncio.sleep(random.uniform(0.5, 1.5))
        self._lives[name] = life
        wire.close()

    async def idle(self, seconds: float) -> None:
        """Everybody asks what an agent asks, for so long; nobody begins in the same moment."""
        ends = time.monotonic() + seconds
        tasks = [asyncio.create_task(self._ask(name, path, ends)) for name in self._keys for path in _QUESTIONS]
        await asyncio.gather(*tasks)

    async def _ask(self, name: str, path: str, ends: float) -> None:
        wire = Wire(self._address, self._keys[name])
        await asyncio.sleep(random.uniform(0, _WAIT_SECONDS))
        while time.monotonic() < ends:
            if "scans" in path:
                self.statuses[
                    await wire.ask("PUT", f"/v1/worker/incarnations/{self._lives[name]}/status", _REPORT)
                ] += 1
            began = time.monotonic()
            self.statuses[await wire.ask("GET", path)] += 1
            self.late_ms.append(1e3 * (time.monotonic() - began - _WAIT_SECONDS))
        wire.close()


def _serve_workers(pipe: Connection, address: str, keys: dict[str, str]) -> None:
    """A process of workers, who do what they are told."""
    workers = Workers(address, keys)
    loop = asyncio.new_event_loop()
    while (asked := pipe.recv()) is not None:
        workers.statuses, workers.times_ms, workers.late_ms = Counter(), [], []
        what, seconds = asked
        took = loop.run_until_complete(workers.herd() if what == "herd" else workers.idle(seconds))
        pipe.send((took, workers.statuses, workers.times_ms, workers.late_ms))


async def _live(address: str, seconds: float) -> list[float]:
    wire, took, ends = Wire(address, ""), [], time.monotonic() + seconds
    while time.monotonic() < ends:
        began = time.perf_counter()
        await wire.ask("GET", "/health/live")
        took.append(1e3 * (time.perf_counter() - began))
        await asyncio.sleep(0.1)
    wire.close()
    return took


def measured(folder: Path, server: Any, count: int, ended: int, seconds: float) -> dict[str, Any]:
    """A fleet of so many workers on a ledger of its own."""
    workers = [f"worker-{number}" for number in range(count)]
    engine = fresh_store(server.get_uri(), folder, f"idle_{count}")
    fill(engine, workers, ended)
    uri = engine.url.render_as_string(False)
    engine.dispose()
    place = folder / str(count)
    place.mkdir()
    settings = {"running_requests_max": str(8 * count + 400)}
    with psycopg.connect(uri.replace("postgresql+psycopg:", "postgresql:")) as connection:
        pid = connection.info.backend_pid
        postmaster = int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])
    plane = Plane(place, uri, "plane", settings, workers)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve_workers, args=(theirs, plane.address, plane.keys), daemon=True)
    process.start()
    try:
        figures: dict[str, Any] = {}
        for herd in ("first", "again"):
            plane.kill_and_begin()
            ours.send(("herd", 0))
            took, statuses, times, _ = ours.recv()
            figures[f"herd_{herd}"] = {
                "seconds": round(took, 1),
                "register_ms_p50": percentile(times, 0.5),
                "register_ms_p99": percentile(times, 0.99),
                "refusals": sum(number for status, number in statuses.items() if status != 200),
                "statuses": {str(status): number for status, number in statuses.items()},
            }
        began = time.perf_counter()
        _await_first_look(uri, ended)
        figures["first_look_seconds"] = round(time.perf_counter() - began, 1)
        ours.send(("idle", 3 * _WAIT_SECONDS + seconds))
        time.sleep(1.5 * _WAIT_SECONDS)  # everybody has begun, and what the herd left is done
        before = [cpu_seconds([plane.pid]), cpu_seconds([postmaster])]
        began = time.perf_counter()
        live = asyncio.run(_live(plane.address, seconds))
        passed = time.perf_counter() - began
        spent = [
            now - had for now, had in zip([cpu_seconds([plane.pid]), cpu_seconds([postmaster])], before, strict=True)
        ]
        _, statuses, _, late = ours.recv()
        figures["idle"] = {
            "cores_of_plane": round(spent[0] / passed, 3),
            "cores_of_postgres": round(spent[1] / passed, 3),
            "cores": round(sum(spent) / passed, 3),
            "live_ms_p50": percentile(live, 0.5),
            "live_ms_p99": percentile(live, 0.99),
            "late_ms_p99": percentile(late, 0.99),
            "refusals": sum(number for status, number in statuses.items() if status != 200),
        }
        return figures
    finally:
        with contextlib.suppress(OSError):
            ours.send(None)
        process.join(10)
        process.kill()
        plane.close()


def _await_first_look(uri: str, ended: int) -> None:
    """Until the sequences of all processes that the ledger was filled with are kept."""
    with psycopg.connect(uri.replace("postgresql+psycopg:", "postgresql:"), autocommit=True) as connection:
        until = time.monotonic() + _FIRST_LOOK_SECONDS_MAX
        while time.monotonic() < until:
            (kept,) = connection.execute("SELECT count(*) FROM sequence_spans").fetchone() or (0,)
            if kept >= ended:
                return
            time.sleep(1)
    raise SystemExit("the first look at the ended processes does not end")


def _now_us() -> int:
    return time.monotonic_ns() // 1000


def main() -> int:
    """Print one JSON object."""
    bench = Bench(__doc__, "psycopg", "SQLAlchemy", "uvicorn", strict=True)
    bench.add("--workers", default="40,300", help="fleets (default: %(default)s)")
    bench.add("--ended", type=int, default=20_000, help="processes that ended before (default: %(default)s)")
    bench.add("--seconds", type=float, default=30, help="that are measured (default: %(default)s)")
    options = bench.parse()
    figures: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="kvcustody-idle-") as folder,
        postgres_server(max_connections="200", shared_buffers="512MB") as server,
    ):
        for count in map(int, options.workers.split(",")):
            figures[str(count)] = measured(Path(folder), server, count, options.ended, options.seconds)
            print(count, orjson.dumps(figures[str(count)]).decode(), file=sys.stderr, flush=True)
    bench.keep({"goals": GOALS, "ended": options.ended, "workers": figures}, show=True)
    met = all(
        one["idle"]["cores"] <= GOALS["idle_cores"]
        and one["idle"]["live_ms_p99"] <= GOALS["live_ms_p99"]
        and one["idle"]["refusals"] + one["herd_again"]["refusals"] == 0
        for one in figures.values()
    )
    return bench.status(met)


if __name__ == "__main__":
    sys.exit(main())
