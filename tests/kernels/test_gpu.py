"""On a real device: graphs, poison in every format, faults, tuning, slots, counters (`benchmarks/gpu.sh` runs it).

Order between streams, recordings beside other threads and far addresses are stages of that script, with their controls.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcustody.allocator.pool.stream_memory import StreamTensorMemory
from kvcustody.allocator.pool.tensor_memory import TensorSpec
from kvcustody.kernels.entry import IDLE, entries_of
from kvcustody.kernels.ordered import OrderedScrub
from kvcustody.kernels.scrub import launch_scrub, scrub
from kvcustody.kernels.segment import SegmentTable
from kvcustody.kernels.strategy import default_strategy
from kvcustody.kernels.tuning import tune
from kvcustody.kernels.verify import verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]


def table_of(blocks=512, layers=4, piece=32 << 10):
    tensors = [torch.full((2, blocks, piece), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(layers)]
    return SegmentTable.from_tensors(tensors, layout="kv_blocks")


def test_a_captured_graph_scrubs_what_its_list_names_at_each_replay():
    table = table_of(blocks=64)
    entries = torch.full((16,), IDLE, dtype=torch.int64, device="cuda")
    strategy = default_strategy(table)
    launch_scrub(table, entries, strategy=strategy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_scrub(table, entries, strategy=strategy)
    for listed in ([3, 5], [0, 1, 2, 63], []):
        for words in table.words:
            words.view(torch.uint8).fill_(0xFF)
        named = entries_of(np.array(listed, dtype=np.int64), strategy.group)
        padded = np.full(16, IDLE, dtype=np.int64)
        padded[: len(named)] = named
        entries.copy_(torch.from_numpy(padded))
        graph.replay()
        torch.cuda.synchronize()
        clean = sorted(set(range(64)) - set(verify(table, np.arange(64)).dirty.tolist()))
        assert clean == listed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_a_poisoned_pool_is_zero_after_its_first_scrub_and_counts_itself(dtype):
    spec = TensorSpec(layers=4, kv_heads=8, head_dim=128, dtype=dtype)
    memory = StreamTensorMemory.allocate(256, spec, "cuda")
    memory.fill(np.arange(256), 0xFF)
    memory.used()
    launched = memory.launch(0, np.arange(256), 1.0)
    ((number, result),) = memory.answered(wait=True)
    assert number == launched.number and result.level == "full" and result.verified == 256
    assert not len(result.failed)
    assert memory.scrubbed(0) == 256 and memory.nonzero_bytes(np.arange(256)) == 0
    for tensor in memory.tables[0].tensors:
        assert not tensor.float().isnan().any()


def test_a_planted_fault_is_named():
    memory = StreamTensorMemory.allocate(64, TensorSpec(layers=2, kv_heads=2, head_dim=64), "cuda")
    memory.stuck.add((0, 9))
    memory.launch(0, np.arange(64), 1.0)
    ((_, result),) = memory.answered(wait=True)
    assert result.failed.tolist() == [9]


def test_tuning_chooses_a_strategy_that_zeroes(tmp_path):
    table = table_of()
    first = tune(table, file=tmp_path / "strategies.json")
    again = tune(table, file=tmp_path / "strategies.json")
    assert again.from_file and again.chosen == first.chosen
    assert first.chosen in dict(first.measured)
    scrub(table, np.arange(0, 512, 3))
    assert not len(verify(table, np.arange(0, 512, 3)).dirty)


def test_a_memory_is_tuned_once_for_its_device(tmp_path):
    file = tmp_path / "strategies.json"
    spec = TensorSpec(layers=2, kv_heads=2, head_dim=64)
    first = StreamTensorMemory.allocate(64, spec, "cuda").prepare(file)
    again = StreamTensorMemory.allocate(64, spec, "cuda").prepare(file)
    assert [one.from_file for one in first + again] == [False, True]
    assert first[0].chosen == again[0].chosen


def test_many_launches_never_wait_on_the_host_twice_for_one_slot():
    table = table_of(blocks=64, layers=1)
    scrubber = OrderedScrub(table)
    for _ in range(200):
        scrubber.launch([(np.arange(0, 64, 2), True), (np.array([1, 3]), False)])
    answers = scrubber.settle()
    assert [answer.number for answer in answers] == list(range(1, 201))
    assert not any(len(dirty) for answer in answers for dirty in answer.dirty)
    assert scrubber.scrubbed_blocks == 200 * 34


def test_launches_allocate_nothing_on_the_device():
    table = table_of(blocks=64, layers=1)
    scrubber = OrderedScrub(table)
    listed = np.arange(0, 64, 2)
    scrubber.launch([(listed, True)])  # compiles
    scrubber.settle()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(50):
        scrubber.launch([(listed, True)])
    after = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert after == before
    assert len(scrubber.settle()) == 50
