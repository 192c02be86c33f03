"""What is compiled, and when: everything at registration, nothing while serving (a counting driver, no device)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kvcustody.allocator.pool.stream_memory import StreamTensorMemory
from kvcustody.kernels.copy import copy, copy_in, copy_out
from kvcustody.kernels.launch import INTERPRETED
from kvcustody.kernels.ordered import OrderedScrub
from kvcustody.kernels.prepare import prepare
from kvcustody.kernels.scrub import scrub, scrub_kernel
from kvcustody.kernels.segment import SegmentTable
from kvcustody.kernels.strategy import default_strategy
from kvcustody.kernels.verify import verify
from standins.device.fake_cuda import FakeCuda
from standins.device.fake_triton import fake_triton

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]
SIZES = (1, 2, 3, 16, 17, 31, 32, 48, 100)
KERNELS = [
    "copy_kernel",
    "exchange_kernel",
    "exchange_kernel",
    "scrub_kernel",
    "scrub_kernel",
    "verify_kernel",
]


def table_of(blocks=128, layers=3, piece=96):
    """Three layers: an odd number of rows, so that the columns of the pointer table are aligned differently."""
    return SegmentTable.from_tensors([torch.zeros(blocks, piece, dtype=torch.uint8) for _ in range(layers)])


def serve(table, scrubber):
    """Orders of every size, read back and not, a read of them, copies (to the host too), a scrub that waits."""
    for size in SIZES:
        blocks = np.arange(0, size)
        scrubber.used()
        scrubber.launch([(blocks, False)])
        scrubber.launch([(blocks, True)])
        scrubber.launch([(blocks, np.arange(size) % 2 == 0), (np.array([120]), False)])
        scrubber.order_before()
        scrubber._streams.drain()
        scrubber.answered()
        scrub(table, blocks)
        verify(table, blocks)
        copy(table, blocks[: size // 2], 127 - blocks[: size // 2])
        memory = memoryview(bytearray(size * table.bytes_per_block))
        copy_out(table, blocks, memory)
        copy_in(table, blocks, memory)


@pytest.mark.parametrize("blocks", [128, 1024])
def test_serving_compiles_nothing(blocks):
    with fake_triton() as driver:
        table = table_of(blocks)
        prepare(table)
        assert sorted(driver.compiled) == KERNELS
        serve(table, OrderedScrub(table, streams=FakeCuda()))
        assert len(driver.compiled) == len(KERNELS)
        assert len(driver.launched) > 6 * len(SIZES)


def test_positive_control_what_was_not_prepared_is_compiled_while_serving():
    with fake_triton() as driver:
        table = table_of()
        serve(table, OrderedScrub(table, streams=FakeCuda()))
        assert sorted(driver.compiled) == KERNELS


def test_a_memory_is_prepared_when_an_engine_registers_it():
    with fake_triton() as driver:
        memory = StreamTensorMemory([table_of()], streams=[FakeCuda()])
        memory.prepare(None)
        assert len(driver.compiled) == len(KERNELS)


def test_an_order_is_one_launch_with_these_arguments():
    """In the order of the kernel's parameters, with memory that host and device share."""
    seen = []
    with fake_triton(on_launch=lambda name, *rest: seen.append((name, *rest))) as driver:
        table = table_of()
        prepare(table)
        seen.clear()
        streams = FakeCuda()
        scrubber = OrderedScrub(table, streams=streams)
        scrubber.launch([(np.arange(5), True), (np.array([9]), False)])
        streams.drain()
        assert driver.launched[-1] == "scrub_kernel"
    ((name, programs, stream, arguments),) = seen
    named = dict(zip(scrub_kernel.arg_names, arguments, strict=True))
    assert (name, programs, stream) == ("scrub_kernel", len(named["entries"]) * table.tiles.count, 1)
    assert named["tally"] is table.tally and named["tile_stride"] is table.tiles.stride
    assert (named["blocks"], named["tiles"], named["pairs"]) == (table.blocks, table.tiles.count, programs)
    assert named["READ_BACK"] is True and named["SPAN_BYTES"] % table.tiles.bytes_max == 0
    assert named["SPAN_BYTES"] == table.tiles.bytes_max * default_strategy(table).group
    assert named["published"].numel() == 1 and named["flags"].dtype == torch.int32
