"""Ends custody in some domains of our own pools, for tenants that are enforced from now on, or for a forecast."""

from __future__ import annotations

from collections.abc import Callable

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.pool.accounting import Domain
from kvcustody.allocator.prefix.node import Node


def nodes_inside(manager: BlockManager, covers: Callable[[Domain], bool]) -> dict[int, Node]:
    """Return the nodes of these domains, and those that continue them, by `id`."""
    inside: dict[int, Node] = {}
    for node in manager.tree.nodes():
        if covers(node.domain) or (node.parent is not None and id(node.parent) in inside):
            inside[id(node)] = node
    return inside


def topmost(inside: dict[int, Node]) -> list[Node]:
    """Return the topmost unreferenced nodes of each chain; those below end with them."""
    return [
        node
        for node in inside.values()
        if node.length
        and node.refs == 0
        and (node.parent is None or id(node.parent) not in inside or node.parent.refs > 0)
    ]


def end_domains(manager: BlockManager, covers: Callable[[Domain], bool], now_us: int) -> None:
    """Close the domains, lapse their holds and end unused blocks; running requests leave nothing."""
    tree, inside = manager.tree, nodes_inside(manager, covers)
    for node in inside.values():
        node.domain.is_open = node.domain.is_open and not covers(node.domain)
    for sequence in manager.decode.sequences:
        if sequence is None:
            continue
        leaf, is_own = sequence.leaf, covers(sequence.domain)
        if is_own or (leaf is not None and id(leaf) in inside):
            sequence.domain.is_open = sequence.domain.is_open and not is_own
            sequence.stop_publishing()
    for account in manager.accounts.values():
        for hold in list(manager.hold_table.of(account)):
            if hold.is_held and hold.leaf is not None and id(hold.leaf) in inside:
                tree.lapse(hold, "unreachable", now_us)
    tree.flush(now_us)
    for node in topmost(inside):
        tree.end_subtree(node, "unreachable", now_us, now_us)
    tree.flush(now_us)
