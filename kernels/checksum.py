"""Checksum: one 64-bit sum of each listed block, over all layer segments, in one launch.

    keys = ChecksumKeys(table)
    sums = checksum(table, keys, [3, 4, 17])         # int64 [3], where the blocks are
    checksum(table, keys, [3]) == sums[:1]           # as long as no byte of block 3 has changed

Words w have 4 bytes where the table is aligned to them, else 1. Both sums are modulo 2^64:

- the sum of a tile of `SegmentTable.tiles` is the sum of `w * k[place in the tile]`;
- the sum of a block is the sum of `tile sum * K[tile]`.

All keys are odd and drawn once from a fixed seed, so equal bytes have equal sums on every device and in every process.

- A change within one word is always found, and so is every flipped bit. The reason: a value that is not zero modulo
  2^32, times two odd numbers, is not zero modulo 2^64.
- Words or tiles that change places are found like any other change: each place has a key of its own.
- A change by somebody who does not use the keys is missed with a small probability, over the choice of keys. It is at
  most 2^-32 where the change lies within one tile, and at most 2^-26 where it does not. For values drawn at random in
  many words it is about 2^-64.
- It finds corruption, not forgery. The keys are no secret: whoever knows them and can write the memory can write other
  bytes with the same sum.
"""

# ruff: noqa: N803 - Triton passes by position and writes constexprs in capitals

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcustody.kernels.launch import HAS_TRITON, launch, to_device, uses_triton
from kvcustody.kernels.segment import BlockIndices, SegmentTable, block_list

GATHER_BYTES = 256 << 10  # of words widened to 64 bits at once: they stay in a second-level cache
_SEED = 0x6B76637573746F64


class ChecksumKeys:
    """The keys for one cache's geometry: one for each place in a tile, and one for each tile. Read only.

    words: int64 [words of a tile]. tiles: int64 [tiles]. Both where the blocks are, or on the host where torch serves.
    """

    __slots__ = ("device", "host_tiles", "host_words", "tiles", "words")

    def __init__(self, table: SegmentTable) -> None:
        draw = np.random.Generator(np.random.PCG64(_SEED))
        self.host_words = _odd(draw, table.tiles.bytes_max // word_bytes(table))
        self.host_tiles = _odd(draw, table.tiles.count)
        self.device = table.device if uses_triton(table) else torch.device("cpu")
        self.words = torch.from_numpy(self.host_words).to(self.device)
        self.tiles = torch.from_numpy(self.host_tiles).to(self.device)


def word_bytes(table: SegmentTable) -> int:
    """Return the width of the words that are summed."""
    return 4 if table.alignment_bytes >= 4 else 1


def checksum(table: SegmentTable, keys: ChecksumKeys, blocks: BlockIndices) -> torch.Tensor:
    """Return the sums of `blocks`, int64 [blocks] on `keys.device`; on CUDA it only launches.

    Raises `DeviceError` on a bad index.
    """
    listed = block_list(table, blocks)
    if not uses_triton(table):
        return torch.from_numpy(checksum_reference(table, keys, listed))
    sums = torch.zeros(len(listed), dtype=torch.int64, device=table.device)
    if len(listed):
        index = to_device(listed, table.device)
        launch(checksum_kernel, table, (index,), constants=(keys.words, keys.tiles), flags=sums)
    return sums


def checksum_reference(table: SegmentTable, keys: ChecksumKeys, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Compute the sums without Triton: one segment after another, some blocks at a time.

    In numpy: torch multiplies int64 at a third of its speed.
    """
    sums = np.zeros(len(blocks), dtype=np.int64)
    first_tile = 0
    for words in table.words:
        tiles = -(-words.shape[1] * words.element_size() // table.tiles.bytes_max)
        _add_segment(table, keys, words, blocks, first_tile, sums)
        first_tile += tiles
    return sums


def _add_segment(
    table: SegmentTable,
    keys: ChecksumKeys,
    words: torch.Tensor,
    blocks: NDArray[np.int64],
    first_tile: int,
    sums: NDArray[np.int64],
) -> None:
    """Add what the listed blocks have in one segment: [blocks, words] of it."""
    kind: Any = np.int32 if word_bytes(table) == 4 else np.uint8
    width = len(keys.host_words)
    piece = words.shape[1] * words.element_size() // word_bytes(table)
    whole, rest = divmod(piece, width)
    host = words.view(torch.uint8).numpy().view(kind) if words.device.type == "cpu" else None
    step = max(1, GATHER_BYTES // (8 * piece))
    wide = np.empty((min(step, len(blocks)), piece), dtype=np.int64)
    tile_keys = keys.host_tiles[first_tile:]
    for start in range(0, len(blocks), step):
        part = blocks[start : start + step]
        read = wide[: len(part)]
        if host is not None:
            read[...] = host[part] if len(part) > 1 else host[part[0]]
        else:
            index = torch.from_numpy(part).to(words.device)
            read[...] = words.index_select(0, index).view(torch.uint8).cpu().numpy().view(kind)
        if whole:
            tiled = read[:, : whole * width].reshape(len(part), whole, width)
            of_tiles = np.einsum("btw,w->bt", tiled, keys.host_words)
            sums[start : start + step] += np.einsum("bt,t->b", of_tiles, tile_keys[:whole])
        if rest:
            of_rest = np.einsum("bw,w->b", read[:, whole * width :], keys.host_words[:rest])
            sums[start : start + step] += of_rest * tile_keys[whole]


def _odd(draw: np.random.Generator, count: int) -> NDArray[np.int64]:
    return draw.integers(-(1 << 63), 1 << 63, size=count, dtype=np.int64) | 1


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit(  # type: ignore[untyped-decorator]
        do_not_specialize=[
            "block_list",
            "tile_address",
            "tile_stride",
            "tile_bytes",
            "word_keys",
            "tile_keys",
            "sums",
            "blocks",
            "tiles",
        ]
    )
    def checksum_kernel(  # type: ignore[no-untyped-def]
        block_list,
        tile_address,
        tile_stride,
        tile_bytes,
        word_keys,
        tile_keys,
        sums,
        blocks,
        tiles,
        ALIGNMENT: tl.constexpr,
        TILE_BYTES: tl.constexpr,
    ):
        """Add one tile of one listed block to the block's sum, in each program.

        block_list int64 [listed]; tile_address, tile_stride, tile_bytes, tile_keys int64 [tiles]; word_keys int64
        [words of a tile]; sums int64 [listed], zero on entry. Addition modulo 2^64 has no order: nor have programs.
        """
        program = tl.program_id(0)
        position = program // tiles
        tile = program % tiles
        block = tl.load(block_list + position)
        if (block >= 0) & (block < blocks):
            address = tl.load(tile_address + tile) + block * tl.load(tile_stride + tile)
            # .cg reads past the L1 cache, so that a stale line cannot vouch for memory.
            if ALIGNMENT >= 4:
                words = tl.multiple_of(tl.load(tile_bytes + tile) // 4, ALIGNMENT // 4)
                offset = tl.arange(0, TILE_BYTES // 4)
                pointer = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), ALIGNMENT)
                value = tl.load(pointer + offset, mask=offset < words, other=0, cache_modifier=".cg")
                key = tl.load(word_keys + offset)
                total = tl.sum(value.to(tl.int64) * key, 0)
            else:
                count = tl.load(tile_bytes + tile)
                narrow = tl.arange(0, TILE_BYTES)
                byte = address.to(tl.pointer_type(tl.uint8))
                byte_value = tl.load(byte + narrow, mask=narrow < count, other=0, cache_modifier=".cg")
                total = tl.sum(byte_value.to(tl.int64) * tl.load(word_keys + narrow), 0)
            tl.atomic_add(sums + position, total * tl.load(tile_keys + tile), sem="relaxed")
