"""Pools beyond 2^31 elements: the blocks that are listed and no others, wherever 31 or 32 bits would have wrapped."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gpu.report import Reason, Report
from kvcustody.kernels.copy import copy
from kvcustody.kernels.ordered import OrderedScrub
from kvcustody.kernels.prepare import prepare
from kvcustody.kernels.segment import SegmentTable

PIECE = 1 << 20  # bytes


def run(report: Report, lab: Any) -> None:
    """Bytes, and elements of two bytes."""
    for dtype, gib in ((torch.uint8, 5), (torch.bfloat16, 9)):
        name = f"{gib} GiB of {str(dtype).removeprefix('torch.')}"
        if lab.rehearsal and dtype is not torch.uint8:
            report.skip(name, Reason.REHEARSAL)
        elif not lab.rehearsal and torch.cuda.mem_get_info()[0] < (gib + 2) << 30:
            report.skip(name, Reason.DEVICE_LACKS, "free memory")
        else:
            pool(report, lab, dtype, gib, name)


def pool(report: Report, lab: Any, dtype: torch.dtype, gib: int, name: str) -> None:
    """One segment; the stand-in's pages come into being where they are written, so it looks at neighbours alone."""
    blocks = (gib << 30) // PIECE
    item = torch.empty(0, dtype=dtype).element_size()
    tensor = torch.empty((blocks, PIECE // item), dtype=dtype, device=lab.device)
    words = tensor.view(torch.uint8)
    wraps = sorted({(1 << 31) // PIECE, (1 << 31) * item // PIECE, (1 << 32) // PIECE} - {blocks})
    listed = np.array(sorted({0, *(one for one in wraps if one < blocks), blocks - 1}))
    near = {one + step for one in listed.tolist() for step in (-1, 1)}
    folded = {one % wrap for one in (listed - 1).tolist() for wrap in wraps}
    looked = np.array(sorted((near | folded | set(wraps)) & set(range(blocks)) - set(listed.tolist())))
    probed = looked if lab.rehearsal else np.setdiff1d(np.arange(blocks), listed)
    if lab.rehearsal:
        words[torch.from_numpy(np.concatenate([listed, probed]))] = 0xFF
    else:
        words.fill_(0xFF)
    table = SegmentTable.from_tensors([tensor])
    prepare(table)
    scrubber = OrderedScrub(table, streams=lab.streams())
    scrubber.used()
    scrubber.launch([(listed, True)])
    lab.synchronize()
    (answer,) = scrubber.settle()
    left = lab.nonzero(table, listed)
    touched = sum(int((words[one] != 0xFF).any()) for one in probed.tolist())
    exact = not left and not touched and not len(answer.dirty[0]) and table.scrubbed() == len(listed)
    report.check(
        f"{name}: the listed blocks are zero, no other has changed", exact,
        elements=tensor.numel(), listed=len(listed), left_bytes=left, touched=touched, looked_at=len(probed),
    )  # fmt: skip
    far, source = blocks - 1, int(probed[0])
    copy(table, [source], [far])
    lab.synchronize()
    report.check(f"{name}: a copy arrives at the far end", bool((words[far] == words[source]).all()))
    words[far].zero_()
    words[far, -1] = 1
    report.control(f"{name}: one byte at the far end is found", lab.nonzero(table, listed) == 1)
