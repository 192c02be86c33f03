"""Device work that outlives its request never meets the block's next owner, and nobody waits longer than it runs.

A device finishes each step 0–N steps late and in any order; requests are aborted and preempted at random meanwhile. An
overlap is a block handed out while a step that touches it is open.
"""

from __future__ import annotations

import random

import pytest

from standins.allocator.world import SECOND, World, run

BLOCKS, SLOTS, LATEST = (
    12,
    4,
    5,
)  # a request is at most 3 blocks: what runs always fits, what is in flight may not


class Device:
    """`fencing` False is the positive control: a release forgets what is in flight."""

    def __init__(self, seed: int, *, fencing: bool = True, latest: int = LATEST) -> None:
        self.rng = random.Random(seed)
        self.fencing = fencing
        self.latest = latest
        self.world = World(BLOCKS, options={"evict_ahead": 2, "fence_bound_us": 3600 * SECOND})
        self.open: dict[int, tuple[int, set[int]]] = {}  # fence: (step at which it retires, blocks)
        self.overlaps = self.waited = self.longest = self.admitted = 0
        self.live: list = []
        self.wanted: list[int] | None = None
        inner = self.world.m.pool.hand_out

        def hand_out(partition, count, account):
            blocks = inner(partition, count, account)
            handed = set(blocks.tolist())
            self.overlaps += sum(bool(handed & touched) for _, touched in self.open.values())
            return blocks

        self.world.m.pool.hand_out = hand_out

    def go(self, steps: int) -> Device:
        for step in range(steps):
            self.step(step)
            if step % 200 == 0:
                self.world.ok()
        return self

    def step(self, step: int) -> None:
        rng, world = self.rng, self.world
        late = [fence for fence, (due, _) in self.open.items() if due <= step]
        rng.shuffle(late)
        for fence in late:
            del self.open[fence]
            world.m.pool.fences.retire(fence)
        world.wait(SECOND)
        if len(self.live) == SLOTS or (self.live and rng.random() < 0.6):
            ended = self.live.pop(rng.randrange(len(self.live)))
            if not self.fencing:
                ended.fence = 0
            world.m.release(ended, world.now, rng.choice(("aborted", "preempted", "finished")))
        self.admit()
        if self.live:
            running = rng.sample(self.live, rng.randrange(1, len(self.live) + 1))
            fence = world.m.pool.fences.open(world.now)
            touched: set[int] = set()
            for sequence in running:
                sequence.fence = fence
                touched.update(sequence.blocks.tolist())
            self.open[fence] = (step + rng.randrange(self.latest + 1), touched)

    def admit(self) -> None:
        """One request at a time, small enough that only blocks in flight can be in its way."""
        rng, world = self.rng, self.world
        if self.wanted is None:
            self.wanted = run(rng.randrange(4), 3)[: rng.randrange(9)] + [rng.randrange(99) for _ in range(4)]
        sequence = world.admit("a", self.wanted)
        if isinstance(sequence, str):
            self.waited += 1
            self.longest = max(self.longest, self.waited)
            return
        world.m.commit(sequence, len(self.wanted), world.now)
        self.admitted += 1
        self.live.append(sequence)
        self.wanted, self.waited = None, 0


@pytest.mark.parametrize("seed", range(3))
def test_no_overlap_and_no_stall_beyond_the_fences(seed):
    device = Device(seed).go(1_500)
    assert device.overlaps == 0
    assert 0 < device.longest <= LATEST + 1
    assert device.admitted > 300


def test_positive_control_immediate_free_overlaps():
    device = Device(0, fencing=False).go(1_000)
    assert device.overlaps > 0


@pytest.mark.soak
def test_no_overlap_in_a_million_steps():
    device = Device(9).go(1_000_000)
    assert device.overlaps == 0
    assert device.longest <= LATEST + 1
