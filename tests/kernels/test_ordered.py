"""Scrubs on their own stream against an engine's writes, over simulated streams.

The device of these tests has no order of its own: work of different streams runs in a random interleaving.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvcustody.errors import DeviceError
from kvcustody.kernels.ordered import OrderedScrub
from kvcustody.kernels.segment import SegmentTable
from kvcustody.kernels.staging import SLOTS, WorkListStaging
from kvcustody.kernels.strategy import Strategy
from standins.device.fake_cuda import FakeCuda


class Device:
    """A pool of 16 blocks over two layers, an engine that writes on stream 0, and the scrub's own stream."""

    def __init__(self, seed, *, capacity=4, group=1):
        self.tensors = [torch.zeros(16, 64, dtype=torch.uint8) for _ in range(2)]
        self.streams = FakeCuda(seed)
        self.table = SegmentTable.from_tensors(self.tensors)
        self.scrub = OrderedScrub(self.table, streams=self.streams, strategy=Strategy(group=group), capacity=capacity)

    def write(self, blocks, byte):
        """The engine's step: later, on its own stream."""
        blocks = list(blocks)

        def work():
            for tensor in self.tensors:
                tensor[blocks] = byte

        self.streams.run(0, work)

    def look(self, blocks, seen):
        """The engine reads what a hand-out finds, in its own stream's order, before it writes."""
        blocks = list(blocks)
        self.streams.run(0, lambda: seen.append(max(int(tensor[blocks].max()) for tensor in self.tensors)))

    def bytes(self):
        return torch.stack(self.tensors).amax(dim=(0, 2)).tolist()


def cycle(device, *, used=True, ordered=True, rounds=6):
    """Write, end, scrub and hand out again, over and over; what each hand-out found, and what is left."""
    seen = []
    generator = np.random.default_rng(5)
    last = {}
    for round_ in range(rounds):
        blocks = generator.permutation(16)[:6]
        device.write(blocks, 10 + round_)
        if used:
            device.scrub.used()
        device.scrub.launch([(blocks, False)])
        if ordered:
            device.scrub.order_before()
        device.look(blocks, seen)
        kept = blocks[:2]
        device.write(kept, 100 + round_)
        last |= dict.fromkeys(kept.tolist(), 100 + round_) | dict.fromkeys(blocks[2:].tolist(), 0)
        for _ in range(int(generator.integers(0, 12))):
            device.streams.advance()
    device.streams.drain()
    device.scrub.answered()
    expected = [last.get(block, 0) for block in range(16)]
    return seen, device.bytes(), expected


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("seed", range(40))
def test_a_hand_out_finds_zeros_and_no_write_is_lost(seed, group):
    device = Device(seed, group=group)
    seen, left, expected = cycle(device)
    assert seen == [0] * 6
    assert left == expected
    assert device.scrub.table.scrubbed() == 36


def test_positive_control_without_a_wait_for_the_last_use_bytes_survive_or_are_lost():
    outcomes = [cycle(Device(seed), used=False) for seed in range(40)]
    assert any(left != expected or any(seen) for seen, left, expected in outcomes)


def test_positive_control_without_a_wait_before_the_next_write_a_hand_out_finds_bytes():
    outcomes = [cycle(Device(seed), ordered=False) for seed in range(40)]
    assert any(any(seen) or left != expected for seen, left, expected in outcomes)


@pytest.mark.parametrize("seed", range(10))
def test_nothing_waits_on_the_host_while_slots_are_free(seed):
    device = Device(seed, capacity=64)
    for round_ in range(SLOTS):
        device.write(range(4), 7 + round_)
        device.scrub.used()
        device.scrub.launch([(np.arange(4), False)])
        device.scrub.order_before()
    assert device.scrub.answered() == []  # nothing has run: nothing is said
    assert device.streams.host_waits == device.scrub.waits == 0
    device.scrub.launch([(np.arange(4), False)])
    assert device.scrub.waits == 1 and device.streams.host_waits == 1  # one more finds every slot in flight
    device.streams.drain()
    assert [answer.number for answer in device.scrub.answered()] == [*range(1, SLOTS + 2)]


@pytest.mark.parametrize("capacity", [1, 3, 64])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("seed", range(6))
def test_a_block_that_does_not_verify_is_named_in_its_launchs_answer_alone(seed, group, capacity):
    device = Device(seed, capacity=capacity, group=group)
    faulty = device.scrub.launch([(np.arange(9), True)], faults=np.array([6]))
    good = device.scrub.launch([(np.array([10, 12]), True)])
    unread = device.scrub.launch([(np.array([15]), False)], faults=np.array([15]))
    answers = {answer.number: answer.dirty[0].tolist() for answer in device.scrub.settle()}
    assert answers == {faulty: [6], good: [], unread: []}
    mixed = device.scrub.launch([(np.arange(6), np.isin(np.arange(6), [0, 1, 4]))], faults=np.array([2, 4]))
    assert [answer.dirty[0].tolist() for answer in device.scrub.settle()] == [[4]], mixed  # 2 was not asked for


@pytest.mark.parametrize("group", [1, 4])
def test_a_block_is_judged_by_what_its_own_launch_read_though_it_was_handed_out_since(group):
    """The flag of one block speaks for it alone; nobody reads the block again, which is somebody else's by then."""
    device = Device(0, group=group, capacity=64)
    dirty = device.scrub.launch([(np.arange(4), True)], faults=np.array([2]))
    clean = device.scrub.launch([(np.arange(8, 12), True)])
    device.scrub.order_before()
    device.write(range(16), 0xAB)  # the next owners' bytes, before anybody asks
    device.streams.drain()
    answers = {answer.number: answer.dirty[0].tolist() for answer in device.scrub.answered()}
    assert answers == {dirty: [2], clean: []}


@pytest.mark.parametrize("capacity", [2, 64])
@pytest.mark.parametrize("group", [1, 4])
def test_the_batches_of_an_order_are_one_launch_and_answer_for_themselves(group, capacity):
    device = Device(3, group=group, capacity=capacity)
    device.write(range(16), 9)
    device.scrub.used()
    batches = [(np.arange(4), True), (np.array([9, 6]), np.array([True, False])), (np.arange(10, 13), False)]
    before = device.streams.waiting(1).count("work")
    device.scrub.launch(batches, faults=np.array([1, 9, 11]))
    put = device.streams.waiting(1).count("work") - before
    assert (put == 1) == (capacity == 64)
    (answer,) = device.scrub.settle()
    assert [dirty.tolist() for dirty in answer.dirty] == [[1], [9], []]
    assert device.scrub.scrubbed_blocks == 9
    assert [block for block, byte in enumerate(device.bytes()) if byte == 9] == [4, 5, 7, 8, 13, 14, 15]


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_a_step_waits_only_for_the_scrub_of_a_block_that_it_hands_out(seed, named):
    device = Device(seed, capacity=64)
    device.write(range(8), 9)
    device.scrub.used()
    device.scrub.launch([(np.arange(8), False)])
    device.scrub.hand_out(np.array([3, 12]) if named else np.array([12, 13]))
    device.scrub.order_handed_out()
    device.scrub.order_handed_out()  # once
    waits = device.streams.waiting(0).count("wait")
    assert waits == named
    device.streams.drain()
    device.scrub.answered()
    device.scrub.hand_out(np.array([3]))  # it has retired
    device.scrub.order_handed_out()
    assert not device.streams.waiting(0)


@pytest.mark.parametrize("where", ["launch", "query"])
def test_a_fault_of_the_device_is_a_device_error(monkeypatch, where):
    """Wherever torch lets it surface: when a kernel is launched, or when an event is asked."""
    device = Device(0)

    def fail(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")

    if where == "launch":
        monkeypatch.setattr(device.streams, "run", fail)
        with pytest.raises(
            DeviceError, match=r"failed on `cpu`: CUDA error: an illegal memory access was encountered$"
        ):
            device.scrub.launch([(np.arange(4), False)])
        return
    device.scrub.launch([(np.arange(4), False)])
    monkeypatch.setattr("standins.device.fake_cuda.FakeEvent.query", fail)
    with pytest.raises(DeviceError, match="illegal memory access"):
        device.scrub.answered()


def test_nothing_is_launched_while_the_engine_records_a_graph():
    device = Device(0)
    with device.streams.capture(0), pytest.raises(DeviceError, match="records a graph"):
        device.scrub.launch([(np.arange(4), False)])
    assert device.scrub.launch([(np.arange(4), False)]) == 1


@pytest.mark.parametrize("seed", range(20))
def test_a_list_in_flight_is_never_overwritten(seed):
    """Many more launches than slots, and a device that is slow to begin."""
    device = Device(seed, capacity=2)
    for block in range(16):
        device.write([block], 9)
    device.scrub.used()
    for block in range(0, 16, 2):
        device.scrub.launch([(np.array([block]), False)])
    device.streams.drain()
    assert device.bytes() == [0, 9] * 8


def test_a_list_that_is_too_long_is_refused():
    staging = WorkListStaging(torch.device("cpu"), capacity=4, event=FakeCuda().event)
    with pytest.raises(DeviceError, match="`5` entries does not fit in `4`"):
        staging.take(np.arange(5), lambda slot: None)


class Allocations(TorchDispatchMode):
    """Names of the operations that make new memory while it is on."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name.startswith(("empty", "zeros", "ones", "full", "new_", "clone", "rand", "arange")):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_no_launch_allocates():
    device = Device(0, capacity=64)

    def launches(count):
        with Allocations() as allocations:
            for _ in range(count):
                device.scrub.used()
                device.scrub.launch([(np.arange(0, 16, 3), np.isin(np.arange(0, 16, 3), [0, 3]))])
                device.scrub.order_before()
        device.streams.drain()
        assert len(device.scrub.answered()) == count
        return allocations.seen

    with Allocations() as made:
        Device(0, capacity=64)
    assert made.seen != []  # the control: slots are made with the scrubber
    for _ in range(5):
        assert launches(2) == []
