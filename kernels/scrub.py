"""Scrub: overwrite every byte of the listed blocks with zero, over all layer segments, in one launch.

    table = SegmentTable.from_tensors(layers)
    scrub(table, [3, 4, 17])        # bytes written; on CUDA it only launches

- After it retires, every byte of every listed block is zero and no other byte has changed.
- The device counts the bytes that it wrote, in `table.counter`. The count is evidence independent of the
  host's own books.
- A block is listed once; listing it twice is refused, since it would be counted twice.
- A read-back of the same launch loads what it stored past the L1 cache: it shows what the L2 cache, or the
  memory behind it, answers, never that DRAM cells have changed. Any non-zero byte raises its entry's flag.
"""

# ruff: noqa: N803 - Triton passes by position and writes constexprs in capitals

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvcustody.kernels.entry import entries_of
from kvcustody.kernels.launch import HAS_TRITON, PROGRAMS_MAX, on_device, uses_triton
from kvcustody.kernels.segment import BlockIndices, SegmentTable, ascending, block_list
from kvcustody.kernels.strategy import Strategy, strategy_of

RUN_BYTES_MIN = (
    1 << 20
)  # from here a run of adjacent blocks is one slice; shorter ones share one indexed fill
SMALL_BYTES = 1 << 20  # less is not worth waking another core


def scrub(table: SegmentTable, blocks: BlockIndices, *, strategy: Strategy | None = None) -> int:
    """Zero `blocks` (int32 or int64, each once); returns the bytes written. On CUDA it only launches.

    Raises `DeviceError` on an index outside the pool or listed twice; an empty list launches nothing.
    """
    ordered = ascending(block_list(table, blocks))
    if not len(ordered):
        return 0
    if uses_triton(table):
        chosen = strategy or strategy_of(table)
        entries = torch.from_numpy(entries_of(ordered, chosen.group)).to(table.device)
        launch_scrub(table, entries, strategy=chosen)
    else:
        scrub_reference(table, ordered)
    return len(ordered) * table.bytes_per_block


def launch_scrub(
    table: SegmentTable,
    entries: torch.Tensor,
    *,
    strategy: Strategy,
    flags: torch.Tensor | None = None,
    faulty: bool = False,
    programs_max: int = PROGRAMS_MAX,
) -> None:
    """Launch the kernel for a work list that is on the device already; waits for nothing, allocates nothing.

    entries: int64 [entries] of `kernels.entry`, contiguous. flags: int32 [entries], zero on entry; with it,
    marked entries are read back, and raised where a byte is not zero. faulty: honour planted faults (tests).
    """
    tiles, listed = table.tiles, len(entries)
    step = max(1, programs_max // tiles.count)
    for start in range(0, listed, step):
        end = min(listed, start + step)
        pairs = (end - start) * tiles.count
        programs = min(pairs, strategy.programs) if strategy.programs else pairs
        with on_device(table.device):
            scrub_kernel[(programs,)](
                entries[start:end],
                tiles.address,
                tiles.stride,
                tiles.bytes,
                table.counter,
                table.counter if flags is None else flags[start:end],
                table.blocks,
                tiles.count,
                pairs,
                ALIGNMENT=table.alignment_bytes,
                SPAN_BYTES=tiles.bytes_max * strategy.group,
                PERSISTENT=bool(strategy.programs),
                READ_BACK=flags is not None,
                FAULTY=faulty,
                STREAMING=strategy.streaming,
                num_warps=strategy.warps,
            )


def scrub_reference(table: SegmentTable, ordered: NDArray[np.int64]) -> None:
    """Without Triton: `ordered` ascending."""
    small = table.device.type == "cpu" and len(ordered) * table.bytes_per_block < SMALL_BYTES
    table.counter += table.rows.zero(ordered) if small else scrub_torch(table, ordered)


def scrub_torch(table: SegmentTable, ordered: NDArray[np.int64]) -> int:
    """Long runs are slices, the rest one indexed fill a segment, on every core and without the GIL.

    Returns the bytes written.
    """
    runs, loose = _split(ordered, -(-RUN_BYTES_MIN // max(one.piece_bytes for one in table.segments)))
    index, written = torch.from_numpy(loose).to(table.device), 0
    for words in table.words:
        for first, count in runs:
            words[first : first + count].zero_()
            written += count * words[0].nbytes
        if len(loose):
            words.index_fill_(0, index, 0)
            written += len(loose) * words[0].nbytes
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


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def scrub_kernel(  # type: ignore[no-untyped-def]
        entries,
        tile_address,
        tile_stride,
        tile_bytes,
        counter,
        flags,
        blocks,
        tiles,
        pairs,
        ALIGNMENT: tl.constexpr,
        SPAN_BYTES: tl.constexpr,
        PERSISTENT: tl.constexpr,
        READ_BACK: tl.constexpr,
        FAULTY: tl.constexpr,
        STREAMING: tl.constexpr,
    ):
        """Zero one tile of one entry, or, persistent, every n-th (entry, tile) pair.

        entries int64 [entries]; tile_address, tile_stride, tile_bytes int64 [tiles]; counter int64 [1];
        flags int32 [entries], read and written only with READ_BACK.
        """
        program = tl.program_id(0)
        if PERSISTENT:
            for pair in range(program, pairs, tl.num_programs(0)):
                scrub_tile(
                    pair, entries, tile_address, tile_stride, tile_bytes, counter, flags, blocks, tiles,
                    ALIGNMENT, SPAN_BYTES, READ_BACK, FAULTY, STREAMING,
                )  # fmt: skip
        else:
            scrub_tile(
                program, entries, tile_address, tile_stride, tile_bytes, counter, flags, blocks, tiles,
                ALIGNMENT, SPAN_BYTES, READ_BACK, FAULTY, STREAMING,
            )  # fmt: skip

    @triton.jit  # type: ignore[untyped-decorator]
    def scrub_tile(  # type: ignore[no-untyped-def]
        pair,
        entries,
        tile_address,
        tile_stride,
        tile_bytes,
        counter,
        flags,
        blocks,
        tiles,
        ALIGNMENT: tl.constexpr,
        SPAN_BYTES: tl.constexpr,
        READ_BACK: tl.constexpr,
        FAULTY: tl.constexpr,
        STREAMING: tl.constexpr,
    ):
        """One entry's share of one tile: store zeros, count them, and read them back where it is asked."""
        position = pair // tiles
        tile = pair % tiles
        entry = tl.load(entries + position)
        block = entry & 0xFFFFFFFF
        count = (entry >> 32) & 0xFFFFFF
        if block + count <= blocks:  # an idle entry's block is outside every pool
            length = tl.load(tile_bytes + tile) * count
            address = tl.load(tile_address + tile) + block * tl.load(tile_stride + tile)
            # 16-byte accesses need two hints: on the pointer (one on the integer is lost in the cast), and on
            # the count that the mask compares with.
            if ALIGNMENT >= 4:
                offset = tl.arange(0, SPAN_BYTES // 4)
                mask = offset < tl.multiple_of(length // 4, ALIGNMENT // 4)
                pointer = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), ALIGNMENT)
                zeros = tl.zeros([SPAN_BYTES // 4], tl.int32)
            else:  # odd strides or addresses: a byte at a time
                offset = tl.arange(0, SPAN_BYTES)
                mask = offset < length
                pointer = address.to(tl.pointer_type(tl.int8))
                zeros = tl.zeros([SPAN_BYTES], tl.int8)
            if STREAMING:
                tl.store(pointer + offset, zeros, mask=mask, cache_modifier=".cs")
            else:
                tl.store(pointer + offset, zeros, mask=mask)
            tl.atomic_add(counter, length, sem="relaxed")
            if READ_BACK:
                if FAULTY and ((entry >> 61) & 1) != 0:
                    tl.debug_barrier()
                    tl.store(address.to(tl.pointer_type(tl.int8)), 1)
                    tl.debug_barrier()
                if ((entry >> 62) & 1) != 0:
                    value = tl.load(pointer + offset, mask=mask, other=0, volatile=True)
                    if tl.max((value != 0).to(tl.int32), 0) != 0:
                        tl.atomic_or(flags + position, 1, sem="relaxed")
        elif READ_BACK and ((entry >> 62) & 1) != 0:
            tl.atomic_or(flags + position, 1, sem="relaxed")  # an index outside the pool never verifies
