"""Random histories that end in an erasure, over memory whose bytes say who wrote them.

Every block that a request computes is filled with the byte of its writer (1 to 4). Prompts begin alike, so that in a
tenant's domain one subject's blocks are another's hits.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvcustody.allocator.pool.block_state import ACTIVE, CACHED
from kvcustody.allocator.pool.tensor_memory import TensorMemory, TensorSpec
from kvcustody.clock import MICROSECONDS, VirtualClock
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.erasure.selector import Selector
from standins.simulation.governed import MODEL, POLICY, governor, person

SPEC = TensorSpec(layers=1, kv_heads=1, head_dim=2, block_tokens=4, dtype=torch.float16)
WHO = [("a", "mia"), ("a", "noa"), ("b", "mia"), ("b", "zoe")]
HEADS = [list(range(100 * at, 100 * at + 24)) for at in range(3)]


class Tally(NamedTuple):
    """What histories came to."""

    histories: int
    erased_blocks: int
    canaries: int  # blocks with the byte of an erased writer, after the acknowledgement
    lookups: int  # hits of the erased on what was before
    changed_hits: int  # other principals whose hits the erasure changed
    others_hits: int
    racing: int
    remaining: int


class Histories:
    """One process that lives through many histories. `scope`: `subject` or `tenant`."""

    def __init__(self, seed: int, *, scope: str = "subject", running: str = "abort", blocks: int = 160) -> None:
        self.random = random.Random(seed)
        self.clock = VirtualClock()
        self.scope = scope
        self.memory = TensorMemory.allocate(blocks, SPEC, clock=self.clock)
        policy = POLICY.replace("scope: subject", f"scope: {scope}").replace("60%", "100%")
        policy += f"\nerasure: {{within: 30s, running: {running}}}\n"
        self.governor = governor(blocks, self.clock, self.memory, policy)
        self.live: dict[object, int] = {}
        self.total = dict.fromkeys(Tally._fields, 0)

    def run(self, histories: int) -> Tally:
        for _ in range(histories):
            for _ in range(self.random.randrange(3, 9)):
                self.act()
            self.erase()
        return Tally(**self.total)

    def act(self) -> None:
        chance = self.random.random()
        if chance < 0.6:
            self.start(self.random.choice(WHO))
        elif chance < 0.85 and self.live:
            self.leave(self.random.choice(list(self.live)))
        else:
            self.tick(self.random.randrange(1, 3 * MICROSECONDS))

    def start(self, who: tuple[str, str]) -> None:
        tokens = self.random.choice(HEADS)[: 4 * self.random.randrange(1, 7)]
        tokens = tokens + [self.random.randrange(1000, 9000) for _ in range(self.random.randrange(1, 9))]
        got = self.governor.admit(person(*who), MODEL, tokens)
        if not isinstance(got, Admission):
            return
        self.memory.fill(got.blocks[got.hit_tokens // 4 :], 1 + WHO.index(who))
        self.governor.commit([got.request_id], [len(tokens)])
        self.live[got.request_id] = 1 + WHO.index(who)
        if len(self.live) > 4:
            self.leave(next(iter(self.live)))

    def leave(self, request: object) -> None:
        self.live.pop(request, None)
        self.governor.release(request)

    def tick(self, microseconds: int) -> None:
        self.clock.advance(microseconds)
        for request in self.governor.step():
            self.live.pop(request, None)

    def probe(self, who: tuple[str, str], head: list[int]) -> int:
        """Whole blocks that a principal would hit; nothing is computed, so nothing of it is ever published."""
        got = self.governor.admit(person(*who), MODEL, [*head, 1])
        if not isinstance(got, Admission):
            return -1
        self.governor.release(got.request_id, "probed")
        return got.hit_tokens // 4

    def erase(self) -> None:
        who = self.random.choice(WHO)
        selector = Selector(who[0], who[1] if self.random.random() < 0.7 else None)
        inside = [one for one in WHO if one[0] == who[0] and selector.subject in (None, one[1])]
        others = [one for one in WHO if one[0] != who[0]]  # of another tenant
        if self.scope == "subject":
            others = [one for one in WHO if one not in inside]
        before = {(one, at): self.probe(one, head) for one in others for at, head in enumerate(HEADS)}
        racing = sum(1 for byte in self.live.values() if WHO[byte - 1] in inside)
        result = self.governor.erase(selector)
        pool = self.governor.managers[0].pool
        kept = np.where((pool.state == ACTIVE) | (pool.state == CACHED), pool.generation, -1)
        self.acknowledge(result.erasure)
        done = self.governor.erasures.result(result.erasure)
        assert done is not None and done.is_complete
        after = {(one, at): self.probe(one, head) for one in others for at, head in enumerate(HEADS)}
        total = self.total
        total["histories"] += 1
        total["racing"] += racing
        total["erased_blocks"] += result.ended_blocks
        total["remaining"] += done.remaining_blocks
        total["canaries"] += self.canaries(inside, kept=kept)
        if selector.subject is None or self.scope == "subject":
            total["lookups"] += sum(self.probe(one, head) for one in inside for head in HEADS)
        total["changed_hits"] += before != after
        total["others_hits"] += sum(before.values())

    def acknowledge(self, erasure: str) -> None:
        """Steps until the process says that it is done; who may finish does, some with delay."""
        while erasure in self.governor.erasures.pending:
            for request in list(self.live):
                if request not in self.governor.running or self.random.random() < 0.3:
                    self.leave(request)
            self.tick(300_000)
        self.live = {one: byte for one, byte in self.live.items() if one in self.governor.running}

    def canaries(self, inside: list[tuple[str, str]], *, kept: NDArray[np.int64]) -> int:
        """Blocks that hold an erased writer's byte, but for those that others held or used when it was erased.

        An erased principal that still holds anything counts too.
        """
        residue = np.zeros(self.memory.blocks, dtype=np.bool_)
        for one in inside:
            pattern = np.uint16((1 + WHO.index(one)) * 257)
            for words in self.memory.tables[0].words:
                rows = words.view(torch.int16).numpy().view(np.uint16).reshape(words.shape[0], -1)
                residue |= (rows == pattern).any(axis=1)
        manager = self.governor.managers[0]
        holders = [hold for account in manager.accounts.values() for hold in manager.hold_table.of(account)]
        holders += [sequence.residency for sequence in self.governor.running.values()]
        theirs = {(hold.facts.tenant, hold.facts.principal.subject) for hold in holders}  # type: ignore[attr-defined]
        if self.scope == "tenant":
            residue &= manager.pool.generation != kept
        return int(np.count_nonzero(residue)) + len(theirs & set(inside))
