"""Work lists on their way to the device: pinned host memory and its device twin, two of each, used in turn.

A list written while the device still reads the one before it would corrupt a scrub, and a fresh allocation a
launch costs more than the launch. So each slot is reused only after the event behind its last use.

- No allocation after construction, on the host or on the device.
- A slot is overwritten only after the launch that reads it has retired.
- `full` says how often the host had to wait for a slot: more slots are needed where it grows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvcustody.errors import DeviceError

CAPACITY_ENTRIES = 1 << 16
SLOTS = 2


class StreamEvent(Protocol):
    """A point in a stream's work, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether everything before it has retired."""

    def synchronize(self) -> None:
        """Wait until everything before it has retired."""

    def record(self, stream: Any = None) -> None:
        """Put the point at the end of the stream's work."""


class WorkListStaging:
    """Slots for int64 work lists of at most `capacity` entries, and for their flags."""

    def __init__(
        self,
        device: torch.device,
        *,
        capacity: int = CAPACITY_ENTRIES,
        slots: int = SLOTS,
        event: Callable[[], StreamEvent] | None = None,
    ) -> None:
        pinned = device.type == "cuda"
        new_event: Callable[[], StreamEvent] = event or torch.cuda.Event
        self.capacity = capacity
        self.full = 0
        self._next = 0
        self._slots = [
            Slot(
                torch.empty(capacity, dtype=torch.int64, pin_memory=pinned),
                torch.empty(capacity, dtype=torch.int64, device=device),
                torch.zeros(capacity, dtype=torch.int32, device=device),
                torch.empty(capacity, dtype=torch.int32, pin_memory=pinned),
                new_event(),
            )
            for _ in range(slots)
        ]

    def take(self, entries: NDArray[np.int64]) -> Slot:
        """The next slot, `entries` in its host half; the caller puts `upload` and a launch on one stream, then `sent`.

        Raises `DeviceError` where the list is longer than the capacity.
        """
        if len(entries) > self.capacity:
            raise DeviceError(
                f"a work list of `{len(entries)}` entries does not fit in `{self.capacity}`",
                entries=len(entries),
                capacity=self.capacity,
            )
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        if slot.busy and not slot.event.query():
            self.full += 1
            slot.event.synchronize()
        slot.harvest()
        slot.write(entries)
        return slot


class Slot:
    """One list in flight: `entries` and `flags` on the device, `answers` the flags' way back to the host."""

    __slots__ = ("_device", "_host", "_raised", "answers", "busy", "entries", "entry_count", "event", "flags")

    def __init__(
        self,
        host: torch.Tensor,
        device: torch.Tensor,
        flags: torch.Tensor,
        answers: torch.Tensor,
        event: StreamEvent,
    ) -> None:
        self._host, self._device = host, device
        self.entries = device[:0]
        self.flags, self.answers = flags, answers
        self.event = event
        self.busy = False
        self.entry_count = 0
        self._raised: list[int] | None = None

    def write(self, entries: NDArray[np.int64]) -> None:
        """Fill the host half; nothing of the device is touched."""
        self.entry_count = len(entries)
        self._host[: self.entry_count].copy_(torch.from_numpy(entries))
        self.entries = self._device[: self.entry_count]

    def upload(self) -> None:
        """In stream order: the list to the device, its flags to zero."""
        self.entries.copy_(self._host[: self.entry_count], non_blocking=True)
        self.flags[: self.entry_count].zero_()

    def download(self) -> None:
        """In stream order: the flags to the host."""
        self.answers[: self.entry_count].copy_(self.flags[: self.entry_count], non_blocking=True)

    def sent(self, stream: object, raised: list[int] | None) -> None:
        """Everything that reads this slot is on `stream` by now; raised entries are to be added to `raised`."""
        self.event.record(stream)
        self.busy = True
        self._raised = raised

    def owned_by(self, raised: list[int]) -> bool:
        """Whether the answers in this slot are still those of the launch that asked with `raised`."""
        return self._raised is raised

    def harvest(self) -> None:
        """After the event has retired: hand the raised entries to whoever asked, once."""
        if self._raised is not None:
            found = np.flatnonzero(self.answers[: self.entry_count].numpy())
            self._raised += self._host[: self.entry_count].numpy()[found].tolist()
            self._raised = None
        self.busy = False
