"""The residency of one classic cache: its slabs, its deadlines, and its uses.

1. A cache ends at the first of: its own end, collection, erasure, `active_max` or `absolute` since it was opened,
   `idle` since its last use. The timer ends it where no call arrives, and the next use where the timer is late.
2. Every later use raises `HandleError`.
3. A use holds the custodian's lock: every write to a slab happens under it, so none comes after the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

import torch

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.pool.block_state import NEVER_US
from kvcustody.allocator.prefix.sequence import RunningSequence
from kvcustody.errors import HandleError
from kvcustody.governance.decisions.access_plan import Plan
from kvcustody.governance.governor.governor import Governor
from kvcustody.policies.table.obligations import Obligations


class CacheKeeper(Protocol):
    """The custodian as a residency sees it."""

    governor: Governor
    lock: threading.RLock
    now_us: Callable[[], int]

    def end(self, residency: CacheResidency, cause: str, /) -> bool:
        """Zero `residency` and end its custody; return False where it had ended."""


class CacheResidency:
    """One classic cache in custody. `with residency:` is one use: it holds the lock and restarts the idle time.

    `slabs`: one uint8 tensor for each size that was asked for, zero at first.
    """

    def __init__(self, custodian: CacheKeeper, handle: object, running: RunningSequence, owed: Obligations) -> None:
        self.handle = handle
        self.slabs: list[torch.Tensor] = []
        self.ended_by: str | None = None
        self.lent: dict[object, list[torch.Tensor]] = {}  # by layer: copies outside the slabs, for one forward pass
        self.on_end: Callable[[], None] = _nothing
        self._custodian = custodian
        self._running = running
        self._opened_us = self._used_us = custodian.now_us()
        self.bind(owed)

    def bind(self, owed: Obligations) -> None:
        """Set deadlines from the active policy. An `idle` or `absolute` of 0 leaves only `active_max` (see the
        docs).
        """
        self.owed = owed
        self.idle_us = owed.idle_us or NEVER_US
        self.ceiling_us = self._opened_us + min(owed.active_max_us, owed.absolute_us or NEVER_US)

    @property
    def plan(self) -> Plan[BlockManager]:
        """The plan, with the owner and the classification."""
        plan = self._running.residency.facts
        assert isinstance(plan, Plan)
        return plan

    @property
    def due_us(self) -> int:
        """The end without further use (boot time)."""
        return min(self.ceiling_us, self._used_us + self.idle_us)

    def overdue(self, now_us: int) -> str | None:
        """Return the deadline that has passed, or None."""
        if now_us >= self.ceiling_us:
            return "active-max" if self.owed.active_max_us <= (self.owed.absolute_us or NEVER_US) else "absolute"
        return "idle" if now_us >= self._used_us + self.idle_us else None

    def is_running(self) -> bool:
        """Return whether the Governor still knows it."""
        return self._custodian.governor.running.get(self.handle) is self._running

    def lend(self, layer: object, tensor: torch.Tensor) -> None:
        """Keep a copy for a forward pass until `layer` is used again, or until the end."""
        self.lent.setdefault(layer, []).append(tensor)

    def zero_lent(self, layer: object) -> None:
        """Zero the copies lent for `layer`, in stream order after all their reads."""
        with torch.inference_mode():  # where they may have been made; it allows writing to any tensor
            for tensor in self.lent.pop(layer, ()):
                tensor.zero_()

    def drop_tensors(self) -> None:
        """Drop every tensor that refers to a slab."""
        self.slabs = []
        for device in {tensor.device for copies in self.lent.values() for tensor in copies if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        for layer in list(self.lent):
            self.zero_lent(layer)
        self.on_end()

    def end(self, cause: str = "finished") -> bool:
        """Zero it and end its custody; return False where it had ended."""
        return self._custodian.end(self, cause)

    def __enter__(self) -> CacheResidency:
        self._custodian.lock.acquire()
        try:
            now_us = self._custodian.now_us()
            if self.is_running():
                cause = self.overdue(now_us)
                if cause is not None:
                    self._custodian.end(self, cause)
            if self.ended_by is not None or not self.is_running():
                cause = self.ended_by or "released by the governor"
                raise HandleError(
                    f"this cache was ended and zeroed: `{cause}`; open another and compute the prompt again",
                    cause=cause,
                )
            self._used_us = now_us
        except BaseException:
            self._custodian.lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._custodian.lock.release()


def _nothing() -> None:
    """Do nothing: no cache exists yet."""
