"""Host memory, written and read row by row. A row is one block's part of one segment, or an equal share of it.

Of a small scrub, calls are the cost: a torch operation takes some microseconds a segment, numpy's assignment of one
row of zeros to every listed row a third of that. A large scrub is torch's (`kernels.scrub.scrub_torch`), on every core.

- After `zero` returns, every byte of every listed block is zero and no other byte has changed.
- Bytes are counted after they have been written.
- `nonzero` reads every byte of every listed block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

SMALL_BYTES = 1 << 20  # less is not worth waking another core
ROW_BYTES_MAX = 32 << 10  # the row of zeros stays in a first-level cache


class HostRows:
    """The rows of one cache in host memory.

    words: one [blocks, words of a piece] view a segment, any strides between blocks, contiguous within.
    """

    def __init__(self, words: Sequence[torch.Tensor]) -> None:
        self._rows: list[tuple[NDArray[Any], NDArray[Any]]] = []  # rows of segments, and the row of zeros
        for one in words:
            self._rows += _rows(one.numpy().view(np.uint8))

    def zero(self, blocks: NDArray[np.int64]) -> int:
        """Zero the listed blocks, each listed once and inside the pool; return the bytes written."""
        written = 0
        for array, zeros in self._rows:
            array[blocks] = zeros
            written += len(blocks) * zeros.nbytes * (array.size // len(array))
        return written

    def nonzero(self, blocks: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return one flag for each listed block: whether any of its bytes is nonzero. Reads all of them."""
        dirty = np.zeros(len(blocks), dtype=np.bool_)
        if not len(blocks):
            return dirty
        for array, _ in self._rows:
            read = array[blocks].tobytes()
            if read != bytes(len(read)):
                dirty |= np.frombuffer(read, np.uint8).reshape(len(blocks), -1).any(axis=1)
        return dirty


def _rows(pieces: NDArray[np.uint8]) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """[blocks, piece bytes] as one or two arrays of equal rows, each with a row of zeros of its own size."""
    piece = pieces.shape[1]
    row = -(-piece // -(-piece // ROW_BYTES_MAX))
    regions = []
    for start, end, size in ((0, piece - piece % row, row), (piece - piece % row, piece, piece % row)):
        if end > start:
            kind = np.dtype((np.void, size))
            rows = pieces[:, start:end].view(kind)
            regions.append((rows[:, 0] if end - start == size else rows, np.zeros((), dtype=kind)))
    return regions
