"""One walk over a prefix tree that reads all a census needs of each node while the node is at hand.

M1  A parent comes before its children, and its number stands in their rows.
M2  Only the links from parents to children are followed: what they do not lead to is not in the tree.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.pool.block_state import Blocks
from kvcustody.allocator.prefix.node import Node

Int64s = NDArray[np.int64]


class NodeReading(NamedTuple):
    """Every node, its blocks, the blocks of all windows, and by node what is kept of it."""

    nodes: list[Node]
    blocks: list[Blocks]
    windows: list[Blocks]
    ids: Int64s  # what `id` says of the node
    parents: Int64s  # numbers of nodes; -1 for a root
    refs: Int64s
    holds: Int64s
    start: Int64s
    length: Int64s
    tags: Int64s  # of its domain
    keyed: Int64s  # 1 where it has keys


def read_nodes(roots: Iterable[Node]) -> NodeReading:
    """One visit to each node: a second one would wait for its memory again, which costs more than reading it."""
    nodes: list[Node] = []
    blocks: list[Blocks] = []
    windows: list[Blocks] = []
    ids: list[int] = []
    parents: list[int] = []
    refs: list[int] = []
    holds: list[int] = []
    start: list[int] = []
    length: list[int] = []
    tags: list[int] = []
    keyed: list[int] = []
    later: list[Node] = []  # siblings to come back to, with the number of their parent
    above: list[int] = []
    for root in roots:
        node: Node | None = root
        parent = -1
        while node is not None:
            number = len(nodes)
            nodes.append(node)
            ids.append(id(node))
            blocks.append(node.blocks)
            if node.windows:
                windows += node.windows
            parents.append(parent)
            refs.append(node.refs)
            holds.append(node.holds)
            start.append(node.start)
            length.append(node.length)
            tags.append(node.domain.tag)
            keyed.append(1 if node.keys else 0)
            sibling = node.next_sibling
            if sibling is not None and parent >= 0:  # roots are linked, too, and come by themselves
                later.append(sibling)
                above.append(parent)
            node = node.first_child
            if node is not None:
                parent = number
            elif later:
                node, parent = later.pop(), above.pop()
    return NodeReading(
        nodes, blocks, windows, *map(_array, (ids, parents, refs, holds, start, length, tags, keyed))
    )


def _array(numbers: list[int]) -> Int64s:
    return np.fromiter(numbers, np.int64, len(numbers))
