"""Scrubs on their own stream, ordered against the engine's streams by events, never by the host.

    ordered.used()                          # after a step: what it uses may end later
    ordered.launch([(blocks, read_back)])   # zero what has ended; returns at once
    ordered.order_before()                  # before a step that writes fresh blocks
    ordered.answered()                      # the launches that have retired, for receipts

    engine    ... last use | .......................... | next writer ...
    scrub                  └─ wait ─ zero, read back ─ event ─┘ wait

- A launch starts, on the device, after every use that `used` recorded before it.
- What a stream does after `order_before` starts, on the device, after every launch made before it. `order_handed_out`
  is the same where a block that is still being scrubbed was handed out, and nothing where none was.
- Whatever the number of batches, a launch is one kernel: it reads the list, and writes flags and count, in host memory.
- Nothing here waits on the host but `settle` and a launch that finds every staging slot in flight.
- A launch's answer is given only when its event has retired: a receipt never speaks of what is still running.
- A block is named where its own flag says so. It is never read again: by then it may be somebody else's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvcustody.errors import DeviceError
from kvcustody.kernels.entry import (
    BLOCK_BITS,
    FAULT,
    POSITION_SHIFT,
    READ_BACK,
    blocks_of,
    entries_of,
    position_of,
)
from kvcustody.kernels.launch import uses_triton
from kvcustody.kernels.scrub import launch_scrub, scrub_reference
from kvcustody.kernels.segment import SegmentTable, ascending, block_list
from kvcustody.kernels.staging import CAPACITY_BLOCKS, Slot, StreamEvent, WorkListStaging
from kvcustody.kernels.strategy import Strategy, strategy_of
from kvcustody.kernels.streams import CudaStreams, Streams
from kvcustody.kernels.verify import verify_reference

NO_BLOCKS: NDArray[np.int64] = np.empty(0, dtype=np.int64)
Batch = tuple[NDArray[np.int64], NDArray[np.bool_] | bool]
"""Blocks, each once, and which of them are read back: bool [blocks], or one for all."""


class RetiredScrub(NamedTuple):
    """One retired launch: its number, and for each batch the blocks that were read back and are nonzero."""

    number: int
    dirty: tuple[NDArray[np.int64], ...]


class _Launch:
    """One launch in flight: its lists, and what its slots have told so far."""

    __slots__ = ("bounds", "counted", "listed", "number", "raised", "slots")

    def __init__(self, number: int, listed: NDArray[np.int64], bounds: list[int]) -> None:
        self.number = number
        self.listed, self.bounds = (
            listed,
            bounds,
        )  # the blocks of all batches; where each batch begins, and the end
        self.counted = 0  # bytes, by the device, at the end of this launch
        self.raised: list[NDArray[np.int64]] = []  # places in the list of blocks that did not verify
        self.slots: list[Slot] = []  # those that have told nothing yet

    def has_retired(self) -> bool:
        """On the device; slots are used again in turn, so the last one tells last."""
        return not self.slots or self.slots[-1].event.query()


class OrderedScrub:
    """One shard's scrubs in stream order."""

    def __init__(
        self,
        table: SegmentTable,
        *,
        streams: Streams | None = None,
        strategy: Strategy | None = None,
        capacity: int = CAPACITY_BLOCKS,
    ) -> None:
        self.table = table
        self._streams = streams or CudaStreams(table.device)
        self._strategy = strategy
        self._stream = self._streams.side()
        self._staging = WorkListStaging(table.device, capacity=capacity, event=self._streams.event)
        self._uses: dict[Any, StreamEvent] = {}
        self._last: _Launch | None = None
        self._launches: deque[_Launch] = deque()
        self._numbers = 0
        self._counted_bytes = 0
        self._launch_of = np.zeros(table.blocks, dtype=np.int64)  # the newest launch that lists a block
        self._expected = False  # a block was handed out whose launch is in flight

    @property
    def scrubbed_blocks(self) -> int:
        """The number of blocks by the device's own count, as of the last answered launch; does not wait."""
        return self._counted_bytes // self.table.bytes_per_block

    @property
    def waits(self) -> int:
        """How often a launch found every staging slot in flight."""
        return self._staging.full

    @property
    def in_flight(self) -> int:
        """The number of launches without an answer yet."""
        return len(self._launches)

    def used(self, stream: Any = None) -> None:
        """Record that everything put on `stream` so far may read or write blocks that end later."""
        stream = self._streams.current() if stream is None else stream
        event = self._uses.get(stream)
        if event is None:
            event = self._uses[stream] = self._streams.event()
        event.record(stream)

    def hand_out(self, blocks: NDArray[np.int64]) -> None:
        """Note `blocks` that are about to be written: `order_handed_out` waits if one of them is still being
        scrubbed.
        """
        if self._launches and len(blocks) and not self._expected:
            self._expected = int(self._launch_of[blocks].max()) >= self._launches[0].number

    def order_handed_out(self, stream: Any = None) -> None:
        """Order later work of `stream` after the scrubs of blocks that `hand_out` named since the last call."""
        if self._expected:
            self.order_before(stream)

    def order_before(self, stream: Any = None) -> None:
        """Order later work of `stream` after every scrub launched so far."""
        self._expected = False
        if self._last is not None and self._last.slots:
            event = self._last.slots[-1].event
            self._streams.wait(self._streams.current() if stream is None else stream, event)

    def launch(self, batches: Sequence[Batch], *, faults: NDArray[np.int64] | None = None) -> int:
        """Zero the blocks of every batch on the scrub stream in one launch; return its number.

        faults: blocks that are written to after they were zeroed, in tests. Raises `DeviceError` on bad lists, while
        the caller's stream records a graph (the scrub would run at each replay), and where the device has failed.
        """
        if self._streams.is_capturing():
            raise DeviceError(
                "a scrub was requested while the current stream records a graph: it would be recorded, not run"
            )
        strategy = self._strategy
        if strategy is None:
            strategy = self._strategy = strategy_of(self.table)
        listed, bounds, marks = _joined(self.table, batches)
        launch = _Launch(self._numbers + 1, listed, bounds)
        size = self._staging.capacity
        try:
            for event in self._uses.values():
                self._streams.wait(self._stream, event)
            for first in range(0, len(listed), size) if len(listed) > size else (0,):
                part = listed if len(listed) <= size else listed[first : first + size]
                mark = marks if isinstance(marks, bool) else marks[first : first + size]
                entries = entries_of(part, strategy.group, read_back=mark)
                if faults is not None and len(faults):
                    entries = _with_faults(entries, faults)
                self._send(launch, entries, first, 0 if mark is False else len(part), strategy, faults is not None)
        except RuntimeError as error:
            raise _failed(self.table, error) from error
        self._numbers, self._last = launch.number, launch
        self._launch_of[listed] = launch.number
        self._launches.append(launch)
        return launch.number

    def answered(self) -> list[RetiredScrub]:
        """Return the launches that have retired since the last call, oldest first; does not wait."""
        answers = []
        try:
            while self._launches and self._launches[0].has_retired():
                answers.append(self._answer(self._launches.popleft()))
        except RuntimeError as error:
            raise _failed(self.table, error) from error
        return answers

    def settle(self) -> list[RetiredScrub]:
        """Wait until every launch has retired; return their answers."""
        if self._launches and self._launches[-1].slots:
            try:
                self._launches[-1].slots[-1].event.synchronize()
            except RuntimeError as error:
                raise _failed(self.table, error) from error
        return self.answered()

    def _send(
        self,
        launch: _Launch,
        entries: NDArray[np.int64],
        first: int,
        flagged: int,
        strategy: Strategy,
        faulty: bool,
    ) -> None:
        """One slot's part of a launch; first: the place of its first block in the launch's list."""

        def answer(slot: Slot) -> None:
            launch.slots.remove(slot)
            launch.counted = int(slot.told[0])
            if flagged and (raised := np.flatnonzero(slot.raised[:flagged])).size:
                launch.raised.append(raised + first)

        slot, table = self._staging.take(entries, answer, flagged), self.table
        launch.slots.append(slot)

        def work(handle: int | None) -> None:
            _zero(table, slot, strategy, flagged, faulty, handle)

        self._streams.run(self._stream, work, by_handle=uses_triton(table))
        slot.event.record(self._stream)

    def _answer(self, launch: _Launch) -> RetiredScrub:
        """Which blocks did not verify, by batch: the blocks whose own flag was set."""
        for slot in launch.slots[:]:
            slot.harvest()
        self._counted_bytes = launch.counted
        if not launch.raised:
            return RetiredScrub(launch.number, (NO_BLOCKS,) * (len(launch.bounds) - 1))
        raised = np.sort(np.concatenate(launch.raised))
        cuts = np.searchsorted(raised, launch.bounds)
        dirty = launch.listed[raised]
        return RetiredScrub(launch.number, tuple(dirty[a:b] for a, b in pairwise(cuts.tolist())))


def _joined(
    table: SegmentTable, batches: Sequence[Batch]
) -> tuple[NDArray[np.int64], list[int], NDArray[np.bool_] | bool]:
    """Return the batches' blocks as one list (each batch ascending), the batch boundaries, and the marks.

    Raises `DeviceError` on an index outside the pool or listed twice in a batch.
    """
    if len(batches) == 1:
        blocks, read_back = batches[0]
        listed = _checked(table, blocks)
        return listed, [0, len(listed)], _marks(read_back, blocks, listed)
    lists = [_checked(table, blocks) for blocks, _ in batches]
    bounds = [0, *accumulate(map(len, lists))]
    listed = np.concatenate(lists) if lists else NO_BLOCKS
    if not any(read_back is not False for _, read_back in batches):
        return listed, bounds, False
    marks = [
        np.broadcast_to(_marks(read_back, blocks, one), len(one))
        for (blocks, read_back), one in zip(batches, lists, strict=True)
    ]
    return listed, bounds, _marks(np.concatenate(marks), listed, listed)


def _checked(table: SegmentTable, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """`blocks`, ascending. A list that is so already is seen to be by one comparison, and its ends tell its range."""
    if blocks.dtype == np.int64 and blocks.ndim == 1 and len(blocks):
        rises = len(blocks) == 1 or (blocks[1:] > blocks[:-1]).all()
        if rises and blocks[0] >= 0 and blocks[-1] < table.blocks:
            return blocks
    return ascending(block_list(table, blocks))


def _marks(
    read_back: NDArray[np.bool_] | bool, unordered: NDArray[np.int64], ordered: NDArray[np.int64]
) -> NDArray[np.bool_] | bool:
    """Which of the ordered blocks are read back; one bool where it is all or none."""
    if isinstance(read_back, bool) or not read_back.any():
        return read_back is True
    if read_back.all():
        return True
    return read_back if ordered is unordered else read_back[np.argsort(unordered)]


def _zero(table: SegmentTable, slot: Slot, strategy: Strategy, flagged: int, faulty: bool, stream: int | None) -> None:
    """The work itself, when the stream comes to it: the list is read from the slot then, not before."""
    if uses_triton(table):
        flags = slot.flags if flagged else None
        launch_scrub(
            table,
            slot.entries,
            strategy=strategy,
            flags=flags,
            published=slot.count,
            faulty=faulty,
            stream=stream,
        )
        return
    for entry in slot.entries.tolist():
        blocks = blocks_of(entry)
        scrub_reference(table, blocks)
        if faulty and entry & FAULT:
            table.words[-1].view(torch.uint8)[int(blocks[0]), -1] = 1
        if flagged and entry & READ_BACK:
            place = position_of(entry)
            slot.raised[place : place + len(blocks)] |= verify_reference(table, blocks)
    slot.count.copy_(table.counter)


def _with_faults(entries: NDArray[np.int64], faults: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the entries with each block of `faults` in a marked entry of its own."""
    marked_entries: list[int] = []
    for entry in entries.tolist():
        run = blocks_of(entry)
        if not np.isin(run, faults).any():
            marked_entries.append(entry)
            continue
        for nth, block in enumerate(run.tolist()):
            place = (position_of(entry) + nth) << POSITION_SHIFT
            fault = FAULT if block in faults else 0
            marked_entries.append((entry & READ_BACK) | (1 << BLOCK_BITS) | place | block | fault)
    return np.array(marked_entries, dtype=np.int64)


def _failed(table: SegmentTable, error: RuntimeError) -> DeviceError:
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DeviceError(f"a scrub failed on `{table.device}`: {message}", device=str(table.device))
