"""A worker's blocks as bytes, one block after the other.

    bytes_of.read(blocks, into)               # `into` holds the blocks, each with all its layers
    bytes_of.write(blocks, data)

On a device both wait: for what was put on it before, and until the copy is there.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from kvcustody.allocator.pool.tensor_memory import TensorMemory


class BlockBytes:
    """The blocks of one worker's memory."""

    def __init__(self, memory: TensorMemory) -> None:
        self._memory = memory
        self.block_bytes = memory.bytes_per_block
        self.pin = memory.pin
        table = memory.tables[0]
        self._device = table.device

    def layout(self, *facts: str) -> bytes:
        """32 bytes that differ where a block's bytes would mean something else."""
        hashed = hashlib.blake2b(digest_size=32)
        for segment in self._memory.tables[0].segments:
            hashed.update(segment.piece_bytes.to_bytes(8, "little"))
        for tensor in self._memory.tables[0].tensors:
            hashed.update(f"{tensor.dtype} {tuple(tensor.shape[1:])}\0".encode())
        for fact in facts:
            hashed.update(fact.encode() + b"\0")
        return hashed.digest()

    def read(self, blocks: list[int], into: memoryview) -> None:
        """Copy `blocks` into memory that is exactly as long."""
        self._wait()
        self._memory.read(0, np.array(blocks, dtype=np.int64), into)

    def write(self, blocks: list[int], data: memoryview) -> None:
        """Copy what `read` made into `blocks`."""
        self._wait()
        self._memory.write(0, np.array(blocks, dtype=np.int64), data)
        self._wait()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
