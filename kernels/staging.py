"""Work lists on their way to the device, in pinned host memory that the kernel reads and answers in; slots are reused.

The kernel reads a list where the host wrote it, and writes flags and the device's count where the host reads them. So
no copy is launched beside the scrub. Overwriting a list that the device still reads would corrupt a scrub. A new
allocation for each launch costs more than the launch. So each slot is reused only after the event behind its use.

- No allocation after construction, on the host or on the device.
- A slot is overwritten only after the launch that reads it has retired.
- `full` counts how often the host had to wait for a slot. If it grows, more slots are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvcustody.errors import DeviceError
from kvcustody.kernels.entry import BLOCKS_MAX

CAPACITY_BLOCKS = 1 << 16
SLOTS = 4


class StreamEvent(Protocol):
    """A point in a stream's work, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether everything before it has retired."""

    def synchronize(self) -> None:
        """Wait until everything before it has retired."""

    def record(self, stream: Any = None) -> None:
        """Put the point at the end of the stream's work."""


Answer = Callable[["Slot"], None]
"""What is done with a slot whose launch has retired, before it is used again."""


class WorkListStaging:
    """Slots for int64 work lists of at most `capacity` blocks, with a flag for each block and the device's count."""

    def __init__(
        self,
        device: torch.device,
        *,
        capacity: int = CAPACITY_BLOCKS,
        slots: int = SLOTS,
        event: Callable[[], StreamEvent] | None = None,
    ) -> None:
        pinned = device.type == "cuda"
        new_event: Callable[[], StreamEvent] = event or torch.cuda.Event
        self.capacity = min(capacity, BLOCKS_MAX)
        self.full = 0
        self._next = 0
        self._slots = [Slot(self.capacity, pinned, new_event()) for _ in range(slots)]

    def take(self, entries: NDArray[np.int64], answer: Answer, flagged: int = 0) -> Slot:
        """Return the next slot with `entries` and `flagged` zeroed flags; the caller launches and records `event`.

        answer: called once, when the launch has retired. Raises `DeviceError` where the list is longer than the
        capacity.
        """
        if len(entries) > self.capacity:
            raise DeviceError(
                f"a work list of `{len(entries)}` entries does not fit in `{self.capacity}`",
                entries=len(entries),
                capacity=self.capacity,
            )
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        if slot.answer is not None and not slot.event.query():
            self.full += 1
            slot.event.synchronize()
        slot.harvest()
        slot.write(entries, flagged)
        slot.answer = answer
        return slot


class Slot:
    """One list in flight, in memory that host and device can both reach.

    entries int64 [entries]; flags int32 [blocks of the list]; count int64 [1]: bytes, as the device counted them.
    """

    __slots__ = ("_all", "_numbers", "answer", "count", "entries", "event", "flags", "raised", "told")

    def __init__(self, capacity: int, pinned: bool, event: StreamEvent) -> None:
        self._all = torch.empty(capacity, dtype=torch.int64, pin_memory=pinned)
        self._numbers: NDArray[np.int64] = self._all.numpy()
        self.entries = self._all[:0]
        self.flags = torch.zeros(capacity, dtype=torch.int32, pin_memory=pinned)
        self.raised: NDArray[np.int32] = self.flags.numpy()
        self.count = torch.zeros(1, dtype=torch.int64, pin_memory=pinned)
        self.told: NDArray[np.int64] = self.count.numpy()
        self.event = event
        self.answer: Answer | None = None

    def write(self, entries: NDArray[np.int64], flagged: int) -> None:
        """Fill the list; does not touch the device."""
        size = len(entries)
        self._numbers[:size] = entries
        self.entries = self._all[:size]
        self.raised[:flagged] = 0

    def harvest(self) -> None:
        """Deliver the device's results once, after the event has retired."""
        answer, self.answer = self.answer, None
        if answer is not None:
            answer(self)
