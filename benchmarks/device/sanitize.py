"""Every kernel once, small, for compute-sanitizer: the matrix of variants over odd sizes, faults, copies, orders.

    compute-sanitizer --tool memcheck --error-exitcode 9 python benchmarks/device/sanitize.py [--fault FAULT]

`--fault` breaks the rules on purpose, with a kernel of its own: a store beyond an allocation (`write`), a load of
memory that nobody wrote (`read`), a word of shared memory read without a barrier (`race`), or a barrier that only some
threads of a block reach (`barrier`). A tool that is quiet about it has shown nothing. `benchmarks/gpu.sh` runs both.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from gpu.lab import lab_of

from kvcustody.kernels.copy import copy
from kvcustody.kernels.entry import FAULT, IDLE, entries_of
from kvcustody.kernels.ordered import OrderedScrub
from kvcustody.kernels.scrub import launch_scrub
from kvcustody.kernels.segment import SegmentTable
from kvcustody.kernels.strategy import Strategy, group_max
from kvcustody.kernels.verify import verify

LISTED = np.array([0, 1, 2, 3, 9, 31, 32])
WIDTHS = (40, 41, 4096, 24_576)  # narrow, odd, one tile, more than one

RAW = {  # Triton places barriers itself: what forgets them is CUDA
    "race": """
extern "C" __global__ void race(int *out) {
    __shared__ int seen[64];
    seen[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = seen[63 - threadIdx.x]; // another warp's, and nothing has waited for it
}
""",
    "barrier": """
extern "C" __global__ void barrier(int *out) {
    if (threadIdx.x < 40) __syncthreads(); // of 64
    out[threadIdx.x] = 1;
}
""",
}
NO_COMPILER = 3  # the exit status where raw kernels cannot be compiled


@triton.jit
def stray_kernel(pointer, offset, READ: tl.constexpr):  # noqa: N803
    """int32 [256]: stores at `offset`, or loads the first word, which nobody wrote."""
    if READ:
        tl.store(pointer + 1, tl.load(pointer) + 1)
    else:
        tl.store(pointer + offset, 1)


def sweep(lab: Any, widths: tuple[int, ...] = WIDTHS) -> int:
    """Every variant; how many launches there were. Raises `AssertionError` where one does not do its work."""
    launches = 0
    for width in widths:
        tensors = [lab.tensor(2, 33, width, byte=0xFF) for _ in range(2)]
        table = SegmentTable.from_tensors(tensors, layout="kv_blocks")
        strategies = (Strategy(), Strategy(group_max(table)), Strategy(programs=7), Strategy(streaming=True))
        for strategy, read_back, faulty in product(strategies, (False, True), (False, True)):
            if faulty and not read_back:
                continue  # faults are honoured where something looks for them
            launches += 1
            _scrub(lab, table, strategy, read_back=read_back, faulty=faulty)
        _orders(lab, table)
    return launches


def _scrub(lab: Any, table: SegmentTable, strategy: Strategy, *, read_back: bool, faulty: bool) -> None:
    """One variant over a list that ends in an idle entry."""
    for words in table.words:
        words.view(torch.uint8).fill_(0xFF)
    entries = np.append(entries_of(LISTED, strategy.group, read_back=read_back), IDLE)
    entries[1] |= FAULT if faulty else 0
    flags = torch.zeros(len(LISTED), dtype=torch.int32, device=lab.device) if read_back else None
    listed = torch.from_numpy(entries).to(lab.device)
    launch_scrub(table, listed, strategy=strategy, flags=flags, faulty=faulty)
    lab.synchronize()
    if flags is not None:
        assert int(flags.sum()) == int(faulty), (strategy, flags.tolist())
    assert (lab.nonzero(table, LISTED) == 0) != faulty, strategy
    rest = np.setdiff1d(np.arange(33), LISTED)
    assert lab.nonzero(table, rest) == len(rest) * table.bytes_per_block, strategy


def _orders(lab: Any, table: SegmentTable) -> None:
    """A copy, a read, and an order of two batches with and without read-back."""
    scrubber = OrderedScrub(table, streams=lab.streams())
    for read_back in (False, True):
        for words in table.words:
            words.view(torch.uint8).fill_(0xFF)
        copy(table, [4, 5], [0, 31])
        verify(table, LISTED)
        scrubber.used()
        scrubber.launch([(LISTED, read_back), (np.array([5, 6]), read_back)])
        scrubber.order_before()
        lab.synchronize()
        assert not any(len(batch) for answer in scrubber.settle() for batch in answer.dirty)
        assert lab.nonzero(table, [*LISTED.tolist(), 5, 6]) == 0


def broken(fault: str) -> bool:
    """Break one rule; False where the kernel for it cannot be compiled."""
    words = torch.empty(256, dtype=torch.int32, device="cuda")
    if fault in RAW:
        compiler = getattr(torch.cuda, "compile_kernel", None) or getattr(torch.cuda, "_compile_kernel", None)
        if compiler is None:
            return False
        compiler(RAW[fault], fault)(grid=(1, 1, 1), block=(64, 1, 1), args=[words])
    else:
        stray_kernel[(1,)](words, 320, READ=fault == "read")
    torch.cuda.synchronize()
    return True


def main() -> int:
    """On the device."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fault", choices=("write", "read", *RAW))
    options = parser.parse_args()
    if options.fault:
        done = broken(options.fault)
        print("the rules were broken" if done else "this torch compiles no kernels of CUDA")
        return 0 if done else NO_COMPILER
    with lab_of(rehearse=False) as lab:
        print(f"every kernel ran, {sweep(lab)} variants")
    return 0


if __name__ == "__main__":
    sys.exit(main())
