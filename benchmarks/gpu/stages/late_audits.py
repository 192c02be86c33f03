"""Late audits: samples of CLEAN blocks, brought to the host by the copy engine long after their receipts, are zero."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gpu.report import Report
from gpu.stages.captures import streams
from kvcustody.allocator.pool.stream_memory import StreamTensorMemory
from kvcustody.kernels.segment import SegmentTable

ROUNDS = 8


def run(report: Report, lab: Any) -> None:
    """Receipts first; then, with the caches of the device turned over, bytes by DMA."""
    blocks, piece, sample = lab.size(4096, 32), lab.size(64 << 10, 64), lab.size(64, 8)
    tensors = [lab.tensor(blocks, piece) for _ in range(2)]
    memory = StreamTensorMemory([SegmentTable.from_tensors(tensors)], streams=streams(lab))
    memory.prepare(None)  # zeroes some blocks
    for one in tensors:
        one.fill_(0xFF)
    generator = np.random.default_rng(3)
    clean = np.sort(generator.permutation(blocks)[: blocks // 2])
    rest = np.setdiff1d(np.arange(blocks), clean)
    memory.used()
    memory.launch(0, clean, 1.0)
    lab.synchronize()
    ((_, result),) = memory.answered(wait=True)
    report.check("the receipts say CLEAN", not len(result.failed) and result.verified == len(clean), blocks=len(clean))
    nonzero = looked = 0
    for _ in range(ROUNDS):
        fill_caches(lab)
        drawn = np.sort(generator.permutation(clean)[:sample])
        nonzero += bytes_by_copy(lab, tensors, drawn)
        looked += len(drawn)
    report.check("no sampled block has a byte that is not zero", nonzero == 0, looked_at=looked, found=nonzero)
    untouched = bytes_by_copy(lab, tensors, rest[:sample])
    report.control("blocks that nobody zeroed are found", untouched == sample * piece * 2, found=untouched)
    planted = int(generator.choice(clean))
    tensors[-1][planted, -1] = 1
    report.control("one planted byte is found", bytes_by_copy(lab, tensors, clean) == 1, block=planted)


def fill_caches(lab: Any) -> None:
    """Write more than the L2 cache holds, so that samples come from memory."""
    lab.tensor(lab.size(256 << 20, 1 << 16), byte=0x55)


def bytes_by_copy(lab: Any, tensors: list[torch.Tensor], blocks: np.ndarray) -> int:
    """Non-zero bytes of whole blocks: contiguous copies to pinned memory, which a device's copy engine makes."""
    lab.synchronize()
    pinned = torch.empty(tensors[0].shape[1:], dtype=torch.uint8, pin_memory=not lab.rehearsal)
    nonzero = 0
    for one in tensors:
        for block in blocks.tolist():
            pinned.copy_(one[block], non_blocking=True)
            lab.synchronize()
            nonzero += int(pinned.count_nonzero())
    return nonzero
