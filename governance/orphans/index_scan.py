"""The index against the tree: chains that nobody can find, and entries that lead nowhere."""

from __future__ import annotations

from itertools import chain

import numpy as np

from kvcustody.allocator.manager.repair import drop_entries, remove_from_index
from kvcustody.allocator.prefix.hash_index import COARSE_BLOCKS
from kvcustody.allocator.prefix.node import Node
from kvcustody.governance.orphans.finding import FindingBuilder, Trouble
from kvcustody.governance.orphans.pool_census import Census

_CLASS = "unreachable chain"


def index_troubles(census: Census, found: FindingBuilder) -> list[Trouble]:
    """Nodes that are indexed and not in the tree, and nodes of which an entry is missing."""
    tree, now_us = census.manager.tree, found.now_us

    def stray(node: Node) -> Trouble:
        def drop() -> tuple[str, str]:
            drop_entries(tree, node)
            return "taken out of the index", "recovered"

        tenant, cause = node.domain.owner.name, "indexed but not in the tree"
        return found(_CLASS, tenant, cause, node.blocks, drop, since_us=node.used_us)

    def part(node: Node) -> Trouble:
        def end() -> tuple[str, str]:
            if node.length:
                remove_from_index(tree, node, now_us)
            return "ended" if node.length == 0 else "left to its requests", "recovered"

        tenant, cause = node.domain.owner.name, "in the tree but not indexed"
        return found(_CLASS, tenant, cause, node.blocks, end, since_us=node.used_us)

    strays, parts = _entries(census)
    return [*map(stray, strays), *map(part, parts)]


def _entries(census: Census) -> tuple[list[Node], list[Node]]:
    """Entered nodes that are not in the tree, and nodes with fewer entries than their keys ask for.

    A key leads to one node, so a node's entries are whole when there are as many as its length calls for.
    """
    index = census.manager.tree.index
    # A stripe's nodes as a list first: fetched together from memory, they are there when their turn comes.
    entered = chain.from_iterable(map(list, map(dict.values, index.stripes)))
    have = census.occurrences(entered, len(index))
    strays: list[Node] = []
    if int(have.sum()) != len(index):
        places = census.places(index.nodes(), len(index)).tolist()
        outside = (node for node, at in zip(index.nodes(), places, strict=True) if at < 0)
        strays = list({id(node): node for node in outside}.values())
    start, length = census.tree.start, census.tree.length
    wanted = census.tree.keyed * (1 + (start + length) // COARSE_BLOCKS - (start + 1) // COARSE_BLOCKS)
    return strays, [census.nodes[at] for at in np.flatnonzero(have != wanted).tolist()]
