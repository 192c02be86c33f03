"""What each router does with a request, from which the table of `docs/reference/routers/compared.md` is made.

    python benchmarks/fleet/routers/probe_routers.py smg --json benchmarks/results/router-smg.json
    python benchmarks/fleet/routers/probe_routers.py vllm-router --pairs 60
    python benchmarks/fleet/routers/probe_routers.py dynamo

1. Each router comes from pip, in an environment of its own (`benchmarks/routers_env.sh`). Workers record, and have no
   model. Nothing leaves loopback.
2. Placement is asked of the router alone, and with `kvcustody door proxy` before it. Rows are void where the control's
   share is not 1/W +- 0.15.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "harness"))

from bench import Bench
from router_probes import PLACEMENTS, Placement, carrier, is_void, placement, renders, residue, retries
from running_router import FOLDER, Router, environment_of, running


def measure(name: str, pairs: int, workers: int, seconds: int) -> dict[str, Any]:
    """Every probe of one HTTP router."""
    governed = {}
    for affinity in ("private", "segment"):
        with running(name, workers, with_door=affinity) as router:
            governed[affinity] = placements(router, pairs)
    with running(name, workers) as router:
        placed = placements(router, pairs)
        return {
            "router": name,
            "version": router.version,
            "workers": workers,
            "carrier": carrier(router)._asdict(),
            "retries": retries(router)._asdict(),
            "renders": renders(router)._asdict(),
            "residue": residue(router, seconds)._asdict(),
            "placement": {question: found._asdict() for question, found in placed.items()},
            "placement_behind_the_door": {
                affinity: {question: found._asdict() for question, found in each.items()}
                for affinity, each in governed.items()
            },
            "is_void": any(is_void(each["control"], workers) for each in (placed, *governed.values())),
        }


def placements(router: Router, pairs: int) -> dict[str, Placement]:
    """Every question about placement, by its name."""
    return {
        question: placement(router, pairing, pairs, seed)
        for seed, (question, pairing) in enumerate(PLACEMENTS.items(), 1)
    }


def measure_dynamo() -> dict[str, Any]:
    """The selection service's own probe, in its environment."""
    program = [environment_of("dynamo") / "bin" / "python", FOLDER / "dynamo_selection.py"]
    said = subprocess.check_output(program, env={**os.environ, "DYN_LOG": "error"})
    return {"router": "dynamo", **json.loads(said)}


def main() -> None:
    """Print one JSON object; exit status 1 where the control is void."""
    bench = Bench(__doc__, "httpx", "starlette")
    bench.add("router", choices=("smg", "vllm-router", "dynamo"))
    bench.add("--pairs", type=int, default=60, help="requests in pairs, a question (default: %(default)s)")
    bench.add("--workers", type=int, default=2)
    bench.add("--residue-seconds", type=int, default=20, help="until memory is read again (default: %(default)s)")
    options = bench.parse()
    if options.router == "dynamo":
        found = measure_dynamo()
    else:
        found = measure(options.router, options.pairs, options.workers, options.residue_seconds)
    bench.keep(found, show=True)
    if found.get("is_void"):
        raise SystemExit("the router does not spread unrelated prompts: its rows on placement are void")


if __name__ == "__main__":
    main()
