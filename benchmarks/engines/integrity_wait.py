"""What a comparison with checksums costs a hit beside vLLM: time to first token with `verify: all` and with `none`.

    .venv-vllm/bin/python benchmarks/engines/integrity_wait.py [--rounds 60] [--json FILE]

A request that would reuse compared blocks waits for the workers' answer, which comes with the step after: that wait is
what is measured, not the reading, which is small here and is measured on devices (`device/integrity.py`). Two governed
engines of three processes each, the tiny model, on a CPU, take turns, request by request; which comes first turns, too.
`idle`: nothing else runs in the engine. `busy`: another request decodes in it, so that there are steps to ride on.
The figure is wall time from the hand-in of a hit of `HIT_TOKENS` tokens to its first token, as the client sees it: the
median of pairs' ratios and differences, with their 95 % interval, and the difference of the fastest tenths, which
others on the machine disturb less. `twin`: `none` against `none`, which is the noise.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "lib"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench, alternate

from standins.engines.vllm.deployment import POLICY, Deployment
from standins.engines.vllm.engine_site import enter_site, make_site
from standins.engines.vllm.local_engine import BLOCK, LocalEngine
from standins.engines.vllm.tiny_model import save_model

HIT_TOKENS = 12 * BLOCK
RESAMPLES = 2_000
VERIFY = {"all": "all", "none": "none", "twin": "none"}


def tokens(seed: int, count: int) -> list[int]:
    """A prompt that shares no block with that of another seed."""
    return [20 + seed % 400, *((seed * 53 + 7 * at) % 480 + 20 for at in range(1, count))]


class Side:
    """One governed engine in which a prompt is cached."""

    def __init__(self, model: Path, site: list[str], folder: Path, verify: str) -> None:
        folder.mkdir()
        policy = f"{POLICY}integrity: {{default: {{verify: {verify}}}}}\n"
        self.engine = LocalEngine(model, site, deployment=Deployment(folder, policy=policy))
        self._prompt = tokens(1, HIT_TOKENS + 1)
        self._asked = 0
        self.hit()

    def hit(self) -> float:
        """Microseconds from the hand-in to the first token."""
        engine = self.engine
        began = time.perf_counter()
        name = engine.submit(self._prompt, tenant="alpha", max_tokens=1)
        while True:
            done = engine.step()
            if name in done:
                break
        spent = time.perf_counter() - began
        self._asked += 1
        if self._asked > 1 and done[name].cached_tokens != HIT_TOKENS:
            raise RuntimeError(f"{done[name].cached_tokens} tokens were found, not {HIT_TOKENS}")
        return spent * 1e6

    def busy_hit(self) -> float:
        """The same beside a request that decodes."""
        other = self.engine.submit(tokens(900 + self._asked, 8), tenant="beta", max_tokens=64)
        for _ in range(4):
            self.engine.step()
        spent = self.hit()
        self.engine.abort(other)
        while self.engine.engine.has_unfinished_requests():
            self.engine.step()
        return spent

    def checked(self) -> int:
        """Blocks that were compared."""
        return int(self.engine.governance("stats")["integrity"]["checked"])


def paired(one: list[float], other: list[float]) -> dict[str, Any]:
    """One side against the other, by pairs."""
    a, b = np.array(one), np.array(other)
    random = np.random.default_rng(0)
    rows = random.integers(0, len(a), (RESAMPLES, len(a)))
    figures: dict[str, Any] = {
        "one_us": round(float(np.median(a)), 1),
        "other_us": round(float(np.median(b)), 1),
    }
    quiet = np.percentile(a[rows], 10, axis=1) - np.percentile(b[rows], 10, axis=1)
    figures["difference_of_tenths_us"] = {
        "value": round(float(np.percentile(a, 10) - np.percentile(b, 10)), 1),
        "low": round(float(np.percentile(quiet, 2.5)), 1),
        "high": round(float(np.percentile(quiet, 97.5)), 1),
    }
    for name, values in (("difference_us", a - b), ("ratio", a / b)):
        low, high = np.percentile(np.median(values[rows], axis=1), (2.5, 97.5))
        figures[name] = {
            "value": round(float(np.median(values)), 3),
            "low": round(float(low), 3),
            "high": round(float(high), 3),
        }
    return figures


def measure(sides: dict[str, Side], rounds: int, result: dict[str, Any]) -> None:
    """Both ways, into `result`; raises where what was to be compared was not."""
    for name, way in (("idle", Side.hit), ("busy", Side.busy_hit)):
        ways: dict[str, Callable[[], float]] = {
            side: (lambda one=one, way=way: way(one)) for side, one in sides.items()
        }
        rows = alternate(ways, rounds, warm=5)
        result[name] = paired(rows["all"], rows["none"])
        result[f"{name}, twin"] = paired(rows["twin"], rows["none"])
        print(name, result[name], "twin", result[f"{name}, twin"], flush=True)
    checked = {name: side.checked() for name, side in sides.items()}
    if not checked["all"] or checked["none"]:
        raise RuntimeError(f"compared: {checked}")
    result["compared_blocks"] = checked


def main() -> None:
    """Measure, print, keep."""
    bench = Bench(__doc__, "kvcustody", "vllm", "torch", "numpy", rounds=60)
    options = bench.parse()
    result: dict[str, Any] = {"benchmark": "integrity-wait", "hit_tokens": HIT_TOKENS}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        site = make_site(folder / "site")
        enter_site(site)
        model = save_model(folder / "model")
        sides = {name: Side(model, site, folder / name, verify) for name, verify in VERIFY.items()}
        try:
            measure(sides, options.rounds, result)
        finally:
            for side in sides.values():
                side.engine.close()
    bench.keep(result)


if __name__ == "__main__":
    main()
