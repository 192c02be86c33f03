"""Launch kernels: which path serves a device, which variants exist, and when they are compiled.

Triton is optional: without it, or off CUDA and ROCm, the torch path serves every device. `TRITON_INTERPRET=1`
before the first import makes the kernels run on CPU tensors, which the tests use.

- A program handles one (listed block, tile) pair; a launch holds every pair, unless the grid would pass its
  limit.
- No argument is specialised, so a table has as many variants as ways to launch, and `SegmentTable.variants` keeps them:
  once they were compiled, serving compiles nothing.
- Addresses are 64-bit; an index outside the pool is skipped by the kernel even if a wrapper's check were
  missing.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcustody.kernels.segment import SegmentTable

HAS_TRITON = importlib.util.find_spec("triton") is not None
PAIRS_MAX = 1 << 30  # of one launch: far below grid axis 0, and a loop over pairs stays within 32 bits
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def uses_triton(table: SegmentTable) -> bool:
    """Return whether this table's device is served by the Triton kernels (else by torch)."""
    return HAS_TRITON and (table.device.type == "cuda" or INTERPRETED)


def warps(tile_bytes: int) -> int:
    """Return as many warps as there are 16-byte words for their threads, at most four."""
    return max(1, min(4, tile_bytes // 512))


class Variant:
    """A kernel with its constants: compiled at its first launch, launched by its handle afterwards.

    A launch by handle looks nothing up: a third of the host time of Triton's own dispatch, and it cannot compile.
    """

    __slots__ = ("_compiled", "_constants", "_kernel", "_warps")

    def __init__(self, kernel: Any, constants: Mapping[str, int | bool], num_warps: int) -> None:
        self._kernel = kernel
        self._constants = dict(constants)  # in the order of the kernel's parameters
        self._warps = num_warps
        self._compiled: Any = None

    def launch(self, programs: int, stream: int | None, *arguments: torch.Tensor | int) -> None:
        """Launch on the stream with this raw handle, or on the current one."""
        if INTERPRETED:
            self._kernel[(programs,)](*arguments, **self._constants)
            return
        compiled = self._compiled
        if compiled is None:
            compiled = self._compiled = self._kernel.warmup(
                *arguments, grid=(1,), num_warps=self._warps, **self._constants
            )
        compiled[programs, 1, 1](*arguments, *self._constants.values(), stream=stream)


def launch(
    kernel: Any,
    table: SegmentTable,
    lists: tuple[torch.Tensor, ...],
    *,
    constants: tuple[torch.Tensor, ...] = (),
    rows: torch.Tensor | None = None,
    flags: torch.Tensor | None = None,
    choice: Mapping[str, bool] | None = None,
    pairs_max: int = PAIRS_MAX,
) -> None:
    """Launch `kernel(*lists, address, stride, bytes, *constants, rows, flags, blocks, tiles)` on the current stream.

    lists: int64 [listed] on the device. constants: what every program may read. rows: [listed, ...] and flags:
    [listed], one for each listed block. choice: constants of the kernel that are compiled in.
    """
    tiles, listed = table.tiles, len(lists[0])
    name = (kernel, *choice.items()) if choice else kernel
    variant = table.variants.get(name)
    if variant is None:
        compiled_in = {"ALIGNMENT": table.alignment_bytes, "TILE_BYTES": tiles.bytes_max, **(choice or {})}
        variant = table.variants[name] = Variant(kernel, compiled_in, warps(tiles.bytes_max))
    step = max(1, pairs_max // tiles.count)
    output = [one for one in (rows, flags) if one is not None]
    with on_device(table.device):
        for start in range(0, listed, step):
            end = min(listed, start + step)
            is_whole = step >= listed  # the rule
            variant.launch(
                (end - start) * tiles.count,
                None,
                *(one if is_whole else one[start:end] for one in lists),
                tiles.address,
                tiles.stride,
                tiles.bytes,
                *constants,
                *(one if is_whole else one[start:end] for one in output),
                table.blocks,
                tiles.count,
            )


def to_device(array: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Return `array` on `device`; on CUDA it goes through pinned memory, so that the host does not wait."""
    return reached(array, device).to(device, non_blocking=True)


def reached(array: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Return `array` in host memory that a kernel on `device` can read; kept until the kernel has run."""
    if device.type != "cuda":
        return torch.from_numpy(array)
    pinned = torch.empty(array.shape, dtype=torch.int64, pin_memory=True)
    pinned.numpy()[...] = array
    return pinned


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the current one for a launch."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)
