"""Sliding-window groups (W1–W3, L7) against a model of which depths can be reused, and of which block is where."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvcustody.allocator.pool.block_state import EMPTY, Blocks
from kvcustody.allocator.prefix.node import Node
from kvcustody.errors import CapacityError
from standins.allocator.world import SIZE, World, run


def window_blocks(leaf: Node | None, group: int, needed: int) -> Blocks:
    """Return the blocks of the last window of `group` on the path of `leaf`, in token order."""
    parts: list[Blocks] = []
    node = leaf
    while node is not None and needed > 0:
        window = node.windows[group] if node.windows else EMPTY
        take = min(needed, len(window))
        if take:
            parts.append(window[len(window) - take :])
        needed -= node.length
        node = node.parent
    return np.concatenate(parts[::-1]) if parts else EMPTY


def prefix(tokens: list[int], blocks: int) -> tuple[int, ...]:
    return tuple(tokens[: SIZE * blocks])


class WindowModel:
    """One domain without eviction, each request computed in one go: where runs end, and where window blocks are."""

    def __init__(self, windows: tuple[int, ...]) -> None:
        self.windows = windows
        self.published: set[tuple[int, ...]] = set()
        self.ends: set[tuple[int, ...]] = set()
        self.present: list[set[tuple[int, ...]]] = [set() for _ in windows]

    def hit(self, tokens: list[int]) -> int:
        limit = (len(tokens) - 1) // SIZE
        return max((depth for depth in range(1, limit + 1) if self.reusable(tokens, depth)), default=0)

    def reusable(self, tokens: list[int], depth: int) -> bool:
        return prefix(tokens, depth) in self.ends and all(
            prefix(tokens, at) in held
            for needed, held in zip(self.windows, self.present, strict=True)
            for at in range(max(0, depth - needed) + 1, depth + 1)
        )

    def compute(self, tokens: list[int], hit: int) -> None:
        whole = len(tokens) // SIZE
        known = hit
        while known < whole and prefix(tokens, known + 1) in self.published:
            known += 1
        if known > hit:
            self.ends.add(prefix(tokens, known))
        if known == whole:
            return
        self.ends.add(prefix(tokens, whole))
        self.published.update(prefix(tokens, at) for at in range(known + 1, whole + 1))
        for needed, held in zip(self.windows, self.present, strict=True):
            held.update(prefix(tokens, at) for at in range(max(known, whole - needed) + 1, whole + 1))


@pytest.mark.parametrize("windows", [(1,), (2,), (5,), (2, 5)])
@pytest.mark.parametrize("seed", range(3))
def test_reusable_depths_are_those_of_the_model(windows, seed):
    rng = random.Random(seed)
    world = World(4096, ("a",), options={"windows": windows})
    model = WindowModel(windows)
    base = run(1, 24)
    for _ in range(60):
        cut = rng.randrange(len(base))
        tokens = base[:cut] + [rng.randrange(3) for _ in range(rng.randrange(1, 14))]
        expected = model.hit(tokens)
        assert world.hit("a", tokens) == expected
        world.cache("a", tokens)
        world.ok()
        model.compute(tokens, expected)


@pytest.mark.parametrize("windows", [(1,), (3,), (2, 6)])
@pytest.mark.parametrize("seed", range(2))
def test_an_attached_path_has_its_whole_last_window_of_the_right_blocks(windows, seed):
    """With chunks, decoding and eviction: every hit finds, per group, exactly the blocks written for those depths."""
    rng = random.Random(seed)
    world = World(160, ("a", "b"), options={"windows": windows, "evict_ahead": 8})
    written: dict[tuple[int, str, tuple[int, ...]], tuple[int, int]] = {}
    base = [run(at, 20) for at in range(2)]
    hits = 0

    def note(sequence, name, tokens):
        for group, blocks in enumerate(sequence.windows):
            for at, block in enumerate(blocks.tolist()):
                depth = sequence.window_first[group] + at + 1
                if SIZE * depth <= len(tokens):
                    key = (group, name, prefix(tokens, depth))
                    written[key] = (block, int(world.m.pool.generation[block]))

    kept: dict[tuple[int, str, tuple[int, ...]], set[tuple[int, int]]] = {}
    for _ in range(120):
        world.now += 1
        name = rng.choice("ab")
        source = rng.choice(base)
        tokens = source[: rng.randrange(len(source))] + [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
        sequence = world.admit(name, tokens)
        if isinstance(sequence, str):
            world.m.tree.evict(world.m.accounts[name], 40, world.now, "test")
            continue
        hit = sequence.hit_blocks
        hits += hit
        for group, needed in enumerate(windows):
            blocks = window_blocks(sequence.leaf, group, needed).tolist()
            assert len(blocks) == min(needed, hit)
            for at, block in enumerate(blocks):
                key = (group, name, prefix(tokens, hit - len(blocks) + at + 1))
                assert (block, int(world.m.pool.generation[block])) in kept[key]
        for part in sorted(rng.sample(range(1, len(tokens) + 1), min(2, len(tokens)))):
            note(sequence, name, tokens)
            world.m.commit(sequence, part, world.now)
            world.ok()
        for _ in range(rng.randrange(12)):
            token = rng.randrange(3)
            if world.extend(sequence, token):
                break
            tokens = [*tokens, token]
            note(sequence, name, tokens)
            world.ok()
        world.m.release(sequence, world.now, rng.choice(("finished", "aborted")))
        for key, value in written.items():
            kept.setdefault(key, set()).add(value)
        written.clear()
        world.ok()
        if rng.random() < 0.1:
            world.m.tree.evict(world.m.accounts[name], rng.randrange(30), world.now, "test")
            world.ok()
    assert hits > 20


def test_a_decoding_sequence_keeps_no_more_than_its_window():
    """What slid out ends at once, so a long decode holds a bounded number of window blocks."""
    world = World(256, ("a",), options={"windows": (3,)})
    sequence = world.start("a", run(1, 2))
    for at in range(SIZE * 60):
        world.extend(sequence, at)
        world.m.commit(sequence, SIZE * 2 + at, world.now)
        world.scrub()
        world.ok()
        held = len(sequence.windows[0]) + sum(len(node.windows[0]) for node in world.nodes() if node.windows)
        assert held <= 3 + 2
    assert sequence.block_count == 62


def test_window_blocks_of_a_segment_are_charged_to_its_owner():
    for compute in (True, False):
        world = World(64, ("o", "b"), options={"windows": (2, 4)})
        world.domain("seg", "o", is_segment=True)
        sequence = world.admit("b", run(1, 6, 2), segment="seg", segment_blocks=3)
        world.ok()
        assert world.m.accounts["o"].active_blocks == 3 * 3
        if compute:
            world.m.commit(sequence, 26, world.now)
            world.ok()
        world.m.release(sequence, world.now, "finished" if compute else "aborted")
        world.ok()
        world.scrub()
        for account in world.m.accounts.values():
            assert account.used_blocks == account.active_blocks + account.cached_blocks
        assert world.hit("b", run(1, 6, 2), segment="seg", segment_blocks=3) == (6 if compute else 0)


def test_a_joined_windowed_run_keeps_its_copies_until_release():
    world = World(64, ("o", "b"), options={"windows": (2,)})
    world.domain("seg", "o", is_segment=True)
    both = [world.admit("b", run(1, 6, 2), segment="seg", segment_blocks=3) for _ in range(2)]
    for sequence in both:
        world.m.commit(sequence, 26, world.now)
        world.ok()
    for sequence in both:
        world.m.release(sequence, world.now, "finished")
        world.ok()
    world.scrub()
    assert world.states() == {"clean": 64 - 6 - 2 * 2, "cached": 6 + 2 * 2}


def test_pools_with_window_groups_do_not_fork():
    world = World(64, ("a",), options={"windows": (2,)})
    sequence = world.start("a", run(1, 4, 2))
    residency = world.m.residency(sequence.account, sequence.domain, "p", None, world.now)
    with pytest.raises(CapacityError, match="does not fork"):
        world.m.fork(sequence, "child", residency, world.now)
    world.ok()


def test_every_window_group_grows_with_the_table():
    world = World(64, ("a",), options={"windows": (2, 4)})
    sequence = world.start("a", run(1, 1))
    before = world.m.accounts["a"].used_blocks
    world.m.extend_many(np.array([sequence.slot]), np.array([1], dtype=np.int32), world.now)
    assert world.m.accounts["a"].used_blocks == before + 3
    world.ok()
