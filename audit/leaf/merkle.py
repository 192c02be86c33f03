"""RFC 6962 hashing, and the frontier by which a log grows.

1. A leaf hashes as SHA-256(0x00 ‖ leaf), a node as SHA-256(0x01 ‖ left ‖ right): neither can pass for the other. The
   root of the empty tree is SHA-256 of nothing.
2. A frontier is a value. `extend` returns another and changes nothing, so that a transaction that rolled back costs
   its caller nothing: it keeps the frontier that it had.
3. A frontier's bytes carry the root. Loading recomputes it from the peaks and refuses what does not agree; nothing is
   repaired.

A *hash* is 32 bytes. A tree of `size` leaves is its *peaks*: the roots of its largest complete subtrees, from
left to right, one for each bit that is set in `size`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvcustody.errors import LedgerError

HASH_BYTES = 32
SIZE_MAX = (1 << 63) - 1
TILE_HEIGHT = 8  # C2SP tlog-tiles: a tile is 256 hashes wide
HALF_HEIGHT = TILE_HEIGHT // 2
HALF = 16  # where the numbers of half levels begin; no tree is as high as tile level 8
EMPTY_ROOT = hashlib.sha256().digest()

_FEW = 32  # leaves

_sha256 = hashlib.sha256


class TreeError(LedgerError):
    """Stored hashes are damaged, missing, or not the expected ones."""

    code = "KVC620"


class TreeHead(NamedTuple):
    """The root of the tree with `size` leaves."""

    size: int
    root: bytes


class Grown(NamedTuple):
    """Hashes that an extension completed for a tile level above 0: at `first`, `first + 1`, … of that level.

    Level `l` has the width `256**l`. Hash `i` of the level is the root of the leaves `i * width` up to `(i + 1) *
    width`. Half levels lie between: `HALF + l` has the width `16 * 256**l`.
    """

    level: int
    first: int
    hashes: list[bytes]

    @property
    def width(self) -> int:
        """The number of leaves under each hash."""
        halves, level = divmod(self.level, HALF)
        return 1 << TILE_HEIGHT * level + HALF_HEIGHT * halves


def placed_nodes(tree: int, grown: Iterable[Grown]) -> list[tuple[int, int, int, bytes]]:
    """Return the hashes that a tree completed, each with its tree, level and place."""
    return [(tree, level, idx, node) for level, first, hashes in grown for idx, node in enumerate(hashes, first)]


class Extended(NamedTuple):
    """A longer frontier, and the hashes to store for proofs from tiles."""

    frontier: Frontier
    grown: tuple[Grown, ...]


def leaf_hash(leaf: bytes) -> bytes:
    """Return the hash of one leaf's bytes."""
    return _sha256(b"\0" + leaf).digest()


def leaf_hashes(leaves: Iterable[bytes]) -> list[bytes]:
    """Return the hashes of many leaves, in order."""
    return [_sha256(b"\0" + leaf).digest() for leaf in leaves]


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return the hash of a node over its two children."""
    return _sha256(b"\1" + left + right).digest()


def parents(hashes: Sequence[bytes]) -> list[bytes]:
    """Return the next level over pairs of neighbours; an odd last hash has no parent here."""
    each = iter(hashes)
    return [_sha256(b"\1" + left + right).digest() for left, right in zip(each, each, strict=False)]


def split_hashes(joined: bytes) -> list[bytes]:
    """Return the single hashes in a joined row, such as a tile."""
    if len(joined) % HASH_BYTES:
        raise TreeError(f"`{len(joined)}` bytes are no row of {HASH_BYTES}-byte hashes", bytes=len(joined))
    return [joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES)]


class Frontier(NamedTuple):
    """Everything a log must remember of its tree in order to grow: one hash for each bit set in `size`."""

    size: int = 0
    peaks: tuple[bytes, ...] = ()

    def root(self) -> bytes:
        """Return the RFC 6962 tree hash."""
        if not self.peaks:
            return EMPTY_ROOT
        *rest, root = self.peaks
        for left in reversed(rest):
            root = node_hash(left, root)
        return root

    def head(self) -> TreeHead:
        """Return size and root together, as a checkpoint states them."""
        return TreeHead(self.size, self.root())

    def extend(self, hashes: Sequence[bytes], *, halves: bool = False) -> Extended:
        """Return this tree with leaf hashes appended, at the cost of one node hash for each leaf.

        `halves` adds the half levels to what has grown. Raises `TreeError` when a hash is not 32 bytes long.
        """
        if hashes and set(map(len, hashes)) != {HASH_BYTES}:
            raise TreeError(f"a leaf hash is not {HASH_BYTES} bytes long")
        size = self.size + len(hashes)
        if size > SIZE_MAX:
            raise TreeError(f"a log of `{size}` leaves is past the largest size", size=size)
        extend = self._extend_few if len(hashes) <= _FEW else self._extend_many
        peaks, grown = extend(hashes, HALF_HEIGHT if halves else TILE_HEIGHT)
        return Extended(Frontier(size, tuple(peaks)), tuple(grown))

    def extend_tiles(self, hashes: Sequence[bytes], *, halves: bool = False) -> Extended:
        """Return this tree with whole tiles appended, each given only by its root.

        Raises `TreeError` where this tree does not end with a tile.
        """
        if self.size % (1 << TILE_HEIGHT):
            raise TreeError(f"a tree of `{self.size}` leaves does not end with a tile", size=self.size)
        # The peaks of whole tiles are those of the tree whose leaves are the tiles' roots.
        above, grown = Frontier(self.size >> TILE_HEIGHT, self.peaks).extend(hashes, halves=halves)
        made = [Grown(level + 1, first, nodes) for level, first, nodes in grown]
        return Extended(Frontier(above.size << TILE_HEIGHT, above.peaks), tuple(made))

    def to_bytes(self, root: bytes | None = None) -> bytes:
        """Return size (8 bytes, big-endian), root, peaks. A caller that already has the root saves computing it."""
        return b"".join((self.size.to_bytes(8, "big"), root or self.root(), *self.peaks))

    @classmethod
    def from_bytes(cls, data: bytes) -> Frontier:
        """Return the frontier from its bytes; raises `TreeError` for anything else (rule 3)."""
        size = int.from_bytes(data[:8], "big")
        if len(data) < 8 or size > SIZE_MAX or len(data) != 8 + HASH_BYTES * (1 + size.bit_count()):
            raise TreeError(f"a frontier of `{len(data)}` bytes is malformed", bytes=len(data))
        root, *peaks = split_hashes(data[8:])
        frontier = cls(size, tuple(peaks))
        if frontier.root() != root:
            raise TreeError(f"the frontier of size `{size}` does not give its own root", size=size)
        return frontier

    def _extend_few(self, hashes: Sequence[bytes], step: int) -> tuple[list[bytes], list[Grown]]:
        """Leaf by leaf: a batch over many logs brings each of them a handful."""
        peaks, grown = list(self.peaks), []
        for index, node in enumerate(hashes, self.size):
            height = 0
            while index >> height & 1:  # a complete neighbour of this height waits on the left
                node = _sha256(b"\1" + peaks.pop() + node).digest()  # noqa: PLW2901
                height += 1
                if height % step == 0:
                    grown.append(Grown(_level(height), index >> height, [node]))
            peaks.append(node)
        return peaks, grown

    def _extend_many(self, hashes: Sequence[bytes], step: int) -> tuple[list[bytes], list[Grown]]:
        """Level by level: less work for each node than leaf by leaf."""
        waiting = iter(reversed(self.peaks))
        peaks, grown = [], []
        level: Sequence[bytes] = hashes
        height, first = 0, self.size
        while level or first:
            if level and height and height % step == 0:
                grown.append(Grown(_level(height), first, list(level)))
            if first & 1:
                level = [next(waiting), *level]
            if len(level) & 1:
                peaks.append(level[-1])
            level = parents(level)
            height, first = height + 1, first >> 1
        peaks.reverse()
        return peaks, grown


def _level(height: int) -> int:
    level, rest = divmod(height, TILE_HEIGHT)
    return HALF + level if rest else level


EMPTY = Frontier()
