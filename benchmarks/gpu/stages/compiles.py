"""Nothing is compiled after warm-up: orders of every size, reads, copies, over aligned and odd pools."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu.report import Report
from kvcustody.kernels.copy import copy, copy_in, copy_kernel, copy_out, exchange_kernel
from kvcustody.kernels.ordered import OrderedScrub
from kvcustody.kernels.prepare import prepare
from kvcustody.kernels.scrub import scrub, scrub_kernel
from kvcustody.kernels.segment import SegmentTable
from kvcustody.kernels.verify import verify, verify_kernel

SIZES = (1, 2, 3, 16, 17, 31, 32, 48, 100)
KERNELS = [
    "copy_kernel",
    "exchange_kernel",
    "exchange_kernel",
    "scrub_kernel",
    "scrub_kernel",
    "verify_kernel",
]


def run(report: Report, lab: Any) -> None:
    """By the hook that Triton calls whenever it compiles or loads a kernel."""
    for blocks, piece in ((128, 96), (1024, 96), (128, 41), (128, 4096))[: lab.size(4, 2)]:
        forget()
        with lab.compiles() as warm:
            table = table_of(lab, blocks, piece)
            prepare(table)
        with lab.compiles() as serving:
            serve(lab, table)
        passed = not serving and sorted(warm) == KERNELS
        report.check(f"{blocks} blocks in pieces of {piece}", passed, warm_up=len(warm), serving=len(serving))
    forget()
    with lab.compiles() as cold:
        serve(lab, table_of(lab, 128, 96))
    report.control("without warm-up serving compiles", sorted(cold) == KERNELS, serving=len(cold))


def forget() -> None:
    """Triton keeps what it has compiled by constants: another pool of the same ones would compile nothing."""
    for kernel in (copy_kernel, exchange_kernel, scrub_kernel, verify_kernel):
        kernel.device_caches.clear()


def table_of(lab: Any, blocks: int, piece: int) -> SegmentTable:
    """An odd number of rows, so that the columns of the pointer table are aligned differently."""
    return SegmentTable.from_tensors([lab.tensor(blocks, piece) for _ in range(3)])


def serve(lab: Any, table: SegmentTable) -> None:
    """What an engine may ask for."""
    scrubber = OrderedScrub(table, streams=lab.streams())
    for size in SIZES[: lab.size(len(SIZES), 5)]:
        blocks = np.arange(size)
        scrubber.used()
        scrubber.launch([(blocks, False)])
        scrubber.launch([(blocks, True)])
        scrubber.launch([(blocks, np.arange(size) % 2 == 0), (np.array([120]), False)])
        scrubber.order_before()
        scrub(table, blocks)
        verify(table, blocks)
        copy(table, blocks[: size // 2], 127 - blocks[: size // 2])
        memory = memoryview(bytearray(size * table.bytes_per_block))
        copy_out(table, blocks, memory)
        copy_in(table, blocks, memory)
        lab.synchronize()
        scrubber.answered()
