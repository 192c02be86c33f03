"""Host memory written row by row: a row is what one block owns of one segment, or an even share of that.

A scattered scrub is thousands of short writes, and a Python call for each costs as much as the write. numpy assigns
one row of zeros to every listed row of a segment instead: a loop of memory copies, without the GIL, whose source
stays in the first cache. Runs of adjacent blocks are one `memset` each; it too runs without the GIL.

H1 After `zero` returns, every byte of every listed block is zero and no other byte has changed, whichever thread
   wrote it; a failure in any thread is raised after all of them have stopped.
H2 Bytes are counted by the thread that wrote them, after it has.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ROW_BYTES_MAX = 32 << 10  # the row of zeros stays in a first-level cache
RUN_BYTES_MIN = 256 << 10  # from here one memset beats the rows of a run
BYTES_PER_THREAD_MIN = 1 << 20  # less is not worth waking another core


class HostRows:
    """The rows of one cache in host memory.

    words: one [blocks, words of a piece] view a segment, any strides between blocks, contiguous within.
    """

    def __init__(self, words: Sequence[torch.Tensor]) -> None:
        self._rows: list[tuple[NDArray[Any], NDArray[Any]]] = []  # rows of segments, and the row of zeros
        self._dense: dict[int, list[int]] = {}  # piece bytes -> addresses of segments whose blocks touch
        self._of_dense: dict[int, list[tuple[NDArray[Any], NDArray[Any]]]] = {}
        self._bytes_per_block = 0
        for one in words:
            pieces = one.numpy().view(np.uint8)
            piece = pieces.shape[1]
            self._bytes_per_block += piece
            if pieces.strides[0] == piece:
                self._dense.setdefault(piece, []).append(pieces.ctypes.data)
                self._of_dense.setdefault(piece, []).extend(_rows(pieces))
            else:
                self._rows += _rows(pieces)

    def zero(self, ordered: NDArray[np.int64]) -> int:
        """Zero the blocks of an ascending list, each listed once and inside the pool; returns the bytes written."""
        total = len(ordered) * self._bytes_per_block
        shares = min(torch.get_num_threads(), total // BYTES_PER_THREAD_MIN, len(ordered))
        if shares <= 1:
            return self._write(ordered)
        first, *rest = np.array_split(ordered, shares)
        others: list[Future[int]] = [_threads().submit(self._write, part) for part in rest]
        try:
            written = self._write(first)
        finally:  # nobody writes behind the caller's back, whatever failed
            problems = [problem for other in others if (problem := other.exception()) is not None]
        if problems:
            raise problems[0]
        return written + sum(other.result() for other in others)

    def _write(self, ordered: NDArray[np.int64]) -> int:
        """One thread's share."""
        written = _assign(self._rows, ordered)
        for piece, addresses in self._dense.items():
            runs, loose = _split(ordered, -(-RUN_BYTES_MIN // piece))
            for address in addresses:
                for block, count in runs:
                    ctypes.memset(address + block * piece, 0, count * piece)
                    written += count * piece
            written += _assign(self._of_dense[piece], loose)
        return written


def _rows(pieces: NDArray[np.uint8]) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """[blocks, piece bytes] as one or two arrays of equal rows, each with a row of zeros of its own size."""
    piece = pieces.shape[1]
    row = -(-piece // -(-piece // ROW_BYTES_MAX))
    found = []
    for start, end, size in ((0, piece - piece % row, row), (piece - piece % row, piece, piece % row)):
        if end > start:
            kind = np.dtype((np.void, size))
            rows = pieces[:, start:end].view(kind)
            found.append((rows[:, 0] if end - start == size else rows, np.zeros((), dtype=kind)))
    return found


def _assign(rows: list[tuple[NDArray[Any], NDArray[Any]]], blocks: NDArray[np.int64]) -> int:
    """Zero these blocks' rows; returns the bytes."""
    if not len(blocks):
        return 0
    written = 0
    for array, zeros in rows:
        array[blocks] = zeros
        written += len(blocks) * zeros.nbytes * (array.size // len(array))
    return written


def _split(
    ordered: NDArray[np.int64], run_blocks_min: int
) -> tuple[list[tuple[int, int]], NDArray[np.int64]]:
    """(first, count) of the long runs of adjacent blocks, and the blocks outside them."""
    if len(ordered) < run_blocks_min:
        return [], ordered
    starts = np.concatenate(([0], np.flatnonzero(ordered[1:] - ordered[:-1] != 1) + 1))
    counts = np.diff(starts, append=len(ordered))
    long = counts >= run_blocks_min
    if not long.any():
        return [], ordered
    runs = list(zip(ordered[starts[long]].tolist(), counts[long].tolist(), strict=True))
    return runs, ordered[np.repeat(~long, counts)]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), thread_name_prefix="kvcustody-scrub")
