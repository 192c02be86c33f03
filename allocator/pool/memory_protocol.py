"""The memory behind the blocks, as the pool uses it: scrub, copy, and a count kept by the device itself.

The pool decides which block is DIRTY; a `Memory` makes it zero and says how it knows. It imports numpy alone,
so a control plane can run without torch.

- `scrub` returns only when the listed blocks of that shard may be handed out; others are in `failed`.
- A result never claims more than was done: `verified` counts the blocks that were read back, and no others.
- `scrubbed(shard)` is counted where the writing is done, never copied from the pool's books.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcustody.clock import Clock, SystemClock
from kvcustody.errors import DeviceError

NO_BLOCKS: NDArray[np.int64] = np.empty(0, dtype=np.int64)
NO_BLOCKS.flags.writeable = False


class ScrubResult(NamedTuple):
    """The result of one scrub on one shard; the pool turns it into receipts.

    level: `unread` (no memory behind the blocks: nothing was written), `launched` (not waited for), `retired`
    (the device finished, nothing was read back), `sampled` (each block was read back with the asked
    probability) or `full` (every block was read back).
    """

    method: str
    device: str
    bytes: int
    started_us: int
    ended_us: int
    level: str
    verified: int
    failed: NDArray[np.int64]


class Memory(Protocol):
    """The pool's interface to its memory. Blocks are arrays of indices, each listed once."""

    @property
    def shards(self) -> int:
        """The number of devices, each of which holds a part of every block: the receipts that a block needs."""

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block on one shard, over all its layer segments."""

    def scrub(self, shard: int, blocks: NDArray[np.int64], verify_share: float) -> ScrubResult:
        """Zero `blocks` on `shard`, reading back all (1), a random share, or none (0) of them."""

    def copy(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copy block `source[i]` to `target[i]` on every shard."""

    def scrubbed(self, shard: int) -> int:
        """Return the number of blocks scrubbed since the start, as counted by the device."""


class UnbackedMemory:
    """No memory, only the count: for control-plane replays and benchmarks of the bookkeeping.

    Its results say so: method `none`, level `unread`, zero bytes, nothing verified.
    """

    def __init__(self, blocks: int, bytes_per_block: int, *, shards: int = 1, clock: Clock | None = None) -> None:
        self.blocks = blocks
        self.bytes_per_block = bytes_per_block
        self.shards = shards
        self._scrubbed = [0] * shards
        self._now_us = (clock or SystemClock()).now_us

    def scrub(self, shard: int, blocks: NDArray[np.int64], verify_share: float) -> ScrubResult:
        """Count `blocks` as scrubbed; writes and reads nothing, whatever the share."""
        self._scrubbed[shard] += len(blocks)
        now = self._now_us()
        return ScrubResult("none", "none", 0, now, now, "unread", 0, NO_BLOCKS)

    def copy(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Refuse lists of different length; there is nothing to copy."""
        if len(source) != len(target):
            raise DeviceError(
                f"`{len(source)}` source blocks for `{len(target)}` targets",
                sources=len(source),
                targets=len(target),
            )

    def scrubbed(self, shard: int) -> int:
        """Return the number of blocks counted so far."""
        return self._scrubbed[shard]
