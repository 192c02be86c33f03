"""A turn at the Governor, over a memory in stream order: behind the step before it, in front of the one after."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcustody.allocator.pool.stream_memory import StreamTensorMemory
from kvcustody.allocator.pool.tensor_memory import TensorMemory
from kvcustody.integrations.transformers.batching.thread_turn import Turn
from kvcustody.kernels.segment import SegmentTable
from standins.device.engine_traces import TRACES
from standins.device.fake_cuda import FakeCuda
from standins.engines.transformers.continuous_world import governed, person


class Loop:
    """An engine that steps on its stream, and takes a turn between steps to have a block scrubbed."""

    def __init__(self, seed, *, in_turn=True):
        self.rows = torch.zeros(8, 64, dtype=torch.uint8)
        self.streams = FakeCuda(seed)
        self.memory = StreamTensorMemory([SegmentTable.from_tensors([self.rows])], streams=[self.streams])
        self.turn = Turn([self.memory] if in_turn else [])
        self.found = []

    def step(self, block, byte):
        def work():
            self.found.append(int(torch.count_nonzero(self.rows[block])))
            self.rows[block] = byte

        self.streams.run(0, work)

    def run(self, steps=30):
        generator = np.random.default_rng(1)
        for number in range(steps):
            self.step(number % 8, 1 + number)
            with self.turn, self.turn:  # nested turns are one
                self.memory.launch(0, np.array([number % 8, (number + 1) % 8]), 0.0)
                self.memory.hand_out(np.array([(number + 1) % 8]))  # as the pool does
            for _ in range(int(generator.integers(0, 6))):
                self.streams.advance()
        self.streams.drain()
        return self.found, self.rows


@pytest.mark.parametrize("seed", range(20))
def test_steps_and_scrubs_follow_the_turns(seed):
    found, rows = Loop(seed).run()
    assert found == [0] * 30
    assert not rows.any()


def test_positive_control_without_the_turns_order_they_overtake_each_other():
    outcomes = [Loop(seed, in_turn=False).run() for seed in range(20)]
    assert any(any(found) or bool(rows.any()) for found, rows in outcomes)


@pytest.mark.parametrize(("handed_out", "waits"), [(3, 1), (5, 0)])
def test_a_turn_that_hands_out_nothing_in_flight_makes_no_step_wait(handed_out, waits):
    loop = Loop(0)
    with loop.turn:
        loop.memory.launch(0, np.arange(4), 0.0)
        loop.memory.hand_out(np.array([handed_out]))
    assert loop.streams.waiting(0).count("wait") == waits


def test_the_trace_of_the_fake_device_is_the_engines_own(monkeypatch):
    """What `tests/device/engine_traces.py` replays: a turn orders, then the forward is launched."""
    calls = []

    def noting(name, call):
        def noted(*args, **kwargs):
            if not calls or calls[-1] != name:
                calls.append(name)
            return call(*args, **kwargs)

        return noted

    with governed(tick_seconds=None) as engine:
        runner = engine.processor.model_runner
        monkeypatch.setattr(Turn, "__exit__", noting("order", Turn.__exit__))
        monkeypatch.setattr(runner, "compute_batch", noting("forward", runner.compute_batch))
        engine.submit(person(), list(range(1, 20)))
        steps = engine.run()
        monkeypatch.undo()
    expected = [name for name in TRACES["transformers"] if name in ("order", "forward")]
    assert steps > 2
    assert calls == expected * steps + ["order"]


def test_a_copy_waits_for_the_scrub_of_its_target():
    loop = Loop(3)
    waits = []
    loop.streams.wait = lambda stream, event: waits.append((stream, event))
    loop.memory.launch(0, np.array([1]), 0.0)
    loop.memory.copy(np.array([0]), np.array([1]))
    assert [stream for stream, _ in waits] == [0]


def test_a_memory_without_streams_needs_no_order():
    memory = TensorMemory.wrap([[torch.zeros(4, 16, dtype=torch.uint8)]])
    with Turn([memory]):
        memory.scrub(0, np.arange(4), 0.0)
