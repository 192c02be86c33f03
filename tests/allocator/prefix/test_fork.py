"""Forks and copy-on-write over real tensors: who reads what, byte by byte."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kvcustody.allocator.pool.tensor_memory import TensorMemory, TensorSpec
from standins.allocator.world import SIZE, World, run

SPEC = TensorSpec(layers=2, kv_heads=1, head_dim=4, block_tokens=SIZE)


class Engine:
    """Writes each token's id into every layer of its place, and reads sequences back."""

    def __init__(self, blocks: int = 64, shards: int = 1) -> None:
        self.memory = TensorMemory.allocate(blocks, SPEC, shards=shards)
        self.world = World(blocks, memory=self.memory)
        self.tokens: dict[object, list[int]] = {}

    def write(self, sequence, first: int) -> None:
        tokens = self.tokens[sequence.id]
        for at in range(first, len(tokens)):
            block = int(sequence.blocks[at // SIZE])
            for table in self.memory.tables:
                for tensor in table.tensors:
                    tensor[:, block, at % SIZE] = tokens[at] % 128

    def read(self, sequence) -> None:
        tokens = self.tokens[sequence.id]
        index = torch.from_numpy(sequence.blocks)
        expected = torch.tensor(tokens) % 128
        for table in self.memory.tables:
            for tensor in table.tensors:
                held = tensor[:, index].reshape(2, -1, 4)
                assert (held[:, : len(tokens)] == expected[None, :, None]).all()
                assert not held[:, len(tokens) :].any()

    def start(self, tokens: list[int], name: str = "a"):
        sequence = self.world.admit(name, tokens)
        self.tokens[sequence.id] = list(tokens)
        self.write(sequence, sequence.hit_blocks * SIZE)
        self.world.m.commit(sequence, len(tokens), self.world.now)
        return sequence

    def fork(self, parent, id_: object):
        residency = self.world.m.residency(parent.account, parent.domain, "p", None, self.world.now)
        child = self.world.m.fork(parent, id_, residency, self.world.now)
        self.tokens[id_] = list(self.tokens[parent.id])
        return child

    def extend(self, sequence, token: int) -> bool:
        if self.world.extend(sequence, token):
            return False
        self.tokens[sequence.id].append(token)
        self.write(sequence, len(self.tokens[sequence.id]) - 1)
        return True

    def release(self, sequence, cause: str = "finished") -> None:
        self.world.m.release(sequence, self.world.now, cause)
        del self.tokens[sequence.id]


@pytest.mark.parametrize("tail", range(SIZE))
@pytest.mark.parametrize("shards", [1, 2])
def test_a_divergent_write_copies_the_tail_and_nothing_else(tail, shards):
    engine = Engine(shards=shards)
    parent = engine.start(run(1, 3, tail))
    child = engine.fork(parent, "child")
    assert child.blocks.tolist() == parent.blocks.tolist()
    used = engine.world.m.accounts["a"].used_blocks
    for at in range(2 * SIZE):
        assert engine.extend(child, 60 + at)
        assert engine.extend(parent, 90 + at)
        engine.read(child)
        engine.read(parent)
        engine.world.ok()
    shared = set(child.blocks.tolist()) & set(parent.blocks.tolist())
    assert shared == set(parent.blocks[:3].tolist())
    assert engine.world.m.accounts["a"].used_blocks == used + (5 if tail else 4)
    engine.release(parent)
    engine.read(child)
    engine.release(child)
    engine.world.scrub()
    engine.world.ok()


def test_the_last_on_a_shared_tail_takes_it_back_without_a_copy():
    engine = Engine()
    parent = engine.start(run(1, 2, 2))
    children = [engine.fork(parent, at) for at in range(3)]
    tail = int(parent.blocks[-1])
    engine.release(parent, "aborted")
    for child in children[:2]:
        engine.extend(child, 5)
        assert int(child.blocks[-1]) != tail
    engine.extend(children[2], 6)
    assert int(children[2].blocks[-1]) == tail
    for child in children:
        engine.read(child)
    engine.world.ok()


def test_positive_control_without_the_copy_the_siblings_overwrite_each_other(monkeypatch):
    engine = Engine()
    parent = engine.start(run(1, 2, 2))
    child = engine.fork(parent, "child")
    monkeypatch.setattr(engine.world.m, "_copy_on_write", lambda slots, now_us: [])
    engine.extend(child, 60)
    engine.extend(parent, 90)
    with pytest.raises(AssertionError):
        engine.read(child)


def test_a_fork_before_anything_is_computed_is_never_published():
    engine = Engine()
    parent = engine.world.admit("a", run(1, 4, 2))
    engine.tokens[parent.id] = run(1, 4, 2)
    child = engine.fork(parent, "child")
    engine.write(parent, 0)
    for sequence in (parent, child):
        engine.world.m.commit(sequence, 18, engine.world.now)
        engine.read(sequence)
        engine.world.ok()
    engine.release(parent)
    engine.release(child)
    assert engine.world.hit("a", run(1, 4, 2)) == 0
    engine.world.scrub()
    engine.world.ok()
    assert engine.world.states() == {"clean": 64}


def test_a_fork_over_an_uncomputed_segment_charges_each_owner():
    world = World(64, ("o", "b"))
    world.domain("seg", "o", is_segment=True)
    parent = world.admit("b", run(1, 6, 2), segment="seg", segment_blocks=3)
    residency = world.m.residency(parent.account, parent.domain, "p", None, world.now)
    child = world.m.fork(parent, "child", residency, world.now)
    world.ok()
    assert {name: a.active_blocks for name, a in world.m.accounts.items()} == {"o": 3, "b": 4}
    for sequence in (parent, child):
        world.m.release(sequence, world.now, "finished")
        world.ok()
    world.scrub()
    assert all(account.used_blocks == 0 for account in world.m.accounts.values())


def test_a_child_is_on_the_canonical_blocks_not_on_its_parents_duplicates():
    """The parent computed what another had published: its copies end with it, and the child must not read them."""
    engine = Engine()
    both = [engine.world.admit("a", run(1, 3, 1)) for _ in range(2)]
    for sequence in both:
        engine.tokens[sequence.id] = run(1, 3, 1)
        engine.write(sequence, 0)
        engine.world.m.commit(sequence, 13, engine.world.now)
    canonical, parent = both
    child = engine.fork(parent, "child")
    assert child.blocks[:3].tolist() == canonical.blocks[:3].tolist()
    engine.world.ok()
    engine.release(parent)
    engine.world.scrub()
    engine.read(child)
    engine.world.ok()


def test_no_room_for_the_copy_stalls_and_changes_nothing():
    engine = Engine(blocks=4)
    parent = engine.start(run(1, 3, 2))
    child = engine.fork(parent, "child")
    assert not engine.extend(child, 5)
    engine.read(child)
    engine.world.ok()
    engine.release(parent)
    assert engine.extend(child, 5)
    engine.read(child)
    engine.world.ok()


@pytest.mark.parametrize("seed", range(4))
def test_random_trees_of_forks_always_read_their_own_tokens(seed):
    rng = random.Random(seed)
    engine = Engine(blocks=96)
    live = []
    for at in range(250):
        engine.world.now += 1
        action = rng.random()
        if not live or action < 0.15:
            tokens = run(rng.randrange(3), rng.randrange(1, 5), rng.randrange(SIZE))
            if not isinstance(engine.world.admit("a", tokens[:1]), str):
                live.append(engine.start(tokens))
        elif action < 0.35 and len(live) < 12:
            live.append(engine.fork(rng.choice(live), ("fork", at)))
        elif action < 0.85:
            engine.extend(rng.choice(live), rng.randrange(128))
        else:
            engine.release(live.pop(rng.randrange(len(live))), rng.choice(("finished", "aborted")))
        engine.world.scrub()
        for sequence in engine.world.m.decode.sequences:
            if sequence is not None and sequence.id not in engine.tokens:
                engine.world.m.release(sequence, engine.world.now, "aborted")
        for sequence in live:
            engine.read(sequence)
        engine.world.ok()
    for sequence in live:
        engine.release(sequence)
    engine.world.m.teardown(engine.world.now)
    engine.world.ok()
    assert engine.memory.nonzero_bytes(np.arange(96)) == 0
