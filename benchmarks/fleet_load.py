"""A fleet's evidence into one PostgreSQL ledger: how much, what it costs, what waits, and what questions cost then.

Real: PostgreSQL (a server of its own, its commits on disk), control planes as processes of their own, HTTP on
loopback, leaves as a worker's writer encodes them (an opening, and what its end came to: two leaves a request), in zstd
frames. Simulated: the engines behind `--workers` workers, which serve `--tenants` tenants, each request anybody's.
Leaves are made before the time is taken, and come at `--rate`, `--group` at once. Each worker hands in what is there,
and then what came meanwhile, 4,000 at most, as its writer does: whoever waits longer sends larger batches. That, and
compressing them, is in the time, on the same cores. `evidence_p50_ms` is from when a leaf came until it was durable.

Stretches with one control plane, with two, and with two where each tenant's workers all have the same one, take turns
(`--rounds` of each, the whole ledger together `--leaves`).
CPU is that of the control planes with their readers, and of all of PostgreSQL. What waits for locks is sampled every
50 ms from `pg_stat_activity`: sessions that wait for a lock, of those that work. `/metrics` is scraped once a second
all the while. The questions are asked with a tenth of the leaves in and with all, each `--asks` times, nobody writing;
`growth` is what the second takes for one of the first. At the end every acknowledged leaf is looked for: lost, double.

Run: `python benchmarks/fleet_load.py [--leaves 10000000] [--tenants 10000] [--json benchmarks/results/fleet-cpu.json]`.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psycopg

sys.path.insert(0, str(Path(__file__).resolve().parent / "harness"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "fleet"))

from bench import Bench, turned
from ledger_stores import fresh_store, kill_postgres, postgres_server
from simulated_fleet import LEAVES_A_REQUEST, RARE_KIND, Fleet, Plane

from kvcustody.errors import ServiceError
from kvcustody.governance.control_plane.connection import ControlPlaneConnection

GOALS = {
    "requests_a_second": 4000,
    "leaves_a_second": 12_000,
    "cpu_of_two_to_one": 1.1,
    "lock_share": 0.05,
    "metrics_p99_ms": 200,
    "rare_kind_ms": 1000,
}
SIDES = {"one": 1, "two": 2, "two_apart": 2}  # control planes
SERVER = {
    "shared_buffers": "2GB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "30min",
    "max_connections": "200",
    "track_io_timing": "off",
}
_TICKS = os.sysconf("SC_CLK_TCK")
_SAMPLE_SECONDS, _SCRAPE_SECONDS = 0.05, 1.0
_REST_SECONDS = 20
_FAULT_SECONDS = 3.0  # before each


def questions(tenant: str) -> dict[str, str]:
    """What is asked of the ledger, as the API asks it."""
    return {
        "metrics": "/metrics",
        "counts": "/v1/audit/counts",
        "totals": "/v1/custody/totals",
        "coverage of the last day by hour": "/v1/custody/coverage/hours",
        "events of all, first page": "/v1/audit/events?limit=100",
        "events of a tenant": f"/v1/audit/events?limit=100&tenant={tenant}",
        "a rare kind over all tenants": f"/v1/audit/events?limit=100&kind={RARE_KIND}",
        "live custody of a tenant": f"/v1/custody/live?limit=100&tenant={tenant}",
        "a subject's residencies": f"/v1/custody/residencies?limit=100&subject=user-1&tenant={tenant}",
        "a leaf's proof": f"/v1/audit/proofs/inclusion?log=tenant/{tenant}&idx=0",
        "gaps": "/v1/audit/gaps",
        "workers": "/v1/workers",
        "findings": "/v1/orphans/findings",
        "denials": "/v1/custody/denials",
        "capacity": "/v1/capacity",
        "health": "/v1/health",
    }


class Stretch(NamedTuple):
    """What one stretch came to; seconds are of wall time and of processors."""

    planes: int
    leaves: int
    seconds: float
    plane_cpu: float
    postgres_cpu: float
    worker_cpu: float
    retries: int
    waits_ms: list[float]
    samples: Counter[str]
    batches: int

    @property
    def leaf_cpu_us(self) -> float:
        """Processor time for each leaf, in control planes and PostgreSQL."""
        return 1e6 * (self.plane_cpu + self.postgres_cpu) / self.leaves

    @property
    def lock_share(self) -> float:
        """Of the sessions that work, those that wait for a lock."""
        return self.samples["Lock"] / max(1, self.samples.total())


def cpu_seconds(roots: Sequence[int]) -> float:
    """Processor time of processes and of all below them, those that ended included."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
            ticks[int(folder.name)] = sum(map(int, fields[11:15]))
    used_ticks = 0
    for process, spent in ticks.items():
        above = process
        while above and above not in roots:
            above = parents.get(above, 0)
        used_ticks += spent if above else 0
    return used_ticks / _TICKS


class Watch:
    """Samples sessions, and scrapes `/metrics`, until it is closed."""

    def __init__(self, uri: str, address: str, key: str) -> None:
        self.samples: Counter[str] = Counter()
        self.scrapes_ms: list[float] = []
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._sample, args=(uri,)),
            threading.Thread(target=self._scrape, args=(address, key)),
        ]
        for thread in self._threads:
            thread.start()

    def _sample(self, uri: str) -> None:
        query = (
            "SELECT coalesce(wait_event_type, 'cpu') FROM pg_stat_activity"
            " WHERE backend_type = 'client backend' AND state = 'active' AND pid <> pg_backend_pid()"
        )
        with psycopg.connect(uri, autocommit=True) as connection:
            while not self._ended.wait(_SAMPLE_SECONDS):
                self.samples.update(row[0] for row in connection.execute(query))

    def _scrape(self, address: str, key: str) -> None:
        with ControlPlaneConnection(address, key, timeout_seconds=300) as connection:
            while not self._ended.wait(_SCRAPE_SECONDS):
                start = time.perf_counter()
                connection.request("GET", "/metrics")
                self.scrapes_ms.append(1e3 * (time.perf_counter() - start))

    def taken(self) -> Counter[str]:
        """The samples since the last time."""
        found, self.samples = self.samples, Counter()
        return found

    def close(self) -> None:
        """No more."""
        self._ended.set()
        for thread in self._threads:
            thread.join()


def stretch(
    fleet: Fleet,
    planes: Sequence[Plane],
    keys: dict[str, str],
    watch: Watch,
    roots: tuple[list[int], list[int]],
    rate: float,
) -> Stretch:
    """Everything that workers have made, sent to these control planes as it comes."""
    watch.taken()
    before = [cpu_seconds(of) for of in roots]
    seconds, sent = fleet.send([plane.address for plane in planes], keys, rate)
    plane_cpu, postgres_cpu = (cpu_seconds(of) - had for of, had in zip(roots, before, strict=True))
    return Stretch(
        len(planes),
        sum(one.leaves for one in sent),
        seconds,
        plane_cpu,
        postgres_cpu,
        sum(one.cpu_seconds for one in sent),
        sum(one.retries for one in sent),
        [wait for one in sent for wait in one.waits_ms],
        watch.taken(),
        sum(one.batches for one in sent),
    )


def asked(address: str, keys: dict[str, str], tenant: str, times: int) -> dict[str, float]:
    """Milliseconds of each question, the median of so many."""
    medians = {}
    with contextlib.ExitStack() as stack:
        connections = {
            who: stack.enter_context(ControlPlaneConnection(address, keys[who], timeout_seconds=600))
            for who in ("operator", "auditor")
        }
        for name, path in questions(tenant).items():
            who = "operator" if path in _OPERATORS else "auditor"
            took = []
            for _ in range(times):
                start = time.perf_counter()
                try:
                    connections[who].request("GET", path)
                except ServiceError as error:
                    raise SystemExit(f"{path}: {error}") from None
                took.append(1e3 * (time.perf_counter() - start))
            medians[name] = round(statistics.median(took), 1)
    return medians


_OPERATORS = frozenset({"/metrics", "/v1/workers", "/v1/capacity", "/v1/health"})


def missing(uri: str, acknowledged: dict[str, int]) -> dict[str, int]:
    """How many acknowledged leaves are not there, and how many are there twice."""
    lost = double = 0
    query = (
        "SELECT i.uuid, count(*), count(DISTINCT (e.sequence, e.part, e.log)), count(DISTINCT e.sequence),"
        " max(e.sequence) FROM events e JOIN incarnations i ON i.id = e.incarnation GROUP BY i.uuid"
    )
    with psycopg.connect(uri) as connection:
        there = {row[0]: row[1:] for row in connection.execute(query)}
    for incarnation, last in acknowledged.items():
        rows, distinct, sequences, highest = there.get(incarnation, (0, 0, 0, 0))
        lost += last - min(sequences, last) + max(0, highest - last)
        double += rows - distinct
    return {"acknowledged": sum(acknowledged.values()), "lost": lost, "double": double}


@contextlib.contextmanager
def two_planes(folder: Path, url: str, workers: Sequence[str], settings: dict[str, str]) -> Iterator[list[Plane]]:
    """Two control planes of one ledger; the first has everybody's keys."""
    planes = [Plane(folder, url, "plane-1", settings, [*workers, "operator", "auditor"])]
    try:
        planes.append(Plane(folder, url, "plane-2", settings))
        yield planes
    finally:
        for plane in planes:
            plane.close()


def with_faults(
    fleet: Fleet, planes: Sequence[Plane], keys: dict[str, str], server: Any, postmaster: int, rate: float
) -> dict[str, Any]:
    """What workers have made is sent while each control plane and the database are killed, one after the other."""
    faults: dict[str, Any] = {}

    def kill() -> None:
        for name, act in (
            ("plane-2", planes[1].kill_and_begin),
            ("postgres", partial(kill_postgres, server, postmaster)),
            ("plane-1", planes[0].kill_and_begin),
        ):
            time.sleep(_FAULT_SECONDS)
            act()
            faults[name] = "killed"

    killing = threading.Thread(target=kill)
    killing.start()
    seconds, sent = fleet.send([plane.address for plane in planes], keys, rate)
    killing.join()
    return faults | {
        "seconds": round(seconds, 1),
        "leaves": sum(one.leaves for one in sent),
        "retries": sum(one.retries for one in sent),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Of what was measured; 0 where nothing was."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1) if ordered else 0.0


def of_side(stretches: Sequence[Stretch]) -> dict[str, Any]:
    """The stretches of one side together."""
    leaves, seconds = sum(one.leaves for one in stretches), sum(one.seconds for one in stretches)
    samples = sum((one.samples for one in stretches), Counter[str]())
    waits = [wait for one in stretches for wait in one.waits_ms]
    return {
        "leaves_a_second": round(leaves / seconds),
        "requests_a_second": round(leaves / LEAVES_A_REQUEST / seconds),
        "leaf_cpu_us": round(sum(one.plane_cpu + one.postgres_cpu for one in stretches) / leaves * 1e6, 1),
        "leaf_cpu_us_of_planes": round(sum(one.plane_cpu for one in stretches) / leaves * 1e6, 1),
        "leaf_cpu_us_of_postgres": round(sum(one.postgres_cpu for one in stretches) / leaves * 1e6, 1),
        "leaf_cpu_us_of_workers": round(sum(one.worker_cpu for one in stretches) / leaves * 1e6, 1),
        "lock_share": round(samples["Lock"] / max(1, samples.total()), 3),
        "sessions": {name: round(count / samples.total(), 3) for name, count in samples.most_common()},
        "leaves_a_batch": round(leaves / sum(one.batches for one in stretches)),
        "evidence_p50_ms": percentile(waits, 0.5),
        "evidence_p99_ms": percentile(waits, 0.99),
        "retries": stretches[-1].retries,
        "each": [[one.leaves, round(one.leaves / one.seconds), round(one.leaf_cpu_us, 1)] for one in stretches],
    }


def main() -> int:
    """Print one JSON object."""
    bench = Bench(__doc__, "psycopg", "SQLAlchemy", "uvicorn", "zstandard", rounds=5, strict=True)
    bench.add("--leaves", type=int, default=10_000_000)
    bench.add("--tenants", type=int, default=10_000)
    bench.add("--workers", type=int, default=60)
    bench.add("--processes", type=int, default=2, help="that the workers are in (default: %(default)s)")
    bench.add("--rate", type=float, default=13_200, help="leaves a second that come (default: %(default)s)")
    bench.add("--group", type=int, default=76, help="leaves that come at once (default: %(default)s)")
    bench.add("--asks", type=int, default=5, help="times each question is asked (default: %(default)s)")
    bench.add("--faults", action="store_true", help="one stretch more, in which each process is killed once")
    bench.add("--set", action="append", default=[], help="a setting of both control planes, NAME=VALUE")
    options = bench.parse()
    workers = [f"worker-{number}" for number in range(options.workers)]
    tenants = [f"tenant-{number:05d}" for number in range(options.tenants)]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcustody-fleet-")))
        server = stack.enter_context(postgres_server(**SERVER))
        uri = fresh_store(server.get_uri(), folder, "fleet").url.render_as_string(False)
        plain = uri.replace("postgresql+psycopg:", "postgresql:")
        planes = stack.enter_context(two_planes(folder, uri, workers, dict(one.split("=", 1) for one in options.set)))
        keys = planes[0].keys
        with psycopg.connect(plain) as connection:
            postmaster = int(
                Path("/proc", str(connection.info.backend_pid), "stat").read_text().rpartition(")")[2].split()[1]
            )
        roots = ([plane.pid for plane in planes], [postmaster])
        fleet = Fleet(workers, tenants, options.processes)
        watch = Watch(plain, planes[0].address, keys["operator"])
        figures: dict[str, Any] = {}
        stretches: dict[str, list[Stretch]] = {side: [] for side in SIDES}
        requests = options.group // LEAVES_A_REQUEST

        def one(leaves: int, side: str) -> Stretch:
            count = SIDES[side]
            tenants_apart = count if side == "two_apart" else 1
            fleet.make(max(1, round(leaves / options.workers / options.group)), requests, tenants_apart)
            made = stretch(fleet, planes[:count], keys, watch, roots, options.rate)
            speed = f"{made.leaves / made.seconds:,.0f} leaves/s, {made.leaf_cpu_us:.0f} us of CPU each"
            print(f"{side}: {speed}, locks {made.lock_share:.3f}", file=sys.stderr)
            return made

        try:
            one(options.leaves // 10, "one")
            time.sleep(min(_REST_SECONDS, options.leaves / 50_000))
            figures["asked_ms_at_a_tenth"] = asked(planes[0].address, keys, tenants[7], options.asks)
            share = options.leaves * 9 // 10 // (len(SIDES) * options.rounds)
            for turn in range(options.rounds):
                for side in turned(list(SIDES), turn):
                    stretches[side].append(one(share, side))
            time.sleep(min(_REST_SECONDS, options.leaves / 50_000))
            figures["asked_ms"] = asked(planes[0].address, keys, tenants[7], options.asks)
            scrapes = list(watch.scrapes_ms)
            watch.close()
            if options.faults:
                fleet.make(max(1, round(options.leaves / 10 / options.workers / options.group)), requests, 1)
                figures["faults"] = with_faults(fleet, planes, keys, server, postmaster, options.rate)
        finally:
            watch.close()
            acknowledged = fleet.close()
        figures["growth"] = {
            name: round(figures["asked_ms"][name] / max(0.1, before), 2)
            for name, before in figures["asked_ms_at_a_tenth"].items()
        }
        figures |= {side: of_side(made) for side, made in stretches.items()}
        figures["leaves_there"] = missing(plain, acknowledged)
        with psycopg.connect(plain) as connection:
            size = connection.execute("SELECT pg_database_size(current_database())").fetchone()
        assert size is not None
        figures["disk_bytes_a_leaf"] = round(size[0] / sum(acknowledged.values()))
    figures["met"] = {
        "requests_a_second": max(figures[side]["requests_a_second"] for side in SIDES),
        "leaves_a_second": max(figures[side]["leaves_a_second"] for side in SIDES),
        "cpu_of_two_to_one": round(figures["two"]["leaf_cpu_us"] / figures["one"]["leaf_cpu_us"], 3),
        "lock_share": figures["two"]["lock_share"],
        "lock_share_apart": figures["two_apart"]["lock_share"],
        "metrics_p50_ms": percentile(scrapes, 0.5),
        "metrics_p99_ms": percentile(scrapes, 0.99),
        "scrapes": len(scrapes),
        "rare_kind_ms": figures["asked_ms"]["a rare kind over all tenants"],
    }
    met = [
        figures["met"][name] >= goal if name.endswith("_a_second") else figures["met"][name] <= goal
        for name, goal in GOALS.items()
    ]
    bench.keep(
        {
            "options": {name: value for name, value in vars(options).items() if name != "json"},
            "goals": GOALS,
            **figures,
        },
        show=True,
    )
    return bench.status(all(met) and not figures["leaves_there"]["lost"] + figures["leaves_there"]["double"])


if __name__ == "__main__":
    raise SystemExit(main())
