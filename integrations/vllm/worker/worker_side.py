"""The worker's half: the pool is zero before its first use, and each step's scrubs precede its first write.

1. Every tensor that vLLM registers is zeroed when it is registered, whatever its allocator left there; the boot order
   of the port then zeroes and reads it back once more, with receipts.
2. `execute` runs before anything else of a step (`first_in_step`), and once a step: the scrub follows every write of
   earlier steps on the model's stream and precedes every write of this one. On a device it runs on a stream of its own
   between the two, by events; the host waits for neither.
3. A worker that cannot scrub fails its step. It never reports work that it has not done. An answer leaves when all of
   its order has retired on the device. Answers leave in the order in which their orders came. A step without requests
   waits for its answer.
4. A step sums and compares blocks before its scrubs, behind the writes of earlier steps. The worker waits for the
   result of a comparison, and its answer leaves with the step's.
5. Copies for tiers are read before the scrubs of their step, and loads begin behind them.
6. The null block is nobody's and is never handed out; what padded rows of a batch leave there goes with every order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.external.block_sums import SumOrder
from kvcustody.allocator.external.scrub_queue import ScrubOrder
from kvcustody.allocator.pool.stream_memory import StreamTensorMemory
from kvcustody.allocator.pool.tensor_memory import TensorMemory
from kvcustody.clock import Clock
from kvcustody.errors import IsolationError
from kvcustody.integrations.vllm.step_messages import ScrubReply, StepOrder, StepReceipt, SumReply
from kvcustody.integrations.vllm.tiers.worker_tiers import WorkerTiers
from kvcustody.integrations.vllm.worker.kv_layout import CacheViews, block_tensors
from kvcustody.integrations.vllm.worker.loaded_adapters import take_loaded
from kvcustody.kernels.segment import SegmentTable
from kvcustody.kernels.streams import Streams
from kvcustody.logger import get_logger

_log = get_logger(__name__)


class WorkerSide:
    """One worker's shard of the cache. streams: a device's, where they are not torch's own (tests).

    tuning: the file in which measured answers on how to scrub are kept. null_block: vLLM's, if the tensors hold it.
    open_tiers: makes the tiers over the registered cache, where there are any.
    """

    def __init__(
        self,
        shard: int,
        clock: Clock | None = None,
        *,
        streams: Streams | None = None,
        tuning: Path | None = None,
        null_block: int | None = None,
        open_tiers: Callable[[TensorMemory], WorkerTiers] | None = None,
    ) -> None:
        self.shard = shard
        self._open_tiers = open_tiers
        self.tiers: WorkerTiers | None = None
        self._null: tuple[tuple[float, NDArray[np.int64]], ...] = ()  # as the last batch of every order (rule 6)
        if null_block is not None:
            self._null = ((0.0, np.array([null_block], dtype=np.int64)),)
        self._tuning = tuning
        self._clock = clock
        self._streams = streams
        self.memory: TensorMemory | None = None
        self._answers: list[ScrubReply] = []
        self._compared: list[SumReply] = []
        self._in_flight: deque[int] = deque()  # orders on the device, each one launch
        self._step = 0
        self._done: StepOrder | None = None  # the order of the step that has begun
        self._may_wait = False
        self._unordered_blocks = 0  # zeroed before the port had ordered anything

    def register(self, caches: CacheViews, blocks: int) -> None:
        """Take vLLM's tensors over and zero them all (rule 1)."""
        table = SegmentTable.from_tensors(block_tensors(caches, blocks))
        if self._streams is not None or table.device.type == "cuda":
            streams = None if self._streams is None else [self._streams]
            self.memory = StreamTensorMemory([table], clock=self._clock, streams=streams)
        else:
            self.memory = TensorMemory([table], clock=self._clock)
        for tuning in self.memory.prepare(self._tuning):
            _log.info("scrub tuned", from_file=tuning.from_file, **tuning.chosen.describe())
        self.memory.scrub(0, np.arange(blocks, dtype=np.int64), 0.0)
        self._unordered_blocks = table.scrubbed()
        if self._open_tiers is not None:
            self.tiers = self._open_tiers(self.memory)
        _log.info(
            "cache registered",
            shard=self.shard,
            blocks=blocks,
            bytes_per_block=self.memory.bytes_per_block,
            pieces=len(table.segments),
        )

    def execute(self, order: StepOrder) -> None:
        """Do a step's scrubs now, or put them on the device ahead of the step (rule 2)."""
        if order is self._done:
            return
        self._done, self._step, self._may_wait = order, order.step, order.is_idle
        memory, tiers = self.memory, self.tiers
        if order.sums is not None:
            self._sum(order.sums)
        if tiers is not None and order.copies:
            tiers.begin(order.copies)
        if isinstance(memory, StreamTensorMemory):
            if order.order is not None:
                self._launch(memory, order.order)
            if order.must_follow:
                memory.order_before()
        elif order.order is not None:
            self._answers.append(self._scrub(order.order))
        if tiers is not None:
            tiers.go_on()

    def finished_loads(self) -> set[str]:
        """Return requests whose load ended since the last call, with any result."""
        return self.tiers.finished_loads() if self.tiers is not None else set()

    def failed_blocks(self) -> set[int]:
        """Return blocks that a load could not fill, since the last call."""
        return self.tiers.failed_blocks() if self.tiers is not None else set()

    def failed_requests(self) -> set[str]:
        """Return requests of a model with several layer groups whose load was incomplete, since the last call."""
        return self.tiers.failed_requests() if self.tiers is not None else set()

    def receipt(self) -> StepReceipt:
        """Return the work since the last receipt (rule 3)."""
        if isinstance(self.memory, StreamTensorMemory) and self._in_flight:
            self._collect(self.memory)
        answers, self._answers = self._answers, []
        compared, self._compared = self._compared, []
        copies = self.tiers.replies() if self.tiers is not None else []
        return StepReceipt(self._step, answers, len(self._in_flight), compared, copies, take_loaded())

    def _sum(self, order: SumOrder) -> None:
        memory = self.memory
        if memory is None:
            raise IsolationError(f"shard {self.shard} is told to sum before its cache was registered")
        memory.keep_sums()
        if len(order.record):
            memory.record_sums(order.record)
        if len(order.compare):
            differing = order.compare[memory.differing(order.compare)].tolist()
            self._compared.append(SumReply(order.number, self.shard, differing))

    def _scrub(self, order: ScrubOrder) -> ScrubReply:
        memory = self.memory
        if memory is None:
            raise IsolationError(f"shard {self.shard} is told to scrub before its cache was registered")
        results = tuple(memory.scrub(0, blocks, share) for share, blocks in order.batches)
        for share, blocks in self._null:
            memory.scrub(0, blocks, share)
        self._unordered_blocks += len(self._null)
        return ScrubReply(order.number, self.shard, results, memory.scrubbed(0) - self._unordered_blocks)

    def _launch(self, memory: StreamTensorMemory, order: ScrubOrder) -> None:
        memory.used()  # whatever earlier steps put on the model's stream reads and writes first
        memory.launch_order(0, (*order.batches, *self._null))
        self._in_flight.append(order.number)

    def _collect(self, memory: StreamTensorMemory) -> None:
        """Turn retired orders into answers; launches retire in the order of their numbers."""
        retired = memory.answered_orders(wait=self._may_wait)
        self._unordered_blocks += len(retired) * len(self._null)
        counted = memory.scrubbed(0) - self._unordered_blocks
        for _, results in retired:
            own = results[: len(results) - len(self._null)]
            self._answers.append(ScrubReply(self._in_flight.popleft(), self.shard, own, counted))

    def close(self) -> None:
        """Zero the whole shard, after all work on the device."""
        if self.tiers is not None:
            self.tiers.close()
            self.tiers = None
        memory = self.memory
        if isinstance(memory, StreamTensorMemory):
            memory.answered(wait=True)
            memory.order_before()
        if memory is not None:
            memory.scrub(0, np.arange(memory.blocks, dtype=np.int64), 0.0)
            self.memory = None
