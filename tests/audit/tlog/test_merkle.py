"""Trees: published vectors, the frontier, and proofs against the RFC's own recursion."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcustody.audit.leaf.merkle import (
    EMPTY,
    EMPTY_ROOT,
    Frontier,
    TreeError,
    TreeHead,
    leaf_hash,
    leaf_hashes,
    node_hash,
    parents,
    split_hashes,
)
from kvcustody.audit.tlog.proofs import (
    MemoryTiles,
    ProofError,
    check_consistency,
    check_inclusion,
    consistency_proof,
    inclusion_proof,
    inclusion_tiles,
    root_of_inclusion,
    tile_width,
    tree_root,
)

# The vectors that Certificate Transparency implementations share: eight leaves, the root of each prefix, and paths.
LEAVES = [
    bytes.fromhex(text)
    for text in (
        "",
        "00",
        "10",
        "2021",
        "3031",
        "40414243",
        "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    )
]
ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
N23 = "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e"
N4567 = "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4"
N67 = "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0"
LEAF1 = "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7"
LEAF4 = "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b"
N45 = "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a"
INCLUSION = [  # index, size, path
    (0, 1, []),
    (0, 8, [LEAF1, N23, N4567]),
    (5, 8, [LEAF4, N67, ROOTS[4]]),
    (2, 3, [ROOTS[2]]),
    (1, 5, [ROOTS[1], N23, LEAF4]),
]
CONSISTENCY = [  # old size, size, path
    (1, 1, []),
    (1, 8, [LEAF1, N23, N4567]),
    (6, 8, [N45, N67, ROOTS[4]]),
    (2, 5, [N23, LEAF4]),
]


def reference_root(leaves: list[bytes]) -> bytes:
    """RFC 6962 §2.1, word for word."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    k = split(len(leaves))
    return hashlib.sha256(b"\x01" + reference_root(leaves[:k]) + reference_root(leaves[k:])).digest()


def reference_path(m: int, leaves: list[bytes]) -> list[bytes]:
    """RFC 6962 §2.1.1, word for word."""
    if len(leaves) == 1:
        return []
    k = split(len(leaves))
    if m < k:
        return [*reference_path(m, leaves[:k]), reference_root(leaves[k:])]
    return [*reference_path(m - k, leaves[k:]), reference_root(leaves[:k])]


def reference_proof(m: int, leaves: list[bytes], whole: bool = True) -> list[bytes]:
    """RFC 6962 §2.1.2, word for word."""
    n = len(leaves)
    if m == n:
        return [] if whole else [reference_root(leaves)]
    k = split(n)
    if m <= k:
        return [*reference_proof(m, leaves[:k], whole), reference_root(leaves[k:])]
    return [*reference_proof(m - k, leaves[k:], False), reference_root(leaves[:k])]


def split(n: int) -> int:
    k = 1
    while k * 2 < n:
        k *= 2
    return k


def some(count: int) -> list[bytes]:
    return [b"leaf %d" % number for number in range(count)]


def head(leaves: list[bytes]) -> TreeHead:
    return EMPTY.extend(leaf_hashes(leaves)).frontier.head()


@pytest.mark.parametrize("size", range(9))
def test_roots_are_the_published_ones(size: int) -> None:
    assert head(LEAVES[:size]) == TreeHead(size, bytes.fromhex(ROOTS[size]))
    assert tree_root(MemoryTiles(leaf_hashes(LEAVES)), size).hex() == ROOTS[size]


@pytest.mark.parametrize(("index", "size", "path"), INCLUSION)
def test_inclusion_paths_are_the_published_ones(index: int, size: int, path: list[str]) -> None:
    tiles = MemoryTiles(leaf_hashes(LEAVES))
    assert [item.hex() for item in inclusion_proof(tiles, index, size)] == path
    check_inclusion(leaf_hash(LEAVES[index]), index, head(LEAVES[:size]), [bytes.fromhex(item) for item in path])


@pytest.mark.parametrize(("old", "size", "path"), CONSISTENCY)
def test_consistency_paths_are_the_published_ones(old: int, size: int, path: list[str]) -> None:
    tiles = MemoryTiles(leaf_hashes(LEAVES))
    assert [item.hex() for item in consistency_proof(tiles, old, size)] == path
    check_consistency(head(LEAVES[:old]), head(LEAVES[:size]), [bytes.fromhex(item) for item in path])


def test_the_example_of_the_rfc() -> None:
    """RFC 6962 §2.1.3: the paths and proofs of a tree of seven leaves, by the names that it gives the nodes."""
    leaves = some(7)
    a, b, c, d, e, f, j = leaf_hashes(leaves)
    g, h, i = parents([a, b, c, d, e, f])
    k, l_ = node_hash(g, h), node_hash(i, j)
    tiles = MemoryTiles(leaf_hashes(leaves))
    assert head(leaves).root == node_hash(k, l_)
    assert inclusion_proof(tiles, 0, 7) == [b, h, l_]
    assert inclusion_proof(tiles, 3, 7) == [c, g, l_]
    assert inclusion_proof(tiles, 4, 7) == [f, j, k]
    assert inclusion_proof(tiles, 6, 7) == [i, k]
    assert consistency_proof(tiles, 3, 7) == [c, d, g, l_]
    assert consistency_proof(tiles, 4, 7) == [l_]
    assert consistency_proof(tiles, 6, 7) == [i, j, k]


def test_every_proof_of_every_tree_up_to_64_and_no_mutant() -> None:
    leaves = some(64)
    hashes, tiles = leaf_hashes(leaves), MemoryTiles(leaf_hashes(leaves))
    heads = [TreeHead(size, reference_root(leaves[:size])) for size in range(65)]
    checked = 0
    for size in range(1, 65):
        for index in range(size):
            path = inclusion_proof(tiles, index, size)
            assert path == reference_path(index, leaves[:size])
            check_inclusion(hashes[index], index, heads[size], path)
            for wrong in _mutants(path):
                with pytest.raises(ProofError):
                    check_inclusion(hashes[index], index, heads[size], wrong)
            with pytest.raises(ProofError):  # the right path under another index
                check_inclusion(hashes[index], index ^ 1, heads[size], path)
            checked += 1
        for old in range(1, size + 1):
            path = consistency_proof(tiles, old, size)
            assert path == reference_proof(old, leaves[:size])
            check_consistency(heads[old], heads[size], path)
            for wrong in _mutants(path):
                with pytest.raises(ProofError):
                    check_consistency(heads[old], heads[size], wrong)
            checked += 1
    assert checked == 64 * 65


def _mutants(path: list[bytes]) -> list[list[bytes]]:
    mutants = [[*path, bytes(32)], [bytes(32), *path], [*path, path[-1] if path else EMPTY_ROOT]]
    for place in range(len(path)):
        mutants += [
            path[:place] + path[place + 1 :],
            [*path[:place], bytes(32), *path[place + 1 :]],
            [*path[:place], path[place][:-1] + bytes([path[place][-1] ^ 1]), *path[place + 1 :]],
            [*path[:place], path[place][:31], *path[place + 1 :]],
        ]
        if place and path[place] != path[place - 1]:
            mutants.append([*path[: place - 1], path[place], path[place - 1], *path[place + 1 :]])
    return mutants


def test_a_good_path_under_a_size_of_another_shape_is_refused() -> None:
    """Whatever its hashes are, even where the head lies about its size or an inner node is passed for a leaf."""
    leaves = some(20)
    tiles = MemoryTiles(leaf_hashes(leaves))
    heads = [head(leaves[:size]) for size in range(21)]
    depth = [[len(reference_path(index, leaves[:size])) for index in range(size)] for size in range(21)]
    steps = [[len(reference_proof(old, leaves[:size])) for old in range(1, size + 1)] for size in range(21)]
    refused = 0
    for size in range(1, 21):
        for index in range(size):
            path, root = inclusion_proof(tiles, index, size), heads[size].root
            for claimed in range(index + 1, 21):
                if depth[claimed][index] != len(path):
                    with pytest.raises(ProofError, match="too"):
                        check_inclusion(leaf_hash(leaves[index]), index, TreeHead(claimed, root), path)
                    refused += 1
        for old in range(1, size):
            proof = consistency_proof(tiles, old, size)
            for claimed in range(old + 1, 21):
                if steps[claimed][old - 1] != len(proof):
                    with pytest.raises(ProofError, match=r"too|empty"):
                        check_consistency(heads[old], TreeHead(claimed, heads[size].root), proof)
                    refused += 1
    assert refused > 2000
    inner = node_hash(leaf_hash(leaves[0]), leaf_hash(leaves[1]))
    with pytest.raises(ProofError, match="too short"):
        check_inclusion(inner, 0, heads[16], inclusion_proof(tiles, 0, 16)[1:])


@settings(max_examples=60, deadline=None)
@given(
    batches=st.lists(st.integers(0, 40) | st.sampled_from([255, 256, 257, 512, 600]), max_size=12),
    chance=st.randoms(use_true_random=False),
)
def test_any_batching_gives_the_tree_and_proofs_of_the_reference(batches: list[int], chance: random.Random) -> None:
    leaves = some(sum(batches))
    frontier, tiles, start = EMPTY, MemoryTiles(), 0
    for count in batches:
        hashes = leaf_hashes(leaves[start : start + count])
        frontier = frontier.extend(hashes).frontier
        tiles.extend(hashes)
        start += count
        assert Frontier.from_bytes(frontier.to_bytes()) == frontier
    root = reference_root(leaves)
    assert frontier.head() == tiles.frontier.head() == TreeHead(len(leaves), root)
    if not leaves:
        return
    size = chance.randrange(1, len(leaves) + 1)
    index, old = chance.randrange(size), chance.randrange(size + 1)
    assert inclusion_proof(tiles, index, size) == reference_path(index, leaves[:size])
    if old:
        path = consistency_proof(tiles, old, size)
        assert path == reference_proof(old, leaves[:size])
        check_consistency(
            TreeHead(old, reference_root(leaves[:old])), TreeHead(size, reference_root(leaves[:size])), path
        )


def test_a_frontier_is_a_value() -> None:
    """A transaction that rolls back keeps the frontier that it had."""
    before = EMPTY.extend(leaf_hashes(some(700))).frontier
    kept = (before.size, before.peaks, before.root())
    after = before.extend(leaf_hashes(some(1000))).frontier
    assert (before.size, before.peaks, before.root()) == kept
    assert after.root() == reference_root(some(700) + some(1000))


def test_every_edit_of_a_stored_frontier_is_refused() -> None:
    """M3, with its control: without the stored root, the edit loads and gives another tree."""
    data = EMPTY.extend(leaf_hashes(some(1000))).frontier.to_bytes()
    assert len(data) == 8 + 32 * (1 + 6)
    for place in range(len(data)):
        wrong = bytearray(data)
        wrong[place] ^= 1 << place % 8
        with pytest.raises(TreeError):
            Frontier.from_bytes(bytes(wrong))
    for wrong_length in (data[:-1], data + b"\0", data[:8], b"", data[:40]):
        with pytest.raises(TreeError):
            Frontier.from_bytes(wrong_length)
    unchecked = Frontier(1000, tuple(split_hashes(data[40:-1] + b"\0")))
    assert unchecked.root() != data[8:40]


def test_a_leaf_cannot_pass_for_a_node() -> None:
    """M1, with its control: without the prefixes, one leaf made of two hashes has the root of a tree of two."""

    def bare(data: bytes) -> bytes:
        return hashlib.sha256(data).digest()

    forged = leaf_hash(b"a") + leaf_hash(b"b")
    assert head([forged]).root != head([b"a", b"b"]).root
    forged = bare(b"a") + bare(b"b")
    bare_root_of_two = bare(bare(b"a") + bare(b"b"))
    assert bare(forged) == bare_root_of_two


@pytest.mark.parametrize("wrong", [[b"short"], [bytes(33)], [bytes(32), bytes(31)]])
def test_what_is_no_hash_is_refused(wrong: list[bytes]) -> None:
    with pytest.raises(TreeError):
        EMPTY.extend(wrong)


def test_proofs_outside_the_tree_are_refused() -> None:
    tiles, whole = MemoryTiles(leaf_hashes(LEAVES)), head(LEAVES)
    for index, size in ((8, 8), (-1, 8), (0, 0)):
        with pytest.raises(ProofError):
            inclusion_proof(tiles, index, size)
        with pytest.raises(ProofError):
            root_of_inclusion(leaf_hash(b""), index, size, [])
    for old, size in ((9, 8), (-1, 8)):
        with pytest.raises(ProofError):
            consistency_proof(tiles, old, size)
        with pytest.raises(ProofError):
            check_consistency(TreeHead(old, whole.root), whole, [])
    with pytest.raises(TreeError):  # the tiles end at 8
        inclusion_proof(tiles, 3, 9)
    with pytest.raises(ProofError):
        root_of_inclusion(leaf_hash(b""), 0, 8, [bytes(32)] * 1000)


def test_the_empty_and_the_equal_tree() -> None:
    """P3."""
    whole, empty = head(LEAVES), head([])
    check_consistency(empty, whole, [])
    check_consistency(whole, whole, [])
    check_consistency(empty, empty, [])
    for old, new, path in (
        (TreeHead(0, bytes(32)), whole, []),
        (empty, whole, [bytes(32)]),
        (TreeHead(8, bytes(32)), whole, []),
        (whole, whole, [bytes(32)]),
        (head(LEAVES[:4]), whole, []),
        (whole, head(LEAVES[:4]), []),
    ):
        with pytest.raises(ProofError):
            check_consistency(old, new, path)


def test_tile_widths_are_those_of_the_specification() -> None:
    """tlog-tiles: a tree of 70,000 has 273 full tiles and one of 112, one full and one of 17, one of 1."""
    assert [tile_width(70_000, 0, index) for index in (0, 272, 273, 274)] == [256, 256, 112, 0]
    assert [tile_width(70_000, 1, index) for index in (0, 1, 2)] == [256, 17, 0]
    assert [tile_width(70_000, 2, index) for index in (0, 1)] == [1, 0]
    assert [tile_width(256, level, 0) for level in (0, 1)] == [256, 1]


def test_one_proof_reads_each_tile_once() -> None:
    """P1."""

    class Counting(MemoryTiles):
        def __init__(self, hashes: list[bytes]) -> None:
            self.reads: list[tuple[int, int, int]] = []
            super().__init__(hashes)

        def tile(self, level: int, index: int, width: int) -> bytes:
            self.reads.append((level, index, width))
            return super().tile(level, index, width)

    tiles = Counting(leaf_hashes(some(70_000)))
    path = inclusion_proof(tiles, 12_345, 70_000)
    check_inclusion(leaf_hash(b"leaf 12345"), 12_345, tiles.frontier.head(), path)
    assert len(tiles.reads) == len(set(tiles.reads)) <= 6
    for index, size in ((12_345, 70_000), (69_999, 70_000), (0, 65_536), (65_536, 65_537), (0, 1)):
        tiles.reads.clear()
        inclusion_proof(tiles, index, size)
        assert inclusion_tiles(index, size) == tiles.reads, "known before, for who reads them all at once"
