"""Engines' call orders on a device that detects races, with each of our fixes removed in turn."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kvcustody.allocator.pool.stream_memory import StreamTensorMemory
from kvcustody.errors import DeviceError
from kvcustody.kernels.launch import INTERPRETED
from kvcustody.kernels.ordered import OrderedScrub, RetiredScrub
from kvcustody.kernels.segment import SegmentTable
from kvcustody.kernels.staging import WorkListStaging
from kvcustody.kernels.streams import capturing, outside_captures
from kvcustody.kernels.verify import verify
from standins.device.engine_traces import TRACES, TracedEngine
from standins.device.fake_cuda import fake_cuda, ranges_of, rows_of

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="the interpreter launches nothing"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]
OURS = ("vllm V1", "vllm V2", "transformers")


def problems(trace, *, seeds=4, steps=40, mutate=None, **options):
    counts = {}
    for seed in range(seeds):
        with fake_cuda(seed) as device:
            engine = TracedEngine(device, TRACES[trace], seed=seed, **options)
            if mutate is not None:
                mutate(engine)
            for name, count in engine.run(steps).problems().items():
                counts[name] = counts.get(name, 0) + count
    return counts


# -- our orders are sound, and each mutant is killed ---------------------------------------------------------


@pytest.mark.parametrize("verify_share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("trace", OURS)
def test_no_race_and_nothing_lost(trace, verify_share):
    assert problems(trace, verify_share=verify_share) == {}


@pytest.mark.parametrize("trace", OURS)
def test_mutant_a_scrub_that_does_not_follow_the_last_use(trace):
    assert "races" in problems(trace, mutate=lambda engine: setattr(engine, "used", lambda: None))


@pytest.mark.parametrize("trace", OURS)
def test_mutant_a_step_that_does_not_follow_the_scrub(trace):
    assert "races" in problems(trace, mutate=lambda engine: setattr(engine, "follow", lambda: None))


@pytest.mark.parametrize("trace", OURS)
def test_mutant_a_hand_out_that_is_not_told(trace):
    """The step would wait only where a block in flight is handed out, and nobody says that one is."""
    mutate = lambda engine: setattr(engine.memory, "hand_out", lambda blocks: None)  # noqa: E731
    assert "races" in problems(trace, mutate=mutate)


def test_mutant_the_v2_runners_own_order_loses_state():
    assert "lost" in problems("vllm V2, its own order")


@pytest.mark.parametrize("trace", OURS)
def test_mutant_a_slot_that_is_used_again_while_the_device_reads_it(trace, monkeypatch):
    def take(self, entries, answer, flagged=0):
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.write(entries, flagged)
        slot.answer = answer
        return slot

    monkeypatch.setattr(WorkListStaging, "take", take)
    assert "races" in problems(trace, steps=60)


# -- verification after the block was handed out again -------------------------------------------------------


def handed_out_again(device, read_block=None):
    """A block does not become zero, and its next owner writes before anybody asks; what the answer names."""
    tensor = torch.full((16, 64), 9, dtype=torch.uint8)
    table = SegmentTable.from_tensors([tensor])
    scrubber = OrderedScrub(table, streams=device)
    if read_block is not None:
        scrubber._answer = lambda launch: read_block(table, scrubber, launch)
    bad = rows_of(table, [5])[0][0]
    device.stuck.add(bad)
    scrubber.used(0)
    scrubber.launch([(np.arange(4, 8), True)])
    scrubber.order_before(0)
    device.op(0, "next owner", writes=rows_of(table, range(4, 8)), act=lambda: tensor[4:8].fill_(0))
    device.drain()
    (answer,) = scrubber.answered()
    return answer.dirty[0].tolist()


def test_a_dirty_block_is_named_though_its_next_owner_has_written_zeros():
    with fake_cuda() as device:
        assert handed_out_again(device) == [5]
        assert not device.races


def test_mutant_a_doubted_run_that_is_read_again_passes_the_dirty_block():
    """The old way: read the run again; where that finds nothing, the whole run has failed."""

    def read_again(table, scrubber, launch):
        for slot in launch.slots[:]:
            slot.harvest()
        flagged = launch.listed if launch.raised else launch.listed[:0]
        dirty = verify_now(table, flagged)
        return RetiredScrub(launch.number, (dirty if len(dirty) else flagged,))

    def verify_now(table, blocks):
        found = [b for b in blocks.tolist() if any(t.view(torch.uint8)[b].any() for t in table.words)]
        return np.array(found, dtype=np.int64)

    with fake_cuda() as device:
        assert handed_out_again(device, read_again) == [4, 5, 6, 7], "void: three innocents are not withheld"


# -- graphs --------------------------------------------------------------------------------------------------


class Capturing:
    """A memory of which a block has ended, and an engine that records its graph on its compute stream."""

    def __init__(self, device):
        self.stream = device.side()
        self.tensor = torch.full((8, 64), 9, dtype=torch.uint8)
        self.memory = StreamTensorMemory([SegmentTable.from_tensors([self.tensor])], streams=[device])

    def tick(self):
        """As a turn does, on a timer's thread."""
        self.memory.used(self.stream)
        self.memory.launch(0, np.array([3]), 0.0)
        self.memory.order_before(self.stream)


def test_a_scrub_in_the_recording_stream_is_refused():
    with fake_cuda() as device:
        engine = Capturing(device)
        with device.capture(engine.stream) as graph, pytest.raises(DeviceError, match="records a graph"):
            engine.memory.launch(0, np.array([3]), 0.0)
        assert graph.names == []


def test_a_tick_waits_until_the_recording_has_ended():
    with fake_cuda() as device:
        engine, done = Capturing(device), threading.Event()

        def turn():
            with outside_captures():
                engine.tick()
            done.set()

        thread = threading.Thread(target=turn)
        with capturing(), device.capture(engine.stream) as graph:
            thread.start()
            assert not done.wait(0.2)
        thread.join(10)
        device.drain()
        assert done.is_set() and graph.names == [] and not engine.tensor[3].any()


def test_mutant_a_tick_that_does_not_wait_is_recorded_and_runs_at_each_replay():
    with fake_cuda() as device:
        engine = Capturing(device)
        with device.capture(engine.stream) as graph:
            thread = threading.Thread(target=engine.tick)  # the timer's stream is not the one that records
            thread.start()
            thread.join(10)
        assert graph.names == ["scrub"], "void: the scrub is not in the graph"
        device.drain()
        assert engine.tensor[3].any(), "void: it was done, not recorded"
        engine.tensor[3] = 7  # somebody else's by now
        device.replay(engine.stream, graph)
        device.drain()
        assert not engine.tensor[3].any()


def test_mutant_a_wait_for_the_device_breaks_the_recording():
    with fake_cuda() as device, device.capture(0), pytest.raises(RuntimeError, match="capturing"):
        device.synchronize()


# -- the device itself: what it must find, and what it must not ----------------------------------------------


def test_order_by_stream_event_and_host():
    with fake_cuda() as device:
        data, side, event = torch.zeros(8, dtype=torch.uint8), device.side(), device.event()
        span = [ranges_of(data)]
        device.op(0, "a", writes=span)
        device.op(0, "b", reads=span)  # one stream
        event.record(0)
        device.wait(side, event)
        device.op(side, "c", writes=span)  # an event
        event.record(side)
        event.synchronize()
        device.host("d", reads=span)  # the host
        assert device.races == []
        device.op(side, "e", writes=span)
        device.op(0, "f", reads=span)
        assert [(race.first, race.second) for race in device.races] == [("e on stream 1", "f on stream 0")]


def test_two_readers_and_two_ranges_are_no_race():
    with fake_cuda() as device:
        data, side = torch.zeros(8, dtype=torch.uint8), device.side()
        device.op(0, "a", reads=[ranges_of(data)])
        device.op(side, "b", reads=[ranges_of(data)])
        device.op(side, "c", writes=[ranges_of(torch.zeros(8, dtype=torch.uint8))])
        assert device.races == []


@pytest.mark.parametrize("pinned", [True, False])
def test_a_pinned_copy_reads_when_it_runs(pinned):
    with fake_cuda() as device:
        host, there = torch.ones(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
        device.copy_to_device(0, host, there, pinned=pinned)
        host.fill_(7)
        device.host("reuse", writes=[ranges_of(host)])
        device.drain()
        assert there.tolist() == [7 if pinned else 1] * 4
        assert bool(device.races) == pinned


def test_memory_given_back_is_a_race_for_another_stream_only():
    with fake_cuda() as device:
        side = device.side()
        for reader in (0, side):
            first = device.allocate(0, 16)
            device.op(reader, "read", reads=[ranges_of(first)])
            device.give_back(0, first)
            again = device.allocate(0, 16)
            assert again.data_ptr() == first.data_ptr()
            device.op(0, "write", writes=[ranges_of(again)])
            device.give_back(0, again)
            assert bool(device.races) == (reader == side)


def test_host_threads_are_ordered_by_what_they_wait_for():
    for wait, races in ((True, 0), (False, 1)):
        with fake_cuda() as device:
            data, event = torch.zeros(8, dtype=torch.uint8), device.event()
            device.op(0, "a", writes=[ranges_of(data)])
            event.record(0)
            device.drain()

            def read(wait=wait, device=device, data=data, event=event):
                if wait:
                    event.synchronize()
                device.host("b", reads=[ranges_of(data)])

            thread = threading.Thread(target=read)
            thread.start()
            thread.join()
            assert len(device.races) == races


def test_what_the_kernels_do_is_done():
    """Scrub, verify and copy of real tables, through Triton's dispatch."""
    with fake_cuda() as device:
        tensor = torch.arange(8, dtype=torch.uint8).repeat_interleave(64).view(8, 64).clone()
        memory = StreamTensorMemory([SegmentTable.from_tensors([tensor])], streams=[device])
        memory.launch(0, np.array([1, 2]), 1.0)
        memory.order_before(0)
        memory.copy(np.array([7]), np.array([2]))
        device.drain()
        assert [int(row[0]) for row in tensor] == [0, 0, 7, 3, 4, 5, 6, 7]
        assert memory.answered(wait=True)[0][1].failed.tolist() == []
        assert memory.scrubbed(0) == 2
        verification = verify(memory.tables[0], np.array([0, 1, 2]))
        assert not len(verification.dirty)  # nothing has run: `verify` waits on a device, and here nobody does
