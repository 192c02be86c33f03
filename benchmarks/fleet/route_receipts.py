"""Route receipts against what a recorder saw: a door, a router and workers, whose leaves go to one ledger.

The door, workers' own doors, tokens, Governors and writers are the product's; the router is a stand-in that says what
it promises (`tests/lib/standins/integrations/routed_fleet.py`). Each figure that follows from the ledger is compared
with the recorder's. Then halves are left out, and each has to be a finding. Exit status 1 where one figure differs.

    python benchmarks/fleet/route_receipts.py --requests 10000 --json benchmarks/results/route-receipts.json
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "lib"))

from bench import Bench

from kvcustody.audit.evidence.routes.route_measures import measure
from kvcustody.audit.evidence.routes.route_receipts import (
    JoinedRoutes,
    ReceiptProblem,
    RoutePeriod,
    by_problem,
    read_routes,
)
from kvcustody.audit.store.database.engine import open_store
from kvcustody.migrations.upgrade import upgrade
from standins.integrations.door_world import make_signers
from standins.integrations.routed_fleet import RoutedFleet, Truth, figures_of, truth_of
from standins.redteam.two_worlds import model

EVER = RoutePeriod(0, 1 << 60)


def run(folder: Path, requests: int, workers: int, lost: int) -> dict[str, Any]:
    """The figures of one run; `lost` halves of each kind are left out."""
    store = open_store(folder / "ledger.db")
    upgrade(store)
    fleet = RoutedFleet(folder, make_signers(), store, model(), workers=workers)
    began = time.process_time()
    fleet.run(requests)
    whole = truth_of(fleet.seen)
    muted = {
        mute: [fleet.ask(fleet.edge.clients.acme, f"lost-{mute}", "acme", at, mute=mute) for at in range(1, lost + 1)]
        for mute in ("door", "worker")
    }
    fleet.close()
    took = time.process_time() - began
    began = time.process_time()
    routes: JoinedRoutes
    with store.connect() as connection:
        routes = read_routes(connection, EVER, now_us=1 << 60)
    joining = time.process_time() - began
    names = {one.receipt for seen in muted.values() for one in seen if one is not None}
    measures = measure(one for one in routes.receipts if one.receipt not in names)
    problems = by_problem(routes.findings)
    seen = figures_of(measures)
    differing = [name for name in Truth._fields if getattr(seen, name) != getattr(whole, name)]
    problems_of_run = {name: number for name, number in problems.items() if number}
    store.dispose()
    return {
        "requests": requests,
        "workers": workers,
        "receipts": len(routes.receipts),
        "figures_compared": len(Truth._fields) + 3 * (len(whole.by_worker) + len(whole.by_tenant)) - 2,
        "figures_that_differ": differing,
        "locality": measures.locality,
        "hit_length": measures.hit_length,
        "queue_delta_mean": measures.queue_delta_mean,
        "stale_misses": measures.stale_misses,
        "imbalance": measures.imbalance,
        "halves_left_out": {"door": lost, "worker": lost},
        "findings": problems_of_run,
        "served_cpu_seconds": round(took, 2),
        "joined_cpu_seconds": round(joining, 2),
    }


def main() -> None:
    """Print one JSON object; exit status 1 where a figure differs, or a lost half is no finding."""
    bench = Bench(__doc__)
    bench.add("--requests", type=int, default=10_000)
    bench.add("--workers", type=int, default=4)
    bench.add("--lost", type=int, default=50, help="halves of each kind that are left out (default: %(default)s)")
    options = bench.parse()
    with tempfile.TemporaryDirectory() as folder:
        figures = run(Path(folder), options.requests, options.workers, options.lost)
    bench.keep(figures, show=True)
    missing = (
        figures["findings"].get(ReceiptProblem.NO_DOOR, 0),
        figures["findings"].get(ReceiptProblem.NO_WORKER, 0),
    )
    if figures["figures_that_differ"] or missing != (options.lost, options.lost):
        raise SystemExit(f"not as it must be: {figures['figures_that_differ']}, lost halves found: {missing}")


if __name__ == "__main__":
    main()
