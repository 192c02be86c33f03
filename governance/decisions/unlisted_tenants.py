"""Tenants that the policy does not name, up to its limit (`tenants_max`).

1. One that holds nothing leaves as soon as another comes; it is welcome again, like any newcomer.
2. A newcomer costs a bounded look at those that are here, whoever comes how often.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypedDict

from kvcustody.errors import CapacityError
from kvcustody.policies.document.model import TenantPolicy

LOOKS_MAX = 64  # at those that are here, for one newcomer


class UnlistedTenants:
    """The unlisted tenants of one process, the least recently considered first."""

    def __init__(self) -> None:
        self._here: OrderedDict[str, None] = OrderedDict()

    def admit(self, name: str, tenant: TenantPolicy, leaves: Callable[[str], bool]) -> None:
        """Raise `CapacityError` where the policy admits no more.

        `leaves` has one that was here go, or says that it stays.
        """
        most = tenant.tenants_max
        if most is not None and not self._admits(name, most, leaves):
            raise CapacityError(
                f"tenant `{name}`: the policy admits {most} unlisted tenants, and all places are taken", tenant=name
            )

    def _admits(self, name: str, most: int, leaves: Callable[[str], bool]) -> bool:
        if name in self._here:
            return True
        for _ in range(min(len(self._here), LOOKS_MAX)):
            if len(self._here) < most:
                break
            oldest = next(iter(self._here))
            if leaves(oldest):
                del self._here[oldest]
            else:
                self._here.move_to_end(oldest)
        if len(self._here) >= most:
            return False
        self._here[name] = None
        return True


class AccountLimits(TypedDict):
    """The limits of a tenant's account in blocks and in holding residencies."""

    guaranteed: int
    cap: int
    borrow: bool
    residencies: int


def account_limits(tenant: TenantPolicy, pool_blocks: int, residencies_max: int, *, isolating: bool) -> AccountLimits:
    """Return a tenant's limits in a pool under the policy; exactly its guarantee where the policy is `isolating`."""
    guaranteed = int(tenant.guaranteed * pool_blocks)
    return AccountLimits(
        guaranteed=guaranteed,
        cap=guaranteed if isolating else int(tenant.cap * pool_blocks),
        borrow=tenant.borrow and not isolating,
        residencies=min(tenant.residencies or residencies_max, residencies_max),
    )
