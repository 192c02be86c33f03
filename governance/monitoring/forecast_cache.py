"""A forecast of the cache under the policy: keys without blocks, for monitored requests.

    lookup = look_up(request, chain, read, forecast, forecast.find, now_us, lazily=False)
    hit = forecast.attachable(...)
    forecast.publish / release

It stands where an engine's index and the pool stand for enforced requests, so that one look-up answers for both.

- An entry is a block that a governed engine would have published: under its key, in its domain, with its deadlines.
- Entries, and the blocks of running requests that are not whole yet, are as many as the pool has blocks. Beyond that
  the entry unused longest goes, of tenants over their guarantee where there are any; over a tenant's cap, its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.pool.accounting import Domain
from kvcustody.allocator.pool.block_state import Blocks


class ForecastEntry:
    """One block that would be cached."""

    __slots__ = ("ceiling_us", "domain", "key", "number", "refs", "until_us", "used")

    def __init__(self, number: int, key: bytes, domain: Domain, ceiling_us: int) -> None:
        self.number = number
        self.key = key
        self.domain = domain
        self.ceiling_us = ceiling_us
        self.until_us = 0
        self.refs = 0
        self.used = 0


class QuotaBlocks(NamedTuple):
    """A tenant's quota under the policy, in blocks."""

    guaranteed: int
    cap: int


class ForecastCache:
    """Keys in the order of eviction. `quota_of`: returns a tenant's quota."""

    def __init__(self, pool_blocks: int, quota_of: Callable[[str], QuotaBlocks]) -> None:
        self.pool_blocks = pool_blocks
        self.quota_of = quota_of
        self._private: dict[str, int] = {}  # blocks of running requests, by tenant, that have no key yet
        self._by_key: dict[bytes, ForecastEntry] = {}
        self._by_number: dict[int, ForecastEntry] = {}
        self._unused: dict[str, OrderedDict[int, ForecastEntry]] = {}  # by tenant, the longest unused first
        self._of: dict[str, int] = {}
        self._next = 0
        self._tick = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, key: bytes) -> int:
        """Return the entry under a key, or -1."""
        entry = self._by_key.get(key)
        return -1 if entry is None else entry.number

    def attachable(self, blocks: Blocks, expected: NDArray[np.int32] | int, now_us: int) -> int:
        """Return the number of leading entries that could be attached now, by the rules of
        `ExternalPool.attachable`.
        """
        tags = [expected] * len(blocks) if isinstance(expected, int) else expected.tolist()
        for at, number in enumerate(blocks.tolist()):
            entry = self._by_number.get(number)
            if entry is None or entry.domain.tag != tags[at] or now_us >= entry.ceiling_us:
                return at
            if not entry.refs and now_us >= entry.until_us:
                return at
        return len(blocks)

    def make_room(self, tenant: str, blocks: int) -> None:
        """Make room for a request of this many blocks: a tenant's own cache gives way under its cap."""
        cap = self.quota_of(tenant).cap
        if cap < self.pool_blocks:
            self._evict_own(tenant, self._used(tenant) + blocks - cap)

    def charge(self, tenant: str, blocks: int) -> None:
        """Change a running request's number of blocks without a key (negative: fewer)."""
        self._private[tenant] = self._private.get(tenant, 0) + blocks
        if blocks > 0:
            self.make_room(tenant, 0)
        self._bound()

    def attach(self, numbers: Sequence[int]) -> list[ForecastEntry]:
        """Attach these entries to a request."""
        entries = [self._by_number[number] for number in numbers]
        for entry in entries:
            self._refer(entry)
        return entries

    def publish(
        self, keys: Sequence[bytes], domains: Sequence[Domain], before: ForecastEntry | None, now_us: int
    ) -> list[ForecastEntry]:
        """Publish the blocks that a request would compute, in order after `before`; returns the new ones.

        The first that is published under a key stays; another's copy has no entry. What the request was charged for
        without a key is charged anew (`charge`) before anything makes room.
        """
        entries: list[ForecastEntry] = []
        ceiling_us = now_us + (1 << 60) if before is None else before.ceiling_us
        for key, domain in zip(keys, domains, strict=True):
            entry = self._by_key.get(key)
            if entry is not None and not entry.refs and now_us >= min(entry.until_us, entry.ceiling_us):
                self._remove(entry)
                entry = None
            if entry is not None:  # another's, which was computed at the same time
                ceiling_us = min(ceiling_us, entry.ceiling_us)
                continue
            ceiling_us = min(ceiling_us, now_us + domain.absolute_us)
            entry = ForecastEntry(self._next, key, domain, ceiling_us)
            self._next += 1
            self._by_key[key] = self._by_number[entry.number] = entry
            owner = domain.owner.name
            self._of[owner] = self._of.get(owner, 0) + 1
            self._refer(entry)
            entries.append(entry)
        return entries

    def release(self, entries: Sequence[ForecastEntry], reader: str, now_us: int) -> None:
        """End a request: it would hold its own tenant's entries, and segments, until their deadlines."""
        idle_us = min((entry.domain.idle_us for entry in entries if _holds(entry, reader)), default=0)
        for entry in reversed(entries):  # what is nearer to the end of a prompt goes first
            entry.refs -= 1
            if _holds(entry, reader):
                entry.until_us = max(entry.until_us, min(now_us + idle_us, entry.ceiling_us))
            if entry.refs or entry.number not in self._by_number:
                continue  # still used, or forgotten meanwhile
            if now_us >= min(entry.until_us, entry.ceiling_us):
                self._remove(entry)
                continue
            self._tick += 1
            entry.used = self._tick
            self._unused.setdefault(entry.domain.owner.name, OrderedDict())[entry.number] = entry

    def forget(self, covers: Callable[[Domain], bool]) -> None:
        """Forget the entries that an erasure ends."""
        for entry in [entry for entry in self._by_key.values() if covers(entry.domain)]:
            self._remove(entry)

    def _refer(self, entry: ForecastEntry) -> None:
        if not entry.refs:
            self._take_out(entry)
        entry.refs += 1

    def _remove(self, entry: ForecastEntry) -> None:
        owner = entry.domain.owner.name
        if self._by_key.get(entry.key) is entry:
            del self._by_key[entry.key]
        if self._by_number.pop(entry.number, None) is not None:
            self._of[owner] -= 1
        self._take_out(entry)

    def _take_out(self, entry: ForecastEntry) -> None:
        unused = self._unused.get(entry.domain.owner.name)
        if unused is not None:
            unused.pop(entry.number, None)

    def _used(self, tenant: str) -> int:
        return self._of.get(tenant, 0) + self._private.get(tenant, 0)

    def _evict_own(self, tenant: str, count: int) -> None:
        unused = self._unused.get(tenant)
        while count > 0 and unused:
            self._remove(next(iter(unused.values())))
            count -= 1

    def _bound(self) -> None:
        for _ in range(len(self._by_key) + sum(self._private.values()) - self.pool_blocks):
            victim = self._victim()
            if victim is None:
                return
            self._remove(victim)

    def _victim(self) -> ForecastEntry | None:
        over = {
            tenant: self._used(tenant) - self.quota_of(tenant).guaranteed
            for tenant, unused in self._unused.items()
            if unused
        }
        tenants = [tenant for tenant, blocks in over.items() if blocks > 0] or list(over)
        fronts = [next(iter(self._unused[tenant].values())) for tenant in tenants]
        return min(fronts, key=lambda entry: entry.used, default=None)


def _holds(entry: ForecastEntry, reader: str) -> bool:
    return entry.domain.owner.name == reader or entry.domain.is_segment
