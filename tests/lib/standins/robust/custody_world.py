"""One process's custody from end to end: Governor, tensors on two shards, keyring on disk, writer, ledger.

- Nothing is a stand-in except the clock, which moves when the workload says so.
- A workload is a function of its seed, so that two runs differ only in what a test changes.
- What a test removes, it removes between the Governor and the writer: one event, once (`Dropping`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from sqlalchemy import Engine

from kvcustody.allocator.pool.options import PoolOptions
from kvcustody.allocator.pool.tensor_memory import TensorMemory, TensorSpec
from kvcustody.audit.evidence.coverage.conservation import ConservationIdentity, conservation
from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys
from kvcustody.audit.kinds import Event, WorkerStarted
from kvcustody.audit.write.event_queue import TenantShares
from kvcustody.audit.write.event_writer import WriterSettings
from kvcustody.clock import MICROSECONDS, Clock, VirtualClock
from kvcustody.errors import HandleError
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.ledger_protocol import Ledger
from kvcustody.ids import SessionId, SubjectId, TenantId
from kvcustody.tenants import Issuers
from kvcustody.testkit.tiny_model import tiny_model
from standins.builders import QUICK, governor, keyring, table, writer

BLOCK = 16
SHARDS = 2
TENANTS = ("alpha", "beta", "gamma")
SPEC = TensorSpec(layers=1, kv_heads=1, head_dim=8, block_tokens=BLOCK, dtype=torch.float16)
POLICY = """\
schema: kvcustody/policy@1
name: custody
profile: shared
scope: tenant
classifications: [low, high]
labels: {region: [eu]}
classify:
  - {tenant: "*", as: low}
  - {tenant: beta, as: high}
tenants:
  alpha:   {quota: {guaranteed: 20%, cap: 70%, borrow: true}}
  beta:    {quota: {guaranteed: 20%, cap: 70%, borrow: true}}
  default: {quota: {guaranteed: 0%, cap: 60%, borrow: true}}
rules:
  - {id: own, effect: permit, action: reuse, when: {reader: owner}}
retention:
  low:  {idle: 2m, absolute: 10m, active_max: 1h}
  high: {idle: 90s, absolute: 5m, active_max: 1h}
scrub:
  default: {within: 5s, verify: 1/4}
  high: {within: 5s, verify: all}
offload: {low: never, high: never}
audit:
  on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}
eviction: {policy: lru}
"""
MODEL = tiny_model(
    weights_digest="sha256:w",
    tokenizer_digest="sha256:t",
    chat_template="template-1",
    kv_layout="nhd",
    block_tokens=BLOCK,
    attention={"heads": 1, "head_dim": 8},
)


class Dropping:
    """A ledger that forgets every event `chosen` says, and remembers what it forgot."""

    def __init__(self, ledger: Ledger, chosen: Callable[[Event], bool]) -> None:
        self._ledger = ledger
        self._chosen = chosen
        self.dropped: list[Event] = []

    @property
    def admitting(self) -> bool:
        return self._ledger.admitting

    @property
    def recording(self) -> bool:
        return self._ledger.recording

    @property
    def shares(self) -> TenantShares:
        return self._ledger.shares

    def issuers(self) -> Issuers:
        return self._ledger.issuers()

    def submit(self, events: Sequence[Event], /) -> int:
        kept = []
        for event in events:
            if self._chosen(event):
                self.dropped.append(event)
            else:
                kept.append(event)
        return self._ledger.submit(kept)

    def submit_durable(self, event: Event, /) -> int:
        return self._ledger.submit_durable(event)


class CustodyWorld:
    """A Governor with everything behind it, and the workload that keeps it busy."""

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        *,
        seed: int = 1,
        blocks: int = 80,
        worker: str = "worker-1",
        chosen: Callable[[Event], bool] | None = None,
        clock: VirtualClock | None = None,
        settings: WriterSettings = QUICK,
        windows: tuple[int, ...] = (),
        memory: Callable[[int, Clock], TensorMemory] | None = None,
        keys: SubjectKeys | None = None,
    ) -> None:
        self.random = Random(seed)
        self.clock = clock or VirtualClock()
        self.engine = engine
        make = memory or (lambda count, at: TensorMemory.allocate(count, SPEC, shards=SHARDS, clock=at))
        self.memory = make(blocks, self.clock)
        self.keyring = keyring(folder, self.clock)
        self.writer = writer(engine, folder / "spill", worker=worker, clock=self.clock, settings=settings, keys=keys)
        size = self.memory.bytes_per_block
        self.writer.submit([WorkerStarted(self.clock.now_us(), worker, blocks, SHARDS, size, "cpu", "test", 1)])
        self.ledger = Dropping(self.writer, chosen or (lambda event: False))
        options = PoolOptions(
            block_tokens=BLOCK, reserve_low=4, reserve_high=8, evict_ahead=4, scrub_batch=8, windows=windows
        )
        self.governor = governor(
            table(POLICY),
            self.clock,
            ledger=self.ledger,
            keys=self.keyring,
            blocks=blocks,
            memory=lambda _: self.memory,
            options=options,
        )
        self.lengths: dict[object, int] = {}
        self.fences: list[int] = []
        self.seen: dict[str, int] = dict.fromkeys(
            ("admitted", "deferred", "hits", "forked", "aborted", "preempted", "copied"), 0
        )
        self._number = 0

    # -- the workload ----------------------------------------------------------------------------------------

    def run(self, steps: int) -> CustodyWorld:
        """Act `steps` times."""
        for _ in range(steps):
            self.act()
        return self

    def act(self) -> None:
        """One random act of the engine or its clients, and a step of the engine."""
        chance = self.random.random()
        if chance < 0.34:
            self.admit(self.random.choice(TENANTS))
        elif chance < 0.58:
            self.decode()
        elif chance < 0.64:
            self.fork()
        elif chance < 0.84:
            self.leave()
        elif chance < 0.88:
            self.fence()
        elif chance < 0.91:
            self.break_a_block()
        else:
            self.wait(self.random.randrange(1, 90))
        self.clock.advance(self.random.randrange(1, 40_000))
        self.step()

    def step(self) -> None:
        """The engine's own step; requests that were active too long are gone after it."""
        for request_id in self.governor.step():
            self.lengths.pop(request_id, None)

    def wait(self, seconds: int) -> None:
        """Time passes and the engine's timer ticks every second."""
        for _ in range(seconds):
            self.clock.advance(MICROSECONDS)
            self.step()

    def admit(self, tenant: str, tokens: NDArray[np.int32] | None = None) -> Admission | None:
        """Admit a prompt of `tenant` (a known beginning, a new end), and compute it."""
        prompt = self.prompt(tenant) if tokens is None else tokens
        self._number += 1
        user = f"{tenant}-user-{self._number % 3}"
        principal = Principal("idp", TenantId(tenant), SubjectId(user), SessionId(f"{user}-chat"))
        answer = self.governor.admit(principal, MODEL, prompt, request_id=self._number)
        if not isinstance(answer, Admission):
            self.seen["deferred"] += 1
            return None
        hit = answer.hit_tokens // BLOCK
        self.memory.fill(answer.blocks[hit:], 1 + TENANTS.index(tenant))
        self.governor.commit((answer.request_id,), (len(prompt),))
        self.lengths[answer.request_id] = len(prompt)
        self.seen["admitted"] += 1
        self.seen["hits"] += hit
        return answer

    def prompt(self, tenant: str) -> NDArray[np.int32]:
        """One of four beginnings of the tenant and a few tokens that are new."""
        which = self.random.randrange(4)
        base = 10_000 * (1 + TENANTS.index(tenant)) + 1000 * which
        head = np.arange(base, base + BLOCK * self.random.randrange(1, 6), dtype=np.int32)
        tail = [self.random.randrange(1000) for _ in range(self.random.randrange(1, 3 * BLOCK))]
        return np.concatenate((head, np.array(tail, dtype=np.int32)))

    def decode(self) -> None:
        """A few tokens for every running request: growth, and copies of shared tails."""
        for _ in range(self.random.randrange(1, 12)):
            ids = list(self.lengths)
            stalled = set(self.governor.extend_many(ids, [self.random.randrange(1000) for _ in ids]))
            for request_id in ids:
                if request_id not in stalled:
                    self.lengths[request_id] += 1

    def fork(self) -> None:
        if not self.lengths:
            return
        parent = self.random.choice(list(self.lengths))
        self._number += 1
        child = self.governor.fork(parent, self._number)
        self.lengths[child.request_id] = self.lengths[parent]
        self.seen["forked"] += 1

    def leave(self) -> None:
        """A request finishes, is aborted or is preempted."""
        if not self.lengths:
            return
        request_id = self.random.choice(list(self.lengths))
        del self.lengths[request_id]
        how = self.random.random()
        if how < 0.6:
            self.governor.release(request_id)
        elif how < 0.85:
            self.governor.abort(request_id)
            self.seen["aborted"] += 1
        else:
            self.governor.preempt(request_id)
            self.seen["preempted"] += 1

    def fence(self) -> None:
        """A device step begins over some requests, or the oldest one retires."""
        if self.fences and self.random.random() < 0.6:
            self.governor.retire(self.fences.pop(0))
        elif self.lengths:
            chosen = self.random.sample(list(self.lengths), 1 + len(self.lengths) // 2)
            self.fences.append(self.governor.fence(chosen))

    def break_a_block(self) -> None:
        """From now on some block of one shard refuses to become zero (at most three blocks do)."""
        if len(self.memory.stuck) < 3:
            self.memory.stuck.add((self.random.randrange(SHARDS), self.random.randrange(self.memory.blocks)))

    def settle(self) -> None:
        """Finish every request, let every deadline pass and scrub all of it."""
        for fence in self.fences:
            self.governor.retire(fence)
        self.fences.clear()
        for request_id in list(self.lengths):
            self.governor.release(request_id)
        self.lengths.clear()
        self.wait(660)

    # -- what is checked -------------------------------------------------------------------------------------

    def identities(self) -> tuple[ConservationIdentity, ...]:
        """Every conservation identity, now."""
        counts = self.governor.counts()
        assert self.writer.flush()
        with self.engine.connect() as connection:
            return conservation(connection, self.writer.incarnation, counts)

    def broken(self) -> set[str]:
        """The names of the identities that do not hold, without their numbers."""
        return {identity.name for identity in self.identities() if identity.difference}

    def handles_are_dead(self) -> bool:
        """No request runs any more, and asking for one says so."""
        try:
            self.governor.blocks(("alpha", 1))
        except HandleError:
            return not self.governor.running
        return False

    def close(self) -> None:
        """End everything in order."""
        self.governor.close()
        self.lengths.clear()
        self.writer.flush()
