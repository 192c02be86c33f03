"""The engine's one cache tensor as the blocks of our pools: where block b lies, and that it does lie there.

1. A block of ours is the row of the engine's block of that number: all layers' keys and values, nothing else.
2. Before custody begins the engine itself writes one block, and exactly that row changes: another layout is refused.
3. The two trash sectors in front are in no pool. What padding writes there is zeroed on time and at the end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog
import torch

from kvcustody.allocator.pool.stream_memory import StreamTensorMemory
from kvcustody.allocator.pool.tensor_memory import TensorMemory
from kvcustody.clock import Clock
from kvcustody.errors import ConfigError
from kvcustody.governance.worker.worker import MemoryPlan

_TRASH_SECTORS = 2
_PROBE = "kvcustody probe"
_log = structlog.get_logger(__name__)


class EngineBlocks:
    """Rows of the cache tensor, [blocks, bytes of a block] uint8, cut into the pools that the Governor asks for."""

    def __init__(self, cache: Any, allocator: Any, clock: Clock, *, tuning: Path | None = None) -> None:
        size = int(allocator.bytes_per_block)
        rows = cache.cache_tensor.view(-1, size)
        self.first = _TRASH_SECTORS * int(allocator.blocks_per_sector)
        self._clock = clock
        self._tuning = tuning
        self._trash = rows[: self.first]
        self._rows = rows[self.first :]
        self.bytes_per_block = size
        self.blocks = len(self._rows)
        self.pool_first: list[int] = []  # engine number of the first block, by pool
        self.memories: list[TensorMemory] = []
        self._taken = 0
        if self.blocks != allocator.num_blocks:
            raise ConfigError(
                f"the engine counts `{allocator.num_blocks}` blocks, its tensor holds `{self.blocks}`"
            )

    @property
    def plan(self) -> MemoryPlan:
        """What a worker is opened over."""
        return MemoryPlan(self.make, self.blocks, 1, self.bytes_per_block, str(self._rows.device))

    def make(self, blocks: int) -> TensorMemory:
        """The next `blocks` rows as the memory of one pool."""
        if self._taken + blocks > self.blocks:
            raise ConfigError(
                f"pools of `{self._taken + blocks}` blocks do not fit in the engine's `{self.blocks}`"
            )
        self.pool_first.append(self.first + self._taken)
        rows = self._rows[self._taken : self._taken + blocks]
        self._taken += blocks
        kind = StreamTensorMemory if rows.device.type == "cuda" else TensorMemory
        memory = kind.wrap([[rows]], clock=self._clock)
        for tuning in memory.prepare(self._tuning):
            _log.info("scrub tuned", from_file=tuning.from_file, **tuning.chosen.describe())
        self.memories.append(memory)
        return memory

    def probe(self, allocator: Any) -> None:
        """Let the engine write its last block in every layer, see that this row and no neighbour changed (rule 2)."""
        last = self.first + self.blocks - 1
        page = int(allocator.tokens_per_page)
        allocator.block_table[_PROBE] = [last]
        try:
            index = torch.tensor(allocator.get_write_indices(_PROBE, 0, page), device=self._rows.device)
        finally:
            del allocator.block_table[_PROBE]
        shape = (page, allocator.num_key_value_heads, allocator.head_dim)
        ones = torch.ones(shape, dtype=allocator.cache_dtype, device=self._rows.device)
        unread = torch.empty(0, dtype=torch.int64, device=self._rows.device)
        before = self._rows[-2:-1].clone()
        try:
            for layer in allocator.layer_indices:
                allocator.update(ones, ones, layer, unread, index)
        except (RuntimeError, IndexError) as error:
            raise ConfigError(
                f"the engine's cache does not take keys and values as expected: {error}"
            ) from error
        written = self._rows[-1].view(allocator.cache_dtype)
        reached = bool((written == 1).all()) and torch.equal(self._rows[-2:-1], before)
        self._rows[-1].zero_()
        if not reached:
            raise ConfigError(
                "the engine's blocks do not lie where this adapter expects them in its cache tensor"
            )

    def clear_trash(self) -> None:
        """Zero both trash sectors, on the current stream (rule 3)."""
        self._trash.zero_()

    def trash_nonzero_bytes(self) -> int:
        """Bytes of the trash sectors that are not zero."""
        return int(torch.count_nonzero(self._trash))
