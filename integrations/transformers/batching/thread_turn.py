"""A turn at the Governor: one thread at a time, with device work in the order of the engine's own.

1. No turn runs while the engine records a graph (`kernels.streams`), whoever takes it; `alone` keeps turns out of what
   the engine does by itself, such as its warm-up.
2. Copies of a turn run on the engine's compute stream. Its scrubs run there too, or, on a memory in stream order, on a
   separate stream. Either way they run after every read and write launched before the turn, and before every one
   launched after it. The host waits for none of them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch

from kvcustody.allocator.pool.stream_memory import StreamTensorMemory
from kvcustody.allocator.pool.tensor_memory import TensorMemory
from kvcustody.kernels.streams import outside_captures


class Turn:
    """Exclusive use of the Governor, on the engine's compute stream where it has one. Reentrant."""

    def __init__(self, memories: Sequence[TensorMemory] = ()) -> None:
        self.stream: Any = None
        self._ordered = [memory for memory in memories if isinstance(memory, StreamTensorMemory)]
        self._lock = threading.RLock()
        self._outside = outside_captures()
        self._entered: list[Any] = []

    def alone(self) -> AbstractContextManager[bool]:
        """Return whether no thread has the turn and none of our streams has work."""
        return self._lock

    def __enter__(self) -> None:
        self._lock.acquire()
        self._outside.__enter__()
        if self.stream is not None:
            context: Any = torch.cuda.stream(self.stream)
            context.__enter__()
            self._entered.append(context)
        for memory in self._ordered:
            memory.used(self.stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for memory in self._ordered:
                memory.order_handed_out(self.stream)
            if self._entered:
                self._entered.pop().__exit__(kind, error, trace)
        finally:
            self._outside.__exit__(kind, error, trace)
            self._lock.release()
