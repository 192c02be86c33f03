"""New limits for domains that are alive: what they hold is bound by the narrower of old and new.

N1  A ceiling or a deadline only ever moves earlier (L8); wider limits hold for what is written or released afterwards.
N2  From here on attach compares the new times, so nothing that they end is served, swept or not.
N3  A hold whose time has passed lapses with the next sweeps, due now: what was lawful until now is not late. So no
    ceiling moves before now, and no hold ends later than it would have.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.pool.accounting import Account, Domain, DomainLimits
from kvcustody.allocator.pool.block_state import NEVER_US
from kvcustody.allocator.pool.hold_table import HoldList
from kvcustody.allocator.prefix.node import Node, PathResidency


def set_limits(
    manager: BlockManager, changed: Mapping[Domain, DomainLimits], now_us: int
) -> dict[Account, HoldList[PathResidency]]:
    """Give domains their new limits and bring what they hold under them. Walks every node and hold of the pool once.

    Returns the accounts of which a hold now ends earlier, with all their holds.
    """
    shorter: dict[Domain, int] = {}
    for domain, limits in changed.items():
        shorter[domain] = max(0, domain.idle_us - limits.idle_us)
        domain.idle_us, domain.absolute_us, domain.scrub_within_us, domain.verify_share = limits
    _lower_ceilings(manager, shorter, now_us)
    holds = [hold for account in manager.accounts.values() for hold in manager.hold_table.of(account)]
    narrowed: dict[Account, HoldList[PathResidency]] = {}
    for hold in holds:
        deadline = max(_deadline(hold, shorter), now_us)
        if deadline < hold.deadline_us:
            manager.hold_table.shorten(hold, deadline)
            narrowed[hold.account] = manager.hold_table.of(hold.account)
    for hold in holds:
        node = hold.leaf
        while node is not None:
            if hold.can_hold(node):
                node.deadline_us = max(node.deadline_us, hold.deadline_us)
            node = node.parent
    return narrowed


def _lower_ceilings(manager: BlockManager, shorter: Mapping[Domain, int], now_us: int) -> None:
    """Top down, so that none is above its parent's. Deadlines are forgotten here and found again from the holds."""
    stack: list[Node] = list(manager.tree.roots)
    while stack:
        node = stack.pop()
        node.deadline_us = 0
        if node.domain in shorter and node.domain.absolute_us < NEVER_US:
            node.ceiling_us = min(node.ceiling_us, max(node.born_us + node.domain.absolute_us, now_us))
        if node.parent is not None:
            node.ceiling_us = min(node.ceiling_us, node.parent.ceiling_us)
        child = node.first_child
        while child is not None:
            stack.append(child)
            child = child.next_sibling


def _deadline(hold: PathResidency, shorter: Mapping[Domain, int]) -> int:
    """The hold's deadline under the new limits: as much earlier as the most narrowed domain on its path."""
    assert hold.leaf is not None, "a held residency has a leaf"
    earlier = 0
    node: Node | None = hold.leaf
    while node is not None:
        earlier = max(earlier, shorter.get(node.domain, 0))
        node = node.parent
    return min(hold.deadline_us - earlier, hold.leaf.ceiling_us)
