"""Scrubs on a stream of their own, ordered against the engine's streams by events, never by the host.

    ordered.used()                        # after a step: what it uses may end later
    ordered.launch(blocks, read_back)     # zero what has ended; returns at once
    ordered.order_before()                # before a step that writes fresh blocks
    ordered.answered()                    # the launches that have retired, for receipts

    engine    ... last use | .......................... | next writer ...
    scrub                  └─ wait ─ upload, zero, read back ─ event ─┘ wait

- A launch starts, on the device, after every use that `used` recorded before it.
- What a stream does after `order_before` starts, on the device, after every launch made before it.
- Nothing here waits on the host, but `settle` and a launch that finds every staging slot in flight.
- A launch's answer is given only when its event has retired: a receipt never speaks of what is still running.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcustody.kernels.entry import BLOCK_BITS, FAULT, READ_BACK, blocks_of, entries_of
from kvcustody.kernels.launch import uses_triton
from kvcustody.kernels.scrub import launch_scrub, scrub_reference
from kvcustody.kernels.segment import SegmentTable, ascending, block_list
from kvcustody.kernels.staging import CAPACITY_ENTRIES, Slot, StreamEvent, WorkListStaging
from kvcustody.kernels.strategy import Strategy, strategy_of
from kvcustody.kernels.streams import CudaStreams, Streams
from kvcustody.kernels.verify import verify, verify_reference


@dataclass(frozen=True, slots=True)
class RetiredScrub:
    """One launch, retired: its number, and the blocks that were read back and are not zero."""

    number: int
    dirty: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Launch:
    number: int
    event: StreamEvent
    slots: tuple[Slot, ...]
    raised: list[int]  # entries that did not verify; slots add theirs before they are used again
    counted: torch.Tensor  # the device's count of bytes at the end of this launch, on the host


class OrderedScrub:
    """One shard's scrubs in stream order."""

    def __init__(
        self,
        table: SegmentTable,
        *,
        streams: Streams | None = None,
        strategy: Strategy | None = None,
        capacity: int = CAPACITY_ENTRIES,
    ) -> None:
        self.table = table
        self._streams = streams or CudaStreams(table.device)
        self._strategy = strategy
        self._stream = self._streams.side()
        self._staging = WorkListStaging(table.device, capacity=capacity, event=self._streams.event)
        self._uses: dict[Any, StreamEvent] = {}
        self._last: StreamEvent | None = None
        self._launches: deque[_Launch] = deque()
        self._numbers = 0
        self._counted_bytes = 0
        self._free: list[torch.Tensor] = []  # pinned words for counts, used again

    @property
    def scrubbed_blocks(self) -> int:
        """Blocks by the device's own count, as of the last launch that was answered; waits for nothing."""
        return self._counted_bytes // self.table.bytes_per_block

    @property
    def waits(self) -> int:
        """How often a launch found every staging slot in flight."""
        return self._staging.full

    @property
    def in_flight(self) -> int:
        """Launches without an answer yet."""
        return len(self._launches)

    def used(self, stream: Any = None) -> None:
        """Everything put on `stream` until now may read or write blocks that end later."""
        stream = self._streams.current() if stream is None else stream
        event = self._uses.get(stream)
        if event is None:
            event = self._uses[stream] = self._streams.event()
        event.record(stream)

    def order_before(self, stream: Any = None) -> None:
        """Let later work of `stream` find every block zero that was launched until now."""
        if self._last is not None:
            self._streams.wait(self._streams.current() if stream is None else stream, self._last)

    def launch(
        self,
        blocks: NDArray[np.int64],
        read_back: NDArray[np.int64],
        *,
        faults: NDArray[np.int64] | None = None,
    ) -> int:
        """Zero `blocks` on the scrub stream and read `read_back` of them back; returns the launch's number.

        faults: blocks that are written to after they were zeroed, in tests. Raises `DeviceError` on bad lists.
        """
        ordered = ascending(block_list(self.table, blocks))
        strategy = self._strategy or strategy_of(self.table)
        entries = entries_of(ordered, strategy.group, read_back=np.isin(ordered, read_back))
        if faults is not None and len(faults):
            entries = _with_faults(entries, faults)
        for event in self._uses.values():
            self._streams.wait(self._stream, event)
        raised: list[int] = []
        size, marked = self._staging.capacity, len(read_back) > 0
        parts = (entries[at : at + size] for at in range(0, len(entries), size))
        slots = [self._send(part, strategy, raised if marked else None, faults is not None) for part in parts]
        counted = self._free.pop() if self._free else self._pinned_count()
        self._streams.run(self._stream, lambda: _copy(self.table.counter, counted))
        last = self._streams.event()
        last.record(self._stream)
        self._last = last
        self._numbers += 1
        self._launches.append(_Launch(self._numbers, last, tuple(slots), raised, counted))
        return self._numbers

    def answered(self) -> list[RetiredScrub]:
        """The launches that have retired since the last call, oldest first; waits for nothing."""
        found = []
        while self._launches and self._launches[0].event.query():
            launch = self._launches.popleft()
            self._counted_bytes = int(launch.counted)
            self._free.append(launch.counted)
            found.append(self._answer(launch))
        return found

    def settle(self) -> list[RetiredScrub]:
        """Wait until every launch has retired; their answers."""
        if self._launches:
            self._launches[-1].event.synchronize()
        return self.answered()

    def _pinned_count(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int64, pin_memory=self.table.device.type == "cuda")

    def _send(
        self, entries: NDArray[np.int64], strategy: Strategy, raised: list[int] | None, faulty: bool
    ) -> Slot:
        slot = self._staging.take(entries)
        read_back = raised is not None

        def work() -> None:
            slot.upload()
            _zero(self.table, slot, strategy, read_back, faulty)
            if read_back:
                slot.download()

        self._streams.run(self._stream, work)
        slot.sent(self._stream, raised)
        return slot

    def _answer(self, launch: _Launch) -> RetiredScrub:
        """Which blocks did not verify. A flag speaks for a run of blocks that wait for it: they are read one by one.

        Where the second reading finds nothing, the whole run has failed: what was seen once is not explained.
        """
        for slot in launch.slots:
            if slot.owned_by(launch.raised):
                slot.harvest()
        failed = [np.empty(0, dtype=np.int64)]
        for entry in launch.raised:
            run = blocks_of(entry)
            dirty = verify(self.table, run).dirty if len(run) > 1 else run
            failed.append(dirty if len(dirty) else run)
        return RetiredScrub(launch.number, np.concatenate(failed))


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _zero(table: SegmentTable, slot: Slot, strategy: Strategy, read_back: bool, faulty: bool) -> None:
    """The work itself, when the stream comes to it: the list is read from the device's half of the slot."""
    if uses_triton(table):
        flags = slot.flags[: slot.entry_count] if read_back else None
        launch_scrub(table, slot.entries, strategy=strategy, flags=flags, faulty=faulty)
        return
    for position, entry in enumerate(slot.entries.tolist()):
        blocks = blocks_of(entry)
        scrub_reference(table, blocks)
        if faulty and entry & FAULT:
            table.words[-1].view(torch.uint8)[int(blocks[0]), -1] = 1
        if read_back and entry & READ_BACK and verify_reference(table, blocks).any():
            slot.flags[position] = 1


def _with_faults(entries: NDArray[np.int64], faults: NDArray[np.int64]) -> NDArray[np.int64]:
    """The entries with each block of `faults` in a marked entry of its own."""
    found: list[int] = []
    for entry in entries.tolist():
        run = blocks_of(entry)
        if not np.isin(run, faults).any():
            found.append(entry)
            continue
        single = (entry & READ_BACK) | (1 << BLOCK_BITS)
        found += [single | block | (FAULT if block in faults else 0) for block in run.tolist()]
    return np.array(found, dtype=np.int64)
