"""The reference engine's external tier: a dictionary behind a copy stream that runs on its own time.

1. A store reads its block when the copy stream comes to it, not when it was asked: the block must stay until then.
2. A copy is as old as its custody allows: it carries the end of it, and is neither served nor kept past that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvcustody.allocator.pool.accounting import Domain


class TierCopy(NamedTuple):
    """One block in the tier, in one domain, until its deadline."""

    data: bytes
    domain: Domain
    until_us: int


class ReferenceTier:
    """The copies by the name under which they were stored, and the running transfers."""

    def __init__(self) -> None:
        self.copies: dict[bytes, TierCopy] = {}
        self.is_held = False
        self._transfers: deque[Callable[[], None]] = deque()

    def start(self, transfer: Callable[[], None]) -> None:
        """Put a transfer on the copy stream."""
        self._transfers.append(transfer)

    def run(self) -> None:
        """Finish every started transfer, unless the stream is held."""
        while self._transfers and not self.is_held:
            self._transfers.popleft()()

    def has(self, name: bytes, now_us: int) -> bool:
        """Return whether a copy may be served now."""
        copy = self.copies.get(name)
        return copy is not None and copy.domain.is_open and now_us < copy.until_us

    def sweep(self, now_us: int) -> None:
        """Drop copies that may no longer be served."""
        for name in [name for name in self.copies if not self.has(name, now_us)]:
            del self.copies[name]
