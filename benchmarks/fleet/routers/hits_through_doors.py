"""How many cached tokens a fleet finds through doors and a real router, beside the router alone and beside an oracle.

    python benchmarks/fleet/routers/hits_through_doors.py smg TRACE

1. A trace in Mooncake's form goes through the router in its order, some requests at once. Each session is of a tenant;
   these have weights as Zipf has them. Doors are taken in turns.
2. Each worker's cache is that of `fleet_model`, by tenant. Alone, neither the router
   nor caches know tenants: everybody finds everybody's.
3. The oracle finds whatever any worker has computed for this tenant.
4. What must hold, and ends with exit status 1 where it does not: with one tenant, doors find 0.97 of what the router
   alone finds; with 8 and 128 they find 0.95 of the oracle's; and with 1, 2 and 4 doors the share of prompt tokens that
   is found is the same to 0.01.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "harness"))

from bench import Bench
from erasures_and_hits import BLOCK_CHARACTERS
from router_probes import chat
from running_router import Router, running

from kvcustody.lab.fleet.fleet_model import WorkerCache
from kvcustody.lab.replay.traces.model import TraceRequest
from kvcustody.lab.replay.traces.readers import open_trace
from kvcustody.lab.replay.workload.labels import Labeller, zipf_weights

TO_ALONE, TO_ORACLE, FLAT = 0.97, 0.95, 0.01
BLOCK_TOKENS: Final = 512


class Setup(NamedTuple):
    """`doors`: 0 is the router alone."""

    tenants: int
    doors: int

    @property
    def name(self) -> str:
        """As it is kept."""
        if not self.doors:
            return "the router alone"
        tenants = f"{self.tenants} tenant{'s' if self.tenants > 1 else ''}"
        return f"{tenants}, {self.doors} door{'s' if self.doors > 1 else ''}"


SETUPS: Final = (Setup(1, 0), Setup(1, 1), Setup(8, 1), Setup(8, 2), Setup(8, 4), Setup(128, 1))


class Counted:
    """Caches of one run, and what was found in them."""

    def __init__(self, router: Router, blocks_max: int) -> None:
        self._router = router
        self._caches = {worker: WorkerCache(blocks_max) for worker in router.workers}
        self._computed: set[tuple[str, int]] = set()
        self._lock = threading.Lock()
        self.tokens = self.found = self.oracle = self.failed = 0
        self.by_worker = dict.fromkeys(router.workers, 0)

    def ask(self, number: int, request: TraceRequest, tenant: str) -> None:
        """Send one request through the next door, and look into the cache of who answered."""
        router = self._router
        if router.doors:
            router = router._replace(url=router.doors[number % len(router.doors)])
        blocks = request.blocks.tolist()
        text = "".join(f"{block:0{BLOCK_CHARACTERS}x}" for block in blocks)
        subject = {"x-kvcustody-subject": str(request.session)}
        answer = router.ask(chat(text) | {"max_tokens": 2}, subject, tenant=tenant)
        with self._lock:
            if answer.status != 200:
                self.failed += 1
                return
            cached, _ = self._caches[answer.worker].take(tenant, blocks)
            known = 0
            while known < len(blocks) and (tenant, blocks[known]) in self._computed:
                known += 1
            self._computed.update((tenant, block) for block in blocks)
            self.by_worker[answer.worker] += 1
            self.tokens += request.input_tokens
            self.found += min(cached * BLOCK_TOKENS, request.input_tokens)
            self.oracle += min(known * BLOCK_TOKENS, request.input_tokens)


def measure(name: str, setup: Setup, requests: list[TraceRequest], options: Any) -> dict[str, Any]:
    """One way to set the fleet up, over one trace."""
    names = [f"t{number}" for number in range(setup.tenants)]
    labels = Labeller(zipf_weights(setup.tenants), tenants=setup.tenants, seed=1)
    tenants = [names[labels.label(request).tenant] for request in requests]
    door = "private" if setup.doors else ""
    with running(
        name, options.workers, with_door=door, doors=max(1, setup.doors), scope="tenant", tenants=names
    ) as router:
        counted = Counted(router, options.blocks)
        with ThreadPoolExecutor(options.at_once) as pool:
            numbers = range(len(requests))
            for start in range(0, len(requests), options.at_once):
                some = slice(start, start + options.at_once)
                list(pool.map(counted.ask, numbers[some], requests[some], tenants[some]))
    mean = sum(counted.by_worker.values()) / len(counted.by_worker)
    return {
        "found_share": round(counted.found / counted.tokens, 4),
        "oracle_share": round(counted.oracle / counted.tokens, 4),
        "to_oracle": round(counted.found / counted.oracle, 4),
        "failed": counted.failed,
        "imbalance": round(max(counted.by_worker.values()) / mean, 3),
    }


def main() -> None:
    """Print one JSON object; exit status 1 where a bound does not hold (rule 4)."""
    bench = Bench(__doc__, "httpx", "starlette")
    bench.add("router", choices=("smg", "vllm-router"))
    bench.add("traces", type=Path, nargs="+", help="files of Mooncake's form")
    bench.add("--workers", type=int, default=4)
    bench.add("--at-once", type=int, default=16, help="requests under way (default: %(default)s)")
    bench.add("--blocks", type=int, default=40_000, help="of 512 tokens, at each worker (default: %(default)s)")
    bench.add("--requests", type=int, default=0, help="of each trace; 0 for all (default: %(default)s)")
    options = bench.parse()
    figures: dict[str, Any] = {}
    problems, version = [], ""
    for path in options.traces:
        requests = list(open_trace(path, "mooncake"))[: options.requests or None]
        trace = path.name.partition(".")[0]
        runs = figures[trace] = {"requests": len(requests), "setups": {}}
        for setup in SETUPS:
            measured = runs["setups"][setup.name] = measure(options.router, setup, requests, options)
            print(trace, setup.name, measured, file=sys.stderr, flush=True)
        of = {setup: runs["setups"][setup.name] for setup in SETUPS}
        runs["to_alone"] = round(of[Setup(1, 1)]["found_share"] / of[Setup(1, 0)]["found_share"], 4)
        flat = [of[Setup(8, doors)]["found_share"] for doors in (1, 2, 4)]
        runs["doors_differ_by"] = round(max(flat) - min(flat), 4)
        problems += [
            f"{trace}, {setup.name}: {measured['failed']} failed"
            for setup, measured in of.items()
            if measured["failed"]
        ]
        if runs["to_alone"] < TO_ALONE:
            problems.append(f"{trace}: {runs['to_alone']} of the router alone")
        for setup in (Setup(8, 1), Setup(128, 1)):
            if of[setup]["to_oracle"] < TO_ORACLE:
                problems.append(f"{trace}, {setup.name}: {of[setup]['to_oracle']} of the oracle")
        if runs["doors_differ_by"] > FLAT:
            problems.append(f"{trace}: doors differ by {runs['doors_differ_by']}")
    with running(options.router, 1) as router:
        version = router.version
    told = {"router": options.router, "version": version, "workers": options.workers, "traces": figures}
    bench.keep(told | {"problems": problems}, show=True)
    if problems:
        raise SystemExit("; ".join(problems))


if __name__ == "__main__":
    main()
