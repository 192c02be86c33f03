"""What the measures of serving cost on vLLM's scheduler: the same requests with them, without, and under plain vLLM.

    .venv-vllm/bin/python benchmarks/engines/vllm_measures.py [--twin] [--json FILE]

Two governed engines and a plain one, all of one process, take turns, unit by unit, with the workloads of
`vllm_cost.py`; only one runs at a time. The measures are on in one of the two governed engines, and change sides every
stretch of units, whose first part counts for nothing: engines of one kind differ by more than what is looked for. The
figure is CPU time of the engine's thread in its steps, on their way and while the workers compute, less what the
stand-in for the workers takes. Where measures are off, there is a silent stand-in for each thing that counts: the
distributions of times and hits, who waits for a first token, the ghosts of what was evicted and the keys by which they
are known again. The keys that a publication carries along are a slice on both sides.

`of_plain`: what the measures add to a unit, over plain vLLM's time for it; the goal is 2 %. `ratio`: governed with over
governed without. Both are medians of a stretch's units, put together so that what is constant in an engine falls out,
with their 95 % interval. `--twin`: silent on both sides, which is this machine's noise. `snapshot_us`: one look at
everything, as a scrape takes it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from time import thread_time_ns
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "lib"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench, Silent, nothing, turned
from spread import spread
from vllm_cost import ARRIVALS, DECODE_STEPS, Side, side_settings

GOVERNED = ("first", "second")
GOAL = 0.02
SNAPSHOTS, RESAMPLES = 20, 2_000


class Unkept(dict[Any, Any]):
    """Keeps nothing."""

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def update(self, *given: object, **named: object) -> None:
        """Nothing."""


class Switch:
    """The measures of one governed engine."""

    def __init__(self, engine: Any) -> None:
        side = engine.scheduler.connector.scheduler_side
        port, state = side.port, side.state
        silent = {
            port: {"measures": Silent(), "evicted_blocks": Silent()},
            port._books: {"evicted_blocks": Silent()},
            state: {"_wait_for_token": Unkept(), "note_first_tokens": nothing},
        }
        self._parts = [
            (owner, name, getattr(owner, name), quiet)
            for owner, names in silent.items()
            for name, quiet in names.items()
        ]
        self._waiting: dict[str, Any] = state._wait_for_token

    def turn(self, on: bool) -> None:
        """On or off. Who waited for a token before is not waited for any more: its end was not told here."""
        self._waiting.clear()
        for owner, name, real, quiet in self._parts:
            setattr(owner, name, real if on else quiet)


def snapshot_us(engine: Any) -> float:
    """One snapshot of the port, in microseconds of the engine's thread."""
    port, spent = engine.scheduler.connector.scheduler_side.port, []
    for _ in range(SNAPSHOTS):
        start = thread_time_ns()
        port.stats()
        spent.append(thread_time_ns() - start)
    return round(float(np.median(spent)) / 1000, 1)


class Sides:
    """The three engines of each workload."""

    def __init__(self, model: str, folder: Path, seed: int) -> None:
        self._settings = {
            name: side_settings(folder / name, governed=name in GOVERNED) | {"VLLM_PLUGINS": "kvcustody"}
            for name in (*GOVERNED, "plain")
        }
        self._sides: dict[str, Side] = {}
        for name, settings in self._settings.items():
            os.environ.update(settings)
            self._sides[name] = Side(model, name in GOVERNED, seed)
        self._switches = {name: Switch(self._sides[name]._churn) for name in GOVERNED}
        self._first = self._switches["first"]

    def begin_decode(self) -> None:
        """Fill the engines of the second workload."""
        for name, side in self._sides.items():
            os.environ.update(self._settings[name])
            side.decode()
        self._switches = {name: Switch(self._sides[name]._decode) for name in GOVERNED}

    def stretch(self, workload: str, on: str | None, units: int, warm_units: int) -> dict[str, list[int]]:
        """CPU time of the engine's thread for each unit, in turns; measured in the engine `on`."""
        for name, switch in self._switches.items():
            switch.turn(name == on)
        spent: dict[str, list[int]] = {name: [] for name in self._sides}
        for unit in range(-warm_units, units):
            finished = set()
            for name in turned(list(self._sides), unit):
                done = getattr(self._sides[name], workload)()
                finished.add(done["finished"])
                if unit >= 0:
                    spent[name].append(done["engine_ns"] + done["waiting_ns"])
            if len(finished) > 1:
                print(f"{workload}: the sides finished requests at different steps", file=sys.stderr)
        return spent

    def snapshot_us(self) -> float:
        """Of a full pool and its churny workload."""
        self._first.turn(on=True)
        return snapshot_us(self._sides["first"]._churn)


def figures(stretches: list[tuple[str, dict[str, list[int]]]], per: int) -> dict[str, Any]:
    """One workload's line. Stretches by the side on which the measures were."""
    of: dict[str, dict[str, Any]] = {}
    for side in GOVERNED:
        mine = [spent for on, spent in stretches if on == side]
        of[side] = {name: np.concatenate([spent[name] for spent in mine]) for name in mine[0]}
    random = np.random.default_rng(0)
    found = np.array([_compared(of, random if resample else None) for resample in (False, *[True] * RESAMPLES)])
    low, high = np.percentile(found[1:], (2.5, 97.5), axis=0)
    ratio, of_plain = (
        {"value": round(found[0, at], 4), "low": round(low[at], 4), "high": round(high[at], 4)} for at in (0, 1)
    )
    plain = np.concatenate([of[side]["plain"] for side in GOVERNED])
    return {
        "units": len(plain),
        "plain": spread([value // per for value in plain])._asdict(),
        "ratio": ratio,
        "of_plain": of_plain,
        "goal": GOAL,
        "met": bool(of_plain["value"] <= GOAL),
    }


def _compared(of: dict[str, dict[str, Any]], random: np.random.Generator | None) -> tuple[float, float]:
    ratios, differences = [], []
    for on, other in (GOVERNED, GOVERNED[::-1]):
        spent, units = of[on], len(of[on]["plain"])
        chosen = slice(None) if random is None else random.integers(0, units, units)
        with_ns, without_ns, plain_ns = (spent[name][chosen] for name in (on, other, "plain"))
        ratios.append(np.median(with_ns / without_ns))
        differences.append(np.median((with_ns - without_ns) / plain_ns))
    return float(np.sqrt(np.prod(ratios))), float(np.mean(differences))


def main() -> int:
    """Measure, print, and write the result file where asked."""
    bench = Bench(__doc__, "kvcustody", "torch", "numpy", rounds=4, strict=True, pin=True)
    bench.add("--twin", action="store_true", help="silent against silent: the noise of this machine")
    bench.add("--units", type=int, default=60, help="of a stretch that count (default: %(default)s)")
    bench.add("--warm", type=int, default=30, help="of a stretch that do not (default: %(default)s)")
    bench.add("--seed", type=int, default=1)
    options = bench.parse()
    from standins.engines.vllm.tiny_model import save_model

    result: dict[str, Any] = {"settings": {"units": options.units, "seed": options.seed, "twin": options.twin}}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:  # the engines live until we exit
        folder = Path(temporary)
        model = save_model(folder / "model", context_tokens=8192)
        sides = Sides(str(model), folder, options.seed)
        for workload, per in (("churny", ARRIVALS), ("decode", DECODE_STEPS)):
            if workload == "decode":
                sides.begin_decode()
            gc.collect()
            gc.freeze()
            gc.disable()
            stretches = [
                (on, sides.stretch(workload, None if options.twin else on, options.units, options.warm))
                for _ in range(options.rounds)
                for on in GOVERNED
            ]
            gc.enable()
            result[workload] = figures(stretches, per)
            print(workload, json.dumps(result[workload]), flush=True)
        if not options.twin:
            result["snapshot_us"] = sides.snapshot_us()
            print("snapshot_us", result["snapshot_us"], flush=True)
    bench.keep(result)
    return bench.status(result["churny"]["met"] and result["decode"]["met"])


if __name__ == "__main__":
    sys.exit(main())
