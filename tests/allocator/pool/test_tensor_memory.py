"""Memory behind the blocks, real and absent; red-team C1, C2 on one memory."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from kvcustody.allocator.pool.memory_protocol import Memory, UnbackedMemory
from kvcustody.allocator.pool.tensor_memory import TensorMemory, TensorSpec
from kvcustody.clock import VirtualClock
from kvcustody.errors import ConfigError, DeviceError

SPEC = TensorSpec(layers=2, kv_heads=2, head_dim=8, block_tokens=4)
BLOCKS = 64
EVERY = np.arange(BLOCKS)


def memory(shards=1, spec=SPEC):
    one = TensorMemory.allocate(BLOCKS, spec, shards=shards)
    one.fill(EVERY, 0xFF)
    return one


def test_scrub_zeroes_and_counts_on_its_shard_only():
    two: Memory = memory(shards=2)
    result = two.scrub(1, np.array([3, 5, 60]), 1.0)
    assert (result.method, result.device, result.level, result.verified) == ("torch", "cpu", "full", 3)
    assert result.bytes == 3 * two.bytes_per_block == 3 * SPEC.bytes_per_block
    assert not len(result.failed)
    assert result.started_us <= result.ended_us
    assert (two.scrubbed(0), two.scrubbed(1)) == (0, 3)
    assert two.nonzero_bytes(np.array([3, 5, 60])) == result.bytes  # the other shard is still dirty
    two.scrub(0, np.array([60, 5, 3]), 0.0)
    assert two.nonzero_bytes(np.array([3, 5, 60])) == 0
    assert two.nonzero_bytes(EVERY) == 2 * 61 * SPEC.bytes_per_block


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_a_scrubbed_block_reads_as_zero_under_every_dtype(dtype, latent):
    one = memory(spec=TensorSpec(2, 2, 8, 4, dtype, latent))
    assert all(tensor.float().isnan().all() for tensor in one.tables[0].tensors)
    one.scrub(0, EVERY, 0.0)
    for tensor in one.tables[0].tensors:
        for view in (torch.uint8, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float32):
            assert not tensor.view(view).float().any()


@pytest.mark.parametrize(("share", "level"), [(0.0, "retired"), (0.25, "sampled"), (1.0, "full")])
def test_the_level_says_what_was_read_back(share, level):
    one = memory()
    results = [one.scrub(0, EVERY, share) for _ in range(20)]
    assert {result.level for result in results} == {level}
    mean = sum(result.verified for result in results) / 20 / BLOCKS
    assert mean == share or 0.15 < mean < 0.35


def test_a_block_that_does_not_become_zero_is_named():
    one = memory(shards=2)
    one.stuck |= {(0, 7), (0, 9)}
    assert one.scrub(0, np.array([6, 7, 8, 9]), 1.0).failed.tolist() == [7, 9]
    assert not len(one.scrub(1, np.array([6, 7, 8, 9]), 1.0).failed)
    assert not len(one.scrub(0, np.array([6, 8]), 1.0).failed)


def test_a_sample_finds_a_stuck_block_in_time_and_cannot_be_foretold():
    one = memory()
    one.stuck.add((0, 7))
    found = [bool(len(one.scrub(0, EVERY, 0.25).failed)) for _ in range(100)]
    assert 5 <= sum(found) <= 50  # binomial(100, 1/4): outside with p < 1e-7
    first, second = memory(), memory()
    draws = [[m.scrub(0, EVERY, 0.5).verified for _ in range(16)] for m in (first, second)]
    assert draws[0] != draws[1]


def test_positive_control_without_verification_a_stuck_block_passes():
    one = memory()
    one.stuck.add((0, 7))
    assert not len(one.scrub(0, EVERY, 0.0).failed)
    assert one.nonzero_bytes(EVERY) == 1


def test_positive_control_without_scrub_everything_is_residue():
    one = memory()
    assert one.nonzero_bytes(EVERY) == BLOCKS * one.bytes_per_block


def test_copy_reaches_every_shard():
    memory = TensorMemory.allocate(BLOCKS, SPEC, shards=2)
    memory.scrub(0, EVERY, 0.0)
    memory.scrub(1, EVERY, 0.0)
    memory.fill(np.array([1]), 0x5A)
    memory.copy(np.array([1, 1]), np.array([4, 9]))
    assert memory.nonzero_bytes(np.array([4, 9])) == 4 * SPEC.bytes_per_block
    assert memory.nonzero_bytes(EVERY) == 6 * SPEC.bytes_per_block


def test_an_engines_own_tensors_are_wrapped_in_place():
    keys = [torch.ones(8, 16, 2, 4) for _ in range(3)]
    one = TensorMemory.wrap([keys])
    assert (one.shards, one.blocks, one.bytes_per_block) == (1, 8, 3 * 16 * 2 * 4 * 4)
    one.scrub(0, np.array([2]), 1.0)
    assert not any(tensor[2].any() for tensor in keys)
    assert all(bool(tensor[[0, 1, 3]].all()) for tensor in keys)
    with pytest.raises(ConfigError, match="shards disagree"):
        TensorMemory.wrap([keys, keys[:2]])


def test_bad_calls_are_refused():
    one = memory()
    with pytest.raises(DeviceError, match="block `64` is outside"):
        one.scrub(0, np.array([64]), 1.0)
    with pytest.raises(ConfigError, match="cannot allocate `0` blocks"):
        TensorMemory.allocate(0, SPEC)
    with pytest.raises(DeviceError, match=r"cannot allocate `.*` bytes on `cpu`"):
        TensorMemory.allocate(2**46, SPEC)


def test_unbacked_memory_counts_and_claims_nothing():
    clock = VirtualClock()
    none: Memory = UnbackedMemory(BLOCKS, 4096, shards=2, clock=clock)
    result = none.scrub(1, EVERY, 1.0)
    assert (result.method, result.level, result.bytes, result.verified) == ("none", "unread", 0, 0)
    assert result.started_us == result.ended_us == clock.now_us()
    assert not len(result.failed)
    assert (none.scrubbed(0), none.scrubbed(1)) == (0, BLOCKS)
    none.copy(EVERY[:1], EVERY[1:2])
    with pytest.raises(DeviceError):
        none.copy(EVERY[:1], EVERY[:2])


def test_unbacked_scrub_is_cheap():
    """As few calls for every block as for one: what it takes is not seen in a benchmark of the books."""
    none = UnbackedMemory(BLOCKS, 4096)
    assert _calls(none, EVERY) == _calls(none, EVERY[:1]) <= 8


def _calls(memory, blocks):
    events = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        memory.scrub(0, blocks, 1.0)
    finally:
        sys.setprofile(None)
    return sum(event in ("call", "c_call") for event in events) - 1  # setprofile itself


def test_the_protocol_imports_without_torch():
    code = "import sys, kvcustody.allocator.pool.memory_protocol; assert not {'torch', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_there_is_nothing_to_tune_on_the_host(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "strategies.json"
    assert TensorMemory.allocate(4, TensorSpec(layers=1, kv_heads=1, head_dim=8)).prepare(file) == []
    assert not file.exists()
