"""Copy block to block over all layer segments, for copy-on-write; and between blocks and host memory.

    copy(table, [3], [17])          # block 17 is now block 3, byte for byte
    copy_out(table, [3, 9], into)   # `into` holds both, one after the other, each segment by segment
    copy_in(table, [5, 2], into)    # block 5 is now block 3, block 2 is block 9

- After it retires, target `i` equals source `i` byte for byte and nothing else has changed.
- Targets are distinct and none is also a source, so the order of the copies cannot matter.
- Between a device and the host one launch moves every piece of the listed blocks. Up to `DIRECT_BYTES` the kernel
  itself reads or writes pinned memory of the host directly. Larger copies, and memory that is not pinned, go in one
  transfer of the copy engine. That leaves the processors to the serving. What stood between is then zeroed behind it,
  on the same stream, before anything else can be given it.
"""

# ruff: noqa: N803 - Triton passes by position and writes constexprs in capitals

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from kvcustody.errors import DeviceError
from kvcustody.kernels.launch import HAS_TRITON, launch, reached, to_device, uses_triton
from kvcustody.kernels.segment import BlockIndices, SegmentTable, ascending, block_list

GATHER_BYTES = 4 << 20  # bytes in flight between source and target on the torch path
DIRECT_BYTES = 4 << 20  # what the kernel itself moves over the bus: of more, the copy engine is hardly slower


def copy(table: SegmentTable, source: BlockIndices, target: BlockIndices) -> int:
    """Copy block `source[i]` to block `target[i]`; returns the bytes written. On CUDA it only launches.

    Raises `DeviceError` on an index outside the pool, unequal lengths, a target listed twice, or a target
    that is a source; empty lists launch nothing.
    """
    sources = block_list(table, source, name="source")
    targets = block_list(table, target, name="target")
    if len(sources) != len(targets):
        raise DeviceError(
            f"`{len(sources)}` source blocks for `{len(targets)}` targets",
            sources=len(sources),
            targets=len(targets),
        )
    if not len(targets):
        return 0
    both = np.intersect1d(sources, ascending(targets, name="target"))
    if len(both):
        raise DeviceError(f"block `{both[0]}` is both a source and a target", block=int(both[0]))
    if uses_triton(table):
        lists = to_device(np.stack((sources, targets)), table.device)
        launch(copy_kernel, table, (lists[0], lists[1]))
    else:
        copy_reference(table, sources, targets)
    return len(targets) * table.bytes_per_block


def copy_out(table: SegmentTable, blocks: BlockIndices, into: memoryview) -> None:
    """Copy `blocks` into host memory of len(blocks) × `bytes_per_block` bytes; waits for the current stream's work.

    On the host each piece is copied straight into `into`: nothing between holds what the caller then zeroes. From a
    device, `into` should be pinned: else the driver's own buffers hold the bytes for a while. Raises `DeviceError` on
    an index outside the pool and memory of another length.
    """
    listed, rows = _checked(table, blocks, into)
    if not len(listed):
        return
    if table.device.type == "cpu" and not uses_triton(table):
        index = torch.from_numpy(listed)
        parts = torch.split(rows, table.piece_bytes, dim=1)
        for pieces, part in zip(table.host_pieces, parts, strict=True):
            torch.index_select(pieces, 0, index, out=part)  # row by row, into what is there
        return
    if _is_direct(table, rows):
        _exchange_directly(table, listed, rows, out=True)
        return
    with _between(table, rows) as held:
        exchange(table, to_device(listed, table.device), held, out=True)
        rows.copy_(held)


def copy_in(table: SegmentTable, blocks: BlockIndices, data: memoryview) -> None:
    """Copy host memory that `copy_out` filled into `blocks`, each listed once; `data` has been read on return.

    On a device the blocks are written in the current stream's order. Raises `DeviceError` as
    `copy_out`, and where a block is listed twice.
    """
    listed, rows = _checked(table, blocks, data)
    ascending(listed)
    if not len(listed):
        return
    if table.device.type == "cpu" and not uses_triton(table):
        given, at = rows.numpy(), 0
        for pieces, size in zip(table.host_arrays, table.piece_bytes, strict=True):
            pieces[listed] = given[:, at : at + size]
            at += size
        return
    if _is_direct(table, rows):
        _exchange_directly(table, listed, rows, out=False)
        return
    with _between(table, rows) as held:
        held.copy_(rows)
        exchange(table, to_device(listed, table.device), held, out=False)


def exchange(table: SegmentTable, index: torch.Tensor, rows: torch.Tensor, *, out: bool) -> None:
    """Move the blocks of `index` (int64 [listed]) out into `rows`, or in from them; it only launches.

    rows: uint8 [listed, bytes_per_block], each block segment by segment; both where the table's device reaches them.
    """
    if uses_triton(table):
        launch(exchange_kernel, table, (index,), constants=(table.tiles.offset,), rows=rows, choice={"OUT": out})
        return
    listed, at = index.tolist(), 0
    for words in table.words:  # row by row: a gather would leave a copy behind
        size = words.shape[1] * words.element_size()
        for row, block in zip(rows[:, at : at + size], listed, strict=True):
            piece = words[block].view(torch.uint8)
            if out:
                row.copy_(piece)
            else:
                piece.copy_(row)
        at += size


def _is_direct(table: SegmentTable, rows: torch.Tensor) -> bool:
    """Return whether the kernel moves these host rows itself: few, pinned, and aligned like the pieces."""
    if not uses_triton(table) or rows.numel() > DIRECT_BYTES or rows.data_ptr() % table.alignment_bytes:
        return False
    return table.device.type == "cpu" or rows.is_pinned()


def _exchange_directly(table: SegmentTable, listed: NDArray[np.int64], rows: torch.Tensor, *, out: bool) -> None:
    """The kernel reads the list and moves the rows where the host has them; waits for the current stream's work."""
    index = reached(listed, table.device)
    exchange(table, index, rows, out=out)
    if table.device.type == "cuda":
        torch.cuda.current_stream(table.device).synchronize()


@contextmanager
def _between(table: SegmentTable, rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Memory of the device for as many rows, zeroed behind its use."""
    held = torch.empty(rows.shape, dtype=torch.uint8, device=table.device)
    try:
        yield held
    finally:
        held.zero_()


def _checked(table: SegmentTable, blocks: BlockIndices, memory: memoryview) -> tuple[NDArray[np.int64], torch.Tensor]:
    """Return the checked list, and the host's memory as uint8 [listed, bytes_per_block]."""
    listed = block_list(table, blocks)
    if len(memory) != len(listed) * table.bytes_per_block:
        raise DeviceError(
            f"`{len(memory)}` bytes for `{len(listed)}` blocks of `{table.bytes_per_block}`",
            bytes=len(memory),
        )
    if not len(listed):
        return listed, torch.empty(0, table.bytes_per_block, dtype=torch.uint8)
    return listed, torch.frombuffer(memory, dtype=torch.uint8).view(len(listed), table.bytes_per_block)


def copy_reference(table: SegmentTable, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
    """Copy with torch: gather and place, a few megabytes at a time."""
    sources, targets = torch.from_numpy(source).to(table.device), torch.from_numpy(target).to(table.device)
    for words in table.words:
        step = max(1, GATHER_BYTES // (words.shape[1] * words.element_size()))
        for start in range(0, len(source), step):
            part = slice(start, start + step)
            words.index_copy_(0, targets[part], words.index_select(0, sources[part]))


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit(  # type: ignore[untyped-decorator]
        do_not_specialize=[
            "source_list",
            "target_list",
            "tile_address",
            "tile_stride",
            "tile_bytes",
            "blocks",
            "tiles",
        ]
    )
    def copy_kernel(  # type: ignore[no-untyped-def]
        source_list,
        target_list,
        tile_address,
        tile_stride,
        tile_bytes,
        blocks,
        tiles,
        ALIGNMENT: tl.constexpr,
        TILE_BYTES: tl.constexpr,
    ):
        """Copy one tile of one listed pair, in each program.

        source_list, target_list int64 [listed]; tile_address, tile_stride, tile_bytes int64 [tiles].
        """
        program = tl.program_id(0)
        position = program // tiles
        tile = program % tiles
        source = tl.load(source_list + position)
        target = tl.load(target_list + position)
        if (source >= 0) & (source < blocks) & (target >= 0) & (target < blocks):
            start = tl.load(tile_address + tile)
            stride = tl.load(tile_stride + tile)
            reads = start + source * stride
            writes = start + target * stride
            if ALIGNMENT >= 4:
                words = tl.multiple_of(tl.load(tile_bytes + tile) // 4, ALIGNMENT // 4)
                offset = tl.arange(0, TILE_BYTES // 4)
                mask = offset < words
                read = tl.multiple_of(reads.to(tl.pointer_type(tl.int32)), ALIGNMENT)
                write = tl.multiple_of(writes.to(tl.pointer_type(tl.int32)), ALIGNMENT)
                tl.store(write + offset, tl.load(read + offset, mask=mask), mask=mask)
            else:
                narrow = tl.arange(0, TILE_BYTES)
                narrow_mask = narrow < tl.load(tile_bytes + tile)
                byte = tl.load(reads.to(tl.pointer_type(tl.int8)) + narrow, mask=narrow_mask)
                tl.store(writes.to(tl.pointer_type(tl.int8)) + narrow, byte, mask=narrow_mask)

    @triton.jit(  # type: ignore[untyped-decorator]
        do_not_specialize=[
            "block_list",
            "tile_address",
            "tile_stride",
            "tile_bytes",
            "tile_offset",
            "rows",
            "blocks",
            "tiles",
        ]
    )
    def exchange_kernel(  # type: ignore[no-untyped-def]
        block_list,
        tile_address,
        tile_stride,
        tile_bytes,
        tile_offset,
        rows,
        blocks,
        tiles,
        ALIGNMENT: tl.constexpr,
        TILE_BYTES: tl.constexpr,
        OUT: tl.constexpr,
    ):
        """Move one tile of one listed block out into its row, or in from it, in each program.

        block_list int64 [listed]; tile_address, tile_stride, tile_bytes int64 [tiles]; tile_offset int64 [tiles + 1],
        whose last is a row's bytes; rows uint8 [listed, bytes_per_block], as aligned as the pieces are.
        """
        program = tl.program_id(0)
        position = program // tiles
        tile = program % tiles
        block = tl.load(block_list + position)
        if (block >= 0) & (block < blocks):
            piece = tl.load(tile_address + tile) + block * tl.load(tile_stride + tile)
            row = rows + position.to(tl.int64) * tl.load(tile_offset + tiles) + tl.load(tile_offset + tile)
            if ALIGNMENT >= 4:
                words = tl.multiple_of(tl.load(tile_bytes + tile) // 4, ALIGNMENT // 4)
                offset = tl.arange(0, TILE_BYTES // 4)
                mask = offset < words
                inside = tl.multiple_of(piece.to(tl.pointer_type(tl.int32)), ALIGNMENT)
                outside = tl.multiple_of(row.to(tl.pointer_type(tl.int32)), ALIGNMENT)
                if OUT:
                    tl.store(outside + offset, tl.load(inside + offset, mask=mask), mask=mask)
                else:
                    tl.store(inside + offset, tl.load(outside + offset, mask=mask), mask=mask)
            else:
                narrow = tl.arange(0, TILE_BYTES)
                narrow_mask = narrow < tl.load(tile_bytes + tile)
                inside_bytes = piece.to(tl.pointer_type(tl.int8))
                outside_bytes = row.to(tl.pointer_type(tl.int8))
                if OUT:
                    byte = tl.load(inside_bytes + narrow, mask=narrow_mask)
                    tl.store(outside_bytes + narrow, byte, mask=narrow_mask)
                else:
                    byte = tl.load(outside_bytes + narrow, mask=narrow_mask)
                    tl.store(inside_bytes + narrow, byte, mask=narrow_mask)
