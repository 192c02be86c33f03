"""A domain as the allocator sees it: an interned id with numeric limits, never a policy.

D1  A block is in one domain from ACTIVE until it is CLEAN again (L5).
D2  A closed domain serves no attach; it never opens again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from kvcustody.allocator.prefix.node import NEVER_US

if TYPE_CHECKING:
    from kvcustody.allocator.pool.account import Account


class DomainFacts(TypedDict, total=False):
    """What a pool is told of a domain that it makes; each is an argument of `Domain`."""

    label: object
    idle_us: int
    absolute_us: int
    scrub_within_us: int
    verify_share: float
    is_segment: bool


class Domain:
    """The unit of reuse. Times are microseconds; `verify_share` is 0 (none) to 1 (every block re-read)."""

    __slots__ = (
        "__weakref__",
        "absolute_us",
        "idle_us",
        "is_open",
        "is_segment",
        "label",
        "owner",
        "scrub_within_us",
        "tag",
        "verify_share",
        "windows",
    )

    def __init__(
        self,
        tag: int,
        owner: Account,
        *,
        label: object = None,
        idle_us: int = NEVER_US,
        absolute_us: int = NEVER_US,
        scrub_within_us: int = NEVER_US,
        verify_share: float = 0.0,
        is_segment: bool = False,
        windows: tuple[int, ...] = (),
    ) -> None:
        self.tag = tag
        self.owner = owner
        self.label = label  # what the governor calls this domain; opaque here
        self.idle_us = idle_us
        self.absolute_us = absolute_us
        self.scrub_within_us = scrub_within_us
        self.verify_share = verify_share
        self.is_segment = is_segment
        self.windows = windows  # blocks a sliding-window group needs, per group
        self.is_open = True

    @property
    def cacheable(self) -> bool:
        """False where the policy says `0s`: such blocks are never CACHED and never published."""
        return self.idle_us > 0 and self.absolute_us > 0
