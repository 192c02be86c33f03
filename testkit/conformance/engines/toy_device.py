"""A toy device: K/V tensors, a compute stream whose steps retire late, and a copy stream for transfers.

1. Work of one stream is done in order. A step that was submitted is done later, `steps_in_flight` steps behind; until
   then nothing of it has touched memory. A transfer is done when the copy stream comes to it, at any time.
2. The two streams do not wait for each other: an engine that frees a block under either has a use-after-free.
3. Before the first write of a block that was handed out, whoever writes, the probe gets its bytes of all shards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvcustody.allocator.pool.memory_protocol import ScrubResult
from kvcustody.allocator.pool.tensor_memory import TensorMemory
from kvcustody.clock import Clock
from kvcustody.kernels.segment import Layout
from kvcustody.testkit.conformance.engine_protocol import FirstWrite
from kvcustody.testkit.conformance.engines.toy_model import LANES, rows, say

Batches = Sequence[tuple[float, NDArray[np.int64]]]


class ToyScrub(NamedTuple):
    """Zero these blocks on every shard, reading back a share of each batch."""

    batches: Batches
    done: Callable[[list[list[ScrubResult]]], None]  # results[shard][batch]


class Write(NamedTuple):
    """Compute positions [first, first + len(states)) of one request into its block table."""

    table: tuple[int, ...]
    first: int
    states: tuple[int, ...]


class Copy(NamedTuple):
    """Copy one block onto another, on every shard."""

    source: int
    target: int


class Say(NamedTuple):
    """Read positions [0, length) through the block table and output the next token."""

    table: tuple[int, ...]
    length: int
    done: Callable[[int], None]


class Call(NamedTuple):
    """Call the engine back when the stream reaches this point."""

    done: Callable[[], None]


Work = ToyScrub | Write | Copy | Say | Call


class ToyDevice:
    """Memory of `blocks` blocks on `shards` shards, with two streams."""

    def __init__(self, blocks: int, block_tokens: int, shards: int, clock: Clock) -> None:
        self.block_tokens = block_tokens
        shape = (2, blocks, block_tokens, LANES)
        self.tensors = [torch.full(shape, 0x5A5A5A5A, dtype=torch.int32) for _ in range(shards)]
        self.memory = TensorMemory.wrap([[one] for one in self.tensors], layout=Layout.KV_BLOCKS, clock=clock)
        self._views = [one.numpy() for one in self.tensors]
        self.stream: deque[list[Work]] = deque()
        self.probe: Callable[[FirstWrite], None] | None = None
        self._fresh: dict[int, tuple[object, int]] = {}
        self.hand_outs = 0

    # -- the compute stream --------------------------------------------------------------------------------------------

    def submit(self, step: list[Work]) -> None:
        """Put one step on the compute stream."""
        self.stream.append(step)

    def retire(self) -> None:
        """Run the oldest step in flight."""
        for work in self.stream.popleft():
            if isinstance(work, Write):
                self._write(work)
            elif isinstance(work, ToyScrub):
                work.done(self.scrub(work.batches))
            elif isinstance(work, Copy):
                self.put(work.target, self.get(work.source))
            elif isinstance(work, Say):
                work.done(self._say(work))
            else:
                work.done()

    def scrub(self, batches: Batches) -> list[list[ScrubResult]]:
        """Zero the blocks now; return results by shard, one for each batch."""
        return [
            [self.memory.scrub(shard, blocks, share) for share, blocks in batches] for shard in range(len(self._views))
        ]

    def _write(self, work: Write) -> None:
        positions = np.arange(work.first, work.first + len(work.states))
        blocks = np.array(work.table, dtype=np.int64)[positions // self.block_tokens]
        for block in dict.fromkeys(blocks.tolist()):
            self.first_write(block)
        for shard, view in enumerate(self._views):
            view[:, blocks, positions % self.block_tokens] = rows(work.states, shard)

    def _say(self, work: Say) -> int:
        positions = np.arange(work.length)
        blocks = np.array(work.table, dtype=np.int64)[positions // self.block_tokens]
        read = [view[:, blocks, positions % self.block_tokens] for view in self._views]
        return say(np.stack(read).astype(np.int64))

    # -- whole blocks, as the copy stream moves them -------------------------------------------------------------------

    def get(self, block: int) -> bytes:
        """Return all bytes of a block, shard after shard."""
        return b"".join(np.ascontiguousarray(view[:, block]).tobytes() for view in self._views)

    def put(self, block: int, data: bytes) -> None:
        """Write all bytes of a block."""
        self.first_write(block)
        shape = (2, self.block_tokens, LANES)
        for view, part in zip(self._views, np.frombuffer(data, np.int32).reshape(-1, *shape), strict=True):
            view[:, block] = part

    # -- hand-out, as the engine tells it ------------------------------------------------------------------------------

    def handed_out(self, block: int, request: object) -> None:
        """Note that the engine allocated this block: its next write is a first write."""
        self.hand_outs += 1
        self._fresh[block] = (request, self.hand_outs)

    def first_write(self, block: int) -> None:
        """Report a first write to this block before it happens (rule 3)."""
        fresh = self._fresh.pop(block, None)
        if fresh is not None and self.probe is not None:
            nonzero = self.memory.nonzero_bytes(np.array([block], dtype=np.int64))
            self.probe(FirstWrite(fresh[0], block, nonzero, fresh[1]))
