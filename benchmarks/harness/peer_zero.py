"""How an engine zeroes blocks itself: one program for each (block, layer segment), its words stored in a loop.

The approach of vLLM's zeroing of new blocks, written here from its description so that it can be timed without vLLM:
absolute segment addresses, the block list on the device, no count and no read-back.
"""

# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcustody.kernels.segment import SegmentTable

WORDS = 1024  # a step of the loop


@triton.jit
def zero_kernel(blocks, address, stride, words, segments, WORDS: tl.constexpr):
    program = tl.program_id(0)
    block = tl.load(blocks + program // segments)
    segment = program % segments
    base = tl.load(address + segment) + block * tl.load(stride + segment)
    pointer = base.to(tl.pointer_type(tl.int32))
    offset = tl.arange(0, WORDS)
    for start in range(0, words, WORDS):
        tl.store(pointer + start + offset, tl.zeros([WORDS], tl.int32), mask=start + offset < words)


class PeerZero:
    """Zeroes listed blocks of one table, which must have pieces of one size."""

    def __init__(self, table: SegmentTable) -> None:
        rows = [(one.address, one.block_stride_bytes) for one in table.segments]
        columns = torch.tensor(rows, dtype=torch.int64, device=table.device).t().contiguous()
        self._address, self._stride = columns[0], columns[1]
        self._words = table.segments[0].piece_bytes // 4
        self._segments = len(rows)

    def zero(self, blocks: torch.Tensor) -> None:
        """blocks: int64 [listed] on the device."""
        zero_kernel[(len(blocks) * self._segments,)](
            blocks, self._address, self._stride, self._words, self._segments, WORDS=WORDS
        )
