"""A step's scrubs come before everything that a model runner writes, in vLLM's own order of calls (W2).

The runners' `execute_model` is the real one, over a runner whose parts are recorded instead of computed: what is under
test is the order in which vLLM calls them. Memory is real, on simulated streams.
"""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from kvcustody.allocator.external.scrub_queue import ScrubOrder
from kvcustody.clock import VirtualClock
from kvcustody.errors import ConfigError, IsolationError
from kvcustody.integrations.vllm import plugin
from kvcustody.integrations.vllm.connector import _shard
from kvcustody.integrations.vllm.step_messages import StepOrder
from kvcustody.integrations.vllm.worker.first_in_step import RUNNERS, order_in, wrap_runners
from kvcustody.integrations.vllm.worker.worker_side import WorkerSide
from standins.device import engine_traces
from standins.device.fake_cuda import FakeCuda

V1, V2 = RUNNERS
BLOCKS = 8
HANDED_OUT = 3
STATE = 0xAB


class Reached(Exception):
    """The runner has come to its forward pass: the order of calls is known."""


@pytest.fixture(autouse=True)
def unwrapped() -> Any:
    """The runners' own methods, before and after."""
    own = {module: importlib.import_module(module).GPUModelRunner.execute_model for module in RUNNERS}
    yield
    for module, method in own.items():
        sys.modules[module].GPUModelRunner.execute_model = method


class Step:
    """One step: block 3 ended before it and is handed out in it; the runner writes state into it as it prepares."""

    def __init__(self, *, wrapped: bool) -> None:
        self.streams = FakeCuda(1)
        self.cache = torch.full((BLOCKS, 32), 0xFF, dtype=torch.uint8)
        self.worker = WorkerSide(0, VirtualClock(), streams=self.streams)
        self.worker.register({"layer": self.cache}, BLOCKS)
        self.cache[HANDED_OUT] = 0x77  # what the last owner left
        self.calls: list[str] = []
        if wrapped:
            wrap_runners(self.execute)
        order = ScrubOrder(1, ((1.0, np.array([HANDED_OUT])),))
        self.output = MagicMock(
            total_num_scheduled_tokens=4,
            num_scheduled_tokens={"a": 4},
            kv_connector_metadata=StepOrder(1, order),
            has_sync_kv_loads=False,
        )

    def execute(self, order: StepOrder) -> None:
        self.calls.append("order")
        self.worker.execute(order)

    def write_state(self, *_: Any, **__: Any) -> None:
        """As `preprocess_state` does in align mode: the state of a running request, into its new block."""
        self.calls.append("write")
        self.streams.run(0, lambda: self.cache[HANDED_OUT].fill_(STATE))

    def state(self) -> set[int]:
        self.streams.drain()
        return set(self.cache[HANDED_OUT].tolist())


def run_v2(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the V2 GPU runner, up to its forward pass."""
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

    connector = ActiveKVConnector.__new__(ActiveKVConnector)
    connector._disabled = False
    connector.kv_connector = MagicMock()
    connector.kv_connector.handle_preemptions = step.execute
    connector.kv_connector.bind_connector_metadata.side_effect = Reached
    description = MagicMock(num_tokens=4, num_ubatches=1, cg_mode=model_runner.CUDAGraphMode.FULL)
    monkeypatch.setattr(model_runner, "dispatch_cg_and_sync_dp", lambda *_, **__: (description, None))
    monkeypatch.setattr(model_runner, "build_slot_mappings_by_layer", lambda *_: {})
    runner = MagicMock(kv_connector=connector, dcp_size=1, is_first_pp_rank=True, supports_mm_inputs=False)
    runner.gather_batch_req_state.return_value = MagicMock(num_tokens=4, has_prefill=False), None
    runner.prepare_attn.return_value = MagicMock(), MagicMock()
    runner.pcp_manager = runner.lora_config = runner.ubatch_runner = None
    runner.uses_inputs_embeds = False
    runner.model_state.preprocess_state = step.write_state
    runner.model_state.prepare_inputs.return_value = {}
    with pytest.raises(Reached):
        model_runner.GPUModelRunner.execute_model(runner, step.output)


def run_v1(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the V1 runner, up to where it has prepared its states."""
    from vllm.v1.worker import gpu_model_runner

    def prepare(*_: Any) -> None:
        step.write_state()
        raise Reached

    group = MagicMock()
    group.handle_preemptions = step.execute
    monkeypatch.setattr(gpu_model_runner, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(gpu_model_runner, "get_kv_transfer_group", lambda: group)
    runner = MagicMock(execute_model_state=None, speculative_config=None)
    runner._update_states.side_effect = prepare
    with pytest.raises(Reached):
        gpu_model_runner.GPUModelRunner.execute_model(runner, step.output)


@pytest.mark.parametrize("run", [run_v1, run_v2])
def test_state_that_a_runner_writes_while_it_prepares_outlives_the_steps_scrub(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(wrapped=True)
    run(step, monkeypatch)
    assert step.calls.index("order") < step.calls.index("write")
    assert step.state() == {STATE}


def test_positive_control_without_the_wrapper_the_v2_runner_loses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(wrapped=False)
    run_v2(step, monkeypatch)
    assert step.calls == ["write", "order"]
    assert step.state() == {0}, "void: the state was not erased"


@pytest.mark.parametrize(("run", "trace"), [(run_v1, "vllm V1"), (run_v2, "vllm V2, its own order")])
def test_the_traces_of_the_fake_device_are_the_runners_own(
    run: Any, trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What tests without vLLM replay (`tests/device/engine_traces.py`), compared with this release's calls."""
    step = Step(wrapped=False)
    run(step, monkeypatch)
    names = {"order": "order", "write": "precopy" if run is run_v2 else "states"}
    expected = [name for name in engine_traces.TRACES[trace] if name in names.values()]
    assert [names[call] for call in step.calls] == expected


def test_an_order_is_done_once_though_vllm_calls_again(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(wrapped=True)
    run_v2(step, monkeypatch)
    assert step.calls == ["order", "write", "order"]
    step.streams.drain()
    (answer,) = step.worker.receipt().answers
    assert answer.device_blocks == 1


def test_every_loaded_runner_is_wrapped_once_and_a_new_connector_takes_over() -> None:
    first, second = [], []
    assert wrap_runners(first.append) == [f"{module}:GPUModelRunner.execute_model" for module in RUNNERS]
    wrap_runners(second.append)
    order = StepOrder(4)
    with pytest.raises(Exception, match=r".*"):  # the runner itself is nothing
        sys.modules[V1].GPUModelRunner.execute_model(None, SimpleNamespace(kv_connector_metadata=order))
    assert (first, second) == ([], [order])


def test_a_runner_that_takes_other_arguments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(self: Any, batch: Any) -> None: ...

    monkeypatch.setattr(sys.modules[V2].GPUModelRunner, "execute_model", other)
    with pytest.raises(ConfigError, match="takes"):
        wrap_runners(lambda order: None)


def test_our_order_among_several_connectors() -> None:
    order = StepOrder(4)
    assert order_in(SimpleNamespace(metadata=(object(), order))) is order
    assert order_in(order) is order
    assert order_in(None) is order_in(SimpleNamespace(metadata=(object(),))) is None


@pytest.mark.parametrize(("world", "rank", "shard"), [(1, 5, 0), (4, 0, 0), (4, 3, 3), (8, 7, 7)])
def test_a_shard_is_the_executors_rank(world: int, rank: int, shard: int) -> None:
    """Tensor, pipeline and prefill context parallel ranks alike: no two workers of an engine have one."""
    assert _shard(SimpleNamespace(parallel_config=SimpleNamespace(world_size=world, rank=rank))) == shard


@pytest.mark.parametrize("rank", [-1, 4, 9])
def test_a_rank_outside_the_engine_is_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match="cannot be distinguished"):
        _shard(SimpleNamespace(parallel_config=SimpleNamespace(world_size=4, rank=rank)))


def test_a_governed_engine_does_not_give_its_memory_away() -> None:
    with pytest.raises(IsolationError, match="has not been zeroed"):
        plugin._refuse_release(SimpleNamespace(kvcustody=object()))
    plugin._refuse_release(SimpleNamespace())  # the control: another engine may
