"""The engine's single cache tensor as our pools' blocks: the position of block b, with a check of it.

1. A block of ours is a row of each of the engine's allocators: one for layers of full attention, one for sliding
   windows, or both. All their layers' keys and values, nothing else: whoever has a block has both rows alone.
2. Where there are two, the sectors are cut in two ranges, so that every block has its rows. A window's ring lies in the
   first blocks of its request; the window's rows of the others stay unused.
3. Before custody begins the engine itself writes one block, and exactly that row changes: another layout is refused.
4. The two trash sectors in front are in no pool. What padding writes there is zeroed on time and at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvcustody.allocator.pool.stream_memory import StreamTensorMemory
from kvcustody.allocator.pool.tensor_memory import TensorMemory
from kvcustody.clock import Clock
from kvcustody.errors import ConfigError
from kvcustody.governance.worker.worker import MemoryPlan
from kvcustody.logger import get_logger

_TRASH_SECTORS = 2
_PROBE = "kvcustody probe"
_log = get_logger(__name__)


class BlockRows(NamedTuple):
    """One allocator's part of every block: `rows` [blocks, bytes] uint8; `first`: the engine's number of row 0."""

    allocator: Any
    rows: torch.Tensor
    first: int

    @property
    def ring(self) -> int | None:
        """The number of a request's blocks that it rewrites; None: all."""
        window = getattr(self.allocator, "sliding_window", None)
        return None if window is None else -(-int(window) // int(self.allocator.tokens_per_page))


class EngineBlocks:
    """The cache tensor's rows, cut into the pools for the Governor."""

    def __init__(self, cache: Any, allocators: Sequence[Any], clock: Clock, *, tuning: Path | None = None) -> None:
        """Cut the tensor.

        Raises:
            ConfigError: it does not match its allocators, or is too small.
        """
        tensor, sectors = cache.cache_tensor, int(cache.num_sectors)
        self._clock = clock
        self._tuning = tuning
        self._trash = tensor[: _TRASH_SECTORS * int(cache.bytes_per_sector)]
        self.blocks = _whole_blocks(sectors, [int(one.blocks_per_sector) for one in allocators])
        self.parts: list[BlockRows] = []
        at = _TRASH_SECTORS
        for allocator in allocators:
            size, per_sector = int(allocator.bytes_per_block), int(allocator.blocks_per_sector)
            rows = tensor.view(-1, size)
            held = len(rows) - _TRASH_SECTORS * per_sector
            if not held == allocator.num_blocks == sectors * per_sector:
                raise ConfigError(
                    f"the engine counts `{allocator.num_blocks}` blocks of `{allocator.layer_type}` in `{sectors}` "
                    f"sectors, its tensor holds `{held}`"
                )
            first = at * per_sector
            self.parts.append(BlockRows(allocator, rows[first : first + self.blocks], first))
            at += -(-self.blocks // per_sector)
        self.bytes_per_block = sum(part.rows.shape[1] for part in self.parts)
        self.pool_first: list[int] = []  # the first block, by pool
        self.memories: list[TensorMemory] = []
        self._taken = 0

    @property
    def are_rewritten(self) -> bool:
        """Whether a request rewrites blocks in place, so that no other may share them, not even its fork."""
        return any(part.ring is not None for part in self.parts)

    @property
    def plan(self) -> MemoryPlan:
        """The memory plan for a worker."""
        return MemoryPlan(self.make, self.blocks, 1, self.bytes_per_block, str(self._trash.device))

    def make(self, blocks: int) -> TensorMemory:
        """Return the next `blocks` rows as the memory of one pool."""
        if self._taken + blocks > self.blocks:
            raise ConfigError(f"pools of `{self._taken + blocks}` blocks do not fit in the engine's `{self.blocks}`")
        self.pool_first.append(self._taken)
        rows = [part.rows[self._taken : self._taken + blocks] for part in self.parts]
        self._taken += blocks
        kind = StreamTensorMemory if self._trash.device.type == "cuda" else TensorMemory
        memory = kind.wrap([rows], clock=self._clock)
        for tuning in memory.prepare(self._tuning):
            _log.info("scrub tuned", from_file=tuning.from_file, **tuning.chosen.describe())
        self.memories.append(memory)
        return memory

    def probe(self) -> None:
        """Make the engine write its last block in every layer; check that only this row changed (rule 3)."""
        for part in self.parts:
            self._probe(part)

    def _probe(self, part: BlockRows) -> None:
        allocator, rows = part.allocator, part.rows
        last = part.first + self.blocks - 1
        page = min(int(allocator.tokens_per_page), getattr(allocator, "sliding_window", 1 << 62))
        allocator.block_table[_PROBE] = [last]
        try:
            index = torch.tensor(allocator.get_write_indices(_PROBE, 0, page), device=rows.device)
        finally:
            del allocator.block_table[_PROBE]
        shape = (page, allocator.num_key_value_heads, allocator.head_dim)
        ones = torch.ones(shape, dtype=allocator.cache_dtype, device=rows.device)
        unread = torch.empty(0, dtype=torch.int64, device=rows.device)
        before = rows[-2:-1].clone()
        try:
            for layer in allocator.layer_indices:
                allocator.update(ones, ones, layer, unread, index)
        except (RuntimeError, IndexError) as error:
            raise ConfigError(f"the engine's cache does not store keys and values as expected: {error}") from error
        written = rows[-1].view(allocator.cache_dtype)
        count = 2 * len(allocator.layer_indices) * ones.numel()  # keys and values; a window may end within a page
        reached = int((written == 1).sum()) == int(written.count_nonzero()) == count and torch.equal(
            rows[-2:-1], before
        )
        rows[-1].zero_()
        if not reached:
            raise ConfigError("the engine's blocks do not lie where this adapter expects them in its cache tensor")

    def clear_trash(self) -> None:
        """Zero both trash sectors, on the current stream (rule 4)."""
        self._trash.zero_()

    def trash_nonzero_bytes(self) -> int:
        """Return how many bytes of the trash sectors are not zero."""
        return int(torch.count_nonzero(self._trash))


def _whole_blocks(sectors: int, per_sector: list[int]) -> int:
    """Return how many blocks have a row from each allocator, given the rows per sector."""
    blocks = int(sectors / sum(1 / count for count in per_sector))
    while sum(-(-blocks // count) for count in per_sector) > sectors:
        blocks -= 1
    if blocks < 2:
        raise ConfigError(
            f"the engine's cache has `{sectors}` sectors, which hold `{blocks}` blocks; give it more memory"
        )
    return blocks
