"""What each eviction policy saves: prefill tokens and seconds against LRU and the offline optimum, and to whom.

    python benchmarks/eviction.py [--traces FOLDER] [--only agentic] [--quick] [--json FILE] [--page FILE]
    python benchmarks/eviction.py --again value --from FILE --json FILE [--page FILE]    # one of ours, the rest as kept
    python benchmarks/eviction.py --kinds [--quick]       # what declared kinds of content save, on generated agents

The product's policies run in the product's own block manager; published ones that it lacks run in a simulator that
equals it: under LRU both must find the same blocks in every request, or the run stops.

1. Pools are shares of a workload's distinct blocks, from where LRU finds little to where it finds nearly all.
2. `closed` is how much of the distance from LRU to the offline optimum a policy covers, in blocks found.
3. The optimum is exact for blocks; for seconds, whose costs differ, `≤` is a bound that nobody need reach.
4. Requests are served one at a time in time order; an age is counted from the start of a request.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent / "harness"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "eviction_sim"))

from bench import Bench, table
from bound import seconds_bound
from page import write_page
from prefill import block_seconds
from product import replay
from published import PUBLISHED
from simulator import LeafHeap, guesses_next_use, knows_dead, lru, offline_optimum, simulate
from streams import Stream
from workloads import workloads

from kvcustody.allocator.prefix.block_priority import END, BlockPriority
from kvcustody.allocator.prefix.eviction_policy import POLICIES
from kvcustody.lab.replay.run.golden_check import find_traces

SKIPPED = ("priority",)  # ranks by what a request declares; traces declare nothing, so it is LRU
OPTIMUM, DEAD = "offline optimum", "LRU that knows what is dead"
WORTH_CLOSING = 0.01  # of what LRU finds
GUESSES = {"next use to a factor of 2": 2.0, "next use to a factor of 8": 8.0}


def measure(stream: Stream, capacity: int) -> dict[str, Any]:
    """Every policy's figures in one pool, and the bounds."""
    by_policy: dict[str, list[int]] = {}
    for name, policy in POLICIES.items():
        if name not in SKIPPED:
            by_policy[name] = replay(stream, capacity, policy)
    if simulate(stream, capacity, LeafHeap(stream, lru)) != by_policy["lru"]:
        raise RuntimeError(f"{stream.name}, {capacity} blocks: the simulator's LRU is not the product's")
    for name, make in PUBLISHED.items():
        by_policy[name] = simulate(stream, capacity, make(stream))
    by_policy[DEAD] = simulate(stream, capacity, knows_dead(stream))
    for name, factor in GUESSES.items():
        by_policy[name] = simulate(stream, capacity, guesses_next_use(stream, factor))
    by_policy[OPTIMUM] = simulate(stream, capacity, offline_optimum(stream))
    rows = {name: figures(stream, hits) for name, hits in by_policy.items()}
    base, best = rows["lru"]["blocks"], rows[OPTIMUM]["blocks"]
    for row in rows.values():
        row["closed"] = (row["blocks"] - base) / (best - base) if best > base else None
        row["against_lru"] = row["blocks"] / base - 1 if base else None
        if row["blocks"] > best:
            raise RuntimeError(f"{stream.name}, {capacity} blocks: a policy exceeds the optimum")
    reached = max(row["seconds"] for row in rows.values())
    return {"capacity": capacity, "policies": rows, "seconds_bound": seconds_bound(stream, capacity, reached)}


def measure_again(stream: Stream, name: str, pools: list[dict[str, Any]]) -> None:
    """The figures of one of the product's policies, into what was measured before of the same stream."""
    for pool in pools:
        rows = pool["policies"]
        lru_found = figures(stream, replay(stream, pool["capacity"], POLICIES["lru"]))["blocks"]
        if lru_found != rows["lru"]["blocks"]:
            raise RuntimeError(f"{stream.name}: LRU finds {lru_found} blocks, not {rows['lru']['blocks']} as kept")
        row = figures(stream, replay(stream, pool["capacity"], POLICIES[name]))
        base, best = rows["lru"]["blocks"], rows[OPTIMUM]["blocks"]
        row["closed"] = (row["blocks"] - base) / (best - base) if best > base else None
        row["against_lru"] = row["blocks"] / base - 1 if base else None
        order = [*(each for each in POLICIES if each in rows or each == name), *rows]
        pool["policies"] = {each: row if each == name else rows[each] for each in order}


def figures(stream: Stream, hits: list[int]) -> dict[str, Any]:
    """Of one policy: prefill avoided, in blocks, tokens and seconds, and how evenly over the tenants."""
    cost = block_seconds(stream)
    tokens = [min(h * stream.block_tokens, t) for h, t in zip(hits, stream.tokens, strict=True)]
    by_tenant: dict[int, list[int]] = {}
    for tenant, saved, asked in zip(stream.tenants, tokens, stream.tokens, strict=True):
        sums = by_tenant.setdefault(tenant, [0, 0])
        sums[0] += saved
        sums[1] += asked
    shares = np.array([saved / asked for saved, asked in by_tenant.values()])
    squares = float((shares**2).sum())
    return {
        "blocks": sum(hits),
        "tokens": sum(tokens),
        "hit_share": sum(tokens) / sum(stream.tokens),
        "seconds": float(cost[hits].sum()),
        "seconds_share": float(cost[hits].sum() / cost[[len(chain) for chain in stream.chains]].sum()),
        "tenant_min": float(shares.min()),
        "tenant_median": float(np.median(shares)),
        "jain": float(shares.sum() ** 2 / (len(shares) * squares)) if squares else 1.0,
    }


def goals(results: Mapping[str, Any]) -> dict[str, Any]:
    """Each policy's least gain on LRU anywhere, and what it closes on the agentic workloads that are reported.

    Pools in which the optimum finds hardly more than LRU leave nothing to close, and are left out of the second.
    """
    summary: dict[str, Any] = {}
    names = next(iter(results.values()))["pools"][0]["policies"]
    for name in names:
        losses, closed = [], []
        for workload, result in results.items():
            for pool in result["pools"]:
                row = pool["policies"][name]
                if row["against_lru"] is None:
                    continue
                losses.append(row["against_lru"])
                distance = pool["policies"][OPTIMUM]["against_lru"]
                if workload.startswith("agent") and result["role"] == "report" and distance >= WORTH_CLOSING:
                    closed.append(row["closed"])
        summary[name] = {
            "least_against_lru": min(losses),
            "closed_agentic_mean": float(np.mean(closed)) if closed else None,
            "closed_agentic_least": min(closed) if closed else None,
        }
    return summary


def declared(stream: Stream) -> dict[str, list[tuple[BlockPriority, ...]]]:
    """What agents could declare: their system prompts (which roles say) at 90, what a failed call gave at 0."""
    system = [(BlockPriority(0, blocks, 90, 0),) for blocks in stream.system_blocks]
    failed = [() if at is None else (BlockPriority(at, END, 0, 0),) for at in stream.failed_from]
    both = [one + other for one, other in zip(system, failed, strict=True)]
    return {"system prompts": system, "failed calls": failed, "both": both}


def kinds(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Blocks that declared kinds find against the same policy without them, and against LRU, on generated agents."""
    results: dict[str, Any] = {}
    for workload in workloads(None, quick=quick):
        stream = workload.make()
        if not stream.system_blocks:
            continue
        rows: dict[str, list[float]] = {}
        pools = [max(stream.longest + 1, int(share * stream.unique_blocks)) for share in workload.shares]
        for capacity in pools:
            base = sum(replay(stream, capacity, POLICIES["lru"]))
            for policy in ("priority", "cost"):
                rows.setdefault(f"{policy}, nothing", []).append(
                    sum(replay(stream, capacity, POLICIES[policy])) / base - 1
                )
                for name, priorities in declared(stream).items():
                    hits = sum(replay(stream, capacity, POLICIES[policy], priorities))
                    rows.setdefault(f"{policy}, {name}", []).append(hits / base - 1)
        cells = [[name, *(f"{value:+.2%}" for value in row)] for name, row in rows.items()]
        say(table([f"{workload.name}, against LRU", *(f"{pool:,}" for pool in pools)], cells) + "\n")
        results[workload.name] = {"pools": pools, "against_lru": rows}
    return results


def show(name: str, result: Mapping[str, Any]) -> str:
    """One workload: a row a policy, the share of prompt tokens found in each pool and the distance closed."""
    pools = result["pools"]
    rows = []
    for policy in pools[0]["policies"]:
        cells = []
        for pool in pools:
            row = pool["policies"][policy]
            closed = "" if row["closed"] is None or policy == "lru" else f" ({row['closed']:+.0%})"
            cells.append(f"{row['hit_share']:.3f}{closed}")
        rows.append([policy, *cells])
    return table([f"{name} ({result['role']})", *(f"{pool['capacity']:,}" for pool in pools)], rows)


def run(folder: Path | None, only: str | None, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Every chosen workload in every pool."""
    results: dict[str, Any] = {}
    for workload in workloads(folder, quick=quick):
        if only and only not in workload.name:
            continue
        begin = perf_counter()
        stream = workload.make()
        pools = []
        for share in workload.shares:
            capacity = max(stream.longest + 1, int(share * stream.unique_blocks))
            pools.append({"share": share} | measure(stream, capacity))
        results[workload.name] = {
            "role": workload.role,
            "requests": len(stream.paths),
            "blocks": sum(map(len, stream.chains)),
            "distinct_blocks": stream.unique_blocks,
            "block_tokens": stream.block_tokens,
            "pools": pools,
        }
        say(show(workload.name, results[workload.name]) + f"\n{perf_counter() - begin:.0f} s\n")
    return results


def run_again(
    folder: Path | None, name: str, kept: dict[str, Any], only: str | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """What was kept, with one policy of ours measured now beside it, in the workloads chosen."""
    results: dict[str, Any] = kept["results"]
    for workload in workloads(folder):
        if (only and only not in workload.name) or workload.name not in results:
            continue
        begin = perf_counter()
        measure_again(workload.make(), name, results[workload.name]["pools"])
        say(show(workload.name, results[workload.name]) + f"\n{perf_counter() - begin:.0f} s\n")
    return results


def main() -> None:
    """Measure, print, keep; `--page` also writes the tables and plots of the documentation."""
    bench = Bench(__doc__, "kvcustody", "numpy", only="workloads whose name contains this")
    bench.add("--traces", type=Path, default=find_traces(), help="recorded traces (%(default)s)")
    bench.add("--quick", action="store_true", help="small generated workloads alone")
    bench.add("--page", type=Path, help="rewrite the measured part of this page, and the plots beside it")
    bench.add("--kinds", action="store_true", help="declared kinds of content alone, on generated agents")
    bench.add("--again", choices=sorted(POLICIES), help="measure this policy of ours alone, beside what is kept")
    bench.add("--from", dest="kept", type=Path, help="with --again: what was kept before")
    options = bench.parse()
    if options.kinds:
        bench.keep({"benchmark": "eviction-kinds", "results": kinds(options.quick, print)})
        return
    if options.traces is None and not options.quick:
        print("no recorded traces here: generated workloads alone", file=sys.stderr)
    if options.again:
        kept = json.loads(options.kept.read_text())
        results = run_again(options.traces, options.again, kept, options.only, lambda text: print(text, flush=True))
    else:
        results = run(options.traces, options.only, options.quick, lambda text: print(text, flush=True))
    summary = goals(results)
    rows = [
        [name, f"{of['least_against_lru']:+.1%}"]
        + [f"{of[key]:+.0%}" if of[key] is not None else "" for key in ("closed_agentic_mean", "closed_agentic_least")]
        for name, of in summary.items()
    ]
    print(table(["policy", "least against LRU, anywhere", "closed, agents, mean", "closed, agents, least"], rows))
    found: dict[str, Any] = {"benchmark": "eviction", "results": results, "summary": summary}
    if options.again:
        found["again"] = {"policy": options.again, "others_measured_at": kept["facts"]["commit"]}
    bench.keep(found)
    if options.page is not None:
        write_page(options.page, found)


if __name__ == "__main__":
    main()
