"""Blocks to the host and into a sealed tier, and back: every byte, nothing left between, none in clear, and rates."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch

from gpu.report import Reason, Report, missing
from kvcustody.allocator.pool.tensor_memory import TensorMemory
from kvcustody.governance.tiers.staging import Staging
from kvcustody.kernels import copy as copies
from kvcustody.kernels.copy import copy_in, copy_out
from kvcustody.kernels.prepare import prepare
from kvcustody.kernels.segment import SegmentTable

NEEDS = ("cryptography", "sqlalchemy", "pydantic", "structlog")  # of a sealed tier
MARK = 0xA7  # a byte that nobody else writes
WAYS = {"direct": 1 << 40, "by the copy engine": 0}  # the most that the kernel moves itself
SHAPES = {"32 KiB pieces of 64 layers": (64, 32 << 10), "odd pieces": (3, 41), "one latent": (1, 18432)}


def run(report: Report, lab: Any) -> None:
    """On the host torch's path is asked, whose bytes are the same."""
    with lab.by_torch():
        for way, at_most in WAYS.items():
            for name, (layers, piece) in SHAPES.items():
                with mock.patch.object(copies, "DIRECT_BYTES", at_most):
                    comes_back(report, lab, f"{name}, {way}", layers, piece)
        if lab.rehearsal:
            for check in ("nothing is left on the device", "rates"):
                report.skip(check, Reason.REHEARSAL, "the host's memory is not a device's")
        else:
            nothing_is_left(report, lab)
            rates(report, lab)
        if absent := missing(*NEEDS):
            report.skip("a sealed tier", Reason.NOT_INSTALLED, ", ".join(absent))
            return
        from gpu.sealed_copies import sealed

        sealed(report, lab)


def table_of(lab: Any, blocks: int, layers: int, piece: int) -> SegmentTable:
    """A pool of random bytes."""
    tensors = [torch.randint(0, 256, (blocks, piece), dtype=torch.uint8, device=lab.device) for _ in range(layers)]
    table = SegmentTable.from_tensors(tensors)
    prepare(table)
    return table


def comes_back(report: Report, lab: Any, name: str, layers: int, piece: int) -> None:
    """Through pinned buffers as a tier has them: targets become their sources, and no other block changes."""
    table = table_of(lab, 64, layers, piece)
    before = [one.cpu().clone() for one in table.tensors]
    chosen = np.random.default_rng(5).permutation(64)
    source, target = chosen[:16], chosen[16:32]
    staging = Staging(1, 16 * table.bytes_per_block)
    staging.pin(TensorMemory([table]).pin)
    with staging.take(16 * table.bytes_per_block) as plain:
        assert plain is not None
        pinned = torch.frombuffer(plain, dtype=torch.uint8).is_pinned()
        copy_out(table, source, plain)
        copy_in(table, target, plain)
        lab.synchronize()
    staging.close()
    expected = [one.clone() for one in before]
    for one in expected:
        one[target] = one[source]
    same = all(torch.equal(one.cpu(), other) for one, other in zip(table.tensors, expected, strict=True))
    report.check(f"{name}: out and in", same, bytes_per_block=table.bytes_per_block)
    report.check(f"{name}: the buffers are pinned", pinned or lab.rehearsal)
    moved = any(not torch.equal(one, other) for one, other in zip(before, expected, strict=True))
    report.control(f"{name}: a copy that did nothing would be seen", moved)


def nothing_is_left(report: Report, lab: Any) -> None:
    """What stood between is given to whoever allocates next: it holds nothing of the blocks."""
    table = table_of(lab, 64, 16, 32 << 10)
    for one in table.tensors:
        one.fill_(MARK)
    size = 16 * table.bytes_per_block
    memory, blocks = memoryview(bytearray(size)), np.arange(16)
    copy_out(table, blocks, memory)
    copy_in(table, blocks, memory)
    again = torch.empty(size, dtype=torch.uint8, device=lab.device)
    left = int((again == MARK).sum())
    again.fill_(MARK)
    del again
    control = int((torch.empty(size, dtype=torch.uint8, device=lab.device) == MARK).sum())
    report.check("nothing is left on the device", left == 0, bytes=left)
    report.control("memory that was not zeroed is handed out as it was", control == size, bytes=control)


def rates(report: Report, lab: Any) -> None:
    """GB/s by the size of an object, either way, against one transfer of as many bytes to and from pinned memory."""
    table = table_of(lab, 512, 64, 1 << 10)
    for blocks in (4, 16, 32, 64, 128):
        size = blocks * table.bytes_per_block
        staging = Staging(1, size)
        staging.pin(TensorMemory([table]).pin)
        listed = np.random.default_rng(9).permutation(512)[:blocks]
        plain = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(size, dtype=torch.uint8, device=lab.device)
        with staging.take(size) as view:
            assert view is not None
            ways: dict[str, Callable[[], Any]] = {
                "out": partial(copy_out, table, listed, view),
                "plain out": partial(plain.copy_, there),
                "in": partial(copy_in, table, listed, view),
                "plain in": partial(there.copy_, plain),
            }
            for way, at_most in {"as served": copies.DIRECT_BYTES, **WAYS}.items():
                with mock.patch.object(copies, "DIRECT_BYTES", at_most):
                    took = {name: [timed(lab, act) for _ in range(60)][10:] for name, act in ways.items()}
                gbps = {name: round(size / median(each) / 1e9, 2) for name, each in took.items()}
                ratios = {f"{to}_ratio": round(gbps[to] / gbps[f"plain {to}"], 3) for to in ("out", "in")}
                report.measured(f"{size >> 10} KiB, {blocks} blocks of 64 pieces, {way}", **gbps, **ratios)
        staging.close()


def timed(lab: Any, act: Callable[[], Any]) -> float:
    """Seconds until the device has done it."""
    lab.synchronize()
    begun = time.perf_counter()
    act()
    lab.synchronize()
    return time.perf_counter() - begun
