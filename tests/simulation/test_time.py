"""No hit after the absolute deadline: dates step by a day, the machine sleeps, the process restarts."""

from __future__ import annotations

import random

import pytest

from kvcustody.allocator.prefix.tree import PrefixTree
from kvcustody.clock import VirtualClock
from kvcustody.governance.admission_outcome import Admission
from standins.simulation.governed import LOW_ABSOLUTE_US, LOW_IDLE_US, MODEL, governor, person
from standins.simulation.simulation import SECOND

DAY = 86_400 * SECOND
Handle = tuple[int, int]


class Life:
    """Hot prompts asked again and again. `late`: blocks hit past the absolute time of their own or of one before them.

    Times are kept by (block, generation), from what was computed, apart from the allocator's own books.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = VirtualClock()
        self.hits = self.late = self.restarts = 0
        self.start()

    def start(self) -> None:
        self.governor = governor(256, self.clock)
        self.running: set[object] = set()
        self.born: dict[Handle, int] = {}

    def go(self, operations: int) -> Life:
        for at in range(operations):
            self.operate()
            if at % 100 == 0:
                assert self.governor.check() == []
        return self

    def operate(self) -> None:
        rng, clock = self.rng, self.clock
        clock.advance(rng.randrange(SECOND))
        action = rng.random()
        if action < 0.70:
            self.request()
        elif action < 0.80:
            for id_ in self.governor.step():  # active-max
                self.running.discard(id_)
        elif action < 0.90 and self.running:  # a long request, pinned across everything below
            id_ = rng.choice(sorted(self.running))
            self.governor.release(id_, rng.choice(("finished", "preempted")))
            self.running.discard(id_)
        elif action < 0.97:
            clock.step_utc(rng.choice((-DAY, DAY, -SECOND, SECOND)))  # an administrator, a leap second
        elif action < 0.995:
            clock.advance(rng.choice((10 * SECOND, LOW_IDLE_US, LOW_ABSOLUTE_US, DAY)))  # suspend
        else:
            self.restarts += 1
            self.start()

    def request(self) -> None:
        rng, now = self.rng, self.clock.now_us()
        prompt = rng.randrange(3)
        tokens = [prompt * 100 + at for at in range(rng.randrange(8, 40))]
        got = self.governor.admit(person("a", rng.choice(("mia", "noa"))), MODEL, tokens)
        if not isinstance(got, Admission):
            return
        generations = self.governor.managers[0].pool.generation
        handles = [(block, int(generations[block])) for block in got.blocks.tolist()]
        hit = got.hit_tokens // 4
        self.hits += hit
        oldest = now
        for handle in handles[:hit]:
            oldest = min(oldest, self.born[handle])
            self.late += now >= oldest + LOW_ABSOLUTE_US
        self.born.update(dict.fromkeys(handles[hit:], now))
        self.governor.commit([got.request_id], [len(tokens)])
        self.running.add(got.request_id)
        if rng.random() < 0.9 or len(self.running) > 4:
            self.governor.release(got.request_id)
            self.running.discard(got.request_id)


@pytest.mark.parametrize("seed", range(2))
def test_no_hit_after_the_absolute_deadline(seed):
    life = Life(seed).go(2_000)
    assert life.late == 0
    assert life.hits > 1_000
    assert life.restarts > 1


def test_positive_control_a_sliding_ceiling_is_hit_for_ever(monkeypatch):
    inner = PrefixTree.attach

    def sliding(self, leaf, now_us):
        node = leaf
        while node is not None:
            node.ceiling_us = now_us + LOW_ABSOLUTE_US
            node = node.parent
        return inner(self, leaf, now_us)

    monkeypatch.setattr(PrefixTree, "attach", sliding)
    assert Life(0).go(3_000).late > 100


def test_positive_control_deadlines_on_the_wall_clock_would_be_wrong(monkeypatch):
    """Were boot time UTC, a step back by a day would bring the dead back."""
    monkeypatch.setattr(VirtualClock, "now_us", VirtualClock.utc_us)
    life = Life(0)
    true = [0]
    advance = life.clock.advance

    def counted(microseconds: int) -> None:
        true[0] += microseconds
        advance(microseconds)

    monkeypatch.setattr(life.clock, "advance", counted)
    hit_late = 0
    for _ in range(50):
        tokens = [7] * 20
        got = life.governor.admit(person("a", "mia"), MODEL, tokens)
        life.governor.commit([got.request_id], [20])
        life.governor.release(got.request_id)
        life.clock.advance(LOW_ABSOLUTE_US)
        life.clock.step_utc(-DAY)
        again = life.governor.admit(person("a", "mia"), MODEL, tokens)
        hit_late += again.hit_tokens > 0
        life.governor.release(again.request_id)
    assert hit_late > 0


@pytest.mark.soak
def test_no_hit_after_the_absolute_deadline_in_a_million_operations():
    life = Life(11).go(1_000_000)
    assert life.late == 0
