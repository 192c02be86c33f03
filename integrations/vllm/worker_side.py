"""The worker's half: the pool is zero before its first use, and each step's scrubs happen before its first write.

W1 Every tensor that vLLM registers is zeroed when it is registered, whatever its allocator left there; the boot
   order of the port then zeroes and reads it back once more, with receipts.
W2 `obey` runs before anything else of a step (vLLM calls `handle_preemptions` first), on the stream of the model,
   so it follows every write of earlier steps and precedes every write of this one.
W3 A worker that cannot scrub fails its step. It never reports what it has not done.
"""

from __future__ import annotations

import numpy as np
import structlog

from kvcustody.allocator.scrub_queue import ScrubOrder
from kvcustody.allocator.tensor_memory import TensorMemory
from kvcustody.clock import Clock
from kvcustody.errors import IsolationError
from kvcustody.integrations.vllm.layout import CacheViews, block_tensors
from kvcustody.integrations.vllm.messages import Answer, StepOrder, StepReceipt

_log = structlog.get_logger(__name__)


class WorkerSide:
    """One worker's shard of the cache."""

    def __init__(self, shard: int, clock: Clock | None = None) -> None:
        self.shard = shard
        self._clock = clock
        self.memory: TensorMemory | None = None
        self._answers: list[Answer] = []
        self._step = 0
        self._unordered_blocks = 0  # zeroed before the port had ordered anything

    def register(self, caches: CacheViews, blocks: int) -> None:
        """Take vLLM's tensors over and zero them all (W1)."""
        self.memory = TensorMemory.wrap([block_tensors(caches, blocks)], clock=self._clock)
        self.memory.scrub(0, np.arange(blocks, dtype=np.int64), 0.0)
        self._unordered_blocks = self.memory.scrubbed(0)
        _log.info(
            "cache registered",
            shard=self.shard,
            blocks=blocks,
            bytes_per_block=self.memory.bytes_per_block,
            pieces=len(self.memory.tables[0].segments),
        )

    def obey(self, order: StepOrder) -> None:
        """Do a step's scrubs now (W2)."""
        self._step = order.step
        if order.order is not None:
            self._answers.append(self._scrub(order.order))

    def receipt(self) -> StepReceipt:
        """What was done since the last receipt."""
        answers, self._answers = self._answers, []
        return StepReceipt(self._step, answers)

    def _scrub(self, order: ScrubOrder) -> Answer:
        memory = self.memory
        if memory is None:
            raise IsolationError(f"shard {self.shard} is told to scrub before its cache was registered")
        results = tuple(memory.scrub(0, blocks, share) for share, blocks in order.batches)
        return Answer(order.number, self.shard, results, memory.scrubbed(0) - self._unordered_blocks)

    def close(self) -> None:
        """Leave nothing behind: the whole shard is zeroed."""
        if self.memory is not None:
            self.memory.scrub(0, np.arange(self.memory.blocks, dtype=np.int64), 0.0)
            self.memory = None
