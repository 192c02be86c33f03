"""What governance costs an SGLang engine, governed over plain: scheduler CPU time a request, and tokens per second.

    .venv-sglang/bin/python benchmarks/engines/sglang_cost.py [--page-size 16] [--pairs 3] [--twin] [--json FILE]

- The two engines live in processes of their own and take turns, unit by unit, with the same requests; the other one
   sleeps. A unit is a number of requests at once: prompts of 64 to 600 tokens, half of which begin as an earlier one of
   their tenant did, and a pool that is full after a while.
- CPU time is the scheduler's thread on the way of requests (arrival, scheduling, the step's preparation, results),
   without the model, which runs in the same thread. Scrubs run in it too, here on the host's memory: the ratio is given
   with and without them, which on a device are the device's. The ledger's writer is a thread of its own.
- `ratio` is the median of the units' ratios, each of the same requests on both sides, one after the other. Tokens per
   second are wall time with a model of 140 thousand weights: this bounds what a real model would see. `--twin` compares
   plain with plain: this machine's noise. Two engines of one kind differ by some hundredths, so several pairs are made.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
for _folder in ("tests/engines/sglang", "tests/engines/vllm", "benchmarks/harness"):
    sys.path.insert(0, str(_ROOT / _folder))

TENANTS, AT_ONCE, NEW_TOKENS = 6, 8, 16
WARM = 6  # units that count for nothing
GOALS = {"scheduler_cpu": 1.10, "tokens_per_second": 0.97}


def serve(pipe: Connection, model: str, site: list[str], governed: bool, page_size: int) -> None:
    """One side's process: does a unit when told to."""
    sys.path[:0] = site
    from deployment import POLICY, Deployment
    from sglang_engine import SglangEngine

    sampled = POLICY.replace("verify: all", "verify: 1/64")  # as a policy for serving has it
    deployment = Deployment(Path(tempfile.mkdtemp()), sampled) if governed else None
    engine = SglangEngine(
        Path(model),
        site,
        deployment=deployment,
        settings={"SGLANG_PROBE_BLIND": "1", "KVCUSTODY_LOG_LEVEL": "error"},
        page_size=page_size,
        max_total_tokens=8192,
        chunked_prefill_size=512,
        max_running_requests=AT_ONCE,
        sleep_on_idle=True,
    )
    pipe.send("ready")
    while (unit := pipe.recv()) is not None:
        batch = [
            (tokens, deployment.token(tenant) if deployment is not None else tenant)
            for tenant, tokens in unit
        ]
        before = engine.probe("spent")
        began = time.monotonic_ns()
        answers = engine.run_all(batch, NEW_TOKENS)
        wall_ns = time.monotonic_ns() - began
        after = engine.probe("spent")
        pipe.send(
            {
                "scheduler_ns": after["scheduler_ns"] - before["scheduler_ns"],
                "scrub_ns": after["scrub_ns"] - before["scrub_ns"],
                "wall_ns": wall_ns,
                "cached": sum(answer.cached_tokens for answer in answers),
                "tokens": [answer.tokens for answer in answers],
            }
        )
    engine.close()


def units(count: int, seed: int = 3) -> list[list[tuple[str, list[int]]]]:
    """Requests, a function of the seed."""
    random = Random(seed)
    heads: dict[str, list[list[int]]] = {}
    made = []
    for _ in range(count):
        unit = []
        for _ in range(AT_ONCE):
            tenant = f"tenant-{random.randrange(TENANTS)}"
            own = heads.setdefault(tenant, [])
            length = int(2 ** random.uniform(6, 9.2))
            head = random.choice(own) if own and random.random() < 0.5 else []
            head = head[: int(len(head) * random.uniform(0.3, 1.0))]
            tokens = head + [random.randrange(16, 500) for _ in range(max(1, length - len(head)))]
            own.append(tokens)
            unit.append((tenant, tokens))
        made.append(unit)
    return made


def pair(model: str, site: list[str], work: list[Any], *, twin: bool, page_size: int) -> dict[str, list[Any]]:
    """Two new engines, and what each did with every unit, in turns."""
    context = multiprocessing.get_context("spawn")
    sides: dict[str, Any] = {}
    for name, governed in (("plain", False), ("governed", not twin)):
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(there, model, site, governed, page_size))
        process.start()
        assert here.poll(180) and here.recv() == "ready", f"the {name} engine did not start"
        sides[name] = (here, process)
    found: dict[str, list[Any]] = {"plain": [], "governed": []}
    for number, unit in enumerate(work):
        for name in ("plain", "governed") if number % 2 else ("governed", "plain"):
            sides[name][0].send(unit)
            found[name].append(sides[name][0].recv())
    for pipe, process in sides.values():
        pipe.send(None)
        process.join(60)
        if process.is_alive():
            os.kill(process.pid, 9)
    return found


def main() -> int:
    """Run both sides in turns."""
    from bench import Bench
    from engine_site import add_distribution
    from spread import paired, spread
    from tiny_model import save_model

    bench = Bench(__doc__, "numpy", "torch", "sglang", rounds=30, strict=True)
    bench.add("--page-size", type=int, default=16)
    bench.add("--twin", action="store_true", help="plain against plain")
    bench.add("--pairs", type=int, default=3, help="of engines, one after the other (default: %(default)s)")
    options = bench.parse()
    folder = Path(tempfile.mkdtemp())
    model = save_model(folder / "model")
    add_distribution(
        folder / "site", "sglang-probe", "0", "[sglang.srt.plugins]\nprobe = sglang_probe:register\n"
    )
    site = [str(folder / "site"), str(_ROOT / "tests/engines/sglang"), str(_ROOT / "tests/engines/vllm")]
    found: dict[str, list[dict[str, Any]]] = {"plain": [], "governed": []}
    differing = 0
    for _ in range(options.pairs):
        each = pair(
            str(model), site, units(options.rounds + WARM), twin=options.twin, page_size=options.page_size
        )
        differing += sum(
            a["tokens"] != b["tokens"] for a, b in zip(each["plain"], each["governed"], strict=True)
        )
        for name, one in each.items():
            found[name] += one[WARM:]
    cpu = {name: [one["scheduler_ns"] / AT_ONCE for one in each] for name, each in found.items()}
    bare = {
        name: [(one["scheduler_ns"] - one["scrub_ns"]) / AT_ONCE for one in each]
        for name, each in found.items()
    }
    rate = {name: [1e9 / one["wall_ns"] for one in each] for name, each in found.items()}
    figures = {
        "page_size": options.page_size,
        "twin": options.twin,
        "pairs_of_engines": options.pairs,
        "units": options.rounds * options.pairs,
        "requests_per_unit": AT_ONCE,
        "units_with_other_tokens": differing,
        "cached_tokens": {name: sum(one["cached"] for one in each) for name, each in found.items()},
        "scheduler_cpu_per_request_us": {name: spread(each)._asdict() for name, each in cpu.items()},
        "scheduler_cpu": paired(cpu["governed"], cpu["plain"])._asdict(),
        "scheduler_cpu_without_scrubs": paired(bare["governed"], bare["plain"])._asdict(),
        "tokens_per_second": paired(rate["governed"], rate["plain"])._asdict(),
        "goals": GOALS,
    }
    bench.keep(figures, show=True)
    met = figures["scheduler_cpu"]["value"] <= GOALS["scheduler_cpu"]
    return bench.status(met and figures["tokens_per_second"]["value"] >= GOALS["tokens_per_second"])


if __name__ == "__main__":
    sys.exit(main())
