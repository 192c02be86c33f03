"""Which tenants that the policy does not name are here, where it says how many may be (`tenants_max`).

1. One that holds nothing leaves as soon as another comes; it is welcome again, like any newcomer.
2. A newcomer costs a bounded look at those that are here, whoever comes how often.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

LOOKS_MAX = 64  # at those that are here, for one newcomer


class UnlistedTenants:
    """The unlisted tenants of one process, those first that were longest not looked at."""

    def __init__(self) -> None:
        self._here: OrderedDict[str, None] = OrderedDict()

    def admit(self, name: str, most: int, leaves: Callable[[str], bool]) -> bool:
        """Whether `name` is among at most `most`; `leaves` has one that was here go, or says that it stays."""
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
