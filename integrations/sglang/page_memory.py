"""The KV pool's tensors as pages: zeroed when custody begins, on each order, and when it ends.

1. Every byte of a page, in every layer, belongs to that page alone (`kernels.segment` proves it, or raises).
2. The padding page is nobody's and is never handed out; what padded rows of a batch leave there goes with every order.
3. The scheduler's process runs the model, and its steps do not overlap: a scrub before a step comes behind every write
   of the steps before and ahead of every write of this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.external.scrub_queue import ScrubOrder
from kvcustody.allocator.pool.memory_protocol import ScrubResult
from kvcustody.allocator.pool.tensor_memory import TensorMemory
from kvcustody.clock import Clock
from kvcustody.errors import ConfigError
from kvcustody.kernels.segment import Layout, SegmentTable

PADDING_PAGE = 0
_PADDING = np.array([PADDING_PAGE], dtype=np.int64)
_POOLS = ("MHATokenToKVPool", "MLATokenToKVPool")


class PageMemory:
    """One pool of SGLang. Raises `ConfigError` for a pool with unknown pages."""

    def __init__(self, pool: Any, pages: int, page_tokens: int, clock: Clock | None = None) -> None:
        name = type(pool).__name__
        if name not in _POOLS or not type(pool).__module__.startswith("sglang."):
            raise ConfigError(
                f"the KV pool is a `{name}`, whose layout is unknown; known are "
                f"{' and '.join(f'`{one}`' for one in _POOLS)}",
                pool=name,
            )
        tensors = list(pool.kv_buffer) if name == "MLATokenToKVPool" else [*pool.k_buffer, *pool.v_buffer]
        if any(getattr(pool, more, None) is not None for more in ("dq_k_buffer", "dq_v_buffer", "index_k_buffer")):
            raise ConfigError("the KV pool stores a second form of its slots, which scrubs would not reach")
        table = SegmentTable.from_tensors(tensors, layout=Layout.TOKENS, block_tokens=page_tokens)
        if table.blocks < pages:
            raise ConfigError(f"the KV pool has `{table.blocks}` pages, its allocator `{pages}`")
        self._table = table
        self._memory = TensorMemory([table], clock=clock)
        self._padding = [tensor[:page_tokens] for tensor in tensors]
        self.pages = table.blocks
        self.bytes_per_page = table.bytes_per_block
        self._memory.scrub(0, np.arange(self.pages, dtype=np.int64), 0.0)
        self._unordered = table.scrubbed()

    def scrub(self, order: ScrubOrder) -> tuple[list[ScrubResult], int]:
        """Zero the order's pages; return the results, and how many pages the device has counted for orders."""
        results = self._memory.scrub_each(0, order.batches)
        if self._table.device.type == "cpu":
            self._table.rows.zero(_PADDING)
        else:
            for padding in self._padding:
                padding.zero_()
        return results, self._memory.scrubbed(0) - self._unordered

    def read(self, pages: NDArray[np.int64], into: memoryview) -> None:
        """Copy `pages` in order into host memory of exactly their size, and wait."""
        self._memory.read(0, pages, into)

    def write(self, pages: NDArray[np.int64], data: memoryview) -> None:
        """Copy what `read` made into `pages`."""
        self._memory.write(0, pages, data)

    def pin(self, address: int, size: int) -> Callable[[], None]:
        """Give the pool's device access to `size` bytes of host memory; return the function that ends it."""
        return self._memory.pin(address, size)

    def close(self) -> None:
        """Zero the pages."""
        self._memory.scrub(0, np.arange(self.pages, dtype=np.int64), 0.0)
