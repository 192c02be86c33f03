"""A small engine that allocates by itself, governed through the engine port: its own free list, index and device queue.

- The engine's books are its own: a free list, a dictionary of keys, reference counts. The port is told, never asked.
- Device work happens `lag` steps after it was scheduled, in order, as on a stream: scrub orders, then writes.
- What a block holds is a function of who wrote it, so residue and wrong reuse show.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Engine

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.allocator.external.scrub_queue import ScrubOrder
from kvcustody.allocator.pool.tensor_memory import TensorMemory
from kvcustody.audit.evidence.coverage.conservation import ConservationIdentity, conservation
from kvcustody.audit.kinds import Event, WorkerStarted
from kvcustody.clock import MICROSECONDS, VirtualClock
from kvcustody.governance.external.engine_control import EngineView
from kvcustody.governance.identity.principal import Principal
from kvcustody.ids import SessionId, SubjectId, TenantId
from standins.builders import keyring, port, table, writer
from standins.robust.custody_world import BLOCK, MODEL, SHARDS, SPEC, Dropping

TENANTS = ("alpha", "beta", "gamma")
POLICY = """\
schema: kvcustody/policy@1
name: port
profile: shared
scope: tenant
classifications: [low, high]
labels: {region: [eu]}
classify:
  - {tenant: "*", as: low}
  - {tenant: gamma, as: high}
tenants:
  alpha:   {quota: {guaranteed: 20%, cap: 70%}}
  beta:    {quota: {guaranteed: 20%, cap: 70%}}
  gamma:   {quota: {guaranteed: 0%, cap: 60%}}
grants:
  - {id: beta-reads-alpha, owner: alpha, reader: beta, at_most: low, until: 2027-03-31, reason: "joint work"}
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


class Request:
    """One request of the toy engine."""

    def __init__(self, residency: ExternalResidency, tenant: str, tokens: list[int], *, most: int) -> None:
        self.residency = residency
        self.tenant = tenant
        self.tokens = tokens
        self.most = most
        self.table: list[int] = []
        self.keys: list[bytes] = []
        self.published = 0
        self.hit = 0
        self.waiting = True


class PortWorld:
    """The engine, its port and everything behind it."""

    def __init__(
        self,
        store: Engine,
        folder: Path,
        *,
        seed: int = 1,
        blocks: int = 81,
        lag: int = 0,
        policy: str = POLICY,
        chosen: Callable[[Event], bool] | None = None,
        clock: VirtualClock | None = None,
        worker: str = "worker-1",
    ) -> None:
        self.random = Random(seed)
        self.clock = clock or VirtualClock()
        self.store = store
        self.lag = lag
        self.memory = TensorMemory.allocate(blocks, SPEC, shards=SHARDS, clock=self.clock)
        self.memory.fill(np.arange(blocks), 99)  # what was in the memory before us
        self.keyring = keyring(folder, self.clock)
        self.writer = writer(store, folder / "spill", worker=worker, clock=self.clock)
        size = self.memory.bytes_per_block
        self.writer.submit([WorkerStarted(self.clock.now_us(), worker, blocks - 1, SHARDS, size, "cpu", "test", 1)])
        self.ledger = Dropping(self.writer, chosen or (lambda event: False))
        self.pool = ExternalPool(blocks, shards=SHARDS, bytes_per_block=size, reserved=[0])
        self.table = table(policy)
        self.port = port(
            self.table,
            self.clock,
            engine=self,
            ledger=self.ledger,
            keys=self.keyring,
            pool=self.pool,
            block_tokens=BLOCK,
        )
        # The engine's own books.
        self.free: deque[int] = deque(range(1, blocks))
        self.unused: OrderedDict[int, None] = OrderedDict()  # indexed and unreferenced, oldest first
        self.index: dict[bytes, int] = {}
        self.key_of: dict[int, bytes] = {}
        self.refs = np.zeros(blocks, dtype=np.int64)
        self.allocated = 0
        self.withheld: set[int] = set()
        self.requests: dict[int, Request] = {}
        self.device: deque[tuple[ScrubOrder | None, list[tuple[int, int, int]], int]] = deque()
        self.writes: list[tuple[int, int, int]] = []
        self.dirty_at_first_write = 0
        self.first_writes = 0
        self.fresh: dict[int, int] = {}  # handed-out blocks by the residency whose write is the first
        self.number = 0
        self.seen = dict.fromkeys(("hits", "granted", "deferred", "refused", "preempted", "evicted"), 0)
        self.woken = 0

    # -- what the port orders -------------------------------------------------------------------------------

    def evict(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            key = self.key_of.pop(block, None)
            if key is not None and self.index.get(key) == block:
                del self.index[key]
            if block in self.unused:
                del self.unused[block]
                self.free.appendleft(block)

    def abort(self, request_ids: Sequence[object], cause: str) -> None:
        for number in list(self.requests):
            if number in request_ids:
                self.end(number, cause)

    def withhold(self, blocks: Sequence[int]) -> None:
        self.withheld.update(blocks)
        self.free = deque(block for block in self.free if block not in self.withheld)

    def wake(self) -> None:
        self.woken += 1

    def view(self) -> EngineView:
        indexed = np.zeros(self.pool.blocks, dtype=np.bool_)
        indexed[list(self.key_of)] = True
        return EngineView(self.refs.copy(), indexed, frozenset(self.requests), self.allocated)

    # -- requests -------------------------------------------------------------------------------------------

    def arrive(self, tenant: str | None, tokens: list[int], most: int = 2 * BLOCK) -> int | None:
        self.number += 1
        principal = None
        if tenant is not None:
            user = f"{tenant}-user-{self.number % 3}"
            principal = Principal("idp", TenantId(tenant), SubjectId(user), SessionId(f"{user}-chat"))
        answer = self.port.admit(principal, MODEL, tokens, request_id=self.number, max_tokens=most)
        if not isinstance(answer, ExternalResidency):
            self.seen["refused"] += 1
            return None
        self.requests[self.number] = Request(answer, tenant or "", tokens, most=most)
        return self.number

    def start(self, number: int) -> bool:
        """Try to schedule one waiting request: look-up, attach, allocate."""
        request = self.requests[number]
        residency = request.residency
        if self.port.may_start(residency) is not None:
            self.seen["deferred"] += 1
            return False
        looked = self.port.look_up(residency, lambda key: self.index.get(key, -1))
        cached = []
        for key in looked.keys[: looked.readable]:
            block = self.index.get(key)
            if block is None:
                break
            cached.append(block)
        cached = cached[: self.port.attachable(residency, cached)]
        need = -(-len(request.tokens) // BLOCK) - len(cached)
        revived = [block for block in cached if block in self.unused]
        if len(self.free) + len(self.unused) - len(revived) < need:
            return False
        for block in revived:
            del self.unused[block]
        self.refs[cached] += 1
        self.port.attached(residency, cached)
        request.hit = len(cached)
        request.table, request.keys, request.published = list(cached), list(looked.keys), len(cached)
        self.seen["hits"] += len(cached)
        self.seen["granted"] += residency.granted_blocks
        self.grow(request, need)
        request.waiting = False
        return True

    def grow(self, request: Request, count: int) -> bool:
        new = self.take(request.residency, count)
        if new is None:
            return False
        self.port.handed_out(request.residency, new)
        request.table += new
        return True

    def take(self, residency: ExternalResidency, count: int) -> list[int] | None:
        if len(self.free) + len(self.unused) < count:
            return None
        short = count - len(self.free)
        if short > 0:
            chosen = self.port.victims(short)
            self.evict(chosen)
            while len(self.free) < count:
                oldest = next(iter(self.unused))
                self.seen["evicted"] += 1
                self.evict([oldest])
                self.port.unpublished([oldest])
        new = [self.free.popleft() for _ in range(count)]
        self.refs[new] = 1
        self.allocated += count
        self.fresh.update(dict.fromkeys(new, residency.id))
        return new

    def compute(self, number: int) -> None:
        """The step computes every token of the request that has no K/V yet, and publishes whole blocks."""
        request = self.requests[number]
        who = 1 + TENANTS.index(request.tenant) if request.tenant else 7
        done = len(request.tokens) // BLOCK
        for block in request.table[request.published :]:
            self.writes.append((block, who, request.residency.id))
        whole = min(done, len(request.keys))
        for position in range(request.published, whole):
            block, key = request.table[position], request.keys[position]
            if not request.residency.publishes or key in self.index:
                continue
            self.index[key] = block
            self.key_of[block] = key
            self.port.published(request.residency, [block], request.table[position - 1] if position else -1)
        request.published = max(request.published, whole)

    def decode(self, number: int) -> None:
        request = self.requests[number]
        full = len(request.tokens) % BLOCK == 0 and len(request.table) * BLOCK <= len(request.tokens)
        if full and not self.grow(request, 1):
            self.preempt(number)
            return
        token = self.random.randrange(1000)
        request.tokens = [*request.tokens, token]
        request.keys += self.port.extend_keys(request.residency, [token])
        self.compute(number)

    def preempt(self, number: int) -> None:
        request = self.requests[number]
        self.give_back(request, "preempted")
        again = self.port.resume(request.residency, request.tokens)
        assert isinstance(again, ExternalResidency)
        fresh = Request(again, request.tenant, request.tokens, most=request.most)
        self.requests[number] = fresh
        self.seen["preempted"] += 1

    def end(self, number: int, cause: str = "finished") -> None:
        request = self.requests.pop(number)
        self.give_back(request, cause)

    def give_back(self, request: Request, cause: str) -> None:
        blocks, request.table = request.table, []
        self.writes = [write for write in self.writes if write[2] != request.residency.id]
        self.refs[blocks] -= 1
        for block in reversed(blocks):
            if self.refs[block]:
                continue
            if block in self.key_of:
                self.unused[block] = None
            elif block not in self.withheld:
                self.free.appendleft(block)
        self.port.release(request.residency, cause)
        assert not self.port.release(request.residency, cause)

    # -- steps ----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """End of one engine step: the order and the writes go to the device; what is due there retires."""
        order = self.port.step()
        fence = self.port.fence()
        self.device.append((order, self.writes, fence))
        self.writes = []
        while len(self.device) > self.lag:
            self.retire()

    def retire(self) -> None:
        order, writes, fence = self.device.popleft()
        if order is not None:
            for shard in range(SHARDS):
                results = [self.memory.scrub(shard, blocks, share) for share, blocks in order.batches]
                self.port.scrubbed(order.number, shard, results, self.memory.scrubbed(shard))
        for block, who, first in writes:
            if self.fresh.get(block) == first:
                del self.fresh[block]
                self.first_writes += 1
                self.dirty_at_first_write += int(self.memory.nonzero_bytes(np.array([block])) > 0)
            self.memory.fill(np.array([block]), who)
        self.port.retire(fence)

    def act(self) -> None:
        """One random act, and a step."""
        chance, random = self.random.random(), self.random
        running = [number for number, request in self.requests.items() if not request.waiting]
        if chance < 0.36:
            self.arrive(random.choice((*TENANTS, None)), self.prompt(), random.randrange(1, 3 * BLOCK))
        elif chance < 0.6 and running:
            for number in running:
                request = self.requests.get(number)
                if request is not None and not request.waiting and len(request.tokens) < 160:
                    self.decode(number)
        elif chance < 0.82 and self.requests:
            self.end(random.choice(list(self.requests)), random.choice(("finished", "aborted")))
        elif chance < 0.88 and running:
            self.preempt(random.choice(running))
        elif chance > 0.94:
            self.wait(random.randrange(1, 60))
        for number in [number for number, request in self.requests.items() if request.waiting]:
            if number in self.requests and self.start(number):
                self.compute(number)
        self.clock.advance(random.randrange(1, 40_000))
        self.step()

    def prompt(self) -> list[int]:
        base = 1000 * self.random.randrange(4)
        head = list(range(base, base + BLOCK * self.random.randrange(1, 6)))
        return head + [self.random.randrange(1000) for _ in range(self.random.randrange(1, 2 * BLOCK))]

    def wait(self, seconds: int) -> None:
        """Time passes with no request; the device finishes, the timer steps the engine when something is due."""
        for _ in range(seconds):
            while self.device:
                self.retire()
            self.clock.advance(MICROSECONDS)
            if self.port.has_work():
                self.step()

    def settle(self) -> None:
        """End everything, let every deadline pass, and let the device finish."""
        for number in list(self.requests):
            self.end(number)
        self.wait(700)
        self.drain()

    def drain(self) -> None:
        """Step until nothing is on its way any more."""
        for _ in range(self.lag + 3):
            self.step()
        while self.device:
            self.retire()
        self.step()
        while self.device:
            self.retire()

    def identities(self) -> tuple[ConservationIdentity, ...]:
        counts = self.port.counts()
        assert self.writer.flush()
        with self.store.connect() as connection:
            return conservation(connection, self.writer.incarnation, counts)

    def broken(self) -> dict[str, tuple[int, int]]:
        return {identity.name: (identity.left, identity.right) for identity in self.identities() if identity.difference}

    def cached(self, tenant: str) -> NDArray[np.int64]:
        """Blocks that are CACHED in a domain of `tenant`."""
        tags = [tag for tag, domain in self.pool.domains.items() if domain.owner.name == tenant]
        return np.flatnonzero((self.pool.state == 2) & np.isin(self.pool.tag, tags))
