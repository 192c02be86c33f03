"""Does a request ever reach a worker that policy does not let serve it, its prompt included?

    python benchmarks/fleet/routers/demanded_placement.py smg --json benchmarks/results/demanded-placement-smg.json

1. Four recording workers, each in a placement group with a router of its own (`none`: the door's own proxy goes to
   each). `acme` is dedicated to `g0`; requests of classification `high` go to `g3` alone. So `acme`'s `high` ones go
   nowhere.
2. Every prompt begins with its tenant and classification. What a worker received is searched for those it may not
   serve, in each path, body and header, whatever the router posted.
3. The controls have the same groups and no rules, and one router over all workers. In each a prompt must reach a worker
   that the rules forbid, and with one router `acme`'s must reach others: else the run is void.
"""

from __future__ import annotations

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "harness"))

from bench import Bench
from router_probes import Prompts, chat
from running_router import NO_ROUTER, RecordedRequest, Router, running

WORKERS = 4
OWN, OTHERS = "acme", tuple(f"t{number}" for number in range(20))
HIGH = {"x-kvcustody-classification": "high"}
DEMANDS = """\
placement:
  - {id: acme-own, groups: [g0], tenants: [acme], dedicated: true}
  - {id: sealed, groups: [g3], classification: [high]}
"""


class Asked(NamedTuple):
    """One request: whose, of which classification, and what its prompt begins with."""

    tenant: str
    level: str
    place: int

    @property
    def mark(self) -> str:
        """What its prompt begins with, and no other."""
        return f"<{self.tenant}|{self.level}|{self.place}>"


def requests(count: int) -> list[Asked]:
    """A third of one tenant, the rest of many; every sixth `high`, of both."""
    tenants = (OWN, *OTHERS)
    return [
        Asked(
            OWN if place % 3 == 0 else tenants[1 + place % len(OTHERS)],
            "high" if place % 6 < 2 else "low",
            place,
        )
        for place in range(count)
    ]


def may_serve(worker: str, asked: Asked) -> bool:
    """What the policy says of it, said anew: `w1` is of `g0`, `w4` of `g3`."""
    if asked.level == "high":
        return worker == "w4" and asked.tenant != OWN
    return worker == "w1" if asked.tenant == OWN else worker != "w1"


def send(router: Router, asked: Asked, text: str) -> int:
    """Send one; the status."""
    headers = {"x-kvcustody-subject": f"s{asked.place % 50}"} | (HIGH if asked.level == "high" else {})
    return router.ask(chat(f"{asked.mark} {text}"), headers, tenant=asked.tenant).status


def measure(name: str, count: int, *, demands: str, group_workers: int) -> dict[str, Any]:
    """Send all; how many went where they may not, and what became of the rest."""
    every, prompts = requests(count), Prompts(11)
    texts = [prompts.text(300) for _ in every]
    with running(
        name,
        WORKERS,
        with_door="private",
        group_workers=group_workers,
        tenants=(OWN, *OTHERS),
        demands=demands,
    ) as router:
        with ThreadPoolExecutor(8) as pool:
            statuses = [*pool.map(lambda pair: send(router, *pair), zip(every, texts, strict=True))]
        received = router.recorded()
    reached = reach(every, received)
    wrong = [
        (asked, worker) for asked, workers in reached.items() for worker in workers if not may_serve(worker, asked)
    ]
    served = {asked for asked, status in zip(every, statuses, strict=True) if status == 200}
    nowhere = [asked for asked in every if asked.tenant == OWN and asked.level == "high"]
    return {
        "groups": group_workers > 0,
        "rules": bool(demands),
        "requests": count,
        "received by workers": len(received),
        "statuses": {str(status): number for status, number in sorted(Counter(statuses).items())},
        "at a worker that may not serve them": len({asked for asked, _ in wrong}),
        "of them dedicated, elsewhere": sum(asked.tenant == OWN for asked, _ in wrong),
        "of them others', at the dedicated worker": sum(
            asked.tenant != OWN and worker == "w1" for asked, worker in wrong
        ),
        "that no group may serve": len(nowhere),
        "of them refused, and seen by no worker": sum(
            asked not in served and asked not in reached for asked in nowhere
        ),
        "others served": len(served),
    }


def reach(every: list[Asked], received: list[RecordedRequest]) -> dict[Asked, set[str]]:
    """Which workers saw which prompts, in anything that they received."""
    marks, reached = {asked.mark: asked for asked in every}, dict[Asked, set[str]]()
    for each in received:
        text = "\n".join((each.path, each.body, *(f"{name}: {value}" for name, value in each.headers)))
        for part in text.split("<")[1:]:
            asked = marks.get(f"<{part.partition('>')[0]}>")
            if asked is not None:
                reached.setdefault(asked, set()).add(each.worker)
    return reached


def main() -> None:
    """Print one JSON object; exit status 1 where a request went wrong, or the controls are void."""
    bench = Bench(__doc__, "httpx", "starlette")
    bench.add("router", choices=("smg", "vllm-router", NO_ROUTER))
    bench.add("--requests", type=int, default=3000)
    options = bench.parse()
    name, count = options.router, options.requests
    ruled = measure(name, count, demands=DEMANDS, group_workers=1)
    controls = [measure(name, count // 3, demands="", group_workers=1)]
    if name != NO_ROUTER:
        controls.append(measure(name, count // 3, demands="", group_workers=0))
    bench.keep({"router": name, "workers": WORKERS, "ruled": ruled, "controls": controls}, show=True)
    if ruled["at a worker that may not serve them"]:
        raise SystemExit("a request reached a worker that may not serve it")
    if ruled["of them refused, and seen by no worker"] != ruled["that no group may serve"]:
        raise SystemExit("a request that no group may serve was served, or seen")
    if ruled["others served"] + ruled["that no group may serve"] != count:
        raise SystemExit("void: a request that a group may serve was not served")
    if not all(one["at a worker that may not serve them"] for one in controls):
        raise SystemExit("void: without rules, no request reaches a worker that may not serve it")
    if name != NO_ROUTER and not controls[-1]["of them dedicated, elsewhere"]:
        raise SystemExit("void: without groups, the dedicated tenant reaches no other worker")


if __name__ == "__main__":
    main()
