"""The residency of one classic cache: its slabs, its deadlines, and what a use of it is.

R1  A cache ends at the first of: its own end, collection, erasure, `active_max` or `absolute` since it was opened,
    `idle` since its last use. The timer ends it where no call arrives, and the next use where the timer is late.
R2  Every later use raises `HandleError`.
R3  A use holds the custodian's lock: every write to a slab happens under it, so none comes after the end.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from kvcustody.allocator.node import NEVER_US
from kvcustody.allocator.sequence import Sequence as Running
from kvcustody.errors import HandleError
from kvcustody.governance.plan import Plan
from kvcustody.policies.obligations import Obligations

if TYPE_CHECKING:
    from kvcustody.integrations.transformers.classic_custodian import Custodian


class CacheResidency:
    """One classic cache in custody. `with residency:` is one use: it holds the lock and restarts the idle time.

    `slabs`: one uint8 tensor for each size that was asked for, zero at first.
    """

    def __init__(self, custodian: Custodian, handle: object, running: Running, owed: Obligations) -> None:
        self.handle = handle
        self.slabs: list[torch.Tensor] = []
        self.ended_by: str | None = None
        self.lent: list[torch.Tensor] = []  # copies outside the slabs that a forward pass may still read
        self.on_end: Callable[[], None] = _nothing
        self._custodian = custodian
        self._running = running
        self._opened_us = self._used_us = custodian.now_us()
        self.bind(owed)

    def bind(self, owed: Obligations) -> None:
        """Deadlines from the active policy. An `idle` or `absolute` of 0 leaves `active_max` alone (see the docs)."""
        self.owed = owed
        self.idle_us = owed.idle_us or NEVER_US
        self.ceiling_us = self._opened_us + min(owed.active_max_us, owed.absolute_us or NEVER_US)

    @property
    def plan(self) -> Plan:
        """Whose it is, under which classification."""
        plan = self._running.residency.facts
        assert isinstance(plan, Plan)
        return plan

    @property
    def due_us(self) -> int:
        """When it ends if it is not used before (boot time)."""
        return min(self.ceiling_us, self._used_us + self.idle_us)

    def overdue(self, now_us: int) -> str | None:
        """The deadline that has passed, if one has."""
        if now_us >= self.ceiling_us:
            return (
                "active-max" if self.owed.active_max_us <= (self.owed.absolute_us or NEVER_US) else "absolute"
            )
        return "idle" if now_us >= self._used_us + self.idle_us else None

    def is_running(self) -> bool:
        """Whether the Governor still knows it."""
        return self._custodian.governor.running.get(self.handle) is self._running

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        """Keep a copy that a forward pass reads until `take_back`, or until the end."""
        self.lent.append(tensor)
        return tensor

    def take_back(self) -> None:
        """Zero what was lent, in stream order after everything that reads it."""
        lent, self.lent = self.lent, []
        with torch.inference_mode():  # where they may have been made; it allows writing to any tensor
            for tensor in lent:
                tensor.zero_()

    def let_go(self) -> None:
        """The end, in this process's tensors: nothing here refers to a slab any more."""
        self.slabs = []
        for device in {tensor.device for tensor in self.lent if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        self.take_back()
        self.on_end()

    def end(self, cause: str = "finished") -> bool:
        """Zero it and end its custody; False where it had ended."""
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
    """Before a cache is there to be told."""
