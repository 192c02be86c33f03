"""The prefix index: from a block key to the node that holds the block.

A node is entered under its first key and under every key at a coarse step of its chain, so a run of n blocks costs
about 1 + n/16 entries. Entries live in stripes, small dictionaries chosen by the key's own bytes: a stripe's rehash
touches a few hundred entries, so no step ever pays for resizing the whole index (ADR 0002).

X1  Every entry names a live, indexed node that holds the block of that key.
X2  A key is entered at most once: publishing a key that exists makes the request hold the canonical block.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcustody.allocator.node import KEY_BYTES, Node

COARSE_BLOCKS = 16
_STRIPE_ENTRIES = 64  # expected entries a stripe, when the index is as full as its pool lets it be


class PrefixIndex:
    """Keys to nodes. `pool_blocks` sizes the stripes once."""

    __slots__ = ("_mask", "_stripes")

    def __init__(self, pool_blocks: int) -> None:
        wanted = max(1, pool_blocks // (COARSE_BLOCKS * _STRIPE_ENTRIES))
        bits = min(16, max(4, (wanted - 1).bit_length()))
        self._mask = (1 << bits) - 1
        self._stripes: list[dict[bytes, Node]] = [{} for _ in range(1 << bits)]

    def __len__(self) -> int:
        return sum(map(len, self._stripes))

    def get(self, key: bytes) -> Node | None:
        """The node that holds the block of `key`, if it is entered."""
        return self._stripes[(key[0] | key[1] << 8) & self._mask].get(key)

    def enter(self, node: Node, first: int = 0) -> None:
        """Enter `node` from its block `first` on: that block's key (only when it is block 0) and the coarse ones."""
        stripes, mask, keys = self._stripes, self._mask, node.keys
        for at in entered_positions(node.start, first, node.length):
            key = keys[KEY_BYTES * at : KEY_BYTES * at + KEY_BYTES]
            stripes[(key[0] | key[1] << 8) & mask][key] = node

    def remove(self, node: Node, first: int = 0) -> None:
        """Remove the entries of `node` from its block `first` on."""
        stripes, mask, keys = self._stripes, self._mask, node.keys
        for at in entered_positions(node.start, first, node.length):
            key = keys[KEY_BYTES * at : KEY_BYTES * at + KEY_BYTES]
            stripes[(key[0] | key[1] << 8) & mask].pop(key, None)

    def items(self) -> Iterator[tuple[bytes, Node]]:
        """Every entry, for checks and scans."""
        for stripe in self._stripes:
            yield from stripe.items()


def entered_positions(start: int, first: int, length: int) -> Iterator[int]:
    """Positions in a run [start, start + length) of a chain whose keys are entered, from position `first` on."""
    if first == 0 and length:
        yield 0
    step = COARSE_BLOCKS
    at = (
        (start + max(first, 1) + step) // step * step - start - 1
    )  # smallest p >= max(first, 1) with (start+p+1) % step == 0
    while at < length:
        yield at
        at += step
