"""Uses of single- and few-use tokens, remembered until each expires, in bounded memory.

- A tag is counted down from the uses of its first sight and never forgotten before it expires.
- Memory is bounded, for all and for each owner. When it is full nothing live is dropped to make room: the new
  token is refused, so a flood costs reuse, never a second use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Literal


class SpentTokens:
    """Remaining uses by tag; each owner has its own bound. Not thread-safe: its owner holds a lock."""

    def __init__(self, most: int, most_per_owner: int) -> None:
        self._most = most
        self._most_per_owner = most_per_owner
        self._left: dict[bytes, int] = {}
        self._owned: Counter[Hashable] = Counter()
        self._ending: dict[int, list[tuple[bytes, Hashable]]] = {}  # by the second in which they expire
        self._swept_second = 0

    def __len__(self) -> int:
        return len(self._left)

    def spend(
        self, tag: bytes, uses: int, owner: Hashable, expires_ms: int, now_ms: int, *, count: int = 1
    ) -> int | Literal["replayed", "memory-full"]:
        """Take `count` uses and return those left, or return why they are not available and take none.

        `now_ms` never steps back; `expires_ms` is after it.
        """
        left = self._left.get(tag)
        if (uses if left is None else left) < count:
            return "replayed"
        if left is not None:
            self._left[tag] = left - count
            return left - count
        if now_ms // 1000 > self._swept_second:
            self._sweep(now_ms // 1000)
        if len(self._left) >= self._most or self._owned[owner] >= self._most_per_owner:
            return "memory-full"
        self._left[tag] = uses - count
        self._owned[owner] += 1
        self._ending.setdefault(expires_ms // 1000, []).append((tag, owner))
        return uses - count

    def _sweep(self, second: int) -> None:
        """Forget what expired in whole seconds before `second`."""
        self._swept_second = second
        for past in [ending for ending in self._ending if ending < second]:
            for tag, owner in self._ending.pop(past):
                del self._left[tag]
                self._owned[owner] -= 1
                if not self._owned[owner]:
                    del self._owned[owner]
