"""Residencies and the deadline wheel: expiry is kept per request, not per block (ADR 0004).

R1  A residency holds its path from its leaf to the root; the path is walked, never stored, so a split costs it nothing.
R2  A hold lapses once: at its deadline, on erasure, when replaced by an extension of the same principal and domain, or
    with its last block.
R3  No deadline is later than the ceiling of the leaf.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcustody.allocator.pool.account import Account
    from kvcustody.allocator.pool.domain import Domain
    from kvcustody.allocator.prefix.node import Node

TICK_BITS = 14  # one wheel tick is 2**14 us = 16.4 ms


class Residency:
    """One request's presence in the cache; after release, its hold. `facts` and `trace` are opaque to the allocator."""

    __slots__ = (
        "account",
        "deadline_us",
        "domain",
        "facts",
        "id",
        "is_held",
        "leaf",
        "may_hold",
        "newer",
        "next_at_leaf",
        "older",
        "opened_us",
        "principal",
        "tick",
        "trace",
    )

    def __init__(
        self, id_: int, account: Account, domain: Domain, principal: object, facts: object, opened_us: int
    ) -> None:
        self.id = id_
        self.account = account
        self.domain = domain
        self.principal = principal
        self.facts = facts
        self.trace = ""
        self.opened_us = opened_us
        self.leaf: Node | None = None
        self.deadline_us = 0
        self.tick = 0
        self.is_held = False
        self.may_hold = True  # False: it leaves nothing behind, whatever its domain allows
        self.next_at_leaf: Residency | None = None
        self.older: Residency | None = None  # among the account's holds
        self.newer: Residency | None = None

    def narrow(self, deadline_us: int) -> None:
        """The hold lasts until this earlier deadline."""
        assert self.is_held and deadline_us < self.deadline_us
        wheel = self.account.partition.wheel
        wheel.remove(self)
        self.deadline_us = deadline_us
        wheel.add(self)


class HoldList:
    """The holds of one account, oldest first: a linked list through the residencies, so that it never resizes."""

    __slots__ = ("_count", "_newest", "oldest")

    def __init__(self) -> None:
        self.oldest: Residency | None = None
        self._newest: Residency | None = None
        self._count = 0

    def add(self, hold: Residency) -> None:
        """Enter `hold` as the newest."""
        newest = self._newest
        hold.older, hold.newer = newest, None
        if newest is None:
            self.oldest = hold
        else:
            newest.newer = hold
        self._newest = hold
        self._count += 1

    def remove(self, hold: Residency) -> None:
        """Take `hold` out; it must be in."""
        older, newer = hold.older, hold.newer
        if older is None:
            self.oldest = newer
        else:
            older.newer = newer
        if newer is None:
            self._newest = older
        else:
            newer.older = older
        hold.older = hold.newer = None
        self._count -= 1

    def values(self) -> Iterator[Residency]:
        """Every hold, oldest first; the one at hand may be removed while iterating."""
        hold = self.oldest
        while hold is not None:
            newer = hold.newer
            yield hold
            hold = newer

    def __len__(self) -> int:
        return self._count


class DeadlineWheel:
    """Holds by deadline, in ticks. Adding, removing and taking one due hold are constant time."""

    __slots__ = ("_due", "_ordered", "_ticks")

    def __init__(self) -> None:
        self._ticks: dict[int, dict[int, Residency]] = {}
        self._due: list[int] = []  # heap of the ticks that exist
        self._ordered = -1  # the tick whose holds stand with their deadlines falling

    def add(self, residency: Residency) -> None:
        """Enter a hold under its deadline."""
        tick = residency.deadline_us >> TICK_BITS
        bucket = self._ticks.get(tick)
        if bucket is None:
            bucket = self._ticks[tick] = {}
            heapq.heappush(self._due, tick)
        residency.tick = tick
        bucket[residency.id] = residency

    def remove(self, residency: Residency) -> None:
        """Take a hold out; no effect where it is out already."""
        bucket = self._ticks.get(residency.tick)
        if bucket is not None:
            bucket.pop(residency.id, None)

    def take_due(self, now_us: int) -> Residency | None:
        """Take out one hold whose tick has passed, earliest first, or None. At most one tick late; attach is exact.

        Of holds on one block the last to lapse says when it was due: so they leave in the order of their deadlines.
        """
        due = self._due
        now_tick = now_us >> TICK_BITS
        while due and due[0] < now_tick:
            bucket = self._ticks[due[0]]
            if not bucket:
                del self._ticks[heapq.heappop(due)]
                continue
            if self._ordered != due[0]:
                self._ordered = due[0]
                falling = sorted(bucket.values(), key=lambda hold: -hold.deadline_us)
                bucket.clear()
                bucket.update((hold.id, hold) for hold in falling)
            return bucket.popitem()[1]
        return None

    def next_due_us(self) -> int | None:
        """When the next sweep takes something out, or None where nothing waits."""
        due = self._due
        while due and not self._ticks[due[0]]:
            del self._ticks[heapq.heappop(due)]
        return (due[0] + 1) << TICK_BITS if due else None

    def overdue(self, now_us: int) -> int:
        """How many holds are past their deadline and not yet swept."""
        now_tick = now_us >> TICK_BITS
        return sum(
            sum(residency.deadline_us <= now_us for residency in bucket.values())
            for tick, bucket in self._ticks.items()
            if tick <= now_tick
        )

    def __len__(self) -> int:
        return sum(map(len, self._ticks.values()))


class DeadlineWheels:
    """Every partition's wheel, read as one. Each is swept by itself: no tenant's expiries delay another's."""

    __slots__ = ("_wheels",)

    def __init__(self, wheels: Iterable[DeadlineWheel]) -> None:
        self._wheels = tuple(wheels)

    def overdue(self, now_us: int) -> int:
        """How many holds are past their deadline and not yet swept."""
        return sum(wheel.overdue(now_us) for wheel in self._wheels)

    def __len__(self) -> int:
        return sum(map(len, self._wheels))
