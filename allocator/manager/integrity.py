"""Compare a path's blocks with their checksums before it is attached, and withdraw blocks that have changed.

- What has changed is never attached: it leaves the index with all that continues it; unreferenced nodes end at once.
- Requests that run on it go on, for nobody can take back what they have read; they publish nothing more, leave no
  hold, and the blocks end with the last of them.
- All blocks of one look-up are compared in one launch a shard.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from kvcustody.allocator.pool.accounting import Domain
from kvcustody.allocator.pool.block_state import Blocks
from kvcustody.allocator.pool.integrity import BlockSums, MismatchedBlocks
from kvcustody.allocator.prefix.decode_table import DecodeTable
from kvcustody.allocator.prefix.longest_prefix import PrefixMatch
from kvcustody.allocator.prefix.node import Node
from kvcustody.allocator.prefix.sequence import RunningSequence
from kvcustody.allocator.prefix.tree import PrefixTree, split_windows

CAUSE = "integrity"


class _Part(NamedTuple):
    """A run of one node that an attach would read."""

    node: Node
    blocks: Blocks
    share: float


def withdraw_changed(
    sums: BlockSums, tree: PrefixTree, decode: DecodeTable, match: PrefixMatch, reader: Domain, now_us: int
) -> bool:
    """Compare what an attach of `match` would read; return whether something had changed and was withdrawn.

    Each block is drawn by the stricter share of its own domain and the reader's.
    """
    parts = _parts(sums, match, reader)
    if not parts:
        return False
    counts = [len(part.blocks) for part in parts]
    bad = sums.differing(
        np.concatenate([part.blocks for part in parts]), np.repeat([part.share for part in parts], counts)
    )
    if not bad.any():
        return False
    changed: list[tuple[Node, Blocks]] = []
    for part, verdict in zip(parts, np.split(bad, np.cumsum(counts)[:-1]), strict=True):
        if verdict.any():
            changed.append((part.node, part.blocks[verdict]))
    generation = tree.pool.generation
    for node, blocks in changed:
        requests = sum(_reads(sequence, node) for sequence in decode.sequences)
        sums.found.append(MismatchedBlocks(node.domain, blocks, generation[blocks], requests, now_us))
        sums.strike(blocks)
    for node, blocks in reversed(changed):  # from the root on: what continues a withdrawn node goes with it
        if node.length and node.keys:
            _withdraw(tree, decode, node, blocks, now_us)
    tree.flush(now_us)
    return True


def sum_published(sums: BlockSums, tree: PrefixTree, domains: Collection[Domain]) -> None:
    """Sum the present content of what these domains published before they asked for checksums."""
    parts: list[Blocks] = []
    for node in tree.nodes():
        if node.domain in domains and node.domain.integrity_share and node.keys:
            parts += [node.blocks, *node.windows]
    missing = sums.missing(np.concatenate(parts)) if parts else ()
    if len(missing):
        sums.record(np.asarray(missing))


def _parts(sums: BlockSums, found: PrefixMatch, reader: Domain) -> list[_Part]:
    """Return the runs of a match to compare, from its leaf to the root."""
    parts: list[_Part] = []
    node, length = found.leaf, found.position
    while node is not None:
        own_share = node.domain.integrity_share
        if own_share or reader.integrity_share:
            windows = node.windows if length == node.length else split_windows(node, length)[0]
            for run in (node.blocks[:length], *windows):
                # Of a domain that asks for nothing there may be no checksum to compare with.
                known = run if own_share else np.setdiff1d(run, sums.missing(run), assume_unique=True)
                parts.append(_Part(node, known, max(own_share, reader.integrity_share)))
        node = node.parent
        length = node.length if node is not None else 0
    return parts


def _withdraw(tree: PrefixTree, decode: DecodeTable, node: Node, changed: Blocks, now_us: int) -> None:
    """Take the node out from its first changed block on, with all that continues it."""
    places = np.flatnonzero(np.isin(node.blocks, changed))
    if len(places) and places[0]:
        tree.split(node, int(places[0]))
    if node.refs == 0:
        tree.end_subtree(node, CAUSE, now_us, now_us)
        return
    for sequence in decode.sequences:
        if sequence is not None and _reads(sequence, node):
            sequence.stop_publishing()
    tree.withdraw(node, CAUSE, now_us)


def _reads(sequence: RunningSequence | None, node: Node) -> bool:
    """Return whether `node` is on the sequence's path."""
    at = sequence.leaf if sequence is not None else None
    while at is not None and at is not node:
        at = at.parent
    return at is not None
