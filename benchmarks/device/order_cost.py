"""Host time of one scrub order on a device's stream, without a device: everything but what the driver itself takes.

Triton's driver is replaced below Triton (`standins.device.fake_triton`); streams and events do nothing. An order of
some blocks, in one batch or one for each of eight owners, is ordered behind the engine, launched, and answered. Median
of thread CPU time, beside the goal of 15 us an order without read-back.
Run: `python benchmarks/device/order_cost.py --json benchmarks/results/order-cost-cpu.json`.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "lib"))

from bench import Bench

from kvcustody.kernels.ordered import OrderedScrub
from kvcustody.kernels.prepare import prepare
from kvcustody.kernels.segment import SegmentTable
from kvcustody.kernels.strategy import Strategy, choose, group_max
from standins.device.fake_triton import fake_triton

GOAL_US = 15.0
BLOCKS = 4096


class NoStreams:
    """Streams whose work is done as it is put there."""

    def side(self) -> Any:
        return 1

    def current(self) -> Any:
        return 0

    def event(self) -> Any:
        return self

    def run(self, stream: Any, work: Any, *, by_handle: bool) -> None:
        work(1)

    def wait(self, stream: Any, event: Any) -> None:
        pass

    def is_capturing(self) -> bool:
        return False

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass


def measure(blocks: int, owners: int, read_back: bool, group: int, rounds: int) -> float:
    """Median microseconds of an order: `used`, `launch`, `order_before`, `answered`."""
    table = SegmentTable.from_tensors([torch.zeros(BLOCKS, 4096, dtype=torch.uint8) for _ in range(64)])
    choose(table, Strategy(group=min(group, group_max(table))))
    prepare(table)
    scrubber = OrderedScrub(table, streams=NoStreams())
    generator, spent = np.random.default_rng(1), []
    for turn in range(rounds):
        chosen = np.sort(generator.permutation(BLOCKS)[:blocks])
        batches = [(part, read_back) for part in np.array_split(chosen, owners)]
        first = time.thread_time_ns()
        scrubber.used()
        scrubber.launch(batches)
        scrubber.order_before()
        scrubber.answered()
        if turn >= rounds // 10:
            spent.append(time.thread_time_ns() - first)
    return statistics.median(spent) / 1000


def main() -> None:
    """Measure, print, keep."""
    bench = Bench(__doc__, "torch", "triton", rounds=4000, facts="")
    arguments = bench.parse()
    rows = []
    print(f"{'blocks':>7}{'owners':>8}{'group':>7}{'read back':>11}{'us an order':>13}")
    with fake_triton():
        for blocks, owners, group, read_back in (
            *((n, 1, g, False) for n in (1, 16, 64, 256, 1024) for g in (1, 4)),
            *((64, 8, g, r) for g in (1, 4) for r in (False, True)),
            (64, 1, 1, True),
        ):
            cost = measure(blocks, owners, read_back, group, arguments.rounds)
            print(f"{blocks:7}{owners:8}{group:7}{read_back!s:>11}{cost:13.1f}", flush=True)
            rows.append(
                {
                    "blocks": blocks,
                    "owners": owners,
                    "group": group,
                    "read_back": read_back,
                    "us": round(cost, 1),
                }
            )
    plain = [row["us"] for row in rows if row["owners"] == 1 and not row["read_back"]]
    print(f"without read-back, one owner: at most {max(plain)} us, goal {GOAL_US}")
    bench.keep({"rounds": arguments.rounds, "goal_us": GOAL_US, "rows": rows})


if __name__ == "__main__":
    main()
