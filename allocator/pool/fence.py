"""Fences: device work in flight, as epochs.

    fence = fences.open(now_us)      # a step was launched
    fences.retire(fence)             # the device has finished it

- A block that ended while device work on it was open becomes DIRTY only later (L6): after every fence up to the last
  one that covered it has retired. Fences are epochs: a node remembers the newest fence of the sequences that used it.
- A fence past its bound is stuck. Blocks that wait for it are quarantined and never handed out, until it retires or the
  process that owns it is confirmed dead.
"""

from __future__ import annotations

from kvcustody.errors import HandleError


class Fences:
    """Open fences, oldest first. Fence ids are consecutive integers from 1."""

    __slots__ = ("_open", "last")

    def __init__(self) -> None:
        self._open: dict[int, int] = {}
        self.last = 0

    def open(self, now_us: int) -> int:
        """Open the next fence."""
        self.last += 1
        self._open[self.last] = now_us
        return self.last

    def retire(self, fence: int) -> None:
        """Close `fence`; retiring the same fence again changes nothing."""
        if not 0 < fence <= self.last:
            raise HandleError(f"fence `{fence}` was never opened; the last one is `{self.last}`", fence=fence)
        self._open.pop(fence, None)

    @property
    def oldest_open(self) -> int:
        """The oldest open fence, or the next id if none is open."""
        for fence in self._open:
            return fence
        return self.last + 1

    @property
    def newest_open(self) -> int:
        """The newest open fence, or 0: custody that ends now waits for all fences up to it."""
        return self.last if self._open else 0

    def stuck_before(self, bound_us: int, now_us: int) -> int:
        """Return an id such that all fences below it are past their bound (0 if there are none)."""
        stuck = 0
        for fence, opened_us in self._open.items():
            if now_us - opened_us <= bound_us:
                break
            stuck = fence + 1
        return stuck

    def __len__(self) -> int:
        return len(self._open)
