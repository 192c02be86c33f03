"""The worker's scrubs on a device: in stream order, in any interleaving, with no wait of the host (W2 W3)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from kvcustody.allocator.external.block_sums import SumOrder
from kvcustody.allocator.external.scrub_queue import ScrubOrder
from kvcustody.allocator.pool.stream_memory import StreamTensorMemory
from kvcustody.clock import VirtualClock
from kvcustody.integrations.vllm.step_messages import ScrubReply, StepOrder, StepReceipt, SumReply
from kvcustody.integrations.vllm.worker.worker_side import WorkerSide
from standins.device.fake_cuda import FakeCuda
from standins.engines.vllm.scheduler_rig import Rig

BLOCKS = 24
SEEDS = range(8)


class Device:
    """A worker on simulated streams, and a model that ends blocks and writes them again in one step."""

    def __init__(self, seed: int, null_block: int | None = None) -> None:
        self.random = np.random.default_rng(seed)
        self.streams = FakeCuda(seed)
        self.cache = torch.full((BLOCKS, 32), 0xFF, dtype=torch.uint8)
        self.worker = WorkerSide(0, VirtualClock(), streams=self.streams, null_block=null_block)
        self.worker.register({"layer": self.cache}, BLOCKS)
        self.found: list[int] = []
        self.answers: list[ScrubReply] = []
        self.ordered: list[int] = []  # blocks by order

    def step(self, number: int, *, shares: tuple[float, ...] = (1.0, 0.0)) -> int:
        """Blocks of the step before are scrubbed and written anew; returns how many orders are pending."""
        chosen = self.random.permutation(BLOCKS)[: 3 * len(shares)]
        parts = np.array_split(np.sort(chosen), len(shares))
        self.ordered.append(len(chosen))
        self.worker.execute(StepOrder(number, ScrubOrder(number, tuple(zip(shares, parts, strict=True)))))
        self.streams.run(0, lambda: self._write(chosen))
        return self._receive()

    def idle(self, number: int) -> int:
        self.worker.execute(StepOrder(number, is_idle=True))
        return self._receive()

    def live(self, steps: int = 40) -> None:
        for number in range(1, steps + 1):
            self.step(number)
            for _ in range(int(self.random.integers(0, 12))):
                self.streams.advance()

    def _write(self, blocks: np.ndarray) -> None:
        self.found.append(int(torch.count_nonzero(self.cache[blocks])))
        self.cache[blocks] = 0xAB

    def _receive(self) -> int:
        receipt = self.worker.receipt()
        self.answers += receipt.answers
        return receipt.pending_orders


def test_a_block_is_compared_before_the_step_that_scrubs_it() -> None:
    """The order of one step: sums and comparisons, scrubs, the step's own writes."""
    device = Device(1)
    device.cache[:] = 5
    first, none = np.arange(6), np.empty(0, dtype=np.int64)
    device.worker.execute(StepOrder(1, sums=SumOrder(1, first, none)))
    assert device.worker.receipt().compared == []
    device.cache[3] ^= 1
    scrub = ScrubOrder(1, ((1.0, np.array([4])),))
    device.worker.execute(StepOrder(2, scrub, sums=SumOrder(2, np.array([7]), first)))
    assert device.worker.receipt().compared == [SumReply(2, 0, [3])]
    device.idle(3)  # the scrub has retired
    device.worker.execute(StepOrder(4, sums=SumOrder(3, none, np.array([4, 7]))))
    assert device.worker.receipt().compared == [SumReply(3, 0, [4])], "positive control: it was zeroed since"


@pytest.mark.parametrize("seed", SEEDS)
def test_every_first_write_finds_zeros_and_every_order_is_answered_once(seed: int) -> None:
    device = Device(seed)
    device.live()
    assert device.idle(41) == 0
    device.streams.drain()
    assert device.found == [0] * 40
    assert [answer.order for answer in device.answers] == list(range(1, 41))
    assert all(len(answer.results) == 2 for answer in device.answers)
    assert not any(len(result.failed) for answer in device.answers for result in answer.results)
    counts = [answer.device_blocks for answer in device.answers]
    least = np.cumsum(device.ordered)
    assert counts == sorted(counts) and all(np.array(counts) >= least)
    assert counts[-1] == least[-1]  # the device's own count, of answered orders only


def test_the_host_waits_for_nothing_and_owes_the_answer_until_it_has_retired() -> None:
    device = Device(0)
    assert device.step(1, shares=(1.0,)) == 1
    assert device.answers == [] and device.streams.host_waits == 0
    assert bool((device.cache == 0).all()), "registered"
    device.streams.drain()
    assert device.step(2, shares=(1.0,)) == 1
    assert [answer.order for answer in device.answers] == [1] and device.streams.host_waits == 0
    assert device.idle(3) == 0
    assert [answer.order for answer in device.answers] == [1, 2] and device.streams.host_waits == 1


def test_an_order_is_one_launch_and_its_blocks_are_in_no_count_but_its_own() -> None:
    """Two batches an order; an answer's count is that of the orders answered so far, whatever flies behind them."""
    device, launches = Device(3), []
    run = device.streams.run
    device.streams.run = lambda stream, work, **how: (launches.append(stream), run(stream, work, **how))
    for number in range(1, 60):
        device.step(number)
        assert launches.count(1) == number
        for _ in range(int(device.random.integers(0, 9))):
            device.streams.advance()
            device._receive()
            if device.answers:
                assert device.answers[-1].device_blocks == sum(device.ordered[: len(device.answers)])
    assert len(device.answers) > 20


@pytest.mark.parametrize("must_follow", [True, False])
def test_a_step_waits_only_where_it_hands_out_what_is_still_being_scrubbed(must_follow: bool) -> None:
    device = Device(4)
    order = ScrubOrder(1, ((0.0, np.arange(4)),))
    device.worker.execute(StepOrder(1, order, must_follow=must_follow))
    assert device.streams.waiting(0).count("wait") == must_follow


def test_the_scheduler_says_which_steps_have_to_wait(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the pool knows it: a block that is handed out before its scrub was answered."""
    rig = Rig(model, monkeypatch)
    connector, pool = rig.scheduler.connector, rig.scheduler.connector.scheduler_side.port.pool

    def waits() -> bool:
        told: bool = connector.build_connector_meta(SchedulerOutput.make_empty()).must_follow
        return told

    waits()  # whatever start-up handed out
    assert not waits()
    pool.unclean_hand_outs += 1
    assert [waits(), waits()] == [True, False]


@pytest.mark.parametrize("on_a_device", [True, False])
@pytest.mark.parametrize("null_block", [None, 0])
def test_what_padding_leaves_in_the_null_block_goes_with_an_order(null_block: int | None, on_a_device: bool) -> None:
    """And is in no receipt and no count. The control: a worker that is not told of it leaves it there."""
    device = Device(5, null_block)
    if not on_a_device:
        device.worker = WorkerSide(0, VirtualClock(), null_block=null_block)
        device.worker.register({"layer": device.cache}, BLOCKS)
    device.cache[0] = 0x66
    for number in (1, 2):
        device.worker.execute(StepOrder(number, ScrubOrder(number, ((1.0, np.arange(5, 9)),))))
    device.worker.execute(StepOrder(3, is_idle=True))
    first, second = device.worker.receipt().answers
    assert bool(device.cache[0].any()) == (null_block is None)
    assert len(first.results) == len(second.results) == 1
    assert second.device_blocks == 8


def test_a_block_that_stays_dirty_is_named_when_its_launch_retires() -> None:
    device = Device(1)
    assert device.worker.memory is not None
    device.worker.memory.stuck.add((0, 7))
    device.worker.execute(StepOrder(1, ScrubOrder(1, ((1.0, np.arange(5, 9)),))))
    device.worker.execute(StepOrder(2, is_idle=True))
    (answer,) = device.worker.receipt().answers
    assert answer.results[0].failed.tolist() == [7] and answer.results[0].level == "full"


def test_closing_waits_and_leaves_nothing() -> None:
    device = Device(2)
    device.live(10)
    device.streams.drain()
    assert device.cache.any()
    device.worker.close()
    assert not device.cache.any()


@pytest.mark.parametrize("missing", ["used", "order_before"])
def test_positive_control_without_one_of_the_waits_residue_is_found(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(StreamTensorMemory, missing, lambda self, stream=None: None)
    residue = []
    for seed in SEEDS:
        device = Device(seed)
        device.live()
        device.streams.drain()
        residue += device.found
    assert sum(residue) > 0


def test_an_idle_engine_takes_one_more_step_while_a_device_owes_answers(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = Rig(model, monkeypatch).scheduler.connector

    def idle_step(pending_orders: int) -> bool:
        order = connector.build_connector_meta(SchedulerOutput.make_empty())
        assert order.is_idle
        receipt = StepReceipt(order.step, pending_orders=pending_orders)
        both = receipt.aggregate(StepReceipt(order.step))  # the other shard owes nothing
        connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=both))
        asks: bool = connector.has_pending_push_work()
        return asks

    assert [idle_step(pending_orders) for pending_orders in (0, 2, 1, 0)] == [False, True, True, False]
