"""Blocks of a device into a sealed host tier and back: every byte, none in clear, rates beside plain transfers."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch
from tiers import copies as tier_copies
from tiers.copies import BLOCK, Copies

from gpu.report import Reason, Report
from kvcustody.allocator.pool.tensor_memory import TensorMemory
from kvcustody.governance.tiers.stores.host_arena import HostArena
from kvcustody.kernels.copy import copy_in, copy_out
from kvcustody.kernels.prepare import prepare
from kvcustody.kernels.segment import SegmentTable

LAYERS = 64
CLEAR = bytes(range(1, 65)) * 2  # at the beginning of every piece: a store that had it would have clear bytes


def sealed(report: Report, lab: Any) -> None:
    """Into a sealed tier and back, by the size of an object."""
    for blocks in (4, 16, 64)[: lab.size(3, 1)]:  # of an object
        objects = 256 // blocks // lab.size(1, 8)
        changed = {"BLOCKS": blocks, "OBJECTS": objects, "OBJECT": blocks * BLOCK}
        with mock.patch.multiple(tier_copies, **changed, RUN=objects * blocks * BLOCK):
            one_size(report, lab)


class OnDevice(Copies):
    """Runs of one half of a device's pool, which come back into the other."""

    def __init__(self, lab: Any, folder: Path, store: HostArena) -> None:
        super().__init__(folder, store)
        self.count = tier_copies.RUNS * tier_copies.RUN // BLOCK
        tensors = [
            torch.randint(0, 256, (2 * self.count, BLOCK // LAYERS), dtype=torch.uint8, device=lab.device)
            for _ in range(LAYERS)
        ]
        for one in tensors:
            one[:, : len(CLEAR)] = torch.tensor(list(CLEAR), dtype=torch.uint8)
        self.table = SegmentTable.from_tensors(tensors)
        prepare(self.table)
        self.tier.staging.pin(TensorMemory([self.table]).pin)

    def take(self, at: int, into: memoryview) -> None:
        first = at // BLOCK
        copy_out(self.table, np.arange(first, first + len(into) // BLOCK), into)

    def put(self, at: int, data: memoryview) -> None:
        first = self.count + at // BLOCK
        copy_in(self.table, np.arange(first, first + len(data) // BLOCK), data)

    def is_back(self) -> bool:
        """Whether one half is the other."""
        return all(torch.equal(one[: self.count], one[self.count :]) for one in self.table.tensors)


def one_size(report: Report, lab: Any) -> None:
    """Bytes, and GB/s of all runs, out and in, beside one plain transfer an object and as many library calls."""
    name = f"objects of {tier_copies.OBJECT >> 10} KiB"
    total = tier_copies.RUNS * tier_copies.RUN
    with tempfile.TemporaryDirectory() as folder:
        arena = HostArena(2 * (total + tier_copies.RUNS * tier_copies.OBJECTS * 4096))
        sides = OnDevice(lab, Path(folder), arena)
        report.control(f"{name}: what did not come back is seen", not sides.is_back())
        sides.store()
        sides.load()
        lab.synchronize()
        report.check(f"{name}: what came back is what was there", sides.is_back())
        stored = [arena.peek(one, tier_copies.OBJECT) or b"" for one in list(sides.tier.index())[:4]]
        report.check(f"{name}: nothing in clear", not any(CLEAR[:32] in bytes(one) for one in stored))
        plain = bytearray(tier_copies.OBJECT)
        sides.take(0, memoryview(plain))
        report.control(f"{name}: clear bytes would be found", CLEAR[:32] in plain and len(stored) == 4)
        if lab.rehearsal:
            report.skip(f"{name}: rates", Reason.REHEARSAL, "the host's memory is not a device's")
        else:
            sealed_rates(report, lab, name, sides, total)
        sides.tier.close()
        sides.tier.staging.close()


def sealed_rates(report: Report, lab: Any, name: str, sides: OnDevice, total: int) -> None:
    """Medians of rounds that took turns."""
    pinned = torch.empty(tier_copies.OBJECT, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(tier_copies.OBJECT, dtype=torch.uint8, device=lab.device)
    objects = total // tier_copies.OBJECT

    def plain_out() -> None:
        for _ in range(objects):
            pinned.copy_(there)

    def plain_in() -> None:
        for _ in range(objects):
            there.copy_(pinned)

    rates: dict[str, list[float]] = {}
    for number in range(6):
        sides.tier.destroy(list(sides.tier.index()))
        for side, act in {
            "store": sides.store,
            "plain out": plain_out,
            "load": sides.load,
            "plain in": plain_in,
        }.items():
            lab.synchronize()
            begun = time.perf_counter()
            act()
            lab.synchronize()
            if number:
                rates.setdefault(side, []).append(total / (time.perf_counter() - begun) / 1e9)
    gbps = {side: round(median(each), 2) for side, each in rates.items()}
    report.measured(
        f"{name}: GB/s",
        **gbps,
        store_ratio=round(gbps["store"] / gbps["plain out"], 3),
        load_ratio=round(gbps["load"] / gbps["plain in"], 3),
    )
