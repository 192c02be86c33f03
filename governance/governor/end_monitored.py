"""What tenants have under the engine's own keys in one of our pools ends: from now on they are enforced for."""

from __future__ import annotations

from collections.abc import Collection

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.prefix.node import Node
from kvcustody.governance.decisions.access_plan import label_of


def end_monitored(manager: BlockManager, tenants: Collection[str], now_us: int) -> None:
    """Close their twins, lapse what is held in them and end what nobody uses; what runs leaves nothing."""
    tree = manager.tree
    inside: dict[int, Node] = {}
    for node in tree.nodes():
        label = label_of(node.domain)
        if label.is_monitored and label.tenant in tenants:
            node.domain.is_open = False
            inside[id(node)] = node
        elif node.parent is not None and id(node.parent) in inside:
            inside[id(node)] = node  # what others computed from it
    for sequence in manager.decode.sequences:
        if sequence is None or sequence.monitored is None:
            continue
        node_or_none = sequence.leaf
        reads = node_or_none is not None and id(node_or_none) in inside
        if reads or label_of(sequence.domain).tenant in tenants:
            sequence.domain.is_open = (
                sequence.domain.is_open and label_of(sequence.domain).tenant not in tenants
            )
            sequence.stop_publishing()
    for account in manager.accounts.values():
        for hold in list(manager.hold_table.of(account)):
            if hold.is_held and hold.leaf is not None and id(hold.leaf) in inside:
                tree.lapse(hold, "unreachable", now_us)
    tree.flush(now_us)
    tops = [
        node
        for node in inside.values()
        if node.length
        and node.refs == 0
        and (node.parent is None or id(node.parent) not in inside or node.parent.refs > 0)
    ]
    for node in tops:
        tree.end_subtree(node, "unreachable", now_us, now_us)
    tree.flush(now_us)
