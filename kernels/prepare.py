"""Compile before serving: launch once, over no blocks, every kernel that serving may launch over one cache.

A compilation takes a second and holds the engine up; it belongs to registration. After `prepare`,
`SegmentTable.variants` has every variant, and a launch is by its handle.
"""

from __future__ import annotations

import numpy as np
import torch

from kvcustody.kernels.copy import exchange
from kvcustody.kernels.entry import IDLE
from kvcustody.kernels.launch import HAS_TRITON, launch, to_device, uses_triton
from kvcustody.kernels.scrub import launch_scrub
from kvcustody.kernels.segment import SegmentTable
from kvcustody.kernels.strategy import strategy_of

if HAS_TRITON:
    from kvcustody.kernels.copy import copy_kernel
    from kvcustody.kernels.verify import verify_kernel


def prepare(table: SegmentTable) -> None:
    """Compile and load the kernels for `table` with its strategy; does nothing if torch serves it."""
    if not uses_triton(table):
        return
    strategy = strategy_of(table)
    flags = torch.zeros(1, dtype=torch.int32, device=table.device)
    idle = to_device(np.array([IDLE], dtype=np.int64), table.device)
    for asked in (None, flags):
        launch_scrub(table, idle, strategy=strategy, flags=asked)
    nowhere = to_device(np.array([-1], dtype=np.int64), table.device)  # outside every pool: skipped
    launch(verify_kernel, table, (nowhere,), flags=flags)
    launch(copy_kernel, table, (nowhere, nowhere))
    row = torch.zeros((1, table.bytes_per_block), dtype=torch.uint8, device=table.device)
    for out in (True, False):
        exchange(table, nowhere, row, out=out)
