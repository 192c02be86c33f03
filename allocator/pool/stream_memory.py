"""Real memory whose scrubs run on their own stream, ordered on the device against the engine's streams.

The engine reports twice a step: with `used`, after it has put work on its stream, and with `order_before`, before it
puts work there that writes fresh blocks. Both calls take microseconds and wait for nothing.

- `launch` returns before the device has begun; `answered` returns what has retired.
- The blocks to read back are drawn here for each launch, with the operating system's randomness.
- `started_us` is the launch and `ended_us` the moment its end was seen: the true interval lies within.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.pool.memory_protocol import NO_BLOCKS, ScrubResult
from kvcustody.allocator.pool.scrubs_in_flight import Launched
from kvcustody.allocator.pool.tensor_memory import TensorMemory
from kvcustody.clock import Clock
from kvcustody.kernels.launch import uses_triton
from kvcustody.kernels.ordered import OrderedScrub, RetiredScrub
from kvcustody.kernels.segment import SegmentTable
from kvcustody.kernels.streams import Streams


class StreamTensorMemory(TensorMemory):
    """`TensorMemory` in stream order. Build it with `allocate` or `wrap`, or with streams of your own in tests."""

    def __init__(
        self,
        tables: Sequence[SegmentTable],
        *,
        clock: Clock | None = None,
        streams: Sequence[Streams] | None = None,
    ) -> None:
        super().__init__(tables, clock=clock)
        given: Sequence[Streams | None] = streams or [None] * len(tables)
        self.ordered = [OrderedScrub(table, streams=one) for table, one in zip(self.tables, given, strict=True)]
        self._numbers = 0
        self._pending: dict[tuple[int, int], tuple[int, tuple[ScrubResult, ...]]] = {}

    def used(self, stream: Any = None) -> None:
        """Record that work on the engine's stream so far may use blocks that end later."""
        for one in self.ordered:
            one.used(stream)

    def order_before(self, stream: Any = None) -> None:
        """Order later work of the engine's stream after the scrubs of every handed-out block."""
        for one in self.ordered:
            one.order_before(stream)

    def hand_out(self, blocks: NDArray[np.int64]) -> None:
        """Note handed-out `blocks`: a step that writes them waits for the scrubs that still zero them."""
        for one in self.ordered:
            one.hand_out(blocks)

    def order_handed_out(self, stream: Any = None) -> None:
        """Order later work of the engine's stream after the scrubs of blocks handed out since the last call."""
        for one in self.ordered:
            one.order_handed_out(stream)

    def launch(self, shard: int, blocks: NDArray[np.int64], verify_share: float) -> Launched:
        """Zero `blocks` on `shard` in stream order; raises `DeviceError` on bad lists."""
        read_back = self._draw(len(blocks), verify_share)
        marks = np.full(len(blocks), read_back) if isinstance(read_back, bool) else read_back
        return Launched(self._launch(shard, [(verify_share, blocks, read_back)]), marks)

    def launch_order(self, shard: int, batches: Sequence[tuple[float, NDArray[np.int64]]]) -> int:
        """Zero every batch of (share to read back, blocks) in one launch; return its number. Raises like `launch`."""
        return self._launch(shard, [(share, blocks, self._draw(len(blocks), share)) for share, blocks in batches])

    def _launch(self, shard: int, batches: Sequence[tuple[float, NDArray[np.int64], NDArray[np.bool_] | bool]]) -> int:
        ordered, table = self.ordered[shard], self.tables[shard]
        number = ordered.launch([(blocks, read_back) for _, blocks, read_back in batches], faults=self._faults(shard))
        self._numbers += 1
        method = "triton-stream" if uses_triton(table) else "torch-stream"
        now, device, results = self._clock.now_us(), str(table.device), []
        for share, blocks, read_back in batches:
            level = "retired" if share <= 0 else "full" if share >= 1 else "sampled"
            verified = len(blocks) * read_back if isinstance(read_back, bool) else int(np.count_nonzero(read_back))
            size = len(blocks) * table.bytes_per_block
            results.append(ScrubResult(method, device, size, now, now, level, verified, NO_BLOCKS))
        self._pending[shard, number] = (self._numbers, tuple(results))
        return self._numbers

    def copy(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copy on the caller's stream, after the scrubs that zero `target`."""
        self.order_before()
        super().copy(source, target)

    def answered(self, *, wait: bool) -> list[tuple[int, ScrubResult]]:
        """Return the launches with a single batch that have retired since the last call; with `wait`, every launch so
        far.
        """
        return [(number, results[0]) for number, results in self.answered_orders(wait=wait)]

    def answered_orders(self, *, wait: bool) -> list[tuple[int, tuple[ScrubResult, ...]]]:
        """Return the launches that have retired since the last call, by number, with a result for each batch; with
        `wait`, all.
        """
        retired = []
        for shard, ordered in enumerate(self.ordered):
            answers: list[RetiredScrub] = ordered.settle() if wait else ordered.answered()
            for answer in answers:
                number, results = self._pending.pop((shard, answer.number))
                ended = self._clock.now_us()
                told = tuple(
                    result._replace(ended_us=ended, failed=dirty)
                    for result, dirty in zip(results, answer.dirty, strict=True)
                )
                retired.append((number, told))
        return retired

    def scrubbed(self, shard: int) -> int:
        """Return the number of blocks by the device's own count, as of the last launch that was answered."""
        return self.ordered[shard].scrubbed_blocks

    def _draw(self, count: int, share: float) -> NDArray[np.bool_] | bool:
        if share <= 0 or share >= 1:
            return share >= 1
        drawn: NDArray[np.bool_] = self._random.random(count) < share
        return drawn

    def _faults(self, shard: int) -> NDArray[np.int64] | None:
        stuck = [block for where, block in self.stuck if where == shard]
        return np.array(stuck, dtype=np.int64) if stuck else None
