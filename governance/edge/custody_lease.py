"""The custody lease: until when a worker may reuse blocks without hearing of the newest erasures.

    lease = CustodyLease()
    lease.require(ERASURES)              # nothing is reused before its first answer
    lease.renew(ERASURES, until_us)      # it was heard
    if lease.is_over(now_us): ...        # read before every attach

1. A lease begins when the question was sent that was answered: an erasure after that may be unheard. It runs in boot
   time, so it ends while a machine is suspended or a process stopped.
2. Each source has a lease of its own, and all must hold. A worker that keeps the ledger itself needs none.
3. Past it nothing is reused, whatever the classification: `on_outage: decisions` is `deny` for each. Requests run, and
   what they write is found again once the worker has heard, unless an erasure that it then hears ends it first.
4. Workers that started together do not ask together: each has a lease of its own length.
"""

from __future__ import annotations

import random
from typing import Final

from kvcustody.allocator.pool.block_state import NEVER_US
from kvcustody.clock import MICROSECONDS

ERASURES, EPOCHS = "erasures", "epochs"
CUSTODY_LEASE: Final = "custody-lease"  # the rule that denies a reuse past it
LEASE_SECONDS_MIN: Final = 300
_JITTER: Final = 0.2


class CustodyLease:
    """The lease of one process. Written on the thread that owns the blocks."""

    def __init__(self) -> None:
        self._until_us: dict[str, int] = {}
        self.until_us = NEVER_US  # boot time; the earliest of all sources

    def require(self, source: str) -> None:
        """Forbid reuse until this source is heard; no change where it was required already."""
        self._until_us.setdefault(source, 0)
        self.until_us = min(self._until_us.values())

    def renew(self, source: str, until_us: int) -> None:
        """Extend the lease because the source was heard; a late answer shortens nothing."""
        self._until_us[source] = max(until_us, self._until_us.get(source, 0))
        self.until_us = min(self._until_us.values())

    def is_over(self, now_us: int) -> bool:
        """Whether no block may be reused at this boot time."""
        return now_us >= self.until_us


def lease_seconds(setting: int, erased_within_us: int) -> int:
    """Return the setting, or where it is 0 the policy's erasure deadline, and at least `LEASE_SECONDS_MIN`."""
    return setting or max(LEASE_SECONDS_MIN, erased_within_us // MICROSECONDS)


def spread(seconds: float) -> float:
    """Return a duration around this one that differs between processes (rule 4)."""
    return seconds * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 - spacing, no secret
