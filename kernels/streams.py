"""The interface to a device's streams that ordering needs, so that it can be tested without a device.

`CudaStreams` is torch's own; tests supply streams whose work runs in any order that the waits allow.

- Work of one stream runs in the order it was put there; between streams only `wait` orders.
- Nothing here waits on the host but `StreamEvent.synchronize`.
- Graph captures and custody's work exclude each other in one process, from whatever thread. `with capturing():` goes
  around an engine's capture, `with outside_captures():` around a scrub, a copy or a wait. Work put on a stream that is
  being captured is recorded instead of done. An event or a wait that touches such a stream breaks the capture. A wait
  for the whole device is refused during a capture. So whoever comes second waits, on the host. Both are re-entrant in
  one thread. A capture that is not announced is not seen here: `OrderedScrub.launch` refuses a capture of its current
  stream.
- No other code uses the side stream. The driver makes it; it is not drawn from torch's pool, in which the 33rd stream
  is the first one again.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from kvcustody.kernels.staging import StreamEvent

_NON_BLOCKING = 1  # no implicit order with the legacy default stream


_turn = threading.RLock()


def outside_captures() -> AbstractContextManager[bool]:
    """Return a context manager that excludes announced graph captures."""
    return _turn


@contextmanager
def capturing() -> Iterator[None]:
    """Announce a graph capture by an engine: meanwhile custody puts no work on a device."""
    with _turn:
        yield


class Streams(Protocol):
    """A device's queues of work, named by handles that only it understands."""

    def side(self) -> Any:
        """Return a new stream for scrubs."""

    def current(self) -> Any:
        """Return the stream of the caller's work."""

    def event(self) -> StreamEvent:
        """Return a new event that is not recorded yet."""

    def run(self, stream: Any, work: Callable[[int | None], None], *, by_handle: bool) -> None:
        """Put `work` at the end of `stream`; `work` receives the stream's raw handle.

        by_handle: `work` launches on that handle; otherwise it uses torch, whose current stream it finds there.
        """

    def wait(self, stream: Any, event: StreamEvent) -> None:
        """Make later work of `stream` wait, on the device, for `event`."""

    def is_capturing(self) -> bool:
        """Return whether the caller's current stream records a graph: work put there is recorded, not done."""


class CudaStreams:
    """torch's streams of one CUDA or ROCm device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def side(self) -> Any:
        """Return a stream of the lowest priority, which is also the default: an engine may ask for a higher one."""
        handle = _own_stream(self._device)
        if handle is None:
            warnings.warn(f"no stream of our own on {self._device}: one of torch's pool is shared", stacklevel=2)
            return torch.cuda.Stream(self._device, priority=0)  # type: ignore[no-untyped-call]
        return torch.cuda.ExternalStream(handle, device=self._device)  # type: ignore[no-untyped-call]

    def current(self) -> Any:
        """Return the caller's current stream on this device."""
        return torch.cuda.current_stream(self._device)

    def event(self) -> StreamEvent:
        """Return an event without timing, the cheapest kind."""
        found: StreamEvent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return found

    def run(self, stream: Any, work: Callable[[int | None], None], *, by_handle: bool) -> None:
        """Launch `work` on `stream`; the host does not wait."""
        if by_handle:
            work(stream.cuda_stream)
            return
        with torch.cuda.stream(stream):
            work(None)

    def wait(self, stream: Any, event: StreamEvent) -> None:
        """Wait on the device."""
        stream.wait_event(event)

    def is_capturing(self) -> bool:
        """Return whether the current stream records a graph."""
        return bool(torch.cuda.is_current_stream_capturing())


def _own_stream(device: torch.device) -> int | None:
    """Return the handle of a new stream of the lowest priority, which lives as long as the process; None if that
    fails.
    """
    hip = torch.version.hip is not None
    library, create, bounds = (
        ("libamdhip64.so", "hipStreamCreateWithPriority", "hipDeviceGetStreamPriorityRange")
        if hip
        else ("libcuda.so.1", "cuStreamCreateWithPriority", "cuCtxGetStreamPriorityRange")
    )
    handle, least, greatest = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    try:
        with torch.cuda.device(device):
            torch.cuda.current_stream(device)  # the context exists and is current
            driver = ctypes.CDLL(library)
            failed = getattr(driver, bounds)(ctypes.byref(least), ctypes.byref(greatest))
            failed = failed or getattr(driver, create)(ctypes.byref(handle), _NON_BLOCKING, least)
    except (OSError, AttributeError):
        return None
    return None if failed else handle.value
