"""A worker's blocks as bytes, one block after the other, copied without anything in between on the host.

    bytes_of.read(blocks, into)               # `into` holds the blocks, each with all its layers
    bytes_of.write(blocks, data)

1. On the host each piece is copied straight from the cache into the caller's memory, and back: no temporary tensor
   holds what the caller then zeroes.
2. On a device both wait: for what was put on it before, and until the copy is there.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray

from kvcustody.allocator.pool.tensor_memory import TensorMemory


class BlockBytes:
    """The blocks of one worker's memory."""

    def __init__(self, memory: TensorMemory) -> None:
        self._memory = memory
        self.block_bytes = memory.bytes_per_block
        table = memory.tables[0]
        self._device = table.device
        self._pieces: list[NDArray[np.uint8]] = []
        if self._device.type == "cpu":
            self._pieces = [words.view(torch.uint8).numpy() for words in table.words]

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
        if not self._pieces:
            self._wait()
            self._memory.read(0, np.array(blocks, dtype=np.int64), into)
            return
        rows = np.frombuffer(into, dtype=np.uint8).reshape(len(blocks), self.block_bytes)
        at = 0
        for piece in self._pieces:
            end = at + piece.shape[1]
            for row, block in enumerate(blocks):
                rows[row, at:end] = piece[block]
            at = end

    def write(self, blocks: list[int], data: memoryview) -> None:
        """Copy what `read` made into `blocks`."""
        if not self._pieces:
            self._wait()
            self._memory.write(0, np.array(blocks, dtype=np.int64), data)
            self._wait()
            return
        rows = np.frombuffer(data, dtype=np.uint8).reshape(len(blocks), self.block_bytes)
        at = 0
        for piece in self._pieces:
            end = at + piece.shape[1]
            for row, block in enumerate(blocks):
                piece[block] = rows[row, at:end]
            at = end

    def _wait(self) -> None:
        torch.cuda.synchronize(self._device)
