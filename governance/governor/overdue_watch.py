"""Custody that is past its deadline and has not ended: seen in the step in which it is, and put on record.

- A suspend, a long step or a backlog of expiries makes holds overdue; no look-up serves them meanwhile (attach
  compares deadlines by itself), and no step extends one.
- The first step that leaves something overdue for longer than `GRACE_US` records it, with how many and since when;
  the first one after it that leaves nothing records that too.
"""

from __future__ import annotations

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.audit.kinds import CustodyOverdue
from kvcustody.governance.observability.stats import overdue_us

GRACE_US = 1_000_000


class OverdueWatch:
    """Watches the deadlines of every pool of a process."""

    def __init__(self) -> None:
        self._late: set[int] = set()

    def look(self, managers: list[BlockManager], now_us: int) -> list[CustodyOverdue]:
        """What became overdue, or is not any more, since the last look."""
        made = []
        for manager in managers:
            number = manager.number
            if not manager.behind and number not in self._late:
                continue
            late_us = overdue_us(manager, now_us)
            if late_us > GRACE_US and number not in self._late:
                self._late.add(number)
                made.append(
                    CustodyOverdue(now_us, number, manager.hold_table.overdue(now_us), now_us - late_us)
                )
            elif not late_us and number in self._late:
                self._late.discard(number)
                made.append(CustodyOverdue(now_us, number, 0, 0))
        return made
