"""How a kernel is launched: which path serves a device, and how many programs and warps a launch holds.

Triton is optional: without it, or off CUDA and ROCm, the torch path serves every device. `TRITON_INTERPRET=1`
before the first import makes the kernels run on CPU tensors, which the tests use.

- A program handles one (listed block, tile) pair; a launch holds every pair, unless the grid would pass its
  limit.
- Addresses are 64-bit; an index outside the pool is skipped by the kernel even if a wrapper's check were
  missing.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kvcustody.kernels.segment import SegmentTable

HAS_TRITON = importlib.util.find_spec("triton") is not None
PROGRAMS_MAX = 2**31 - 1  # of grid axis 0
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def uses_triton(table: SegmentTable) -> bool:
    """Whether this table's device is served by the Triton kernels (else by torch)."""
    return HAS_TRITON and (table.device.type == "cuda" or INTERPRETED)


def warps(tile_bytes: int) -> int:
    """As many warps as have a 16-byte word for each thread, at most four."""
    return max(1, min(4, tile_bytes // 512))


def launch(
    kernel: Any,
    table: SegmentTable,
    lists: tuple[torch.Tensor, ...],
    *,
    flags: torch.Tensor | None = None,
    programs_max: int = PROGRAMS_MAX,
) -> None:
    """Launch `kernel(*lists, address, stride, bytes, flags, blocks, tiles)`.

    lists: int64 [listed] on the device. flags: int32 [listed], one for each listed block.
    """
    tiles, listed = table.tiles, len(lists[0])
    step = max(1, programs_max // tiles.count)
    for start in range(0, listed, step):
        end = min(listed, start + step)
        output = [] if flags is None else [flags[start:end]]
        with on_device(table.device):
            kernel[((end - start) * tiles.count,)](
                *(one[start:end] for one in lists),
                tiles.address,
                tiles.stride,
                tiles.bytes,
                *output,
                table.blocks,
                tiles.count,
                ALIGNMENT=table.alignment_bytes,
                TILE_BYTES=tiles.bytes_max,
                num_warps=warps(tiles.bytes_max),
            )


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Launch on `device`, which need not be the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
