"""The holds of a pool, found by account (the oldest first) and by deadline.

A hold is what an ended residency leaves behind: until its deadline its blocks stay cached. Both look-ups are intrusive
or bucketed, so that adding, removing and taking one due hold are constant time and nothing ever resizes at once; expiry
is kept per request, not per block (docs/build/adr/0004-residency-expiry.md).

    table.add(hold)                        # under hold.account and hold.deadline_us
    table.take_due(partition, now_us)      # one hold that is past its deadline, or None
    table.of(account)                      # its holds, oldest first
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

from kvcustody.allocator.pool.accounting import Account, PoolPartition
from kvcustody.allocator.pool.residency import Residency

TICK_BITS = 14  # one wheel tick is 2**14 us = 16.4 ms
HoldT = TypeVar("HoldT", bound=Residency)


class HoldTable(Generic[HoldT]):
    """Every hold of one pool. Each partition is swept separately: no tenant's expiries delay another's."""

    __slots__ = ("_lists", "_wheels")

    def __init__(self) -> None:
        self._lists: dict[Account, HoldList[HoldT]] = {}
        self._wheels: dict[PoolPartition, DeadlineWheel[HoldT]] = {}

    def add(self, hold: HoldT) -> None:
        """Add a hold as the newest of its account, under its deadline."""
        holds = self._lists.get(hold.account)
        if holds is None:
            holds = self.of(hold.account)
        holds.add(hold)
        holds.wheel.add(hold)

    def remove(self, hold: HoldT) -> None:
        """Remove a hold that is over. It must be in the account's list; the wheel may already have returned it."""
        hold.is_held = False
        holds = self._lists[hold.account]
        holds.wheel.remove(hold)
        holds.remove(hold)

    def shorten(self, hold: HoldT, deadline_us: int) -> None:
        """Move the hold to this earlier deadline."""
        assert hold.is_held and deadline_us < hold.deadline_us
        wheel = self._lists[hold.account].wheel
        wheel.remove(hold)
        hold.deadline_us = deadline_us
        wheel.add(hold)

    def of(self, account: Account) -> HoldList[HoldT]:
        """Return the holds of `account`, oldest first."""
        holds = self._lists.get(account)
        if holds is None:
            wheel = self._wheels.setdefault(account.partition, DeadlineWheel())
            holds = self._lists[account] = HoldList(wheel)
        return holds

    def count(self, account: Account) -> int:
        """Return how many holds `account` has."""
        holds = self._lists.get(account)
        return holds.count if holds is not None else 0

    def forget(self, account: Account) -> None:
        """Forget an account that holds nothing."""
        holds = self._lists.pop(account, None)
        assert holds is None or not holds.count

    def take_due(self, partition: PoolPartition, now_us: int) -> HoldT | None:
        """Remove from the wheel and return the earliest hold of `partition` whose tick has passed, or None."""
        wheel = self._wheels.get(partition)
        return wheel.take_due(now_us) if wheel is not None else None

    def next_due_us(self) -> int | None:
        """Return when the next sweep will remove a hold, or None if no hold is scheduled."""
        soonest: int | None = None
        for wheel in self._wheels.values():
            due_us = wheel.next_due_us()
            if due_us is not None and (soonest is None or due_us < soonest):
                soonest = due_us
        return soonest

    def is_due(self, now_us: int) -> bool:
        """Return whether a sweep now would remove a hold."""
        for wheel in self._wheels.values():
            if wheel.may_be_due(now_us):
                due_us = wheel.next_due_us()
                if due_us is not None and due_us <= now_us:
                    return True
        return False

    def overdue(self, now_us: int) -> int:
        """Return how many holds are past their deadline and not swept yet."""
        return sum(wheel.overdue(now_us) for wheel in self._wheels.values())

    def scheduled(self) -> int:
        """Return how many holds are scheduled under their deadlines; `check` compares this with the number of holds."""
        return sum(map(len, self._wheels.values()))

    def __len__(self) -> int:
        return sum(map(len, self._lists.values()))


class HoldList(Generic[HoldT]):
    """The holds of one account, oldest first: a linked list through the residencies, which never needs resizing."""

    __slots__ = ("_newest", "count", "oldest", "wheel")

    def __init__(self, wheel: DeadlineWheel[HoldT]) -> None:
        self.oldest: HoldT | None = None
        self._newest: HoldT | None = None
        self.count = 0
        self.wheel = wheel  # of the account's partition: the same holds, by deadline

    def add(self, hold: HoldT) -> None:
        """Add `hold` as the newest."""
        newest = self._newest
        hold.older, hold.newer = newest, None
        if newest is None:
            self.oldest = hold
        else:
            newest.newer = hold
        self._newest = hold
        self.count += 1

    def remove(self, hold: HoldT) -> None:
        """Remove `hold`, which must be in the list."""
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
        self.count -= 1

    def __iter__(self) -> Iterator[HoldT]:
        """Every hold, oldest first; the one at hand may be removed while iterating."""
        hold = self.oldest
        while hold is not None:
            newer = hold.newer
            yield hold
            hold = newer

    def __len__(self) -> int:
        return self.count


class DeadlineWheel(Generic[HoldT]):
    """Holds by deadline, in ticks. Adding, removing and taking one due hold are constant time."""

    __slots__ = ("_due", "_ordered", "_ticks")

    def __init__(self) -> None:
        self._ticks: dict[int, dict[int, HoldT]] = {}
        self._due: list[int] = []  # heap of the ticks that exist
        self._ordered = -1  # the tick whose holds stand with their deadlines falling

    def add(self, hold: HoldT) -> None:
        """Add a hold under its deadline."""
        tick = hold.deadline_us >> TICK_BITS
        bucket = self._ticks.get(tick)
        if bucket is None:
            bucket = self._ticks[tick] = {}
            heapq.heappush(self._due, tick)
        hold.tick = tick
        bucket[hold.id] = hold

    def remove(self, hold: HoldT) -> None:
        """Remove a hold; no effect if it was already removed."""
        bucket = self._ticks.get(hold.tick)
        if bucket is not None:
            bucket.pop(hold.id, None)

    def take_due(self, now_us: int) -> HoldT | None:
        """Remove and return the earliest hold whose tick has passed, or None. At most one tick late; attach is exact.

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

    def may_be_due(self, now_us: int) -> bool:
        """Return whether a hold may be due. False is exact; True may refer to holds that were already removed."""
        return bool(self._due) and (self._due[0] + 1) << TICK_BITS <= now_us

    def next_due_us(self) -> int | None:
        """Return when the next sweep will remove a hold, or None if no hold is scheduled."""
        due = self._due
        while due and not self._ticks[due[0]]:
            del self._ticks[heapq.heappop(due)]
        return (due[0] + 1) << TICK_BITS if due else None

    def overdue(self, now_us: int) -> int:
        """Return how many holds are past their deadline and not swept yet."""
        now_tick = now_us >> TICK_BITS
        return sum(
            sum(hold.deadline_us <= now_us for hold in bucket.values())
            for tick, bucket in self._ticks.items()
            if tick <= now_tick
        )

    def __len__(self) -> int:
        return sum(map(len, self._ticks.values()))
