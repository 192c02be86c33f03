"""Every change of the index is reported once; blocks reported whole equal those reported token by token."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from kvcustody.allocator.prefix.node import KEY_BYTES
from kvcustody.allocator.prefix.tree import PrefixTree
from kvcustody.errors import CapacityError, HandleError
from standins.allocator.world import MINUTE, SIZE, World, run


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


class Told:
    """A consumer of changes: the keys it believes to be in the index."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.keys: Counter[bytes] = Counter()
        self.causes: Counter[str] = Counter()
        world.m.tree.changes = []

    def agrees(self) -> bool:
        taken, self.world.m.tree.changes = self.world.m.tree.changes, []
        for change in taken:
            keys = split(change.keys)
            self.causes[change.cause] += len(keys)
            (self.keys.subtract if change.cause else self.keys.update)(keys)
        indexed = {key for node in self.world.m.tree.nodes() for key in split(node.keys)}
        return set(self.keys.values()) <= {0, 1} and {key for key, count in self.keys.items() if count} == indexed


def churn(world: World, observer: Told) -> None:
    """Publication, joins, splits, eviction with and without trimming, expiry, and the end of everything."""
    for turn in range(30):
        shared = run(turn % 4, 3)
        first, second = world.start("a", shared + run(50 + turn, 3, 1)), world.start("b", shared + run(7, 2))
        twin = world.start("a", shared + run(50 + turn, 3, 1))
        for sequence in (first, second, twin):
            world.m.release(sequence, world.now, "finished")
        assert observer.agrees()
    world.wait(3 * MINUTE)
    assert observer.agrees() and not +observer.keys
    assert {"", "pressure", "expired"} <= set(observer.causes)
    world.cache("a", run(1, 5))
    world.m.teardown(world.now)
    assert observer.agrees() and observer.causes["shutdown"] == 5


def world() -> World:
    return World(24, domain={"idle_us": MINUTE, "absolute_us": 9 * MINUTE})


def test_told_changes_are_the_index_after_every_request():
    one = world()
    churn(one, Told(one))


def test_positive_control_an_eviction_that_is_not_told_is_seen(monkeypatch):
    def silent(self, *args):
        kept, self.changes = self.changes, None
        try:
            return trim(self, *args)
        finally:
            self.changes = kept

    trim = PrefixTree._trim
    monkeypatch.setattr(PrefixTree, "_trim", silent)
    one = world()
    with pytest.raises(AssertionError):
        churn(one, Told(one))


def test_a_published_run_names_its_residency_and_the_key_before_it():
    one = world()
    changes = one.m.tree.changes = []
    first = one.start("a", run(1, 3))
    one.m.release(first, one.now, "finished")
    second = one.start("a", run(1, 3) + run(2, 2))
    assert [(change.parent, change.residency, len(change.keys) // KEY_BYTES) for change in changes] == [
        (b"", first.residency.id, 3),
        (changes[0].keys[-KEY_BYTES:], second.residency.id, 2),
    ]


def told_by_block(world_of_one: World, sequence, tokens: list[int]) -> None:
    """Accept these tokens: the first of each block by itself, the rest when the block is full; a last part never."""
    room = -(1 + SIZE) % SIZE
    while len(tokens) >= room:
        world_of_one.m.fill(sequence, np.array(tokens[:room], dtype=np.int32))
        tokens, room = tokens[room:], SIZE - 1
        if tokens:
            world_of_one.extend(sequence, tokens.pop(0))


@pytest.mark.parametrize("count", [3, 4, 7, 12])
def test_blocks_told_as_a_whole_have_the_keys_of_tokens_told_one_by_one(count):
    tokens = run(9, 3)[:count]
    worlds = [world(), world()]
    for one, tell in zip(worlds, (lambda one, *told: one.extend(told[0], *told[1]), told_by_block), strict=True):
        sequence = one.start("a", run(1, 1, 1))
        tell(one, sequence, tokens)
        one.m.release(sequence, one.now, "finished")
        one.ok()
    asked = [*run(1, 1, 1), *tokens, 1, 2, 3, 4]
    # Told a token at a time, the last one counts as computed only with the next: a full block may be one short.
    hits = [one.hit("a", asked) for one in worlds]
    assert hits[1] == (1 + SIZE + count) // SIZE and hits[0] == (SIZE + count) // SIZE


def test_withheld_tokens_are_never_published_and_wrong_ones_refused():
    small = world()
    sequence = small.start("a", run(1, 1, 1))
    with pytest.raises(CapacityError, match="fill its last block"):
        small.m.fill(sequence, np.array([1, 2], dtype=np.int32))
    small.m.fill(sequence, None)
    with pytest.raises(CapacityError, match="fill its last block"):
        small.m.extend_many(np.array([sequence.slot]), np.array([5], dtype=np.int32), small.now)
        small.m.fill(sequence, np.array([1], dtype=np.int32))
    small.m.release(sequence, small.now, "finished")
    assert small.hit("a", [*run(1, 1, 1), 1, 2, 3, 4]) == 1
    with pytest.raises(HandleError):
        small.m.fill(sequence, None)
