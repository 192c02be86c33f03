"""Reused blocks hold what was published: changed blocks are detected, never attached, and leave custody.

Real tensors and real checksums. Positive control: where nothing is compared, changed blocks are a full hit.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvcustody.allocator.manager.check_invariants import check
from kvcustody.allocator.pool.block_state import ACTIVE, CACHED, QUARANTINED
from kvcustody.allocator.pool.memory_protocol import UnbackedMemory
from kvcustody.allocator.pool.tensor_memory import TensorMemory, TensorSpec
from standins.allocator.world import SIZE, World, run

BLOCKS = 48
SPEC = TensorSpec(layers=2, kv_heads=1, head_dim=4, block_tokens=SIZE)


class Engine(World):
    """A pool whose blocks hold something: each request writes a pattern of its own into what it computes."""

    def __init__(self, share: float = 1.0, *, shards: int = 1, **how) -> None:
        self.memory = TensorMemory.allocate(BLOCKS, SPEC, shards=shards)
        limits = {"integrity_share": share, "verify_share": 1.0, **how.pop("domain", {})}
        super().__init__(BLOCKS, memory=self.memory, domain=limits, **how)

    def start(self, own, tokens, **how):
        sequence = self.admit(own, tokens, **how)
        self.write(sequence, sequence.hit_blocks, len(tokens) // SIZE)
        self.m.commit(sequence, len(tokens), self.now)
        return sequence

    def write(self, sequence, first: int, last: int) -> None:
        for block in sequence.blocks[first:last].tolist():
            self.memory.fill(np.array([block]), 1 + block % 250)

    def flip(self, block: int, *, shard: int = 0) -> None:
        self.memory.tables[shard].words[-1].view(torch.uint8)[block, -1] ^= 4

    def end(self, sequence) -> None:
        self.m.release(sequence, self.now, "finished")

    def cached(self, own: str, tokens: list[int]) -> list[int]:
        """One whole request; returns the blocks that it published."""
        sequence = self.start(own, tokens)
        blocks = sequence.blocks[: len(tokens) // SIZE].tolist()
        self.end(sequence)
        return blocks


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("at", [0, 3, 5])
def test_a_changed_block_and_all_that_continues_it_is_a_miss(at, shards):
    engine = Engine(shards=shards)
    tokens = run(1, 6, 1)
    blocks = engine.cached("a", tokens)
    assert engine.hit("a", tokens) == 6
    engine.flip(blocks[at], shard=shards - 1)
    assert engine.hit("a", tokens) == at
    pool = engine.m.pool
    (found,) = pool.sums.found
    assert found.blocks.tolist() == [blocks[at]] and found.requests == 0
    assert found.generations.tolist() == [pool.generation[blocks[at]]]
    ended = [custody for custody in pool.partitions[0].fenced if custody.cause != "partial-or-unpublished"]
    assert {custody.cause for custody in ended} == {"integrity"}
    assert {block for custody in ended for block in custody.blocks.tolist()} == set(blocks[at:])
    assert check(engine.m) == []


@pytest.mark.parametrize(("share", "hit"), [(0.0, 6), (1.0, 0)])
def test_random_values_over_the_cache_are_served_only_where_nothing_is_compared(share, hit):
    engine = Engine(share)
    tokens = run(1, 6, 1)
    blocks = engine.cached("a", tokens)
    engine.memory.fill(np.array(blocks), 0x5A)
    assert engine.hit("a", tokens) == hit
    assert (engine.m.pool.sums is None) == (share == 0)


def test_changed_blocks_are_zeroed_and_read_back_in_full_before_they_are_handed_out_again():
    engine = Engine(domain={"verify_share": 0.0})
    tokens = run(1, 3, 1)
    blocks = engine.cached("a", tokens)
    engine.flip(blocks[0])
    assert engine.hit("a", tokens) == 0
    engine.scrub()
    pool = engine.m.pool
    (receipt,) = [one for one in pool.receipts if one.custodies[0].cause == "integrity"]
    assert receipt.result.level == "full" and not len(receipt.result.failed)
    assert engine.memory.nonzero_bytes(np.array(blocks)) == 0
    assert pool.counts[QUARANTINED] == 0 and check(engine.m) == []


def test_a_block_that_changes_a_second_time_is_withheld():
    engine = Engine()
    tokens, pool = run(1, 3, 1), engine.m.pool
    seen: list[int] = []
    for _ in range(2):
        while True:  # until the same block holds a prefix again
            blocks = engine.cached("a", tokens)
            if not seen or seen[0] in blocks:
                break
            engine.m.tree.evict(engine.m.accounts["a"], BLOCKS, engine.now, "test")
            engine.scrub()
        seen.append(blocks[0] if not seen else seen[0])
        engine.flip(seen[0])
        assert engine.hit("a", tokens) == blocks.index(seen[0])
        engine.m.tree.evict(engine.m.accounts["a"], BLOCKS, engine.now, "test")
        engine.scrub()
    assert np.flatnonzero(pool.state == QUARANTINED).tolist() == [seen[0]]
    assert [one.result.failed.tolist() for one in pool.receipts if len(one.result.failed)] == [[seen[0]]]
    for round_ in range(2, 40):
        assert seen[0] not in engine.cached("a", run(round_, 8, 1))
    assert check(engine.m) == []


def test_whoever_runs_on_a_changed_block_goes_on_and_nobody_finds_what_it_adds():
    engine = Engine()
    tokens = run(1, 6, 1)
    running = engine.start("a", tokens)
    before = engine.start("a", [*tokens[:-1], *run(2, 3, 1)])
    engine.end(before)
    engine.flip(int(running.blocks[2]))
    assert engine.hit("a", tokens) == 2
    (found,) = engine.m.pool.sums.found
    assert found.requests == 1 and check(engine.m) == []
    assert engine.m.pool.state[running.blocks[3]] == ACTIVE
    assert engine.extend(running, *run(3, 3)) == []
    engine.end(running)
    assert engine.hit("a", [*tokens[:-1], *run(3, 3, 1)]) == 2
    assert engine.m.pool.state[running.blocks[2]] not in (ACTIVE, CACHED)
    assert check(engine.m) == []


def test_what_a_request_adds_after_a_hit_and_while_decoding_is_summed():
    engine = Engine()
    first = engine.start("a", run(1, 2, 1))
    for token in run(1, 4, 1)[2 * SIZE + 1 :]:
        assert engine.extend(first, token) == []
    engine.write(first, 2, 4)
    engine.end(first)
    tokens = run(1, 4, 1)
    assert engine.hit("a", tokens) == 4
    assert engine.m.pool.sums.missing(first.blocks[:4]).tolist() == []
    engine.flip(int(first.blocks[3]))
    assert engine.hit("a", tokens) == 3


def test_forks_and_copies_change_nothing_that_was_summed():
    engine = Engine()
    tokens = run(1, 3, 2)
    parent = engine.start("a", tokens)
    account, domain = parent.account, parent.domain
    child = engine.m.fork(parent, "child", engine.m.residency(account, domain, object(), None, engine.now), engine.now)
    for at, sequence in enumerate((parent, child)):
        first = sequence.block_count - 1
        assert engine.extend(sequence, *run(10 + at, 2)) == []
        engine.write(sequence, first, sequence.block_count)
        engine.end(sequence)
    for at in range(2):
        assert engine.hit("a", [*tokens, *run(10 + at, 2, 1)]) >= 3
    assert engine.m.pool.sums.mismatched_blocks == 0 and check(engine.m) == []


def test_a_reader_with_a_stricter_share_compares_anothers_blocks():
    engine = Engine(0.0)
    engine.domain("lent", "a", integrity_share=1e-9)  # summed, and as good as never compared by its own
    tokens = run(1, 4, 1)
    blocks = engine.cached("lent", tokens)
    engine.flip(blocks[1])
    assert engine.hit("b", tokens, grants=("lent",)) == 4
    engine.domain("b", "b", integrity_share=1.0)
    assert engine.hit("b", tokens, grants=("lent",)) == 1


def test_a_policy_that_begins_to_ask_sums_what_is_there():
    engine = Engine(0.0)
    tokens = run(1, 4, 1)
    blocks = engine.cached("a", tokens)
    domain = engine.chains["a"].domain
    engine.m.set_limits({domain: domain.limits._replace(integrity_share=1.0)}, engine.now)
    assert engine.hit("a", tokens) == 4
    engine.flip(blocks[3])
    assert engine.hit("a", tokens) == 3


def test_sliding_windows_are_compared_too():
    engine = Engine(options={"windows": (2,)})
    tokens = run(1, 5, 1)
    sequence = engine.start("a", tokens)
    node = sequence.leaf
    window = node.windows[0].tolist()
    engine.end(sequence)
    assert engine.hit("a", tokens) == 5
    engine.flip(window[-1])
    assert engine.hit("a", tokens) < 5
    assert engine.m.pool.sums.found[0].blocks.tolist() == [window[-1]] and check(engine.m) == []


def test_a_share_compares_that_share():
    engine = Engine(0.25)
    tokens = run(1, 8, 1)
    engine.cached("a", tokens)
    for _ in range(500):
        assert engine.hit("a", tokens) == 8
    checked = engine.m.pool.sums.checked_blocks
    assert abs(checked - 1000) < 6 * (4000 * 0.25 * 0.75) ** 0.5


def test_without_bytes_there_is_nothing_to_sum():
    world = World(BLOCKS, memory=UnbackedMemory(BLOCKS, 0), domain={"integrity_share": 1.0})
    world.cache("a", run(1, 4, 1))
    assert world.hit("a", run(1, 4, 1)) == 4 and world.m.pool.sums is None


@pytest.mark.parametrize(("share", "flips"), [(1.0, 200), (1 / 8, 800), (0.0, 40)])
def test_flipped_bits_are_found_as_stated(share, flips):
    """`benchmarks/device/integrity.py` does so with 10,000 at each level."""
    random, detected = np.random.default_rng(3), 0
    tokens = run(1, 6, 1)
    for done in range(flips):
        if done % 20 == 0:  # blocks that are found changed twice are used up
            engine = Engine(share)
        blocks = engine.cached("a", tokens)
        at = int(random.integers(6))
        rows = [words.view(torch.uint8) for words in engine.memory.tables[0].words]
        row = rows[int(random.integers(len(rows)))][blocks[at]]
        byte, bit = int(random.integers(len(row))), 1 << int(random.integers(8))
        row[byte] ^= bit
        hit = engine.hit("a", tokens)
        assert hit in (at, 6)
        detected += hit == at
        if hit == 6:
            row[byte] ^= bit
    assert abs(detected - flips * share) <= 5 * (flips * share * (1 - share)) ** 0.5
