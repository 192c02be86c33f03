"""The order in which engines call us in a step, as their sources have it, over a device that finds races.

    engine = TracedEngine(device, TRACES["vllm V2"])
    engine.run(40)
    engine.problems()            # races, state that was lost, bytes that a hand-out found

Each step ends some requests' blocks, hands out others (some of which have just ended), and calls in the trace's order:

- `order`: what a worker does with a step's scrubs: behind all uses, in front of what writes a block that is handed out;
- `states`: tables and inputs go to the device;
- `precopy`: state of a running request moves into its new block (V2's `preprocess_state`);
- `forward`: reads what requests hold, writes what was handed out;
- `answers`: results are read, receipts collected.

`tests/engines/vllm/adapter/test_first_in_step.py` compares the two vLLM traces with the calls of the installed runners.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvcustody.allocator.pool.stream_memory import StreamTensorMemory
from kvcustody.kernels.segment import SegmentTable
from standins.device.fake_cuda import FakeCuda, rows_of

TRACES = {
    "vllm V1": ("order", "states", "forward", "answers"),
    "vllm V2": ("order", "states", "precopy", "forward", "answers"),
    "vllm V2, its own order": ("states", "precopy", "order", "forward", "answers"),
    "transformers": ("answers", "order", "states", "forward"),
}
BLOCKS = 16
STATE = 0x55


class TracedEngine:
    """One engine of real blocks. mutate: what a test takes away, by name of a method here."""

    def __init__(self, device: FakeCuda, trace: Sequence[str], *, seed: int = 0, verify_share: float = 0.0) -> None:
        self.device, self.trace = device, trace
        self.tensors = [torch.zeros(BLOCKS, 32, dtype=torch.uint8) for _ in range(2)]
        self.table = SegmentTable.from_tensors(self.tensors)
        self.memory = StreamTensorMemory([self.table], streams=[device])
        self.random = random.Random(seed)
        self.held: list[int] = []
        self.clean = list(range(BLOCKS))
        self.found: list[int] = []  # bytes that a hand-out found and that were not zero
        self.lost: list[int] = []  # steps whose state was gone
        self.failed: list[int] = []
        self._ended: list[int] = []
        self._new: list[int] = []
        self._inputs = torch.zeros(64, dtype=torch.uint8)
        self._verify_share = verify_share

    def run(self, steps: int) -> TracedEngine:
        """So many steps, with the device behind by a random amount; then everything is done."""
        for number in range(1, steps + 1):
            self._schedule()
            for name in self.trace:
                getattr(self, name)(number)
            for _ in range(self.random.randrange(12)):
                self.device.advance()
        self.device.drain()
        self.answers(steps)
        return self

    def problems(self) -> dict[str, int]:
        """What went wrong, by kind; empty where nothing did."""
        counts = {
            "races": len(self.device.races),
            "found": sum(map(bool, self.found)),
            "lost": len(self.lost),
        }
        return {name: count for name, count in counts.items() if count}

    def _schedule(self) -> None:
        """Requests end and begin: three blocks each, of which at least one has just ended."""
        self._ended = [self.held.pop(0) for _ in range(3)] if len(self.held) > 6 else []
        fresh = self._ended[:1] + [self.clean.pop(0) for _ in range(3 - len(self._ended[:1]))]
        self.clean += [block for block in self._ended if block not in fresh]
        self._new = fresh

    # -- the calls of a step, by their names in a trace ---------------------------------------------------------------

    def order(self, number: int) -> None:
        """As `WorkerSide.execute`."""
        if self._ended:
            self.used()
            self.memory.launch_order(0, [(self._verify_share, np.array(sorted(self._ended)))])
        self.memory.hand_out(np.array(self._new))
        self.follow()

    def used(self) -> None:
        self.memory.used(0)

    def follow(self) -> None:
        self.memory.order_handed_out(0)

    def states(self, number: int) -> None:
        """Inputs, from pinned memory, in stream order."""
        host = torch.full((64,), number % 256, dtype=torch.uint8)
        self.device.copy_to_device(0, host, self._inputs, pinned=False)

    def precopy(self, number: int) -> None:
        """The first new block takes the state of a running request."""
        target = self._new[0]
        self.device.op(0, "precopy", writes=rows_of(self.table, [target]), act=lambda: self._fill([target], STATE))

    def forward(self, number: int) -> None:
        """Reads all, writes what is new."""
        new, held = list(self._new), list(self.held)
        moved = [new[0]] if "precopy" in self.trace else []

        def act() -> None:
            self.lost += [number for block in moved if int(self._row(block).min()) != STATE]
            self.found += [int(self._row(block).max()) for block in new if block not in moved]
            self._fill(new, 1 + number % 200)

        self.device.op(0, "forward", reads=rows_of(self.table, held), writes=rows_of(self.table, new), act=act)
        self.held += new

    def answers(self, number: int) -> None:
        """Receipts of what has retired."""
        for _, results in self.memory.answered_orders(wait=False):
            self.failed += [block for result in results for block in result.failed.tolist()]

    def _row(self, block: int) -> torch.Tensor:
        return torch.stack([tensor[block] for tensor in self.tensors])

    def _fill(self, blocks: Sequence[int], byte: int) -> None:
        for tensor in self.tensors:
            tensor[list(blocks)] = byte


Mutant = Callable[[TracedEngine], None]
