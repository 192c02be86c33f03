"""Inclusion and consistency proofs (RFC 6962 §2.1, checked by RFC 9162 §2.1.3 and §2.1.4).

1. A proof is made from tiles alone. One proof reads each tile at most once: two for each level, eight for a tree of
   ten million leaves. Where tiles of half the height are kept as well, it reads 16 hashes instead of 256 from each,
   and hashes as many.
2. A check accepts exactly the path that the tree's shape calls for. A longer, shorter or reordered path, or an index
   outside the tree, is refused with its reason.
3. Between equal sizes only equal roots agree, and only with an empty path. Every tree extends the empty one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvcustody.audit.leaf.merkle import (
    EMPTY,
    EMPTY_ROOT,
    HASH_BYTES,
    TILE_HEIGHT,
    Frontier,
    Grown,
    TreeError,
    TreeHead,
    node_hash,
    parents,
    split_hashes,
)

TILE_WIDTH = 1 << TILE_HEIGHT
PATH_HASHES_MAX = 64


class ProofError(TreeError):
    """A proof does not show what it claims."""

    code = "KVC621"


class TileSource(Protocol):
    """A store of tiles: a folder, a table, a test's memory.

    A tile of height `h` is `2**h` hashes wide. Hash `i` of level `l` is the root of the leaves `i * 2**(h*l)` up to `(i
    + 1) * 2**(h*l)`. The specification's tiles have the height 8.
    """

    def tile(self, level: int, index: int, width: int) -> bytes:
        """Return the first `width` hashes of a tile, joined; raises `TreeError` if they are missing."""


def tile_width(size: int, level: int, index: int, height: int = TILE_HEIGHT) -> int:
    """Return how many hashes a tile holds in a tree of `size` leaves: 256 if it is full, 0 if it does not exist."""
    return max(0, min(1 << height, (size >> height * level) - (index << height)))


def inclusion_proof(tiles: TileSource, index: int, size: int, height: int = TILE_HEIGHT) -> list[bytes]:
    """Return the audit path of leaf `index` in the tree of `size` leaves, from the leaf's sibling upwards.

    `height` is that of the tiles; the path does not depend on it.
    """
    tree = _Tree(tiles, size, height)
    return [tree.range(*place) for place in _siblings(index, size)]


def inclusion_tiles(index: int, size: int, height: int = TILE_HEIGHT) -> list[tuple[int, int, int]]:
    """Return level, index and width of every tile that `inclusion_proof` reads, for prefetching."""
    places = dict.fromkeys(
        (level, (node << inner) >> height)
        for start, end in _siblings(index, size)
        for node_height, node in _nodes(start, end)
        for level, inner in [divmod(node_height, height)]
    )
    return [(level, tile, tile_width(size, level, tile, height)) for level, tile in places]


def consistency_proof(tiles: TileSource, old_size: int, size: int, height: int = TILE_HEIGHT) -> list[bytes]:
    """Return the path that proves that the tree of `size` leaves extends the one of `old_size`."""
    if not 0 <= old_size <= size:
        raise ProofError(f"a tree of `{size}` leaves extends none of `{old_size}`", old_size=old_size, size=size)
    if old_size in (0, size):
        return []
    ranges: list[tuple[int, int]] = []
    start, end = 0, size
    while end != old_size:
        middle = start + _largest_power_below(end - start)
        if old_size <= middle:
            ranges.append((middle, end))
            end = middle
        else:
            ranges.append((start, middle))
            start = middle
    if start:  # else the old tree is itself a node of the new one, and the verifier has its root
        ranges.append((start, end))
    tree = _Tree(tiles, size, height)
    return [tree.range(*place) for place in reversed(ranges)]


def tree_root(tiles: TileSource, size: int) -> bytes:
    """Return the root of the tree of `size` leaves, from the tiles of its right edge."""
    return _Tree(tiles, size).range(0, size) if size else EMPTY_ROOT


def frontier_at(tiles: TileSource, size: int) -> Frontier:
    """Return the frontier of the first `size` leaves, from which a reader without those leaves continues."""
    tree, peaks, start = _Tree(tiles, size), [], 0
    for height in reversed(range(size.bit_length())):
        if size >> height & 1:
            peaks.append(tree.range(start, start + (1 << height)))
            start += 1 << height
    return Frontier(size, tuple(peaks))


def root_of_inclusion(leaf_hash: bytes, index: int, size: int, path: Sequence[bytes]) -> bytes:
    """Return the root to which a path leads from a leaf hash; raises `ProofError` for a path of another shape (rule
    2).
    """
    if not 0 <= index < size:
        raise ProofError(f"leaf `{index}` is not in a tree of `{size}` leaves", index=index, size=size)
    _check_hashes((leaf_hash, *path))
    node, last, root = index, size - 1, leaf_hash
    for sibling in path:
        if last == 0:
            raise ProofError(f"the path of leaf `{index}` is too long", index=index, size=size)
        if node & 1 or node == last:
            root = node_hash(sibling, root)
            while node and not node & 1:
                node, last = node >> 1, last >> 1
        else:
            root = node_hash(root, sibling)
        node, last = node >> 1, last >> 1
    if last:
        raise ProofError(f"the path of leaf `{index}` is too short", index=index, size=size)
    return root


def check_inclusion(leaf_hash: bytes, index: int, head: TreeHead, path: Sequence[bytes]) -> None:
    """Raise `ProofError` unless the path proves the leaf hash at `index` of the tree with this head."""
    if root_of_inclusion(leaf_hash, index, head.size, path) != head.root:
        raise ProofError(f"leaf `{index}` is not the one in the tree of `{head.size}`", index=index, size=head.size)


def check_consistency(old: TreeHead, new: TreeHead, path: Sequence[bytes]) -> None:
    """Raise `ProofError` unless the path proves that the new tree extends the old one (rule 3)."""
    if not 0 <= old.size <= new.size:
        raise _inconsistent(old, new, "it is shorter")
    _check_hashes((old.root, new.root, *path))
    if old.size in (0, new.size):
        if path:
            raise _inconsistent(old, new, "its proof should be empty")
        if old.root != (new.root if old.size else EMPTY_ROOT):
            raise _inconsistent(old, new, "their roots differ")
        return
    hashes = list(path)
    if old.size & (old.size - 1) == 0:  # a complete tree is a node of the new one: the proof leaves it out
        hashes.insert(0, old.root)
    if not hashes:
        raise _inconsistent(old, new, "its proof is empty")
    node, last = old.size - 1, new.size - 1
    while node & 1:
        node, last = node >> 1, last >> 1
    old_root = new_root = hashes[0]
    for sibling in hashes[1:]:
        if last == 0:
            raise _inconsistent(old, new, "its proof is too long")
        if node & 1 or node == last:
            old_root, new_root = node_hash(sibling, old_root), node_hash(sibling, new_root)
            while node and not node & 1:
                node, last = node >> 1, last >> 1
        else:
            new_root = node_hash(new_root, sibling)
        node, last = node >> 1, last >> 1
    if last:
        raise _inconsistent(old, new, "its proof is too short")
    if old_root != old.root:
        raise _inconsistent(old, new, "its proof does not lead to the old root")
    if new_root != new.root:
        raise _inconsistent(old, new, "its proof does not lead to the new root")


class MemoryTiles:
    """Tiles of a tree whose hashes are held in memory."""

    def __init__(self, hashes: Sequence[bytes] = ()) -> None:
        self._levels: list[list[bytes]] = [[]]
        self.frontier = EMPTY
        self.extend(hashes)

    def extend(self, hashes: Sequence[bytes]) -> None:
        """Append leaf hashes."""
        self.frontier, grown = self.frontier.extend(hashes)
        for level, first, made in (Grown(0, len(self._levels[0]), list(hashes)), *grown):
            if level == len(self._levels):
                self._levels.append([])
            assert len(self._levels[level]) == first
            self._levels[level] += made

    def tile(self, level: int, index: int, width: int) -> bytes:
        """Return the first `width` hashes of a tile."""
        row = self._levels[level] if level < len(self._levels) else []
        start = index * TILE_WIDTH
        return b"".join(row[start : start + width])


class _Tree:
    """The tiles that one proof needs, each read once, with the levels inside it."""

    def __init__(self, tiles: TileSource, size: int, height: int = TILE_HEIGHT) -> None:
        self._tiles = tiles
        self._size = size
        self._height = height
        self._levels: dict[tuple[int, int], list[list[bytes]]] = {}

    def range(self, start: int, end: int) -> bytes:
        """Return the hash over leaves `start` up to `end`, for ranges that are nodes of RFC 6962."""
        found = [self._node(*place) for place in _nodes(start, end)]
        root = found.pop()
        while found:
            root = node_hash(found.pop(), root)
        return root

    def _node(self, height: int, index: int) -> bytes:
        level, inner = divmod(height, self._height)
        tile, offset = divmod(index << inner, 1 << self._height)
        levels = self._levels.get((level, tile))
        if levels is None:
            levels = self._levels[(level, tile)] = [self._read(level, tile)]
        while len(levels) <= inner:
            levels.append(parents(levels[-1]))
        return levels[inner][offset >> inner]

    def _read(self, level: int, tile: int) -> list[bytes]:
        width = tile_width(self._size, level, tile, self._height)
        hashes = split_hashes(self._tiles.tile(level, tile, width))
        if len(hashes) != width:
            problem = f"tile `{level}/{tile}` holds `{len(hashes)}` hashes, not {width}"
            raise TreeError(problem, level=level, index=tile, width=width)
        return hashes


def _siblings(index: int, size: int) -> list[tuple[int, int]]:
    """Return the leaves [start, end) under each sibling on the way from a leaf to the root, from the leaf upwards."""
    if not 0 <= index < size:
        raise ProofError(f"leaf `{index}` is not in a tree of `{size}` leaves", index=index, size=size)
    siblings: list[tuple[int, int]] = []
    start, end = 0, size
    while end - start > 1:
        middle = start + _largest_power_below(end - start)
        if index < middle:
            siblings.append((middle, end))
            end = middle
        else:
            siblings.append((start, middle))
            start = middle
    return siblings[::-1]


def _nodes(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Height and index of the complete subtrees of which the leaves [start, end) are made, the largest first."""
    while start < end:
        height = (end - start).bit_length() - 1
        yield height, start >> height
        start += 1 << height


def _largest_power_below(count: int) -> int:
    return 1 << ((count - 1).bit_length() - 1)


def _check_hashes(hashes: Sequence[bytes]) -> None:
    if len(hashes) > PATH_HASHES_MAX + 2:
        raise ProofError(f"a path of `{len(hashes)}` hashes is longer than any tree's", hashes=len(hashes))
    if set(map(len, hashes)) != {HASH_BYTES}:
        raise ProofError(f"a hash in the proof is not {HASH_BYTES} bytes long")


def _inconsistent(old: TreeHead, new: TreeHead, why: str) -> ProofError:
    problem = f"the tree of `{new.size}` leaves does not extend the one of `{old.size}`: {why}"
    return ProofError(problem, old_size=old.size, size=new.size, why=why)
