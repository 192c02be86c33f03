"""What one tenant learns of another's prompt through door and router, from answers and from where its request goes.

    python benchmarks/fleet/routers/two_worlds.py smg --pairs 10000 --json benchmarks/results/two-worlds-smg.json

1. A pair is two worlds that differ in what the victim sent: the attacker's next prompt in one, another of that length
   in the other. Then the attacker sends its prompt. Both are tenants of their own.
2. Answers of a pair are compared byte for byte, without dates, ids and workers' names.
3. Placement is told by one bit: whether the attacker's request went to the victim's worker. Its AUC says how well that
   bit tells the worlds apart: 0.5 is not at all, 1 always. The interval is of 95 %.
4. The control is the router alone, with the policy that looks at prompts: it has to tell the worlds apart.
"""

from __future__ import annotations

import math
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "harness"))

from bench import Bench
from router_probes import Prompts, chat
from running_router import Router, running

# Policies of both routers by what they look at; the last two look at load.
BLIND: Final = ("round_robin", "random")
BY_LOAD: Final = ("power_of_two", "cache_aware")
BOUND: Final = 0.55
AT_ONCE: Final = 8


class World(NamedTuple):
    """What the attacker got, and whether its request went to the victim's worker."""

    shown: str
    is_with_victim: bool


class Found(NamedTuple):
    """Of `pairs`: answers that differ, the AUC of placement and its interval."""

    pairs: int
    answers_that_differ: int
    auc: float
    low: float
    high: float


def measure(router: Router, pairs: int, seed: int) -> Found:
    """Ask `pairs` of worlds, several at once, so that requests of others are under way."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        worlds = list(pool.map(lambda number: _pair(router, seed * 1_000_003 + number), range(pairs)))
    differ = sum(same.shown != other.shown for same, other in worlds)
    shares = [sum(pair[world].is_with_victim for pair in worlds) / pairs for world in (0, 1)]
    auc = 0.5 + (shares[0] - shares[1]) / 2
    margin = 1.96 * math.sqrt(sum(share * (1 - share) for share in shares) / pairs) / 2
    return Found(pairs, differ, round(auc, 4), round(auc - margin, 4), round(auc + margin, 4))


def _pair(router: Router, seed: int) -> tuple[World, World]:
    """The world in which the victim sent the attacker's prompt, and the other, in either order."""
    prompts = Prompts(seed)
    order = [True, False]
    random.Random(seed).shuffle(order)
    worlds: dict[bool, World] = {}
    for is_same in order:
        probe, another = prompts.text(600), prompts.text(600)
        victim = router.ask(chat(probe if is_same else another), _SUBJECT, tenant="a")
        attacker = router.ask(chat(probe), _SUBJECT, tenant="b")
        worlds[is_same] = World(attacker.shown, attacker.worker == victim.worker)
    return worlds[True], worlds[False]


_SUBJECT: Final = {"x-kvcustody-subject": "s"}


def main() -> None:
    """Print one JSON object; exit status 1 where a bound is passed, or the control tells nothing apart."""
    bench = Bench(__doc__, "httpx", "starlette")
    bench.add("router", choices=("smg", "vllm-router"))
    bench.add("--pairs", type=int, default=200, help="pairs of worlds, a policy (default: %(default)s)")
    bench.add("--workers", type=int, default=2)
    options = bench.parse()
    behind: dict[str, dict[str, Any]] = {}
    for seed, policy in enumerate((*BLIND, *BY_LOAD), 1):
        with running(options.router, options.workers, with_door="private", policy=policy) as router:
            behind[policy] = measure(router, options.pairs, seed)._asdict()
            version = router.version
    with running(options.router, options.workers) as router:
        control = measure(router, min(options.pairs, 1000), 9)
    figures = {
        "router": options.router,
        "version": version,
        "workers": options.workers,
        "behind_the_door": behind,
    }
    bench.keep({**figures, "control_alone": control._asdict()}, show=True)
    wrong = [name for name, one in behind.items() if one["answers_that_differ"]]
    wrong += [name for name in BLIND if behind[name]["low"] > BOUND or behind[name]["high"] < 1 - BOUND]
    if control.low <= BOUND:
        wrong.append("the control, which tells nothing apart")
    if wrong:
        raise SystemExit(f"not as it must be: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
