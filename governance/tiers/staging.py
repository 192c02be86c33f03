"""Staging buffers for plaintext between the device and a seal: bounded, and under custody like blocks.

    with staging.take(size) as plain:           # zeros, `size` bytes, this caller's alone
        ...
    staging.counts                              # what was zeroed, in buffers and bytes

1. A buffer is locked in memory, kept out of core dumps, and zeros in forked children. Where the system locks less than
   that, nothing starts: the error names the limit.
2. It is zeroed when it is given back, whatever happened in between; it is zeros when it is taken.
3. Where there is a device, it reads and writes the buffers by itself (`pin`): no driver's buffer stands between.
4. There are no more than `buffers`; whoever finds none gets None at once, and does without the tier.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from kvcustody.errors import ConfigError
from kvcustody.governance.keys.locked_buffer import map_private


class StagingCounts(NamedTuple):
    """Zeroed buffers and bytes, and the number of times that no buffer was free."""

    zeroed_buffers: int
    zeroed_bytes: int
    refused: int


Pin = Callable[[int, int], Callable[[], None]]
"""Makes the host memory at an address, of so many bytes, reachable for the devices; what it returns undoes that."""


class Staging:
    """`buffers` of `buffer_bytes` each. Thread-safe. Raises `ConfigError` where they cannot be locked."""

    def __init__(self, buffers: int, buffer_bytes: int) -> None:
        self.buffer_bytes = -(-buffer_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.buffers = buffers
        self._lock = threading.Lock()
        self._free: list[tuple[mmap.mmap, int]] = []
        self._unpin: dict[int, Callable[[], None]] = {}
        self._zeroed, self._bytes, self._refused = 0, 0, 0
        # Memory that is gone must not stay pinned: the next at its address could not be, and a device could write it.
        weakref.finalize(self, _unpin_all, self._unpin).atexit = False
        for _ in range(buffers):
            self._free.append(self._made())

    @property
    def counts(self) -> StagingCounts:
        """The counts since the start."""
        return StagingCounts(self._zeroed, self._bytes, self._refused)

    @contextmanager
    def take(self, size: int) -> Iterator[memoryview | None]:
        """Lend a buffer's first `size` bytes until the block ends; None where none is free or large enough."""
        with self._lock:
            taken = self._free.pop() if self._free and size <= self.buffer_bytes else None
            self._refused += taken is None
        if taken is None:
            yield None
            return
        memory, address = taken
        view = memoryview(memory)[:size]
        try:
            yield view
        finally:
            ctypes.memset(address, 0, size)
            view.release()
            with self._lock:
                self._zeroed += 1
                self._bytes += size
                self._free.append(taken)

    @contextmanager
    def take_for_many(self, size: int) -> Iterator[Callable[[int], memoryview | None]]:
        """Lend one buffer for a series, taken at its first use; `size` is that of the largest.

        What passed before is there still, and is overwritten; at the end all of it is zeroed, once.
        """
        with ExitStack() as held:
            taken: memoryview | None = None

            def first(part: int) -> memoryview | None:
                nonlocal taken
                if taken is None:
                    taken = held.enter_context(self.take(size))
                return None if taken is None else taken[:part]

            yield first

    def pin(self, pin: Pin) -> None:
        """Pin free buffers before use; a second call changes nothing."""
        with self._lock:
            for _, address in self._free:
                if address not in self._unpin:
                    self._unpin[address] = pin(address, self.buffer_bytes)

    def close(self) -> None:
        """Zero and release every buffer that is not lent."""
        with self._lock:
            for _, address in self._free:
                ctypes.memset(address, 0, self.buffer_bytes)
                if unpin := self._unpin.pop(address, None):
                    unpin()
            self._free.clear()

    def _made(self) -> tuple[mmap.mmap, int]:
        memory, address, is_locked = map_private(self.buffer_bytes)
        if not is_locked:
            self.close()
            raise ConfigError(
                f"staging of `{self.buffers}` × `{self.buffer_bytes}` bytes cannot be locked in memory; "
                "raise the limit (`ulimit -l`, LimitMEMLOCK of systemd, IPC_LOCK of a container), "
                "or have fewer or smaller buffers"
            )
        return memory, address


def _unpin_all(undo: dict[int, Callable[[], None]]) -> None:
    """What nobody has closed."""
    while undo:
        undo.popitem()[1]()
