"""Every kernel once, small, for compute-sanitizer: odd sizes, every strategy, read-back, faults, copies."""

from __future__ import annotations

import numpy as np
import torch

from kvcustody.kernels.copy import copy
from kvcustody.kernels.entry import FAULT, IDLE, entries_of
from kvcustody.kernels.ordered import OrderedScrub
from kvcustody.kernels.scrub import launch_scrub
from kvcustody.kernels.segment import SegmentTable
from kvcustody.kernels.strategy import Strategy, group_max
from kvcustody.kernels.verify import verify


def main() -> None:
    for width in (40, 4096, 24_576):
        tensors = [torch.full((2, 33, width), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(2)]
        table = SegmentTable.from_tensors(tensors, layout="kv_blocks")
        listed = np.array([0, 1, 2, 3, 9, 31, 32])
        for strategy in (
            Strategy(),
            Strategy(group_max(table)),
            Strategy(programs=7),
            Strategy(streaming=True),
        ):
            named = np.append(entries_of(listed, strategy.group, read_back=True), IDLE)
            named[1] |= FAULT
            entries = torch.from_numpy(named).cuda()
            flags = torch.zeros(len(named), dtype=torch.int32, device="cuda")
            launch_scrub(table, entries, strategy=strategy, flags=flags, faulty=True)
            launch_scrub(table, entries, strategy=strategy)
            assert flags.cpu().tolist() == [int(at == 1) for at in range(len(named))]
        assert not len(verify(table, listed).dirty)
        copy(table, [4, 5], [0, 31])
        assert verify(table, listed).dirty.tolist() == [0, 31]
        scrubber = OrderedScrub(table)
        scrubber.used()
        scrubber.launch(listed, listed)
        scrubber.order_before()
        assert not any(len(answer.dirty) for answer in scrubber.settle())
    print("every kernel ran")


if __name__ == "__main__":
    main()
