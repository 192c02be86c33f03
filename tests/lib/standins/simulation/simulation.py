"""A block manager beside its model: every operation is done in both, and every answer and invariant is compared.

The Hypothesis machine, the seeded drives and the mutants all run this. A disagreement raises `AssertionError`.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from kvcustody.allocator.manager.check_invariants import check
from kvcustody.allocator.pool.memory_protocol import UnbackedMemory
from standins.allocator.world import SECOND, World, run
from standins.simulation.model import SIZE, Limits, Model

DOMAINS = {
    "a": Limits(20 * SECOND, 90 * SECOND),
    "b": Limits(200 * SECOND, 200 * SECOND),
    "c": Limits(0, 90 * SECOND),
}
BASES = [run(at, 12) for at in range(3)]


class Simulation:
    """`exact`: no eviction can happen, so hits must equal the model's; else they must not exceed it."""

    def __init__(
        self, blocks: int, *, exact: bool, tenants: dict[str, dict[str, Any]] | None = None, **how: Any
    ) -> None:
        self.exact = exact
        self.world = World(blocks, tenants or {name: {} for name in DOMAINS}, **how)
        for name, limits in DOMAINS.items():
            self.world.domain(name, name, **limits._asdict())
        self.model = Model(DOMAINS)
        self.live: dict[object, Any] = {}
        self.ended: list[Any] = []
        self.open: dict[int, set[int]] = {}  # fences, with the blocks that device work may still touch
        self.last_generation = 0
        self.handed = 0
        self.serial = 0
        self.hits = 0
        self._watch_hand_out()

    def _watch_hand_out(self) -> None:
        inner = self.world.m.pool.hand_out

        def hand_out(partition, count, account):
            blocks = inner(partition, count, account)
            generations = self.world.m.pool.generation[blocks].tolist()
            assert min(generations) > self.last_generation, "L3: a generation was given twice"
            assert len(set(generations)) == count, "L3: one generation for several blocks"
            self.last_generation = max(generations)
            self.handed += count
            for fence, touched in self.open.items():
                assert not touched.intersection(blocks.tolist()), f"L6: fence {fence} is still open"
            return blocks

        self.world.m.pool.hand_out = hand_out

    # -- operations ---------------------------------------------------------------------------------------------------

    def admit(self, name: str, tokens: list[int], principal: object, computed: float = 1.0) -> None:
        now, manager = self.world.now, self.world.m
        expected = self.model.hit(name, tokens, now)
        sequence = self.world.admit(name, tokens, principal=principal, active_us=300 * SECOND)
        if isinstance(sequence, str):
            assert not self.exact, sequence
            return
        assert sequence.hit_blocks == expected or (not self.exact and sequence.hit_blocks < expected), (
            f"hit {sequence.hit_blocks}, the model says {expected}"
        )
        for depth in range(sequence.hit_blocks):
            entry = self.model.entries[name, tuple(tokens[: SIZE * (depth + 1)])]
            handle = (int(sequence.blocks[depth]), int(manager.pool.generation[sequence.blocks[depth]]))
            assert not self.exact or entry.handle == handle, "the table does not name the published block"
        self.hits += sequence.hit_blocks
        self.serial += 1
        sequence.id = self.serial
        self.live[sequence.id] = sequence
        if not self.exact:
            self._note_evictions(name, tokens)
        self.model.admit(sequence.id, name, tokens, sequence.hit_blocks)
        self.commit(sequence.id, int(computed * len(tokens)))

    def _note_evictions(self, name: str, tokens: list[int]) -> None:
        """Where eviction is free to act, what the model still has may be born again: drop what is not there."""
        hit = self.world.hit(name, [*tokens, 0])
        for depth in range(hit + 1, len(tokens) // SIZE + 1):
            for key in [
                k for k in self.model.entries if k[0] == name and k[1][: SIZE * depth] == tuple(tokens[: SIZE * depth])
            ]:
                if not self.model.entries[key].users:
                    del self.model.entries[key]

    def commit(self, id_: object, computed: int) -> None:
        sequence = self.live[id_]
        computed = max(computed, int(self.world.m.decode.computed[sequence.slot]))
        self.world.m.commit(sequence, computed, self.world.now)
        self._model_commit(sequence, computed)

    def _model_commit(self, sequence: Any, computed: int) -> None:
        if not self.exact:
            self._note_evictions(self.model.running[sequence.id].name, self.model.running[sequence.id].tokens)
        generations = self.world.m.pool.generation
        handles = [(block, int(generations[block])) for block in sequence.blocks.tolist()]
        self.model.commit(sequence.id, computed, self.world.now, handles)

    def extend(self, ids: list[object], token: int) -> None:
        table = self.world.m.decode
        slots = np.array([self.live[id_].slot for id_ in ids], dtype=np.int64)
        tokens = np.full(len(ids), token, dtype=np.int32)
        stalled = self.world.m.extend_many(slots, tokens, self.world.now)
        assert not (stalled and self.exact)
        for id_ in ids:
            if self.live[id_] not in stalled:
                request = self.model.running[id_]
                request.tokens.append(token)
                request.computed = len(request.tokens) - 1
            assert int(table.length[self.live[id_].slot]) == len(self.model.running[id_].tokens)

    def fork(self, id_: object) -> None:
        parent = self.live[id_]
        self.serial += 1
        residency = self.world.m.residency(parent.account, parent.domain, "fork", None, self.world.now)
        computed = int(self.world.m.decode.computed[parent.slot])
        child = self.world.m.fork(parent, self.serial, residency, self.world.now)
        self._model_commit(parent, computed)
        self.live[self.serial] = child
        self.model.fork(id_, self.serial)

    def release(self, id_: object, cause: str) -> None:
        sequence = self.live.pop(id_)
        computed = int(self.world.m.decode.computed[sequence.slot])
        handles = sequence.blocks.copy()
        self._model_commit(sequence, computed)
        assert self.world.m.release(sequence, self.world.now, cause)
        self.model.release(id_, self.world.now)
        self.ended.append((sequence, handles))

    def release_again(self, at: int, cause: str) -> None:
        if self.ended:
            sequence, _ = self.ended[at % len(self.ended)]
            before = list(self.world.m.pool.counts)
            assert not self.world.m.release(sequence, self.world.now, cause)
            assert before == self.world.m.pool.counts

    def fence(self, ids: list[object]) -> None:
        if len(self.open) >= 4:  # an engine has a few steps in flight, not hundreds
            self.retire(0)
        fence = self.world.m.pool.fences.open(self.world.now)
        touched: set[int] = set()
        for id_ in ids:
            self.live[id_].fence = fence
            touched.update(self.live[id_].blocks.tolist())
        self.open[fence] = touched

    def retire(self, at: int) -> None:
        if self.open:
            fence = sorted(self.open)[at % len(self.open)]
            del self.open[fence]
            self.world.m.pool.fences.retire(fence)

    def wait(self, microseconds: int, *, sweep: bool) -> None:
        self.world.now += microseconds
        if sweep:
            for sequence in self.world.m.step(self.world.now):
                self.release(sequence.id, "active-max")

    # -- invariants ---------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        manager = self.world.m
        problems = check(manager)
        assert not problems, problems
        clean = sum(partition.clean_count for partition in manager.pool.partitions)
        scrubbed = self.world.memory.scrubbed(0)
        assert scrubbed == self.handed + clean, (
            f"L2: {scrubbed} blocks scrubbed, {self.handed} handed out, {clean} CLEAN"
        )
        free = [slot for slot, sequence in enumerate(manager.decode.sequences) if sequence is None]
        assert not manager.decode.pending[free].any(), "tokens outlive their sequence"
        for name, limits in DOMAINS.items():
            account = manager.accounts[name]
            assert account.used_blocks <= account.cap_blocks, "Q2"
            assert limits.idle_us or not account.cached_blocks, "a domain of `0s` has CACHED blocks"
        for partition in manager.pool.partitions:
            assert partition.over_blocks <= partition.common_blocks, "Q3"

    def close(self) -> None:
        for id_ in list(self.live):
            self.release(id_, "shutdown")
        for fence in list(self.open):
            self.world.m.pool.fences.retire(fence)
        self.open.clear()
        self.world.m.teardown(self.world.now)
        self.verify()
        assert self.world.states() == {"clean": self.world.m.pool.blocks}
        assert all(account.used_blocks == 0 for account in self.world.m.accounts.values())


def drive(simulation: Simulation, seed: int, steps: int, every: int = 1) -> Simulation:
    """`steps` random operations; invariants after every `every`."""
    rng = random.Random(seed)
    for at in range(steps):
        action = rng.random()
        ids = list(simulation.live)
        if action < 0.3 or not ids:
            base = rng.choice(BASES)
            tokens = base[: rng.randrange(len(base))] + [rng.randrange(4) for _ in range(rng.randrange(1, 9))]
            part = 1.0 if rng.random() < 0.7 else rng.random()
            simulation.admit(rng.choice("abc"), tokens, rng.choice("mno"), part)
        elif action < 0.4:
            id_ = rng.choice(ids)
            simulation.commit(id_, rng.randrange(len(simulation.model.running[id_].tokens) + 1))
        elif action < 0.55:
            simulation.extend(rng.sample(ids, rng.randrange(1, len(ids) + 1)), rng.randrange(4))
        elif action < 0.62 and len(ids) < 16:
            simulation.fork(rng.choice(ids))
        elif action < 0.7:
            simulation.fence(rng.sample(ids, rng.randrange(1, len(ids) + 1)))
        elif action < 0.78:
            simulation.retire(rng.randrange(99))
        elif action < 0.93:
            simulation.release(rng.choice(ids), rng.choice(("finished", "aborted", "preempted")))
            simulation.release_again(rng.randrange(99), "finished")
        else:
            simulation.wait(rng.choice((1, SECOND, 7 * SECOND, 30 * SECOND)), sweep=rng.random() < 0.7)
        if at % every == 0:
            simulation.verify()
    simulation.close()
    return simulation


def roomy(**how: Any) -> Simulation:
    """Nothing is ever evicted: answers are exact."""
    return Simulation(4096, exact=True, memory=UnbackedMemory(4096, 0), **how)


def tight(**how: Any) -> Simulation:
    """Quotas, guarantees, a small pool: eviction all the time."""
    tenants = {"a": {"guaranteed": 20, "cap": 40}, "b": {"cap": 40}, "c": {"guaranteed": 8}}
    options = {"evict_ahead": 4, "scrub_batch": 4, "reserve_low": 4, "reserve_high": 8}
    return Simulation(64, exact=False, tenants=tenants, options=options, memory=UnbackedMemory(64, 0), **how)
