"""A tier of files whose copies have custody of their own: it tells the ledger each step of each copy."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from kvcustody.audit.kinds import Event
from kvcustody.clock import Clock
from kvcustody.governance.erasure.tier_protocol import HeldCopy
from kvcustody.governance.tiers.copy_event import CopyEvent
from kvcustody.governance.tiers.copy_leaves import copy_leaves
from standins.erasure.file_tier import FileTier

LIFE_US = 60_000_000


class CustodyTier(FileTier):
    name = "host"

    def __init__(self, folder: Path, clock: Clock, tell: Callable[[list[Event]], object]) -> None:
        super().__init__(folder)
        self.clock = clock
        self.tell = tell
        self.held: dict[bytes, HeldCopy] = {}
        self.telling = True
        self._next = 1

    def keep(self, name: bytes, tenant: str, life_us: int = LIFE_US) -> HeldCopy:
        now_us = self.clock.now_us()
        self.store(name, tenant, now_us)
        copy = HeldCopy(name, self._next, tenant, "low", 4, 6, now_us, now_us + life_us)
        self._next += 1
        self.held[name] = copy
        self._say("stored", copy)
        return copy

    def copies(self) -> list[HeldCopy]:
        return [*self.held.values()]

    def known_us(self, now_us: int) -> int:
        return now_us

    def destroy(self, keys: Collection[bytes]) -> int:
        for copy in [self.held[key] for key in keys if key in self.held]:
            self.entries.pop(copy.name, None)
            del self.held[copy.name]
            self._say("ended", copy, "orphan")
            self._say("destroyed", copy, "unlinked")
        return super().destroy(keys)

    def expire(self) -> None:
        now_us = self.clock.now_us()
        self.destroy([copy.name for copy in self.copies() if copy.due_us <= now_us])

    def _say(self, step: str, copy: HeldCopy, cause: str = "") -> None:
        if self.telling:
            event = CopyEvent(step, *copy[:6], self.clock.now_us(), copy.due_us, cause)
            self.tell(copy_leaves(self.name, [event]))
