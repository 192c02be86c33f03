"""A census of one pool: its nodes, the references of live sequences, and the holds of residencies, counted
independently.

A full scan compares a `TreeCensus` with what the pool keeps. One walk over the prefix tree reads all that is needed of
each node while it is at hand; the rest are array operations, and no walk from a hold to its root. Only the links from
parents to children are followed: what they do not lead to is not in the tree. The pool must not move meanwhile;
nothing in it is changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.pool.block_state import Blocks
from kvcustody.allocator.prefix.node import Node, PathResidency
from kvcustody.allocator.prefix.sequence import RunningSequence

Int64s = NDArray[np.int64]


class NodeReading(NamedTuple):
    """Every node, its blocks, the blocks of all windows, and what the pool keeps by node."""

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
    """Visit each node once; a second visit would wait for its memory again, which costs more than reading."""
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
    return NodeReading(nodes, blocks, windows, *map(_array, (ids, parents, refs, holds, start, length, tags, keyed)))


def _array(numbers: list[int]) -> Int64s:
    return np.fromiter(numbers, np.int64, len(numbers))


_SEGMENT = -2  # in place of an owner: held in the name of whoever reads it


class TreeCensus:
    """Arrays over `nodes`, parents before their children. `refs`, `holds`: as kept; `counted`, `held`: as explained."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.tree = read_nodes(iter(manager.tree.roots))
        self.nodes, self.refs, self.holds = self.tree.nodes, self.tree.refs, self.tree.holds
        self._order = np.argsort(self.tree.ids)
        self._sorted = self.tree.ids[self._order]
        self.sequences = [sequence for sequence in manager.decode.sequences if sequence is not None]
        self.broken: dict[RunningSequence, list[Node]] = {}  # sequences with path nodes that are not in the tree
        self.counted = self._count_references()
        self.blockless: list[PathResidency] = []  # holds whose last block has ended
        self.held = self._count_holds()

    def places(self, objects: Iterable[object], count: int) -> Int64s:
        """Return each object's index in `nodes`, -1 where it is absent."""
        wanted = np.fromiter(map(id, objects), np.int64, count)
        if not len(self.nodes):
            return np.full(count, -1, dtype=np.int64)
        at = np.minimum(np.searchsorted(self._sorted, wanted), len(self._sorted) - 1)
        return np.where(self._sorted[at] == wanted, self._order[at], -1)

    def occurrences(self, objects: Iterable[object], count: int) -> Int64s:
        """Count each node among the objects; sorting both sides costs less than searching each index."""
        among = np.sort(np.fromiter(map(id, objects), np.int64, count))
        often = np.empty(len(self.nodes), dtype=np.int64)
        often[self._order] = np.searchsorted(among, self._sorted, "right") - np.searchsorted(among, self._sorted)
        return often

    def _count_references(self) -> Int64s:
        users: list[RunningSequence] = []
        path: list[Node] = []
        for sequence in self.sequences:
            node = sequence.leaf
            while node is not None:
                users.append(sequence)
                path.append(node)
                node = node.parent
        places = self.places(path, len(path))
        for at in np.flatnonzero(places < 0).tolist():
            self.broken.setdefault(users[at], []).append(path[at])
        return np.bincount(places[places >= 0], minlength=len(self.nodes)).astype(np.int64)

    def _count_holds(self) -> Int64s:
        """How many residencies explain each node's holds: (node, account) pairs climb to the roots together."""
        accounts = list(self.manager.accounts.values())
        every = [residency for account in accounts for residency in self.manager.hold_table.of(account)]
        owners = np.repeat(np.arange(len(accounts)), [len(self.manager.hold_table.of(account)) for account in accounts])
        leaves = self.places(map(attrgetter("leaf"), every), len(every))
        self.blockless = [every[at] for at in np.flatnonzero(leaves < 0).tolist()]
        known = leaves >= 0
        width = max(1, len(accounts))
        holder = self._holders({id(account): code for code, account in enumerate(accounts)})
        counted = np.zeros(len(self.nodes))
        pairs = leaves[known] * width + owners[known]
        counts, level = np.ones(len(pairs)), 0
        while len(pairs):
            if level & (level - 1) == 0:  # seldom: joining equal pairs costs more than climbing twice
                pairs, counts = _joined(pairs, counts)
            here, who = np.divmod(pairs, width)
            owner = holder[here]
            holds = (owner == who) | (owner == _SEGMENT)
            counted += np.bincount(here[holds], counts[holds], len(counted))
            up = self.tree.parents[here]
            inside = up >= 0
            pairs, counts, level = up[inside] * width + who[inside], counts[inside], level + 1
        return counted.astype(np.int64)

    def _holders(self, codes: dict[int, int]) -> Int64s:
        """By node, the code of the account in whose name it is held."""
        distinct, one = np.unique(self.tree.tags, return_index=True)
        by_tag = np.full(int(distinct[-1]) + 1 if len(distinct) else 0, -1, dtype=np.int64)
        for tag, at in zip(distinct.tolist(), one.tolist(), strict=True):
            domain = self.nodes[at].domain
            by_tag[tag] = _SEGMENT if domain.is_segment else codes.get(id(domain.owner), -1)
        return by_tag[self.tree.tags]


def _joined(pairs: Int64s, counts: NDArray[np.float64]) -> tuple[Int64s, NDArray[np.float64]]:
    order = np.argsort(pairs)
    pairs = pairs[order]
    starts = np.flatnonzero(np.concatenate(([True], pairs[1:] != pairs[:-1])))
    return pairs[starts], np.add.reduceat(counts[order], starts)
