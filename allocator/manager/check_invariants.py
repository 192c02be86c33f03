"""`check()`: recompute every counter and invariant from scratch and name the operands that disagree.

Vectorised over blocks, one pass over nodes; it changes nothing and may run between any two operations.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.pool.block_state import BlockState
from kvcustody.allocator.prefix.hash_index import indexed_positions
from kvcustody.allocator.prefix.node import KEY_BYTES, Node
from kvcustody.allocator.prefix.sequence import RunningSequence


def check(manager: BlockManager) -> list[str]:
    """Return every violated invariant in words; an empty list if all hold."""
    problems: list[str] = []
    _check_counts(manager, problems)
    nodes = _check_nodes(manager, problems)
    _check_holders(manager, nodes, problems)
    _check_accounts(manager, nodes, problems)
    return problems


def _check_counts(manager: BlockManager, problems: list[str]) -> None:
    pool = manager.pool
    found = np.bincount(pool.state, minlength=len(BlockState)).tolist()
    if found != pool.counts:
        problems.append(f"L1: states counted {found}, kept {pool.counts}")
    if sum(pool.counts) != pool.blocks:
        problems.append(f"L1: states sum to {sum(pool.counts)}, the pool has {pool.blocks}")
    for partition in pool.partitions:
        ring = np.arange(partition.clean_head, partition.clean_head + partition.clean_count) % partition.size
        clean = partition.clean_ring[ring]
        wrong = int(np.count_nonzero(pool.state[clean] != BlockState.CLEAN))
        if wrong:
            problems.append(f"L2: {wrong} blocks in the clean ring are not CLEAN")
        ranged = pool.state[partition.first : partition.first + partition.size]
        if int(np.count_nonzero(ranged == BlockState.CLEAN)) != partition.clean_count:
            problems.append(f"L2: the clean ring has {partition.clean_count} blocks, the state array more or fewer")
        dirty = sum(len(custody.blocks) for custody in partition.dirty)
        if dirty != partition.dirty_blocks:
            problems.append(f"L1: dirty queue has {dirty} blocks, counted {partition.dirty_blocks}")
    if int(pool.generation.max(initial=0)) >= pool.next_generation:
        problems.append("L3: a block has a generation that was never given out")


def _check_nodes(manager: BlockManager, problems: list[str]) -> list[Node]:
    """Walk the tree once: prefix closure, ceilings, links, index entries."""
    nodes: list[Node] = []
    stack = list(manager.tree.roots)
    entries = 0
    stripes, mask = manager.tree.index.stripes, manager.tree.index.mask
    while stack:
        node = stack.pop()
        nodes.append(node)
        child = node.first_child
        while child is not None:
            if child.parent is not node:
                problems.append("L7: a child does not know its parent")
            if child.refs > node.refs:
                problems.append(f"L7: child refs {child.refs} exceed parent refs {node.refs}")
            if child.ceiling_us > node.ceiling_us:
                problems.append(f"L8: child ceiling {child.ceiling_us} exceeds parent ceiling {node.ceiling_us}")
            if child.depth != node.depth + node.length:
                problems.append(f"L7: child depth {child.depth}, parent ends at {node.depth + node.length}")
            stack.append(child)
            child = child.next_sibling
        if node.refs == 0 and node.holds == 0:
            problems.append("L7: a node without references and holds is still in the tree")
        if (node.refs == 0) != (node.older is not None):
            problems.append(f"node with refs {node.refs} is queued: {node.older is not None}")
        keys = node.keys
        if keys:
            for at in indexed_positions(node.start, 0, node.length):
                entries += 1
                key = keys[KEY_BYTES * at : KEY_BYTES * at + KEY_BYTES]
                if stripes[hash(key) & mask].get(key) is not node:
                    problems.append(f"position {at} of a node at depth {node.depth} is not entered")
    if entries != len(manager.tree.index):
        problems.append(f"{entries} entries expected, {len(manager.tree.index)} in the index")
    if len(nodes) != manager.tree.node_count:
        problems.append(f"{len(nodes)} nodes reached, {manager.tree.node_count} counted")
    return nodes


def _sequences(manager: BlockManager) -> list[RunningSequence]:
    return [sequence for sequence in manager.decode.sequences if sequence is not None]


def _check_holders(manager: BlockManager, nodes: list[Node], problems: list[str]) -> None:
    """Every block outside CLEAN has exactly one place: a node, a sequence, or a queue (L5)."""
    pool = manager.pool
    owners = np.zeros(pool.blocks, dtype=np.int32)
    expected: dict[BlockState, list[NDArray[np.int64]]] = {state: [] for state in BlockState}
    active, cached = expected[BlockState.ACTIVE], expected[BlockState.CACHED]
    for node in nodes:
        held = active if node.refs else cached
        held.append(node.blocks)
        if node.windows:
            held.extend(node.windows)
    for sequence in _sequences(manager):
        expected[BlockState.ACTIVE].append(sequence.table[sequence.published : sequence.block_count])
        expected[BlockState.ACTIVE].extend(blocks for blocks, _ in sequence.duplicates)
        expected[BlockState.ACTIVE].extend(sequence.windows)
        _check_table(sequence, problems)
    for partition in pool.partitions:
        expected[BlockState.FENCED].extend(custody.blocks for custody in partition.fenced)
        expected[BlockState.DIRTY].extend(custody.blocks for custody in partition.dirty)
        expected[BlockState.QUARANTINED].extend(custody.blocks for custody in partition.stuck)
    if pool.flight is not None:
        expected[BlockState.DIRTY].extend(pool.flight.held())
    for state, parts in expected.items():
        if not parts:
            continue
        blocks = np.concatenate(parts)
        wrong = int(np.count_nonzero(pool.state[blocks] != state))
        if wrong:
            problems.append(f"L1: {wrong} of {len(blocks)} blocks held as {state.name} are in another state")
        np.add(owners, np.bincount(blocks, minlength=pool.blocks), out=owners, casting="unsafe")
    if owners.max(initial=0) > 1:
        problems.append(f"L5: {int(np.count_nonzero(owners > 1))} blocks have more than one holder")
    placed = (pool.state != BlockState.CLEAN) & (pool.state != BlockState.QUARANTINED)
    placed[sum(partition.size for partition in pool.partitions) :] = False  # in no partition yet: never handed out
    lost = int(np.count_nonzero(placed & (owners == 0)))
    if lost:
        problems.append(f"{lost} blocks are held by nobody")


def _check_table(sequence: RunningSequence, problems: list[str]) -> None:
    """A table is its path, except where its own duplicate serves it."""
    parts: list[NDArray[np.int64]] = []
    node = sequence.leaf
    while node is not None:
        parts.append(node.blocks)
        node = node.parent
    path = np.concatenate(parts[::-1]) if parts else np.empty(0, dtype=np.int64)
    table = sequence.table[: sequence.published]
    if len(path) != sequence.published:
        problems.append(f"a path of {len(path)} blocks under {sequence.published} published ones")
        return
    own = table[table != path]
    if len(own):
        spare = np.concatenate([blocks for blocks, _ in sequence.duplicates] or [own[:0]])
        if not np.isin(own, spare).all():
            problems.append("a block table names blocks that are neither on its path nor its own duplicates")


def _check_accounts(manager: BlockManager, nodes: list[Node], problems: list[str]) -> None:
    """Recount what each account has ACTIVE and CACHED, and what each node holds."""
    active: dict[str, int] = dict.fromkeys(manager.accounts, 0)
    cached = dict(active)
    for node in nodes:
        counts = active if node.refs else cached
        counts[node.domain.owner.name] += node.block_count
    for sequence in _sequences(manager):
        for first, last, domain in sequence.shares(sequence.published, sequence.block_count):
            active[domain.owner.name] += last - first
        for blocks, domain in sequence.duplicates:
            active[domain.owner.name] += len(blocks)
        for at, window in zip(sequence.window_first, sequence.windows, strict=True):
            for first, last, domain in sequence.shares(at, at + len(window)):
                active[domain.owner.name] += last - first
    for name, account in manager.accounts.items():
        if (account.active_blocks, account.cached_blocks) != (active[name], cached[name]):
            problems.append(
                f"Q1: tenant `{name}`: kept {account.active_blocks} active and {account.cached_blocks} cached blocks, "
                f"counted {active[name]} and {cached[name]}"
            )
        if account.used_blocks < account.active_blocks + account.cached_blocks:
            problems.append(f"Q1: tenant `{name}`: charged for {account.used_blocks}, holds more")
    for partition in manager.pool.partitions:
        over = sum(account.over_blocks() for account in partition.accounts)
        charged = sum(account.charged_over_blocks() for account in partition.accounts)
        if charged != partition.charged_over:
            problems.append(f"Q2: {charged} blocks charged over guarantees, kept {partition.charged_over}")
        if over != partition.over_blocks:
            problems.append(f"Q3: {over} blocks over guarantees, kept {partition.over_blocks}")
    _check_holds(manager, nodes, problems)


def _check_holds(manager: BlockManager, nodes: list[Node], problems: list[str]) -> None:
    counted: dict[int, int] = {}
    for account in manager.accounts.values():
        for residency in manager.hold_table.of(account):
            node = residency.leaf
            if node is not None and residency.deadline_us > node.ceiling_us:
                problems.append(f"a hold until {residency.deadline_us}, its leaf's ceiling is {node.ceiling_us}")
            while node is not None:
                if node.domain.owner is account or node.domain.is_segment:
                    counted[id(node)] = counted.get(id(node), 0) + 1
                node = node.parent
    wrong = sum(counted.get(id(node), 0) != node.holds for node in nodes)
    if wrong:
        problems.append(f"{wrong} nodes have holds that no residency explains")
    held, scheduled = len(manager.hold_table), manager.hold_table.scheduled()
    if held != scheduled:
        problems.append(f"{held} holds by account, {scheduled} in the deadline wheel")
