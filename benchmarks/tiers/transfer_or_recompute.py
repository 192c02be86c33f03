"""Moving or computing: how much time the decisions lose against the better choice in hindsight, on recorded traces.

    python benchmarks/tiers/transfer_or_recompute.py [--rounds 10] [--json FILE]

- Each request of a trace that has a prefix in an endless cache could restore it: its bytes over a link, or its tokens
  at a prefill rate. The link's rate is drawn anew each minute, from a tenth to ten times of what is as fast as
  computing, and each transfer has a fixed cost and a jitter of 10 %. It is known through transfers alone.
- `regret`: time lost against whoever chose right each time, as a share of the time of the right choices. The goal is
  0.10 on average of the rounds, each with another link.
  `always`, `never`: the same for a tier that is always used, or never.
- `decision_us`: what one prediction with its comparison takes; the goal is 5.
- `slow`: a link that is always slower: how often it was used, of all times that it could have been.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from kvcustody.governance.tiers.transfer_rates import LinkWatch, TransferRates
from kvcustody.lab.replay.traces.readers import open_trace

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench

TRACES = (
    ("mooncake conversation", "mooncake_conv_dev40.jsonl.gz", "mooncake"),
    ("mooncake synthetic", "mooncake_synthetic_upstream.jsonl.gz", "mooncake"),
)
TOKEN_BYTES, TOKENS_PER_SECOND, FIXED_US = 128 << 10, 10_000.0, 300.0
MINUTE_US, GOAL = 60_000_000, 0.10


class Chance(NamedTuple):
    """A prefix that could be restored: when, and its tokens."""

    at_us: int
    tokens: int


def chances(path: Path, kind: str) -> list[Chance]:
    trace, seen, chances = open_trace(path, kind), set[object](), list[Chance]()
    for request in trace:
        known = 0
        for block in request.blocks:
            if block not in seen:
                break
            known += 1
        seen.update(request.blocks)
        if known:
            chances.append(Chance(request.at_us, known * trace.block_tokens))
    return chances


class Link:
    """A link whose rate, in relation to computing, is drawn anew each minute."""

    def __init__(self, seed: int, factor: float | None) -> None:
        self.drawn, self.seed, self.factor = random.Random(seed), seed, factor

    def takes_us(self, at_us: int, tokens: int) -> float:
        minute = random.Random(1_000_003 * self.seed + at_us // MINUTE_US)
        now = self.factor or 10 ** minute.uniform(-1, 1)
        return FIXED_US + tokens / TOKENS_PER_SECOND * 1e6 / now * self.drawn.uniform(0.9, 1.1)


def run(asked: list[Chance], seed: int, factor: float | None = None) -> dict[str, float]:
    link, rates, watch = Link(seed, factor), TransferRates(), LinkWatch()
    best = lost = always = never = 0.0
    used = 0
    for at_us, tokens in asked:
        size, computing = tokens * TOKEN_BYTES, tokens / TOKENS_PER_SECOND * 1e6
        moving = link.takes_us(at_us, tokens)
        while watch.due(at_us):
            small = 16 * 16
            rates.learn(small * TOKEN_BYTES, int(link.takes_us(at_us, small)))
        expected = rates.predict(size)
        moves = expected is None or expected < computing
        if moves:
            rates.learn(size, int(moving))
            watch.used()
            used += 1
        else:
            watch.left_alone(at_us)
        right = min(moving, computing)
        best += right
        lost += (moving if moves else computing) - right
        always += moving - right
        never += computing - right
    return {
        "requests": len(asked),
        "regret": lost / best,
        "always": always / best,
        "never": never / best,
        "used": used / len(asked),
        "error": rates.error or 0.0,
    }


def decision_us() -> float:
    rates = TransferRates()
    for size in (1 << 20, 1 << 24):
        rates.learn(size, 1000)
    times = 100_000
    begun = time.perf_counter()
    for number in range(times):
        expected = rates.predict((1 << 20) + number)
        _ = expected is None or expected < 2000.0
    return (time.perf_counter() - begun) / times * 1e6


def main() -> int:
    bench = Bench(__doc__, rounds=10, strict=True)
    bench.add("--traces", type=Path, default=Path("../shared/traces"))
    options = bench.parse()
    took_us, met = decision_us(), True
    figures: dict[str, object] = {"goal": GOAL, "decision_us": took_us}
    print(f"one decision {took_us:.2f} us")
    for name, file, kind in TRACES:
        path = options.traces / file
        if not path.exists():
            print(f"{name}: no `{path}` here")
            continue
        asked = chances(path, kind)
        rows = [run(asked, seed) for seed in range(options.rounds)]
        rows.append(run(asked, 0, factor=0.5) | {"slow": 1.0})
        figures[name] = rows
        mean = fmean(row["regret"] for row in rows[:-1])
        met = met and mean <= GOAL and rows[-1]["regret"] <= GOAL
        print(f"{name}: mean regret {mean:.3f}")
        for row in rows:
            kind_of = "always half as fast" if row.get("slow") else "a rate each minute"
            print(
                f"  {kind_of}: regret {row['regret']:.3f} (always {row['always']:.2f}, never "
                f"{row['never']:.2f}), used {row['used']:.1%} of {row['requests']:,}, error {row['error']:.2f}"
            )
    bench.keep(figures)
    return bench.status(met)


if __name__ == "__main__":
    sys.exit(main())
