"""A node: one published run of blocks of one chain, the unit that the prefix tree attaches, holds and evicts.

Requests that share a prefix share the nodes of it; where they diverge inside a run, the tree splits the node. A
`PathResidency` is what such a request leaves behind: a hold on the path from its leaf to the root.

- `refs` of a parent is at least that of each child, because a sequence refers to its whole path.
- A node is ACTIVE while `refs > 0`, CACHED while `refs == 0 and holds > 0`, and otherwise ended.
- `ceiling_us` never grows, and is at most the parent's.
- All fields hold for every block of the run: where requests diverge inside a run, the node is split.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from kvcustody.allocator.pool.accounting import Account, Domain, OwnerData
from kvcustody.allocator.pool.block_state import NEVER_US, Blocks
from kvcustody.allocator.pool.residency import Residency

KEY_BYTES = 32


class Offered(NamedTuple):
    """An offer of the run's blocks, from depth `begin` on, to a tier before their eviction; `taker` is the tier's
    number.
    """

    begin: int
    taker: int
    ended: int  # how much had ended there: as long as that stays, what was taken is there


class Node:
    """A run of `length` blocks. `windows` holds, per sliding-window group, the blocks at the run's end (or nothing)."""

    __slots__ = (
        "block_count",
        "blocks",
        "born_us",
        "ceiling_us",
        "deadline_us",
        "demote_at_us",
        "demote_us",
        "depth",
        "domain",
        "fence",
        "first_child",
        "hits",
        "hold_here",
        "holds",
        "keys",
        "length",
        "level",
        "newer",
        "next_sibling",
        "offered",
        "older",
        "parent",
        "pause_us",
        "previous_sibling",
        "priority",
        "rank_us",
        "refs",
        "released_us",
        "start",
        "used_us",
        "windows",
    )

    def __init__(
        self, domain: Domain, parent: Node | None, start: int, depth: int, blocks: Blocks, length: int
    ) -> None:
        self.domain = domain
        self.parent = parent
        self.start = start  # depth of the first block in its own chain
        self.depth = depth  # depth of the first block in the prompt
        self.blocks = blocks
        self.length = length
        self.block_count = len(blocks)  # over all layer groups
        self.keys = b""
        self.windows: tuple[Blocks, ...] = ()
        self.refs = 0
        self.holds = 0
        self.hits = 0
        self.fence = 0
        self.born_us = 0
        self.used_us = 0
        self.released_us = 0  # when its last reference was given back
        self.rank_us = 0
        self.pause_us = 0  # how long it was CACHED before its last use, for a policy that learns; 0: unknown
        self.ceiling_us = NEVER_US
        self.deadline_us = 0
        self.priority = 35
        self.demote_us = 0  # how long after its release the priority counts; 0: always
        self.demote_at_us = 0  # when that ends; 0: not waiting
        self.offered: Offered | None = None  # where the node is split, the tail keeps it
        self.level = 0
        self.first_child: Node | None = None
        self.next_sibling: Node | None = None
        self.previous_sibling: Node | None = None
        self.older: Node | None = None
        self.newer: Node | None = None
        self.hold_here: PathResidency | None = None  # the newest hold whose leaf is this node

    def add_child(self, child: Node) -> None:
        """Add `child` as the first of this node's children."""
        head = self.first_child
        child.parent = self
        child.previous_sibling = None
        child.next_sibling = head
        if head is not None:
            head.previous_sibling = child
        self.first_child = child

    def remove_from_parent(self) -> None:
        """Remove this node from its parent's children."""
        before, after = self.previous_sibling, self.next_sibling
        if before is not None:
            before.next_sibling = after
        elif self.parent is not None and self.parent.first_child is self:
            self.parent.first_child = after
        if after is not None:
            after.previous_sibling = before
        self.previous_sibling = self.next_sibling = None

    def update_block_count(self) -> None:
        """Update `block_count` after the runs or windows have changed."""
        count = len(self.blocks)
        for window in self.windows:
            count += len(window)
        self.block_count = count


class PathResidency(Residency):
    """A residency in the prefix tree. Its hold keeps the path from its leaf to the root; the path is walked, never
    stored, so that splitting a node costs it nothing.
    """

    __slots__ = ("leaf", "next_at_leaf")

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
        super().__init__(id_, account, domain, principal, facts, opened_us, trace)
        self.leaf: Node | None = None
        self.next_at_leaf: PathResidency | None = None

    def can_hold(self, node: Node) -> bool:
        """Return whether its hold may keep `node`.

        Readers through a grant get references, not holds; a segment's blocks are held in its owner's name.
        """
        return node.domain.owner is self.account or node.domain.is_segment
