"""Thrashing: whether a tenant's cache is evicted before it is needed again, and which pool size would have kept it.

    watch = ThrashWatch()
    watch.look(counters, room)                 # at each snapshot; {tenant: is it thrashing}

1. A tenant's window is as many blocks as it may have, attached or computed again. It is judged once it is a quarter
   full. The tenant thrashes when at least half of the window's blocks were computed again after they had been evicted.
2. A verdict stands until the next window.
3. The advice is the pool plus a distance (`allocator.prefix.evicted_keys`), to a power of two. Nine in ten of the
   blocks computed again do not exceed that distance: they would have been hits.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcustody.allocator.prefix.evicted_keys import distance_of
from kvcustody.governance.observability.tenant_counters import TenantCounters

_SHARE, _QUANTILE, _EARLY = 0.5, 0.9, 4


class ThrashWatch:
    """Windows by tenant, over all pools of a process."""

    __slots__ = ("_from", "thrashing")

    def __init__(self) -> None:
        self._from: dict[str, tuple[int, int]] = {}  # attached and computed again, when the window began
        self.thrashing: dict[str, bool] = {}

    def look(self, counters: Mapping[str, TenantCounters], room: Mapping[str, int]) -> dict[str, bool]:
        """Judge the windows that are due; `room`: a tenant's most blocks. Tenants that have left are forgotten."""
        self._from = {name: at for name, at in self._from.items() if name in counters}
        self.thrashing = {name: is_so for name, is_so in self.thrashing.items() if name in counters}
        for name, one in counters.items():
            hits, again = self._from.setdefault(name, (0, 0))
            hits, again = one.hit_blocks - hits, one.recomputed_blocks - again
            wanted, blocks = hits + again, max(1, room.get(name, 1))
            if wanted * _EARLY >= blocks:
                self.thrashing[name] = again >= _SHARE * wanted
            if wanted >= blocks:
                self._from[name] = (one.hit_blocks, one.recomputed_blocks)
        return self.thrashing


def advised_blocks(blocks: int, distances: list[int]) -> int:
    """Return the pool size that would have turned most recomputed blocks into hits; 0 where none were recomputed."""
    distance = distance_of(distances, _QUANTILE)
    return blocks + distance if distance else 0
