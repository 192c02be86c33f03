"""Slabs: memory that exists only while a classic cache is in custody, and that the pool sees as blocks.

A classic cache needs contiguous tensors and the pool hands out scattered blocks. So a block is here a charge of
`bytes_per_block`, bound at admission to one row of a slab of the cache's own (docs/build/adr/0006-classic-caches.md).

1. A block has bytes behind it from `bind` until a scrub has zeroed them, and read them back where that was asked.
2. A slab serves one cache and is never handed to another: a stale view of an ended cache reads zeros.
3. A row that does not become zero stays bound, and its slab with it: such memory never returns to torch's allocator.
4. Before a slab is zeroed, every stream of the GPU that uses it has finished: no write comes after the zeros. While an
   engine of this process records a graph, that waits: a wait for the whole device would break the recording.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvcustody.allocator.pool.memory_protocol import NO_BLOCKS, ScrubResult
from kvcustody.allocator.pool.tensor_memory import TensorMemory
from kvcustody.clock import Clock, SystemClock
from kvcustody.errors import ConfigError, DeviceError, IsolationError
from kvcustody.governance.worker.worker import MemoryPlan
from kvcustody.kernels.streams import outside_captures

BLOCK_BYTES = 64 << 10
_LEVELS = ("unread", "launched", "retired", "sampled", "full")  # weakest first


class SlabSize(NamedTuple):
    """A slab to make: `rows` blocks on `device`; `used_by` is the device whose streams write it."""

    rows: int
    device: torch.device
    used_by: torch.device


class _Slab:
    """One bound slab: its memory, whose streams write it, and how many of its rows are not scrubbed yet."""

    __slots__ = ("bound_rows", "memory", "used_by")

    def __init__(self, memory: TensorMemory, used_by: torch.device) -> None:
        self.memory = memory
        self.used_by = used_by
        self.bound_rows = memory.blocks


class SlabMemory:
    """A `Memory` of `blocks` charges of `bytes_per_block`; bytes are behind a block only while it is bound.

    `stuck` is for fault injection in tests: blocks that refuse to become zero.
    """

    def __init__(self, blocks: int, bytes_per_block: int = BLOCK_BYTES, *, clock: Clock | None = None) -> None:
        if bytes_per_block < 1 or bytes_per_block % 64:
            raise ConfigError(
                f"bytes_per_block `{bytes_per_block}` is not a multiple of 64",
                bytes_per_block=bytes_per_block,
            )
        self.shards = 1
        self.blocks = blocks
        self.bytes_per_block = bytes_per_block
        self.stuck: set[int] = set()
        self._clock = clock or SystemClock()
        self._slab_of: NDArray[np.int64] = np.full(blocks, -1, dtype=np.int64)
        self._row_of: NDArray[np.int64] = np.zeros(blocks, dtype=np.int64)
        self._slabs: dict[int, _Slab] = {}
        self._next_slab = 0
        self._scrubbed_past = 0  # by slabs that are gone, as their devices counted
        self._unbound_scrubbed = 0  # blocks that had no bytes behind them

    @classmethod
    def plan(
        cls,
        bytes_max: int,
        *,
        bytes_per_block: int = BLOCK_BYTES,
        device: str = "cpu",
        clock: Clock | None = None,
    ) -> MemoryPlan:
        """The memory plan of a worker whose classic caches take at most `bytes_max` bytes together."""
        blocks = bytes_max // bytes_per_block
        if blocks < 1:
            raise ConfigError(f"bytes_max `{bytes_max}` is less than one block of `{bytes_per_block}` bytes")
        return MemoryPlan(lambda count: cls(count, bytes_per_block, clock=clock), blocks, 1, bytes_per_block, device)

    def bind(self, blocks: NDArray[np.int64], sizes: Sequence[SlabSize]) -> list[torch.Tensor]:
        """Put bytes behind `blocks`, all zero: one uint8 tensor [rows * bytes_per_block] for each size.

        Raises `DeviceError` where a device has no room, and `IsolationError` for a bound block; then nothing is bound.
        """
        assert sum(size.rows for size in sizes) == len(blocks)
        if (self._slab_of[blocks] >= 0).any():
            raise IsolationError("a block was handed out while another cache's bytes are behind it")
        tensors = [self._make(size) for size in sizes]
        first = 0
        for size, tensor in zip(sizes, tensors, strict=True):
            mine = blocks[first : first + size.rows]
            memory = TensorMemory.wrap([[tensor]], clock=self._clock)
            self._slabs[self._next_slab] = _Slab(memory, size.used_by)
            self._slab_of[mine] = self._next_slab
            self._row_of[mine] = np.arange(size.rows)
            self._next_slab += 1
            first += size.rows
        return [tensor.view(-1) for tensor in tensors]

    def _make(self, size: SlabSize) -> torch.Tensor:
        pinned = size.device.type == "cpu" and size.used_by.type == "cuda"
        try:
            with torch.inference_mode(False):  # an inference tensor could not be zeroed by another thread
                return torch.zeros(
                    (size.rows, self.bytes_per_block),
                    dtype=torch.uint8,
                    device=size.device,
                    pin_memory=pinned,
                )
        except (RuntimeError, AssertionError) as error:
            count = size.rows * self.bytes_per_block
            raise DeviceError(
                f"cannot allocate a cache of `{count}` bytes on `{size.device}`: {str(error).splitlines()[0]}",
                bytes=count,
                device=str(size.device),
            ) from error

    @property
    def bound_bytes(self) -> int:
        """Bytes that exist behind blocks now."""
        return sum(slab.memory.blocks for slab in self._slabs.values()) * self.bytes_per_block

    def scrub(self, shard: int, blocks: NDArray[np.int64], verify_share: float) -> ScrubResult:
        """Zero `blocks`, read back the asked share, and let go of the rows that are zero (rule 1, rule 3)."""
        assert shard == 0
        owners = self._slab_of[blocks]
        results = [
            self._scrub_slab(int(number), blocks[owners == number], verify_share)
            for number in np.unique(owners[owners >= 0])
        ]
        bare = int((owners < 0).sum())
        if bare:  # before a first `bind`: nothing is there to write or read, and the result says so
            self._unbound_scrubbed += bare
            now = self._clock.now_us()
            results.append(ScrubResult("none", "none", 0, now, now, "unread", 0, NO_BLOCKS))
        return _merged(results)

    def _scrub_slab(self, number: int, blocks: NDArray[np.int64], verify_share: float) -> ScrubResult:
        slab, rows = self._slabs[number], self._row_of[blocks]
        if self.stuck:
            slab.memory.stuck = {(0, int(row)) for row in rows[np.isin(blocks, list(self.stuck))]}
        with outside_captures():
            if slab.used_by.type == "cuda":
                torch.cuda.synchronize(slab.used_by)  # rule 4
            result = slab.memory.scrub(0, rows, verify_share)
        bad = np.isin(rows, result.failed)
        clean = blocks[~bad]
        self._slab_of[clean] = -1
        slab.bound_rows -= len(clean)
        if not slab.bound_rows:
            self._scrubbed_past += slab.memory.scrubbed(0)
            del self._slabs[number]
        return result._replace(failed=blocks[bad])

    def copy(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Classic caches are never forked: raises `DeviceError` for any block."""
        if len(source) or len(target):
            raise DeviceError("blocks of classic caches are not copied: open another cache instead of a fork")

    def scrubbed(self, shard: int) -> int:
        """Blocks scrubbed since the start: bound ones as their devices counted them, and those without bytes."""
        assert shard == 0
        live = sum(slab.memory.scrubbed(0) for slab in self._slabs.values())
        return self._unbound_scrubbed + self._scrubbed_past + live


def _merged(results: Sequence[ScrubResult]) -> ScrubResult:
    """One result for a launch over several slabs: its level is the weakest among them."""
    if len(results) == 1:
        return results[0]
    return ScrubResult(
        _joined(result.method for result in results),
        _joined(result.device for result in results),
        sum(result.bytes for result in results),
        min(result.started_us for result in results),
        max(result.ended_us for result in results),
        min((result.level for result in results), key=_LEVELS.index),
        sum(result.verified for result in results),
        np.concatenate([result.failed for result in results]),
    )


def _joined(names: Iterable[str]) -> str:
    return "+".join(sorted(set(names)))
