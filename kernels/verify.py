"""Verify: read the listed blocks back and report which hold a nonzero byte.

    verify(table, [3, 4, 17]).dirty         # the blocks that are not zero
    verify(table, blocks, 0.05).checked     # a secret sample of one in twenty

- A listed block is flagged exactly when at least one of its bytes, in any segment, is not zero.
- It only reads.
- A sample is drawn block by block with secret randomness, unless a seed is given: no caller can tell which
  blocks of a batch will be read.
"""

# ruff: noqa: N803 - Triton passes by position and writes constexprs in capitals

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvcustody.errors import ConfigError
from kvcustody.kernels.host import SMALL_BYTES
from kvcustody.kernels.launch import HAS_TRITON, launch, to_device, uses_triton
from kvcustody.kernels.segment import BlockIndices, SegmentTable, block_list

GATHER_BYTES = 1 << 20  # scattered pieces are gathered into a buffer of this size, which stays in the cache


class Verification(NamedTuple):
    """The result of a read-back: `checked` blocks, and the `dirty` ones among them."""

    checked: NDArray[np.int64]
    dirty: NDArray[np.int64]


def verify(
    table: SegmentTable,
    blocks: BlockIndices,
    share: float = 1.0,
    *,
    seed: int | None = None,
    generator: np.random.Generator | None = None,
) -> Verification:
    """Read back `blocks`, or the sampled `share` of them, in full; waits for the answer.

    share: 0 reads nothing, 1 reads all; between, each block is drawn with that probability. seed: for
    reproducible tests; without it (or a `generator`) the operating system's randomness is used. Raises
    `DeviceError` on a bad index.
    """
    listed = block_list(table, blocks)
    checked = sample(listed, share, generator if generator is not None else np.random.default_rng(seed))
    if not len(checked):
        return Verification(checked, checked)
    if uses_triton(table):
        index = to_device(checked, table.device)
        flags = torch.zeros(len(checked), dtype=torch.int32, device=table.device)
        launch(verify_kernel, table, (index,), flags=flags)
        dirty = flags.cpu().numpy() != 0
    elif table.device.type == "cpu" and len(checked) * table.bytes_per_block < SMALL_BYTES:
        dirty = table.rows.nonzero(checked)
    else:
        dirty = verify_reference(table, checked)
    return Verification(checked, checked[dirty])


def sample(blocks: NDArray[np.int64], share: float, generator: np.random.Generator) -> NDArray[np.int64]:
    """Draw each block with probability `share`; 0 and 1 draw nothing."""
    if not 0.0 <= share <= 1.0:
        raise ConfigError(f"verify share `{share}` is outside 0..1", share=share)
    if share in (0.0, 1.0):
        return blocks if share else blocks[:0]
    return blocks[generator.random(len(blocks)) < share]


def verify_reference(table: SegmentTable, blocks: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return one flag for each listed block, with torch. The maximum over unsigned bytes replaces their OR."""
    dirty = torch.zeros(len(blocks), dtype=torch.bool, device=table.device)
    adjacent = len(blocks) > 0 and bool((np.diff(blocks) == 1).all())
    index = torch.from_numpy(blocks).to(table.device)
    for words in table.words:
        if adjacent:
            first = int(blocks[0])
            dirty |= _any(words[first : first + len(blocks)])
            continue
        step = max(1, GATHER_BYTES // (words.shape[1] * words.element_size()))
        buffer = words.new_empty((min(step, len(blocks)), words.shape[1]))
        for start in range(0, len(blocks), step):
            part = index[start : start + step]
            gathered = torch.index_select(words, 0, part, out=buffer[: len(part)])
            dirty[start : start + step] |= _any(gathered)
    flags: NDArray[np.bool_] = dirty.cpu().numpy()
    return flags


def _any(words: torch.Tensor) -> torch.Tensor:
    """[rows, words] -> bool [rows]: whether a row has a byte that is not zero."""
    return words.view(torch.uint8).amax(dim=1) != 0


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit(  # type: ignore[untyped-decorator]
        do_not_specialize=[
            "block_list",
            "tile_address",
            "tile_stride",
            "tile_bytes",
            "flags",
            "blocks",
            "tiles",
        ]
    )
    def verify_kernel(  # type: ignore[no-untyped-def]
        block_list,
        tile_address,
        tile_stride,
        tile_bytes,
        flags,
        blocks,
        tiles,
        ALIGNMENT: tl.constexpr,
        TILE_BYTES: tl.constexpr,
    ):
        """OR one tile of one listed block and raise the block's flag if it is nonzero, in each program.

        block_list int64 [listed]; tile_address, tile_stride, tile_bytes int64 [tiles]; flags int32 [listed].
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
                if tl.max((value != 0).to(tl.int32), 0) != 0:
                    tl.atomic_or(flags + position, 1, sem="relaxed")
            else:
                count = tl.load(tile_bytes + tile)
                narrow = tl.arange(0, TILE_BYTES)
                byte = address.to(tl.pointer_type(tl.int8))
                byte_value = tl.load(byte + narrow, mask=narrow < count, other=0, cache_modifier=".cg")
                if tl.max((byte_value != 0).to(tl.int32), 0) != 0:
                    tl.atomic_or(flags + position, 1, sem="relaxed")
        else:
            tl.atomic_or(flags + position, 1, sem="relaxed")  # an index outside the pool never verifies
