"""Scrub: overwrite every byte of the listed blocks with zero, over all layer segments, in one launch.

    table = SegmentTable.from_tensors(layers)
    scrub(table, [3, 4, 17])        # bytes written; on CUDA it only launches

- After it retires, every byte of every listed block is zero and no other byte has changed.
- The device counts the bytes that it stored, lane by lane, in `table.counter`. The count is evidence independent of
  the host's own books.
- A block is listed once; listing it twice is refused, since it would be counted twice.
- A read-back of the same launch loads what it stored past the L1 cache: it shows what the L2 cache, or the
  memory behind it, answers, never that DRAM cells have changed. Any non-zero byte sets its block's flag.
"""

# ruff: noqa: N803 - Triton passes by position and writes constexprs in capitals

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvcustody.kernels.entry import entries_of
from kvcustody.kernels.host import SMALL_BYTES
from kvcustody.kernels.launch import HAS_TRITON, PAIRS_MAX, Variant, on_device, to_device, uses_triton
from kvcustody.kernels.segment import BlockIndices, SegmentTable, ascending, block_list
from kvcustody.kernels.strategy import Strategy, strategy_of

RUN_BYTES_MIN = 1 << 20  # from here a run of adjacent blocks is one slice; shorter ones share one indexed fill


def scrub(table: SegmentTable, blocks: BlockIndices, *, strategy: Strategy | None = None) -> int:
    """Zero `blocks` (int32 or int64, each once); return the bytes written. On CUDA it only launches.

    Raises `DeviceError` on an index outside the pool or listed twice; an empty list launches nothing.
    """
    ordered = ascending(block_list(table, blocks))
    if not len(ordered):
        return 0
    if uses_triton(table):
        chosen = strategy or strategy_of(table)
        entries = to_device(entries_of(ordered, chosen.group), table.device)
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
    published: torch.Tensor | None = None,
    faulty: bool = False,
    stream: int | None = None,
    pairs_max: int = PAIRS_MAX,
) -> None:
    """Launch the kernel for a work list that the device can read; does not wait or allocate.

    entries: int64 [entries] of `kernels.entry`, contiguous, on the device or in pinned memory. flags: int32 [blocks of
    the list], zero on entry, likewise; with it, marked entries are read back, and the flag of each block with a byte
    that is not zero is set. published: int64 [1], likewise: takes the device's count as of this launch's end. faulty:
    honour planted faults (tests). stream: the raw handle of the stream to launch on; the current one where None.
    """
    tiles, listed = table.tiles, len(entries)
    variant = scrub_variant(table, strategy, read_back=flags is not None, faulty=faulty)
    counter = table.scratch if published is None else published
    step = max(1, pairs_max // tiles.count)
    with on_device(table.device):
        for start in range(0, listed, step):
            part = entries if listed <= step else entries[start : start + step]
            pairs = len(part) * tiles.count
            programs = min(pairs, strategy.programs) if strategy.programs else pairs
            variant.launch(
                programs,
                stream,
                part,
                tiles.address,
                tiles.stride,
                tiles.bytes,
                table.tally,
                counter,
                table.tally if flags is None else flags,
                table.blocks,
                tiles.count,
                pairs,
            )


def scrub_variant(table: SegmentTable, strategy: Strategy, *, read_back: bool, faulty: bool = False) -> Variant:
    """Return the compiled kernel for this table and strategy; compiled at the first call."""
    key = ("scrub", strategy, read_back, faulty)
    variant = table.variants.get(key)
    if variant is None:
        constants: dict[str, int | bool] = {
            "ALIGNMENT": table.alignment_bytes,
            "SPAN_BYTES": table.tiles.bytes_max * strategy.group,
            "PERSISTENT": bool(strategy.programs),
            "READ_BACK": read_back,
            "FAULTY": faulty,
            "STREAMING": strategy.streaming,
        }
        variant = table.variants[key] = Variant(scrub_kernel, constants, strategy.warps)
    return variant


def scrub_reference(table: SegmentTable, ordered: NDArray[np.int64]) -> None:
    """Scrub without Triton, `ordered` ascending."""
    if table.device.type == "cpu" and len(ordered) * table.bytes_per_block < SMALL_BYTES:
        table.host_counter[0] += table.rows.zero(ordered)
    else:
        table.counter += scrub_torch(table, ordered)


def scrub_host(table: SegmentTable, blocks: NDArray[np.int64], checked: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Scrub a little host memory and read it back; return a flag for each block of `checked`.

    Raises `DeviceError` on an index outside the pool.
    """
    block_list(table, blocks)
    table.host_counter[0] += table.rows.zero(blocks)
    return table.rows.nonzero(checked)


def scrub_torch(table: SegmentTable, ordered: NDArray[np.int64]) -> int:
    """Zero long runs by slices and the rest by one indexed fill for each segment, on every core and without the GIL.

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


def _split(ordered: NDArray[np.int64], run_blocks_min: int) -> tuple[list[tuple[int, int]], NDArray[np.int64]]:
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

    # Nothing is specialised: one variant serves every address, count and number of blocks.
    _NUMBERS = ("entries", "tile_address", "tile_stride", "tile_bytes", "blocks", "tiles")

    @triton.jit(  # type: ignore[untyped-decorator]
        do_not_specialize=[*_NUMBERS, "tally", "published", "flags", "pairs"]
    )
    def scrub_kernel(  # type: ignore[no-untyped-def]
        entries,
        tile_address,
        tile_stride,
        tile_bytes,
        tally,
        published,
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
        """Zero one tile of one entry in each program or, if persistent, every n-th (entry, tile) pair.

        entries int64 [entries]; tile_address, tile_stride, tile_bytes int64 [tiles]; tally int64 [2]: bytes stored, and
        programs of this launch that have ended; published int64 [1]; flags int32 [blocks of the list], with READ_BACK.
        """
        program = tl.program_id(0)
        stored = tl.zeros([], tl.int64)
        if PERSISTENT:
            for pair in range(program, pairs, tl.num_programs(0)):
                stored += scrub_tile(
                    pair, entries, tile_address, tile_stride, tile_bytes, flags, blocks, tiles,
                    ALIGNMENT, SPAN_BYTES, READ_BACK, FAULTY, STREAMING,
                )  # fmt: skip
        else:
            stored += scrub_tile(
                program, entries, tile_address, tile_stride, tile_bytes, flags, blocks, tiles,
                ALIGNMENT, SPAN_BYTES, READ_BACK, FAULTY, STREAMING,
            )  # fmt: skip
        tl.atomic_add(tally, stored, sem="relaxed")
        tl.debug_barrier()
        if tl.atomic_add(tally + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1:  # the last one tells the count
            tl.store(published, tl.atomic_add(tally, 0, sem="acq_rel"))
            tl.store(tally + 1, tl.zeros([], tl.int64))

    @triton.jit  # type: ignore[untyped-decorator]
    def scrub_tile(  # type: ignore[no-untyped-def]
        pair,
        entries,
        tile_address,
        tile_stride,
        tile_bytes,
        flags,
        blocks,
        tiles,
        ALIGNMENT: tl.constexpr,
        SPAN_BYTES: tl.constexpr,
        READ_BACK: tl.constexpr,
        FAULTY: tl.constexpr,
        STREAMING: tl.constexpr,
    ):
        """Zero one entry's share of one tile, read it back if requested, and return the bytes stored.

        The bytes are counted over the lanes that the store's mask let through, not from what the entry says.
        """
        stored = tl.zeros([], tl.int64)
        tile = pair % tiles
        entry = tl.load(entries + pair // tiles)
        block = entry & 0xFFFFFFFF
        count = (entry >> 32) & 0x7FF
        position = (entry >> 43) & 0x3FFFF
        if block + count <= blocks:  # an idle entry's block is outside every pool
            piece = tl.load(tile_bytes + tile)
            address = tl.load(tile_address + tile) + block * tl.load(tile_stride + tile)
            # 16-byte accesses need two hints: on the pointer (one on the integer is lost in the cast), and on
            # the count that the mask compares with.
            if ALIGNMENT >= 4:
                offset = tl.arange(0, SPAN_BYTES // 4)
                piece = tl.multiple_of(piece // 4, ALIGNMENT // 4)
                mask = offset < tl.multiple_of(piece * count, ALIGNMENT // 4)
                pointer = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), ALIGNMENT)
                zeros = tl.zeros([SPAN_BYTES // 4], tl.int32)
                stored += tl.sum(mask.to(tl.int32), 0) * 4
            else:  # odd strides or addresses: a byte at a time
                offset = tl.arange(0, SPAN_BYTES)
                mask = offset < piece * count
                pointer = address.to(tl.pointer_type(tl.int8))
                zeros = tl.zeros([SPAN_BYTES], tl.int8)
                stored += tl.sum(mask.to(tl.int32), 0)
            if STREAMING:
                tl.store(pointer + offset, zeros, mask=mask, cache_modifier=".cs")
            else:
                tl.store(pointer + offset, zeros, mask=mask)
            if READ_BACK:
                if FAULTY and ((entry >> 61) & 1) != 0:
                    tl.debug_barrier()
                    tl.store(address.to(tl.pointer_type(tl.int8)), 1)
                    tl.debug_barrier()
                if ((entry >> 62) & 1) != 0:
                    wrong = tl.load(pointer + offset, mask=mask, other=0, volatile=True) != 0
                    if tl.max(wrong.to(tl.int32), 0) != 0:  # which of the run's blocks it is
                        for place in range(0, count):
                            own = wrong & (offset >= place * piece) & (offset < (place + 1) * piece)
                            if tl.max(own.to(tl.int32), 0) != 0:
                                tl.store(flags + position + place, 1)
        elif READ_BACK and ((entry >> 62) & 1) != 0:
            for place in range(0, count):
                tl.store(flags + position + place, 1)  # an index outside the pool never verifies
        return stored
