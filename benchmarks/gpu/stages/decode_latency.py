"""A decode step's p50 and p99, governed over plain, while every step frees a storm of blocks; outputs are equal."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from gpu.report import Report
from kvcustody.kernels.ordered import OrderedScrub
from kvcustody.kernels.prepare import prepare
from kvcustody.kernels.segment import SegmentTable
from kvcustody.kernels.streams import capturing

P50_MAX, P99_MAX = (
    1.05,
    1.50,
)  # of a step under a storm: wide at its end, since a shared machine has its own tails
PASSES = 12  # of the weights a step: some milliseconds, as a small model's
STORM = 256  # blocks a step
ROUNDS = 6  # of each kind, in turns


def run(report: Report, lab: Any) -> None:
    """The engine writes the storm's blocks in both; governance frees them, and waits where they come back."""
    bench = Decode(lab)
    bench.round(governed=True, counting=False)
    bench.round(governed=False, counting=False)
    for turn in range(lab.size(ROUNDS, 1)):
        for governed in (turn % 2 == 0, turn % 2 == 1):
            bench.round(governed=governed, counting=True)
    ratios = {}
    for name, share in (("p50", 50), ("p99", 99)):
        plain, governed = (statistics.quantiles(bench.spent[one], n=100)[share - 1] for one in (False, True))
        report.measured(
            name, plain_us=round(plain, 1), governed_us=round(governed, 1), ratio=round(governed / plain, 3)
        )
        ratios[name] = governed / plain
    near = lab.rehearsal or (ratios["p50"] <= P50_MAX and ratios["p99"] <= P99_MAX)
    report.check("governed steps are near to plain ones", near, p50_max=P50_MAX, p99_max=P99_MAX)
    report.check("outputs are equal", bench.outputs[True] == bench.outputs[False], rounds=len(bench.outputs[True]))
    report.check("what the storms freed is zero", bench.left[True] == 0, dirty=bench.dirty, orders=bench.orders)
    report.check("every order verified", bench.dirty == 0 and bench.orders > 0, host_waits=bench.scrubber.waits)
    report.control("without governance it is not", bench.left[False] > 0, bytes=bench.left[False])


class Decode:
    """A few layers of weights over a pool: active blocks are read, a storm's are written and freed.

    The forward is a recorded graph, as engines decode: else the host's launches would be what is timed.
    """

    def __init__(self, lab: Any) -> None:
        self._lab = lab
        self._blocks, self._storm = lab.size(4096, 32), lab.size(STORM, 8)
        self._steps, width = lab.size(200, 4), lab.size(4096, 16)
        self._tensors = [lab.tensor(self._blocks, lab.size(32 << 10, 64)) for _ in range(2)]
        self._table = SegmentTable.from_tensors(self._tensors)
        prepare(self._table)
        self.scrubber = OrderedScrub(self._table, streams=lab.streams())
        generator = torch.Generator(device=lab.device).manual_seed(1)
        self._weights = [
            torch.randn(width, width, generator=generator, device=lab.device) / width**0.5 for _ in range(4)
        ]
        self._first = torch.randn(32, width, generator=generator, device=lab.device)
        self._state = self._first.clone()
        self._active = np.arange(8)
        self._index = lab.index(self._active)
        storms = [8 + (np.arange(self._storm) + at * self._storm) % (self._blocks - 8) for at in range(self._steps)]
        self._storms = [(np.sort(one), lab.index(one)) for one in storms]
        self._passes = lab.size(PASSES, 1)
        self._forward()  # what is made once is made before it is recorded
        lab.synchronize()
        with capturing(), lab.capture() as self._graph:
            lab.engine("forward", self._forward, self._table, self._active, writes=False)
        self.spent: dict[bool, list[float]] = {False: [], True: []}
        self.outputs: dict[bool, list[float]] = {False: [], True: []}
        self.left: dict[bool, int] = {}
        self.dirty = self.orders = 0

    def round(self, *, governed: bool, counting: bool) -> None:
        """Steps of one kind, each to its end as a sampled token has it."""
        lab, state = self._lab, self._state
        state.copy_(self._first)
        for one in self._tensors:
            one.zero_()
        lab.synchronize()
        for listed, index in self._storms:
            began = time.perf_counter_ns()
            if governed:
                self.scrubber.hand_out(listed)
                self.scrubber.order_handed_out()
            lab.engine("write", lambda index=index: self._write(index), self._table, listed)
            lab.replay(self._graph)
            if governed:
                self.scrubber.used()
                self.scrubber.launch([(listed, True)])
                self._take(self.scrubber.answered())
            self._until(state)
            if counting:
                self.spent[governed].append((time.perf_counter_ns() - began) / 1000)
        lab.synchronize()
        self._take(self.scrubber.settle())
        if counting:
            self.outputs[governed].append(float(state.double().sum()))
            self.left[governed] = lab.nonzero(self._table, np.arange(8, self._blocks))

    def _until(self, state: torch.Tensor) -> None:
        """The step's own output is on the host; scrubs go on beside it."""
        if self._lab.rehearsal:
            self._lab.synchronize()
        else:
            state[0, 0].item()

    def _take(self, answers: list[Any]) -> None:
        self.orders += len(answers)
        self.dirty += sum(len(batch) for answer in answers for batch in answer.dirty)

    def _write(self, index: torch.Tensor) -> None:
        for one in self._tensors:
            one.index_fill_(0, index, 0x5A)

    def _forward(self) -> None:
        for _ in range(self._passes):
            seen = sum(one[self._index].float().mean() for one in self._tensors)
            for weight in self._weights:
                self._state.copy_(torch.tanh(self._state @ weight + seen))
