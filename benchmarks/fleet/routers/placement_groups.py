"""Does a tenant's shared prompt find its worker, with placement groups of few workers and without?

    python benchmarks/fleet/routers/placement_groups.py smg --json benchmarks/results/placement-groups-smg.json

1. In each pair two subjects of one tenant send one long system message, each with a prompt of its own. Their names are
   of subjects, so a router by itself finds nothing of the first for the second.
2. Each pair is of another tenant. The control without groups shares nothing beyond chance; a row is void where tenants
   are not spread over the workers: where two tenants that come one after the other meet at 1/W +- 0.15.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "harness"))

from bench import Bench
from recording_worker import SLOW_TOKENS
from router_probes import CONTROL_MARGIN, Prompts, chat
from running_router import Router, running


def measure(name: str, workers: int, group_workers: int, pairs: int) -> dict[str, Any]:
    """Pairs that met at one worker: by a shared segment, and by one conversation; how tenants are spread."""
    tenants = [f"t{number}" for number in range(pairs)]
    prompts, chance = Prompts(7), Random(7)
    with running(name, workers, with_door="private", group_workers=group_workers, tenants=tenants) as router:

        def ask(tenant: str, subject: str, shared: str, own: str) -> str:
            """Up to three unrelated requests are under way, as in `router_probes.placement`."""
            with ThreadPoolExecutor(8) as pool:
                for _ in range(chance.randrange(4)):
                    slow = chat(prompts.text()) | {"max_tokens": SLOW_TOKENS}
                    pool.submit(router.ask, slow, {"x-kvcustody-subject": "load"}, tenant=chance.choice(tenants))
                time.sleep(0.01)
                return sent(router, tenant, subject, shared, own)

        segment, own_prompt, first = 0, 0, list[str]()
        for tenant in tenants:
            shared, own = prompts.text(), prompts.text(100)
            first.append(ask(tenant, "s1", shared, own))
            own_prompt += bool(first[-1]) and ask(tenant, "s1", shared, own) == first[-1]
            segment += bool(first[-1]) and ask(tenant, "s2", shared, prompts.text(100)) == first[-1]
        meet = sum(one == other for one, other in pairwise(first)) / (pairs - 1)
        return {
            "group_workers": group_workers or workers,
            "pairs": pairs,
            "segment across subjects": segment,
            "own prompt": own_prompt,
            "tenants by worker": sorted(Counter(first).values()),
            "tenants that meet": round(meet, 3),
            "is_void": abs(meet - 1 / workers) > CONTROL_MARGIN,
        }


def sent(router: Router, tenant: str, subject: str, shared: str, own: str) -> str:
    """Send one request; the worker that answered."""
    return router.ask(chat(own, shared=shared), {"x-kvcustody-subject": subject}, tenant=tenant).worker


def main() -> None:
    """Print one JSON object; exit status 1 where a row is void."""
    bench = Bench(__doc__, "httpx", "starlette")
    bench.add("router", choices=("smg", "vllm-router"))
    bench.add("--pairs", type=int, default=60)
    bench.add("--workers", type=int, default=4)
    options = bench.parse()
    rows = [
        measure(options.router, options.workers, size, options.pairs) for size in (0, 1, 2) if options.workers > size
    ]
    bench.keep({"router": options.router, "workers": options.workers, "rows": rows}, show=True)
    if any(row["is_void"] for row in rows):
        raise SystemExit("tenants are not spread over the workers: the row is void")


if __name__ == "__main__":
    main()
