"""The prefix index: maps a block key to the node that holds the block.

    index.insert(node)          # a published run
    index.get(key)              # the node whose run holds the block of `key`, or None
    index.remove(node)

A node is entered under its first key and under every key at a coarse step of its chain. So a run of n blocks costs
about 1 + n/16 entries. Entries live in stripes, small dictionaries chosen by the key's hash: a stripe's rehash touches
a few hundred entries, so no step ever pays for resizing the whole index (docs/build/adr/0002-prefix-index.md).

A caller that subscribes receives each change: an `IndexChange` names what may be found from now on, or no longer.

- Every entry names a live, indexed node that holds the block of that key.
- A key is entered at most once: publishing a key that exists makes the request hold the canonical block.
- Every key is reported once when it is entered, and once when it leaves, whatever the reason. A split reports nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvcustody.allocator.pool.accounting import Domain
from kvcustody.allocator.prefix.node import KEY_BYTES, Node

COARSE_BLOCKS = 16
_STRIPE_ENTRIES = 64  # expected entries a stripe, when the index is as full as its pool lets it be


class PrefixIndex:
    """Keys and their nodes. `pool_blocks` sizes the stripes once."""

    __slots__ = ("mask", "stripes")

    def __init__(self, pool_blocks: int) -> None:
        wanted = max(1, pool_blocks // (COARSE_BLOCKS * _STRIPE_ENTRIES))
        bits = min(16, max(4, (wanted - 1).bit_length()))
        self.mask = (1 << bits) - 1
        self.stripes: list[dict[bytes, Node]] = [{} for _ in range(1 << bits)]

    def __len__(self) -> int:
        return sum(map(len, self.stripes))

    def get(self, key: bytes) -> Node | None:
        """Return the node that holds the block of `key`, if the key is indexed."""
        return self.stripes[hash(key) & self.mask].get(key)

    def insert(self, node: Node, first: int = 0) -> None:
        """Index `node` from its block `first` on: that block's key (only if it is block 0) and the coarse ones."""
        stripes, mask, keys = self.stripes, self.mask, node.keys
        if first == 0:
            key = keys[:KEY_BYTES]
            stripes[hash(key) & mask][key] = node
        for at in coarse_positions(node.start, first, node.length):
            key = keys[KEY_BYTES * at : KEY_BYTES * at + KEY_BYTES]
            stripes[hash(key) & mask][key] = node

    def insert_first(self, node: Node) -> None:
        """Index `node` under its first key only."""
        key = node.keys[:KEY_BYTES]
        self.stripes[hash(key) & self.mask][key] = node

    def remove(self, node: Node, first: int = 0) -> None:
        """Remove the entries of `node` from its block `first` on."""
        stripes, mask, keys = self.stripes, self.mask, node.keys
        if first == 0:
            key = keys[:KEY_BYTES]
            stripes[hash(key) & mask].pop(key, None)
        for at in coarse_positions(node.start, first, node.length):
            key = keys[KEY_BYTES * at : KEY_BYTES * at + KEY_BYTES]
            stripes[hash(key) & mask].pop(key, None)

    def nodes(self) -> Iterator[Node]:
        """Yield the node of every entry, for scans."""
        for stripe in self.stripes:
            yield from stripe.values()

    def items(self) -> Iterator[tuple[bytes, Node]]:
        """Yield every entry, for checks and scans."""
        for stripe in self.stripes:
            yield from stripe.items()


class IndexChange(NamedTuple):
    """A run of blocks that was published (`cause` is empty), or that ended because of `cause`.

    keys: 32 bytes a block, in chain order. parent: the key before the first of a published run (b"" at the start of a
    prompt). residency: the id of the one that published; 0 for an end.
    """

    domain: Domain
    keys: bytes
    parent: bytes
    residency: int
    cause: str


def coarse_positions(start: int, first: int, length: int) -> range:
    """Return positions from max(`first`, 1) of a run [start, start + length) of a chain that end a coarse step."""
    step = COARSE_BLOCKS
    return range((start + (first or 1) + step) // step * step - start - 1, length, step)


def indexed_positions(start: int, first: int, length: int) -> list[int]:
    """Return every position of a run, from `first` on, whose key is indexed."""
    return [*([0] if first == 0 and length else []), *coarse_positions(start, first, length)]
