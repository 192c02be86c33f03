"""What size costs: one decision, blocks at 40 thousand and 4 million, a step's worst case, bytes, lapses, the check.

    python benchmarks/scale.py [--only cost,bytes] [--blocks 4000000] [--json FILE]

1. Times are CPU time of the calling thread. The collector is off and the heap frozen, as an engine runs it.
2. The two pools of a comparison live in one process and take turns by batches, whose medians count. The mix is the
   same: each request shares its first half with one of the warmed chains, all visited in turn, so that every
   request hits and every block it takes was evicted.
3. Prompts are int32 arrays, so that reading a list of Python ints, the same at any size, hides nothing.
"""

from __future__ import annotations

import gc
import json
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.pool.block_state import BlockState
from kvcustody.clock import SystemClock, VirtualClock
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.governor.governor import Governor
from kvcustody.policies.document.model import Action, Scope, Via
from kvcustody.policies.table.model import AccessRequest

sys.path.insert(0, str(Path(__file__).resolve().parent / "harness"))

from bench import Bench, table
from governed import MODEL, READER, RESERVE_HIGH, Shelf, govern, policy_table, principal, serve
from workload import BLOCK_TOKENS, VOCABULARY

Tokens = NDArray[np.int32]
SMALL_BLOCKS, LARGE_BLOCKS = 40_000, 4_000_000
LONG_TOKENS, SHORT_TOKENS = 8192, 256
BATCH, BATCHES = 16, 80
RUNS = (16, 64)  # blocks a run
LAPSE_RESIDENCIES, LAPSE_BLOCKS, CALIBRATION = 100_000, 1_000_000, 10_000
SLICES = (256, 128, 64, 32, 16, 8)
GOALS = {
    "decision_ns": 1000.0,
    "cost_ratio": 1.5,
    "bytes_per_block": 160.0,
    "lapse_seconds": 1.0,
    "lapse_slice_ms": 1.0,
    "check_seconds": 1.0,
}
READER_PRINCIPAL = principal(READER)


class Stock:
    """A full pool whose cached blocks are chains of `tokens`-long prompts; each request shares its first half."""

    def __init__(self, blocks: int, tokens: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self.tokens = tokens
        self.half = tokens // 2
        self.governor = govern(blocks, BLOCK_TOKENS, Shelf(keeping=False))
        chain_blocks = tokens // BLOCK_TOKENS
        warmed = max(1, int(0.4 * blocks) // chain_blocks)
        self._heads = [self.unique(self.half) for _ in range(warmed)]
        self._turn = cycle(self._heads)
        self.filling: dict[str, list[int]] = {}
        for head in self._heads:
            self.fill(np.concatenate((head, self.unique(tokens - self.half))))
        while self.governor.managers[0].tree.evicted.get("pressure", 0) < 0.1 * blocks:
            self.fill(self.prompt())

    def fill(self, tokens: Tokens) -> None:
        """One request before the measurement, timed too: growth happens here."""
        request(self.governor, tokens, self.filling)

    def unique(self, tokens: int) -> Tokens:
        """Tokens that no other prompt starts with."""
        return self._random.integers(0, VOCABULARY, tokens, dtype=np.int32)

    def prompt(self) -> Tokens:
        """The next head in turn, continued anew."""
        return np.concatenate((next(self._turn), self.unique(self.tokens - self.half)))

    def facts(self) -> dict[str, Any]:
        """What the pool holds, and the most entries that any one rehash touches."""
        manager = self.governor.managers[0]
        return {
            "blocks": manager.pool.blocks,
            "cached": manager.pool.counts[BlockState.CACHED],
            "nodes": manager.tree.node_count,
            "index_entries": len(manager.tree.index),
            "largest_stripe": max(map(len, manager.tree.index.stripes)),
            "residencies": len(manager.hold_table),
            "roots": sum(1 for _ in manager.tree.roots),
        }


# -- decision ---------------------------------------------------------------------------------------------------------


def decision() -> dict[str, Any]:
    """One `decide` of an own reuse, and of one through a grant; medians over batches of 100."""
    clock = SystemClock()
    table = policy_table(4, clock)
    now, decide = clock.utc_us(), table.decide
    own = AccessRequest(Action.REUSE, READER, READER, 0, Scope.TENANT, Via.OWN)
    granted = AccessRequest(Action.REUSE, READER, "owner-1", 0, Scope.TENANT, Via.GRANT, "read-owner-1")

    def by_own() -> None:
        for _ in range(100):
            decide(own, now)

    def by_grant() -> None:
        for _ in range(100):
            decide(granted, now)

    assert decide(own, now).permitted
    assert decide(granted, now).permitted
    return {"own_ns": median(by_own, 2000) / 100, "grant_ns": median(by_grant, 2000) / 100}


def median(work: Callable[[], object], times: int) -> float:
    """The median CPU time of `work`, in nanoseconds."""
    taken = []
    for _ in range(times):
        start = thread_time_ns()
        work()
        taken.append(thread_time_ns() - start)
    return float(np.median(taken))


# -- cost per block and worst step ------------------------------------------------------------------------------------


def cost(tokens: int, large_blocks: int) -> dict[str, Any]:
    """Nanoseconds a block, evicting, in the small and the large pool by turns; and each call's worst case."""
    stocks = {"small": Stock(SMALL_BLOCKS, tokens, 1), "large": Stock(large_blocks, tokens, 2)}
    calls: dict[str, dict[str, list[int]]] = {name: {} for name in stocks}
    hits = dict.fromkeys(stocks, 0)
    batches = BATCHES * LONG_TOKENS // tokens
    freeze()
    for turn in range(batches):
        for name in ("small", "large") if turn % 2 else ("large", "small"):
            prompts = [stocks[name].prompt() for _ in range(BATCH)]
            for prompt in prompts:
                hits[name] += request(stocks[name].governor, prompt, calls[name])
    blocks = tokens // BLOCK_TOKENS
    result: dict[str, Any] = {"prompt_tokens": tokens, "requests": batches * BATCH}
    for name, stock in stocks.items():
        taken = calls[name]
        assert hits[name] == batches * BATCH * stock.half, "every request shares its first half"
        whole = np.sum([taken[call] for call in taken if not call.endswith("wall")], axis=0)
        per_batch = whole.reshape(batches, BATCH).sum(axis=1)
        result[name] = stock.facts() | {
            "ns_per_block": float(np.median(per_batch)) / (BATCH * blocks),
            "ns_per_block_mean": float(per_batch.mean()) / (BATCH * blocks),
            "calls": {call: tail(sample) for call, sample in taken.items()},
            "filling": {call: tail(sample) for call, sample in stock.filling.items()},
        }
    result["ratio"] = result["large"]["ns_per_block"] / result["small"]["ns_per_block"]
    return result


def request(governor: Governor, tokens: Tokens, calls: dict[str, list[int]]) -> int:
    """One request with each call's CPU time kept, and the wall time of the whole."""
    wall, start = perf_counter_ns(), thread_time_ns()
    admission = governor.admit(READER_PRINCIPAL, MODEL, tokens)
    admitted = thread_time_ns()
    assert isinstance(admission, Admission), admission
    governor.commit([admission.request_id], [len(tokens)])
    committed = thread_time_ns()
    governor.release(admission.request_id)
    released = thread_time_ns()
    governor.step()
    stepped = thread_time_ns()
    calls.setdefault("admit", []).append(admitted - start)
    calls.setdefault("commit", []).append(committed - admitted)
    calls.setdefault("release", []).append(released - committed)
    calls.setdefault("step", []).append(stepped - released)
    calls.setdefault("request wall", []).append(perf_counter_ns() - wall)
    return admission.hit_tokens


def tail(sample: list[int]) -> dict[str, float]:
    """Median, 99.9th percentile and maximum, in microseconds."""
    p50, p999, top = np.percentile(sample, (50, 99.9, 100)) / 1000
    return {"p50_us": float(p50), "p99_9_us": float(p999), "max_us": float(top)}


# -- bytes and the check ----------------------------------------------------------------------------------------------


def metadata(run_blocks: int, blocks: int) -> dict[str, Any]:
    """Bytes a block of a pool full of runs of this length, keys and arrays included, as the interpreter traces them."""
    random = np.random.default_rng(run_blocks)
    freeze()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    governor = govern(blocks, BLOCK_TOKENS, Shelf(keeping=False))
    fill(governor, random, run_blocks, blocks)
    gc.collect()
    manager = governor.managers[0]
    traced = tracemalloc.get_traced_memory()[0] - before
    sites = by_file(tracemalloc.take_snapshot(), blocks)
    tracemalloc.stop()
    cached = manager.pool.counts[BlockState.CACHED]
    return {
        "run_blocks": run_blocks,
        "blocks": blocks,
        "cached": cached,
        "nodes": manager.tree.node_count,
        "bytes_per_block": traced / blocks,
        "by_file": sites,
        "check_seconds": timed_check(governor),
    }


def fill(governor: Governor, random: np.random.Generator, run_blocks: int, blocks: int) -> None:
    """Fill the pool, up to its clean reserve, with distinct prompts of `run_blocks` whole blocks."""
    counts = governor.managers[0].pool.counts
    while counts[BlockState.CLEAN] > RESERVE_HIGH:
        serve(
            governor,
            READER_PRINCIPAL,
            random.integers(0, VOCABULARY, run_blocks * BLOCK_TOKENS, dtype=np.int32),
        )


def by_file(snapshot: tracemalloc.Snapshot, blocks: int) -> dict[str, float]:
    """Bytes a block by the source line that allocated them, the largest ten."""
    lines = snapshot.statistics("lineno")[:10]
    return {
        "/".join(Path(line.traceback[0].filename).parts[-2:]) + f":{line.traceback[0].lineno}": line.size / blocks
        for line in lines
    }


def timed_check(governor: Governor) -> float:
    """Seconds of one full check, the median of three; raises where it finds a problem."""
    problems: list[str] = []
    seconds = median(lambda: problems.extend(governor.check()), 3) / 1e9
    if problems:
        raise RuntimeError(f"the check found {problems[:3]}")
    return seconds


# -- lapses -----------------------------------------------------------------------------------------------------------


def lapses(residencies: int, blocks: int) -> dict[str, Any]:
    """Lapse `residencies` over `blocks` in slices; the slice is the largest count that stayed within 1 ms before."""
    clock = VirtualClock()
    governor = overdue(residencies + CALIBRATION, residencies, blocks, clock, 256)
    manager = governor.managers[0]
    tried = {count: max(sweep(manager, clock.now_us(), count, CALIBRATION // (2 * len(SLICES)))) for count in SLICES}
    fitting = [count for count, worst in tried.items() if worst <= 0.8e6]
    count = max(fitting, default=min(SLICES))
    slices = sweep(manager, clock.now_us(), count, residencies)
    governor = overdue(residencies, residencies, blocks, clock, max(1, count // 2))
    steps = []
    while len(governor.managers[0].hold_table):
        start = thread_time_ns()
        governor.step()
        steps.append(thread_time_ns() - start)
    return {
        "residencies": residencies,
        "blocks": blocks,
        "slice": count,
        "tried_ms": {str(key): value / 1e6 for key, value in tried.items()},
        "seconds": sum(slices) / 1e9,
        "slice_max_ms": max(slices) / 1e6,
        "slice_median_ms": float(np.median(slices)) / 1e6,
        "step_slice": max(1, count // 2),
        "steps": tail(steps) | {"seconds": sum(steps) / 1e9},
    }


def overdue(count: int, residencies: int, blocks: int, clock: VirtualClock, sweep_batch: int) -> Governor:
    """A pool with `count` residencies of blocks / residencies blocks each, all past their deadline."""
    room = int(blocks * 1.15)
    governor = govern(room, BLOCK_TOKENS, Shelf(keeping=False), clock=clock, sweep_batch=sweep_batch)
    random = np.random.default_rng(0)
    run_tokens = blocks // residencies * BLOCK_TOKENS
    for _ in range(count):
        serve(governor, READER_PRINCIPAL, random.integers(0, VOCABULARY, run_tokens, dtype=np.int32))
        clock.advance(100)
    clock.advance(2 * 86_400 * 1_000_000)
    freeze()
    return governor


def sweep(manager: BlockManager, now_us: int, count: int, residencies: int) -> list[int]:
    """Lapse about `residencies` in slices of `count`; each slice's nanoseconds."""
    taken: list[int] = []
    lapsed = 0
    while lapsed < residencies:
        start = thread_time_ns()
        done = manager.sweep(now_us, at_most=count)
        taken.append(thread_time_ns() - start)
        if not done:
            raise RuntimeError("fewer holds than expected")
        lapsed += done
    return taken


# -- the command ------------------------------------------------------------------------------------------------------


def freeze() -> None:
    """Collect what is left over, then put the rest out of the collector's sight."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def measure(parts: list[str], blocks: int) -> Iterator[tuple[str, Any]]:
    """Each part by name, one after the other."""
    if "decision" in parts:
        yield "decision", decision()
    if "cost" in parts:
        yield "cost_long", cost(LONG_TOKENS, blocks)
    if "short" in parts:
        yield "cost_short", cost(SHORT_TOKENS, blocks)
    if "lapse" in parts:
        yield "lapse", lapses(LAPSE_RESIDENCIES, LAPSE_BLOCKS)
    if "bytes" in parts:
        for run_blocks in RUNS:
            yield f"bytes_{run_blocks}", metadata(run_blocks, blocks)


def markdown(results: dict[str, Any]) -> str:
    """One row a goal, then the worst calls."""
    rows: list[list[str]] = []

    def row(what: str, value: float, goal: str, text: str) -> None:
        limit = GOALS[goal]
        rows.append([what, text, f"≤ {limit:g} {'met' if value <= limit else 'missed'}"])

    if "decision" in results:
        point = results["decision"]
        row("decision, own, ns", point["own_ns"], "decision_ns", f"{point['own_ns']:.0f}")
        row("decision, grant, ns", point["grant_ns"], "decision_ns", f"{point['grant_ns']:.0f}")
    for name in ("cost_long", "cost_short"):
        if name in results:
            point = results[name]
            small, large = point["small"]["ns_per_block"], point["large"]["ns_per_block"]
            text = f"{point['ratio']:.2f} ({large:.0f} over {small:.0f} ns)"
            row(
                f"block at {point['large']['blocks']:,} over {point['small']['blocks']:,}, "
                f"{point['prompt_tokens']:,} tokens",
                point["ratio"],
                "cost_ratio",
                text,
            )
    if "lapse" in results:
        point = results["lapse"]
        what = f"lapse {point['residencies']:,} residencies over {point['blocks']:,} blocks"
        row(f"{what}, s", point["seconds"], "lapse_seconds", f"{point['seconds']:.3f}")
        row(
            f"worst slice of {point['slice']}, ms",
            point["slice_max_ms"],
            "lapse_slice_ms",
            f"{point['slice_max_ms']:.3f}",
        )
        steps = point["steps"]
        row(
            f"the same with scrub and evidence, in engine steps of {point['step_slice']}, s",
            steps["seconds"],
            "lapse_seconds",
            f"{steps['seconds']:.3f}",
        )
        row("worst such step, ms", steps["max_us"] / 1000, "lapse_slice_ms", f"{steps['max_us'] / 1000:.3f}")
    for run_blocks in RUNS:
        point = results.get(f"bytes_{run_blocks}")
        if point is not None:
            row(
                f"bytes a block, runs of {run_blocks}",
                point["bytes_per_block"],
                "bytes_per_block",
                f"{point['bytes_per_block']:.0f}",
            )
            row(
                f"full check of {point['blocks']:,} blocks, runs of {run_blocks}, s",
                point["check_seconds"],
                "check_seconds",
                f"{point['check_seconds']:.2f}",
            )
    parts = [table(["measure", "value", "goal"], rows)]
    parts += [worst(results[name]) for name in ("cost_long", "cost_short") if name in results]
    return "\n\n".join(parts)


def worst(one: dict[str, Any]) -> str:
    """Each call's median and worst case in the large pool."""
    large = one["large"]
    title = f"{large['blocks']:,} blocks, {one['prompt_tokens']:,} tokens ({one['requests']:,} requests)"
    rows = [
        [call, *(f"{spread[key]:,.1f}" for key in ("p50_us", "p99_9_us", "max_us"))]
        for call, spread in large["calls"].items()
    ]
    rows += [
        [
            f"{call}, while the pool filled",
            *(f"{spread[key]:,.1f}" for key in ("p50_us", "p99_9_us", "max_us")),
        ]
        for call, spread in large["filling"].items()
    ]
    rows.append([f"largest stripe of the index: {large['largest_stripe']} of {large['index_entries']:,}", "", "", ""])
    return table([title, "median µs", "p99.9 µs", "max µs"], rows)


PARTS = "decision,cost,short,lapse,bytes"


def main() -> None:
    """Measure the chosen parts, print the tables, write the result file."""
    bench = Bench(__doc__, "kvcustody", "numpy", only=f"parts, of {PARTS}")
    bench.add("--blocks", type=int, default=LARGE_BLOCKS, help="the large pool (%(default)s)")
    options = bench.parse()
    gc.disable()
    results: dict[str, Any] = {}
    for name, values in measure((options.only or PARTS).split(","), options.blocks):
        results[name] = values
        print(f"{name}: {json.dumps(values)}", file=sys.stderr, flush=True)
        freeze()
    print(markdown(results))
    bench.keep({"benchmark": "scale", "goals": GOALS, "results": results})


if __name__ == "__main__":
    main()
