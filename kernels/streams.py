"""The four things that ordering needs of a device's streams, so that ordering can be tested where there is none.

`CudaStreams` is torch's own; tests supply streams whose work runs in any order that the waits allow.

- Work of one stream runs in the order it was put there; between streams only `wait` orders.
- Nothing here waits on the host but `StreamEvent.synchronize`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from kvcustody.kernels.staging import StreamEvent


class Streams(Protocol):
    """A device's queues of work, by handles that only it understands."""

    def side(self) -> Any:
        """A new stream for scrubs."""

    def current(self) -> Any:
        """The stream that the caller's work goes to."""

    def event(self) -> StreamEvent:
        """A new event, not recorded yet."""

    def run(self, stream: Any, work: Callable[[], None]) -> None:
        """Put `work` at the end of `stream`."""

    def wait(self, stream: Any, event: StreamEvent) -> None:
        """Let later work of `stream` wait, on the device, for what `event` marks."""


class CudaStreams:
    """torch's streams of one CUDA or ROCm device. Scrubs get the default, lowest priority."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def side(self) -> Any:
        """A stream of the lowest priority: an engine that asks for a higher one decodes first."""
        return torch.cuda.Stream(self._device, priority=0)  # type: ignore[no-untyped-call]

    def current(self) -> Any:
        """The caller's current stream on this device."""
        return torch.cuda.current_stream(self._device)

    def event(self) -> StreamEvent:
        """An event without timing, the cheapest kind."""
        found: StreamEvent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return found

    def run(self, stream: Any, work: Callable[[], None]) -> None:
        """Launches in `work` go to `stream`; the host does not wait for them."""
        with torch.cuda.stream(stream):
            work()

    def wait(self, stream: Any, event: StreamEvent) -> None:
        """A wait on the device."""
        stream.wait_event(event)
