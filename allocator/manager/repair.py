"""Repair the state of a pool where a scan found it wrong: references, holds, index entries, lost blocks.

Nothing here guesses in favour of reuse: what cannot be explained ends, and goes the way of all ended custody.

- After a repair `check` has nothing to say about what was repaired.
- A block that somebody may still read or write is never made CLEAN here: it waits for its fences like any other.
"""

from __future__ import annotations

import numpy as np

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.pool.accounting import Domain
from kvcustody.allocator.pool.block_state import ACTIVE, CACHED, Blocks
from kvcustody.allocator.pool.records import EndingRun
from kvcustody.allocator.prefix.hash_index import indexed_positions
from kvcustody.allocator.prefix.node import KEY_BYTES, Node
from kvcustody.allocator.prefix.sequence import RunningSequence
from kvcustody.allocator.prefix.tree import PrefixTree


def set_refs(tree: PrefixTree, node: Node, refs: int, now_us: int) -> None:
    """Set the node's references to `refs`; it is revived, cached or ended accordingly. Call it for children first."""
    if node.refs == 0 and refs:
        tree.incref(node, now_us)
        node.hits -= 1
    elif node.refs and refs == 0:
        node.refs = 1
        tree.decref(node, now_us, "orphan")
    node.refs = refs
    tree.flush(now_us)


def set_holds(tree: PrefixTree, node: Node, holds: int, now_us: int) -> None:
    """Set the node's holds to `holds`; without holds and references it ends, with everything that continues it."""
    node.holds = holds
    if holds == 0 and node.refs == 0 and node.length:
        tree.end_subtree(node, "orphan", now_us, now_us)
    tree.flush(now_us)


def drop_entries(tree: PrefixTree, node: Node) -> int:
    """Remove every index entry of a node that is not in the tree; return how many there were."""
    dropped = 0
    for stripe in tree.index.stripes:
        for key in [key for key, at in stripe.items() if at is node]:
            del stripe[key]
            dropped += 1
    return dropped


def remove_from_index(tree: PrefixTree, node: Node, now_us: int) -> None:
    """Remove a node whose keys are not all indexed from the index; without references it ends."""
    stripes, mask = tree.index.stripes, tree.index.mask
    for at in indexed_positions(node.start, 0, node.length):
        key = node.keys[KEY_BYTES * at : KEY_BYTES * at + KEY_BYTES]
        if stripes[hash(key) & mask].get(key) is node:
            del stripes[hash(key) & mask][key]
    node.keys = b""
    if node.refs == 0:
        tree.end_subtree(node, "orphan", now_us, now_us)
    tree.flush(now_us)


def end_lost(manager: BlockManager, blocks: Blocks, domain: Domain, now_us: int) -> None:
    """End the custody of blocks that no node and no sequence has, in the name of `domain`."""
    pool, account = manager.pool, domain.owner
    fence = pool.fences.last if len(pool.fences) else 0
    for state in (ACTIVE, CACHED):
        part = blocks[pool.state[blocks] == state]
        if not len(part):
            continue
        if state == ACTIVE:
            account.charge_active(-len(part))
        else:
            account.cached_blocks -= len(part)
        pool.end([EndingRun(part, domain, "orphan", now_us, fence)], state, now_us)


def cut_path(manager: BlockManager, sequence: RunningSequence) -> None:
    """Keep the live part of a path that ended under a sequence, and its own blocks, for release."""
    sequence.stop_publishing()
    own = sequence.table[sequence.published : sequence.block_count]
    node = sequence.leaf
    while node is not None and node.length == 0:
        node = node.parent
    sequence.leaf = node
    path: list[Blocks] = []
    while node is not None:
        path.append(node.blocks)
        node = node.parent
    alive = np.concatenate(path[::-1]) if path else np.empty(0, dtype=np.int64)
    sequence.table = np.concatenate((alive, own))
    sequence.published = sequence.hit_blocks = len(alive)
    sequence.block_count = len(sequence.table)
    sequence.spans = []
