"""The prefix index and the search in it."""

from __future__ import annotations

import hashlib
import random
import statistics

import numpy as np
import pytest

from kvcustody.allocator.prefix.hash_index import COARSE_BLOCKS, PrefixIndex, indexed_positions
from kvcustody.allocator.prefix.key_chain import keys_of
from kvcustody.allocator.prefix.node import KEY_BYTES, Node
from standins.allocator.world import SIZE, World, run, state_of


def test_indexed_positions_are_the_first_block_and_the_coarse_ends():
    """Exhaustive: position p of a run from s is entered when it is 0, or when s + p + 1 is a coarse step."""
    for start in range(2 * COARSE_BLOCKS + 1):
        for length in range(3 * COARSE_BLOCKS):
            for first in range(length + 2):
                expected = [at for at in range(first, length) if at == 0 or (start + at + 1) % COARSE_BLOCKS == 0]
                assert list(indexed_positions(start, first, length)) == expected, (start, first, length)


def node_of(count: int, start: int = 0) -> Node:
    node = Node(None, None, start, start, np.arange(count), count)  # type: ignore[arg-type]
    node.keys = hashlib.shake_256(f"{count}-{start}".encode()).digest(KEY_BYTES * count)
    return node


def test_entering_in_two_parts_is_entering_once_and_removal_leaves_nothing():
    for cut in range(41):
        index, node = PrefixIndex(1000), node_of(40)
        whole, node.length = node.length, cut
        index.insert(node)
        node.length = whole
        index.insert(node, cut)
        assert len(index) == 3
        assert {entry for _, entry in index.items()} == {node}
        index.remove(node, cut)
        assert len(index) == len(list(indexed_positions(0, 0, cut)))
        index.remove(node)
        assert len(index) == 0


def test_stripes_stay_small_at_the_fullest_the_pool_allows():
    """Every block a node of its own, the worst case: no stripe is so large that its rehash is felt."""
    blocks = 1 << 16
    index = PrefixIndex(blocks)
    for at in range(blocks):
        node = Node(None, None, 0, 0, np.arange(1), 1)  # type: ignore[arg-type]
        node.keys = hashlib.blake2b(at.to_bytes(4, "little"), digest_size=KEY_BYTES).digest()
        index.insert(node)
    sizes = [len(stripe) for stripe in index.stripes]
    assert len(index) == blocks
    assert max(sizes) < 2 * statistics.mean(sizes) <= 2 * 64 * COARSE_BLOCKS


@pytest.mark.parametrize("chunk", range(4))
def test_longest_prefix_of_random_prompts_is_exact(chunk):
    """Against a model: what was computed before, in the same domain, block by block (no eviction, no deadline)."""
    rng = random.Random(chunk)
    world = World(4096, ("a", "b"))
    known: dict[str, set[tuple[int, ...]]] = {"a": set(), "b": set()}
    bases = [run(at, 80) for at in range(3)]
    for _ in range(150):
        name = rng.choice("ab")
        base = rng.choice(bases)
        cut = rng.randrange(len(base) + 1)
        tokens = base[:cut] + [rng.randrange(50) for _ in range(rng.randrange(1, 9))]
        whole = [tuple(tokens[: SIZE * (at + 1)]) for at in range((len(tokens) - 1) // SIZE)]
        expected = sum(prefix in known[name] for prefix in whole)
        assert world.hit(name, tokens) == expected
        sequence = world.start(name, tokens)
        assert sequence.hit_blocks == expected
        known[name].update(tuple(tokens[: SIZE * (at + 1)]) for at in range(len(tokens) // SIZE))
        if rng.random() < 0.8:
            world.m.release(sequence, world.now, "finished")
        world.ok()


def test_extra_content_changes_every_key_from_its_block_on():
    data = np.arange(24, dtype=np.int32).tobytes()
    plain = keys_of(state_of("a"), data, 0, 6, 16)
    framed = keys_of(state_of("a"), data, 0, 6, 16, {2: b"image"})
    same = [plain[at : at + KEY_BYTES] == framed[at : at + KEY_BYTES] for at in range(0, 192, KEY_BYTES)]
    assert same == [True, True, False, False, False, False]
    assert keys_of(state_of("a"), data, 0, 6, 16, {2: b"image"}) == framed


def test_extra_content_is_searched_as_it_was_published():
    world = World(64)
    tokens = run(1, 20, 1)
    with_image = world.prompt(tokens)._replace(extras={3: b"digest-1"})
    found = world.m.match_prefix(world.plan("a"), with_image, world.now)
    account, domain = world.m.accounts["a"], world.chains["a"].domain
    residency = world.m.residency(account, domain, "p", None, world.now)
    sequence = world.m.allocate("r", found, with_image, residency, world.now)
    world.m.commit(sequence, len(tokens), world.now)
    world.m.release(sequence, world.now, "finished")
    for extras, expected in (({3: b"digest-1"}, 20), ({3: b"digest-2"}, 3), ({}, 3), ({4: b"digest-1"}, 3)):
        prompt = with_image._replace(extras=extras)
        assert world.m.match_prefix(world.plan("a"), prompt, world.now).hit_blocks == expected


def test_the_last_token_is_always_computed_unless_told():
    world = World(64)
    world.cache("a", run(1, 4))
    assert world.hit("a", run(1, 4)) == 3
    golden = World(64, options={"keep_last_token": False})
    golden.cache("a", run(1, 4))
    assert golden.hit("a", run(1, 4)) == 4
    full = golden.admit("a", run(1, 4))
    assert full.hit_blocks == full.block_count == 4
    golden.ok()


def test_publishing_a_key_that_exists_holds_the_canonical_block():
    """Two requests compute the same prompt at once; the second one's copies serve it and end with it."""
    world = World(64)
    tokens = run(1, 10, 2)
    first, second = world.admit("a", tokens), world.admit("a", tokens)
    world.m.commit(first, len(tokens), world.now)
    world.m.commit(second, len(tokens), world.now)
    world.ok()
    assert not set(first.blocks.tolist()) & set(second.blocks.tolist())
    assert sum(len(blocks) for blocks, _ in second.duplicates) == 10
    world.m.release(second, world.now, "finished")
    assert world.states() == {"clean": 42, "active": 11, "fenced": 11}
    world.m.release(first, world.now, "finished")
    world.ok()
    assert world.hit("a", tokens) == 10


def test_a_partial_tail_and_what_is_not_computed_are_never_published():
    """L10: drafts and uncomputed blocks cannot be found."""
    world = World(64)
    sequence = world.admit("a", run(1, 5, 3), lookahead=9)
    world.m.commit(sequence, 11, world.now)
    assert world.hit("a", run(1, 8)) == 2
    world.m.commit(sequence, 23, world.now)
    assert world.hit("a", run(1, 8)) == 5
    world.extend(sequence, *run(1, 8)[23:25])  # fills block 5; its last token is accepted, not yet computed
    world.m.commit(sequence, 24, world.now)
    assert world.hit("a", run(1, 8)) == 6
    world.m.release(sequence, world.now, "finished")
    assert world.hit("a", run(1, 8)) == 6
    world.ok()


def test_tokens_that_the_engine_withholds_are_never_published():
    world = World(64)
    sequence = world.start("a", run(1, 2))
    for _ in range(9):
        world.m.extend_many(np.array([sequence.slot]), None, world.now)
    world.m.release(sequence, world.now, "finished")
    assert world.hit("a", run(1, 9)) == 2
    world.ok()


@pytest.mark.parametrize("seed", range(3))
def test_segment_then_own_then_grant_is_the_longest_match(seed):
    """The longest match wins, against a model of three chains: segment's, owner's, and what a reader adds below."""
    rng = random.Random(seed)
    world = World(4096, ("o", "a", "b"))
    world.domain("seg", "o", is_segment=True)
    base, cut = run(1, 30, 1), 5
    depth = dict.fromkeys(("seg", "a", "b", "b-over-a"), 0)  # blocks computed of each chain, ends in prompt depth
    for _ in range(40):
        count = rng.randrange(SIZE * cut + 1, len(base))
        reader = rng.choice(("a", "b"))
        grants = ("a",) if reader == "b" and rng.random() < 0.7 else ()
        limit, whole = (count - 1) // SIZE, count // SIZE
        own = depth[reader]
        expected = via_own = min(limit, max(cut, own)) if depth["seg"] else 0
        if grants and depth["seg"]:
            granted = min(limit, max(cut, depth["a"]))
            if granted > via_own:
                expected = granted
        hit = world.hit(reader, base[:count], segment="seg", segment_blocks=cut, grants=grants)
        if "b-over-a" and grants and depth["b-over-a"]:
            assert hit >= expected
        else:
            assert hit == expected, (reader, grants, depth)
        world.cache(reader, base[:count], segment="seg", segment_blocks=cut, grants=grants)
        world.ok()
        depth["seg"] = cut
        if grants and hit > via_own:
            depth["b-over-a"] = max(depth["b-over-a"], whole)
        else:
            depth[reader] = max(own, whole)
    for nobody in ("a", "b"):
        assert world.hit(nobody, base) == 0  # the segment's blocks are not found without the segment


def test_a_reader_without_the_grant_never_sees_the_owners_blocks():
    world = World(64)
    world.cache("a", run(1, 8, 1))
    assert world.hit("b", run(1, 8, 1)) == 0
    assert world.hit("b", run(1, 8, 1), grants=("a",)) == 8
    world.chains["a"].domain.is_open = False
    assert world.hit("b", run(1, 8, 1), grants=("a",)) == world.hit("a", run(1, 8, 1)) == 0


def test_a_run_that_can_be_joined_only_in_part_keeps_its_books(monkeypatch):
    """The second node of a path refuses: what was joined stays joined, the rest stays private, nothing is lost."""
    world = World(64)
    tokens = run(1, 8, 1)
    first, second = world.admit("a", tokens), world.admit("a", tokens)
    for computed in (16, 33):
        world.m.commit(first, computed, world.now)
    publication = world.m.publication
    inner, calls = publication._attach_canonical, []

    def refusing(*arguments):
        calls.append(arguments)
        return inner(*arguments) if len(calls) == 1 else -1

    monkeypatch.setattr(publication, "_attach_canonical", refusing)
    world.m.commit(second, 33, world.now)
    assert len(calls) == 2
    world.ok()
    for sequence in (second, first):
        world.m.release(sequence, world.now, "finished")
        world.ok()
    world.scrub()
    assert world.states() == {"clean": 56, "cached": 8}
