"""Scrub: overwrite every byte of the listed blocks with zero, over all layer segments, in one launch.

Z1 After it retires, every byte of every listed block is zero and no other byte has changed.
Z2 The device counts what it wrote, tile by tile, in `table.counter`: a block counts once all its tiles are
   written. The count is evidence independent of the host's own books.
Z3 A block is listed once; listing it twice is refused, since it would be counted twice.
"""

# ruff: noqa: N803 - Triton passes by position and writes constexprs in capitals

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcustody.kernels import host
from kvcustody.kernels.launch import HAS_TRITON, launch, uses_triton
from kvcustody.kernels.segment import SegmentTable, ascending, block_list, runs_of

RUN_BLOCKS_MIN = 8  # from here a run of adjacent blocks is one slice; shorter ones share one indexed fill


def scrub(table: SegmentTable, blocks: Any) -> int:
    """Zero `blocks` (int32 or int64, each once); returns the bytes written. On CUDA it only launches.

    Raises `DeviceError` on an index outside the pool or listed twice; an empty list launches nothing.
    """
    ordered = ascending(block_list(table, blocks))
    if not len(ordered):
        return 0
    if uses_triton(table):
        index = torch.from_numpy(ordered).to(table.device)
        launch(scrub_kernel, table, (index,), counter=table.counter)
    else:
        scrub_reference(table, ordered)
    return len(ordered) * table.bytes_per_block


def scrub_reference(table: SegmentTable, ordered: NDArray[np.int64]) -> None:
    """Without Triton: `ordered` ascending. On the host one system call writes many pieces of memory."""
    if table.device.type == "cpu" and host.available():
        host.zero_pieces(table.pieces(ordered))
    else:
        _scrub_torch(table, ordered)
    table.counter += len(ordered) * table.tiles.count


def _scrub_torch(table: SegmentTable, ordered: NDArray[np.int64]) -> None:
    """Long runs are slices, the rest one indexed fill a segment."""
    if len(ordered) < RUN_BLOCKS_MIN:
        runs, loose = [], ordered
    else:
        every = runs_of(ordered)
        runs = [run for run in every if run[1] - run[0] >= RUN_BLOCKS_MIN]
        short = [np.arange(first, last) for first, last in every if last - first < RUN_BLOCKS_MIN]
        loose = np.concatenate(short) if short else ordered[:0]
    index = torch.from_numpy(loose).to(table.device)
    for words in table.words:
        for first, last in runs:
            words[first:last].zero_()
        if len(loose):
            words.index_fill_(0, index, 0)


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def scrub_kernel(  # type: ignore[no-untyped-def]
        block_list,
        tile_address,
        tile_stride,
        tile_bytes,
        counter,
        blocks,
        tiles,
        ALIGNMENT: tl.constexpr,
        TILE_BYTES: tl.constexpr,
    ):
        """One program zeroes one tile of one listed block.

        block_list int64 [listed]; tile_address, tile_stride, tile_bytes int64 [tiles]; counter int64 [1].
        """
        program = tl.program_id(0)
        block = tl.load(block_list + program // tiles)
        tile = program % tiles
        if (block >= 0) & (block < blocks):
            address = tl.load(tile_address + tile) + block * tl.load(tile_stride + tile)
            # 16-byte stores need two hints: on the pointer (one on the integer is lost in the cast), and on
            # the count that the mask compares with.
            if ALIGNMENT >= 4:
                words = tl.multiple_of(tl.load(tile_bytes + tile) // 4, ALIGNMENT // 4)
                offset = tl.arange(0, TILE_BYTES // 4)
                pointer = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), ALIGNMENT)
                tl.store(pointer + offset, tl.zeros([TILE_BYTES // 4], tl.int32), mask=offset < words)
            else:  # odd strides or addresses: a byte at a time
                count = tl.load(tile_bytes + tile)
                narrow = tl.arange(0, TILE_BYTES)
                byte = address.to(tl.pointer_type(tl.int8))
                tl.store(byte + narrow, tl.zeros([TILE_BYTES], tl.int8), mask=narrow < count)
            tl.atomic_add(counter, 1, sem="relaxed")
