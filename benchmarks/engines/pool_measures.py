"""What the measures of serving cost a request on our own pool: the same Governor with them and without, in turns.

    python benchmarks/engines/pool_measures.py [--rounds 40] [--requests 400] [--processes 7] [--json FILE]

Thread CPU time of admission, commit, release and step, events left to the writer. `without` has a silent stand-in for
each thing that counts: the distributions, the ghosts of what was evicted, who waits since when, the timing of look-ups.
Pools are fresh (nothing is evicted) or evicting; half of every other prompt is a hit. Where a process has its objects
in memory moves a figure by half a microsecond: each is the median of several processes. The goal is 3 us a request.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from time import thread_time_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench, Silent, frozen, nothing, turned
from governed import GovernedPeer

BLOCK_TOKENS, GOAL_US = 16, 3.0
_CHILD = "KVCUSTODY_MEASURES_BENCH"


def peer(*, blocks: int, measured: bool) -> GovernedPeer:
    """One Governor; without measures where `measured` is False."""
    peer = GovernedPeer(blocks, BLOCK_TOKENS)
    governor: Any = peer.governor
    if not measured:
        governor.measures, governor._asked = Silent(), Silent()
        governor._match = lambda manager, *rest: manager.match_prefix(*rest)
        governor._measure = nothing
        for manager in governor.managers:
            manager.tree.evicted_keys = Silent()
    return peer


def prompts(requests: int, tokens: int, seed: int) -> list[list[int]]:
    """Prompts of which every other one's first half was seen before."""
    rng = np.random.default_rng(seed)
    made: list[list[int]] = []
    for at in range(requests):
        fresh = rng.integers(3, 50_000, tokens).tolist()
        made.append(made[at - 1][: tokens // 2] + fresh[tokens // 2 :] if at % 2 else fresh)
    return made


def turns(tokens: int, blocks: int, requests: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds a request, round by round; both sides take the same prompts, the order turns."""
    peers = {side: peer(blocks=blocks, measured=side == "with") for side in ("with", "without")}
    rows: dict[str, list[float]] = {side: [] for side in peers}
    for number in range(-2, rounds):
        work = prompts(requests, tokens, number + 3)
        for side in turned(list(peers), number):
            start = thread_time_ns()
            for prompt in work:
                peers[side].run_request(prompt)
            if number >= 0:
                rows[side].append((thread_time_ns() - start) / len(work) / 1000)
    return rows


def in_both_orders(differences: NDArray[np.float64]) -> NDArray[np.float64]:
    """Whoever comes second finds the prompts in the processor's caches: two rounds, one of each order, are one."""
    pairs = len(differences) // 2
    halves: NDArray[np.float64] = differences[: 2 * pairs].reshape(pairs, 2).mean(axis=1)
    return halves


def measure(rounds: int, requests: int) -> dict[str, dict[str, float]]:
    """Every point, in this process."""
    points: dict[str, dict[str, float]] = {}
    for tokens in (256, 2048):
        for name, blocks in (("fresh", 1 << 19), ("evicting", 4 * tokens // BLOCK_TOKENS * 8)):
            with frozen():
                rows = turns(tokens, blocks, requests if name == "evicting" else requests // 4, rounds)
            differences = in_both_orders(np.array(rows["with"]) - np.array(rows["without"]))
            points[f"{tokens} tokens, {name}"] = {
                "with_us": float(np.median(rows["with"])),
                "without_us": float(np.median(rows["without"])),
                "measures_us": float(np.median(differences)),
            }
    return points


def main() -> None:
    """Run it."""
    bench = Bench(__doc__, "numpy", rounds=40, strict=True, pin=True)
    bench.add("--requests", type=int, default=400)
    bench.add("--processes", type=int, default=7, help="that measure, one after the other (default: %(default)s)")
    options = bench.parse()
    if os.environ.get(_CHILD):
        print(json.dumps(measure(options.rounds, options.requests)))
        return
    command = [sys.executable, __file__, "--rounds", str(options.rounds), "--requests", str(options.requests)]
    runs: list[dict[str, dict[str, float]]] = []
    for _ in range(options.processes):
        done = subprocess.run(command, env={**os.environ, _CHILD: "1"}, capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    points: dict[str, dict[str, Any]] = {}
    for name, point in runs[0].items():
        points[name] = {figure: round(float(np.median([one[name][figure] for one in runs])), 2) for figure in point}
        points[name]["by_process"] = sorted(round(one[name]["measures_us"], 2) for one in runs)
        print(f"{name:<21}", points[name], flush=True)
    bench.keep({"points": points, "goal_us": GOAL_US})
    if options.strict and any(point["measures_us"] > GOAL_US for point in points.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
