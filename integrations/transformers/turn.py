"""A turn at the Governor: one thread at a time, and device work in the order of the engine's own.

N1  Scrubs and copies of a turn run on the engine's compute stream: after every read and write that was launched before,
    and before every one that will be.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import torch


class Turn:
    """Exclusive use of the Governor, on the engine's compute stream where it has one (B3). Reentrant."""

    def __init__(self) -> None:
        self.stream: Any = None
        self._lock = threading.RLock()
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        if self.stream is not None:
            context: Any = torch.cuda.stream(self.stream)
            context.__enter__()
            self._entered.append(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._entered:
                self._entered.pop().__exit__(kind, error, trace)
        finally:
            self._lock.release()
