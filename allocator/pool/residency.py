"""A residency: one request's presence in the cache while it runs, and afterwards its hold.

The block manager makes one for each admitted request. `principal` is compared when a later residency extends an earlier
one; `facts` and `trace` are the caller's own and are never read here.

- A hold lapses once: at its deadline, on erasure, when replaced by an extension of the same principal and domain, or
  with its last block.
- No deadline is later than the ceiling of what it holds.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Self

from kvcustody.allocator.pool.accounting import Account, Domain, OwnerData


class Residency:
    """One request's presence in the cache; after release, its hold. `facts` and `trace` are opaque to the allocator."""

    __slots__ = (
        "account",
        "deadline_us",
        "domain",
        "facts",
        "id",
        "is_held",
        "may_hold",
        "newer",
        "older",
        "opened_us",
        "principal",
        "tick",
        "trace",
    )

    def __init__(
        self,
        id_: int,
        account: Account,
        domain: Domain,
        principal: Hashable,
        facts: OwnerData | None,
        opened_us: int,
        trace: str = "",
    ) -> None:
        self.id = id_
        self.account = account
        self.domain = domain
        self.principal = principal
        self.facts = facts
        self.trace = trace
        self.opened_us = opened_us
        self.deadline_us = 0
        self.tick = 0
        self.is_held = False
        self.may_hold = True  # False: it leaves nothing behind, whatever its domain allows
        self.older: Self | None = None  # among the account's holds
        self.newer: Self | None = None
