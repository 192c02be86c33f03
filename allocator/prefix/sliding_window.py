"""Sliding-window layer groups: each has its own blocks, and needs only the last window of them.

- A node keeps, per window group, the blocks at its run's end, at most one window of them. The ends of published runs
  are therefore the points from which a window group can be reused.
- A path is reusable at a run's end when, for every window group, the last window before it is present (L7).
- Blocks that have slid out of a running sequence's window end at once, as custody of their own.
"""

from __future__ import annotations

import numpy as np

from kvcustody.allocator.pool.block_state import EMPTY, Blocks
from kvcustody.allocator.prefix.node import Node


def reusable(node: Node, position: int) -> int:
    """The most blocks of `node` that can be attached, at most `position`; 0 where none can.

    Without window groups every position is reusable. With them, `node.windows[g]` must reach back a full window from
    the run's end, or to the run's start where the ancestors carry on.
    """
    if not node.windows:
        return position
    return node.length if position == node.length and complete(node) else 0


def complete(node: Node) -> bool:
    """Whether every window group is present for a full window before the end of `node`."""
    for group, needed in enumerate(node.domain.windows):
        missing = min(needed, node.depth + node.length)
        at: Node | None = node
        while at is not None and missing > 0:
            held = len(at.windows[group]) if at.windows else 0
            if held < min(missing, at.length):
                return False
            missing -= at.length
            at = at.parent
        if missing > 0:
            return False
    return True


def attached(leaf: Node | None, group: int, needed: int) -> Blocks:
    """The blocks of the last window of `group` on the path of `leaf`, in token order."""
    parts: list[Blocks] = []
    node = leaf
    while node is not None and needed > 0:
        window = node.windows[group] if node.windows else EMPTY
        take = min(needed, len(window))
        if take:
            parts.append(window[len(window) - take :])
        needed -= node.length
        node = node.parent
    return np.concatenate(parts[::-1]) if parts else EMPTY
