"""A forecast of our own pools under the policy: block managers without memory, for monitored requests.

    forecast.judge(request, plan, read, prompt, now_us)            # what it would find: `request.forecast_blocks`
    forecast.begin(request.run, record, now_us)                    # it has begun; `record` says so once that is known
    forecast.computed(request, tokens, now_us); forecast.extend([request, ...], tokens, now_us)
    child = forecast.fork(request, now_us)                         # a second one runs on its blocks
    forecast.end(request, cause, now_us)                           # and it is over

It is the code that enforces, over the same number of blocks: quotas, eviction, deadlines, fences and forks of a path
are not modelled a second time.

- Its domains are twins of the policy's, with the same keys, limits and owner.
- What would be put off waits here, oldest first, while the real request runs. It may begin after that has ended.
- Nothing of it is on record, no block of it exists, and nobody is served from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.manager.check_invariants import check
from kvcustody.allocator.pool.accounting import Domain, OwnerData
from kvcustody.allocator.pool.memory_protocol import UnbackedMemory
from kvcustody.allocator.prefix.block_priority import BlockPriority
from kvcustody.allocator.prefix.longest_prefix import Chain, PrefixMatch, Prompt, ReadPlan
from kvcustody.allocator.prefix.sequence import RunningSequence
from kvcustody.clock import Clock
from kvcustody.errors import CapacityError
from kvcustody.governance.decisions.access_plan import Plan
from kvcustody.governance.governor.end_domains import end_domains
from kvcustody.governance.governor.pools import Pools
from kvcustody.governance.monitoring.monitor import ForecastRun, MonitoredRequest, WaitingForecast
from kvcustody.policies.table.decision_table import DecisionTable


class PoolRun(ForecastRun):
    """One monitored request in the forecast pool."""

    __slots__ = (
        "can_preempt",
        "computed",
        "forks",
        "found",
        "is_over",
        "lookahead_tokens",
        "plan",
        "policy_read",
        "priorities",
        "prompt",
        "read",
        "record",
        "request",
        "sequence",
        "tokens",
    )

    def __init__(
        self,
        request: MonitoredRequest,
        plan: Plan[BlockManager],
        policy_read: ReadPlan,
        read: ReadPlan,
        prompt: Prompt,
        match: PrefixMatch | None,
    ) -> None:
        self.request = request
        self.plan = plan
        self.policy_read = policy_read
        self.read = read  # the same in twins
        self.prompt = prompt
        self.found = match  # until it begins
        self.priorities: tuple[BlockPriority, ...] = ()
        self.lookahead_tokens = 0
        self.can_preempt = False
        self.sequence: RunningSequence | None = None
        self.computed = 0  # tokens, while it waits
        self.tokens: list[int] | None = []  # accepted while it waits; None: the engine withholds them
        self.forks: list[tuple[int, PoolRun]] = []  # while it waits: after how many tokens
        self.is_over = False
        self.record: Callable[[], None] | None = None  # until what it would have found is known


class ForecastPools(WaitingForecast[PoolRun]):
    """The pool as it would be if the policy were enforced. Belongs to the Governor's owning thread.

    It has no pool before the first monitored request (`is_open`), and does nothing.
    """

    def __init__(self, pools: Pools, clock: Clock) -> None:
        """`pools`: those that serve."""
        super().__init__()
        self._pools = pools.like(lambda blocks: UnbackedMemory(blocks, 0, clock=clock))
        self.is_open = False
        self._table: DecisionTable
        self._manager: BlockManager
        self._twins: WeakKeyDictionary[Domain, Domain] = WeakKeyDictionary()
        self._fences: dict[int, int] = {}

    def open(self, table: DecisionTable) -> None:
        """Make the pool if there is none, with the quotas of `table`."""
        if not self.is_open:
            self._table, self.is_open = table, True
            self._pools.boot(table)
            self._manager = self._pools.managers[0]
            self._discard()

    def check(self) -> list[str]:
        """Return the problems of its books, as `Governor.check` does."""
        return check(self._manager)

    def limit(self, table: DecisionTable) -> None:
        """Apply new quotas."""
        if self.is_open:
            self._table = table
            self._pools.limit(table)

    # -- requests -----------------------------------------------------------------------------------------------------

    def judge(
        self,
        request: MonitoredRequest,
        plan: Plan[BlockManager],
        read: ReadPlan,
        prompt: Prompt,
        now_us: int,
    ) -> None:
        """Find what the request could read from the forecast cache under the policy."""
        self._manager.sweep(now_us)
        self.start_waiting(now_us)
        try:
            twins = self._read(read, now_us)
        except CapacityError:
            return  # no room for an unlisted tenant: it would not be admitted
        found = self._manager.match_prefix(twins, prompt, now_us)
        request.forecast_blocks = found.hit_blocks
        request.run = PoolRun(request, plan, read, twins, prompt, found)

    def begin(self, run: PoolRun, record: Callable[[], None], now_us: int) -> None:
        """Begin a request that was admitted now; its match is still valid. `record` is called once, when the outcome is
        known.
        """
        run.record = record
        if not self._start(run, now_us):
            self._wait(run)

    def computed(self, monitored: OwnerData, tokens: int, now_us: int) -> None:
        """Note the number of computed leading tokens."""
        run = _run_of(monitored)
        if run is not None and not run.is_over:
            run.computed = tokens
            if run.sequence is not None:
                self._manager.commit(run.sequence, tokens, now_us)
                self._discard()

    def extend(self, requests: Sequence[OwnerData | None], tokens: NDArray[np.int32] | None, now_us: int) -> None:
        """Give each monitored request one more token; one that would get no room is preempted."""
        at, slots = [], []
        for place, request in enumerate(requests):
            run = _run_of(request)
            if run is None or run.is_over:
                continue
            if run.sequence is not None:
                at.append(place)
                slots.append(run.sequence.slot)
            elif tokens is None:
                run.tokens = None
            elif run.tokens is not None:
                run.tokens.append(int(tokens[place]))
        if slots:
            given = None if tokens is None else tokens[at]
            stalled = {id(one) for one in self._manager.extend_many(np.array(slots, dtype=np.int64), given, now_us)}
            for place in at if stalled else ():
                run = _run_of(requests[place])
                if run is not None and id(run.sequence) in stalled:
                    self._end(run, "preempted", now_us)

    def fill(self, monitored: OwnerData, tokens: NDArray[np.int32] | None) -> None:
        """Note that its last block is full."""
        run = _run_of(monitored)
        if run is not None and not run.is_over:
            if run.sequence is not None:
                self._manager.fill(run.sequence, tokens)
            elif tokens is None:
                run.tokens = None
            elif run.tokens is not None:
                run.tokens += tokens.tolist()

    def fork(self, request: MonitoredRequest, now_us: int) -> MonitoredRequest:
        """Start a second request on its blocks; it waits while its parent waits."""
        child, run = request.forked(), _run_of(request)
        if run is None or run.is_over:
            return child
        child.run = forked = PoolRun(child, run.plan, run.policy_read, run.read, run.prompt, None)
        forked.computed, forked.priorities = run.computed, run.priorities
        if run.sequence is not None:
            self._fork(run.sequence, forked, now_us)
        elif run.tokens is not None:
            run.forks.append((len(run.tokens), forked))
        return child

    def end(self, monitored: OwnerData, cause: str, now_us: int) -> None:
        """End a request; a second call changes nothing."""
        run = _run_of(monitored)
        if run is not None:
            if run.sequence is not None:
                self._end(run, cause, now_us)
            elif cause == "finished":
                run.is_over = True  # it waits still, and will run at once
            else:
                self._drop(run)

    def forget(self, covers: Callable[[Domain], bool], now_us: int) -> None:
        """Forget the blocks that an erasure ends, or those of tenants that are enforced now."""
        if not self.is_open:
            return
        for twin in self._twins.values():
            if covers(twin):
                twin.is_open = False
        end_domains(self._manager, covers, now_us)
        for run in [run for run in self._waiting if covers(run.read.own.domain)]:
            self._drop(run)
        self._discard()

    def forget_tenant(self, tenant: str, now_us: int) -> None:
        """Forget an unlisted tenant that has left."""
        if self._pools.seat(tenant) is not None:
            self.forget(lambda domain: domain.owner.name == tenant, now_us)
            self._pools.leave(tenant)

    # -- time ---------------------------------------------------------------------------------------------------------

    def step(self, now_us: int) -> None:
        """Advance time as `Governor.step` does: expiry, reserve, and the end of requests that run too long."""
        if not self.is_open:
            return
        for sequence in self._manager.step(now_us):
            if isinstance(sequence.id, PoolRun):
                self._end(sequence.id, "active-max", now_us)
        self.start_waiting(now_us)
        self._discard()

    def fence(self, number: int, requests: Iterable[OwnerData | None], now_us: int) -> None:
        """Note that a device step is in flight over these requests' blocks."""
        runs = map(_run_of, requests)
        running = [run.sequence for run in runs if run is not None and run.sequence is not None]
        if running:
            opened = self._pools.open_fence({0}, now_us)
            self._fences[number] = opened.number
            for sequence in running:
                sequence.fence = opened.by_pool[0]

    def retire(self, number: int) -> None:
        """Note that the step has retired."""
        fence = self._fences.pop(number, None)
        if fence is not None:
            self._pools.retire_fence(fence)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _start(self, run: PoolRun, now_us: int) -> bool:
        manager, plan, read = self._manager, run.plan, run.read
        found, run.found = run.found or manager.match_prefix(read, run.prompt, now_us), None
        account = read.own.domain.owner
        begun = manager.allocate(
            run,
            found,
            run.prompt,
            manager.residency(account, read.own.domain, plan.subject_key, None, now_us),
            now_us,
            active_us=plan.active_us,
            lookahead_tokens=run.lookahead_tokens,
            can_preempt=run.can_preempt,
        )
        self._discard()
        if isinstance(begun, str):
            return False
        begun.priorities = run.priorities
        run.sequence, run.request.forecast_blocks = begun, begun.hit_blocks
        _put_on_record(run)
        return True

    def _is_idle(self) -> bool:
        return not self._fences and all(sequence is None for sequence in self._manager.decode.sequences)

    def _catch_up(self, run: PoolRun, now_us: int) -> None:
        """What the real request did while this one waited."""
        sequence, tokens = run.sequence, run.tokens
        assert sequence is not None
        self._manager.commit(sequence, min(run.computed, run.prompt.tokens), now_us)
        self._fork_at(run, 0, now_us)
        for at, token in enumerate(tokens or (), 1):
            slots = np.array([sequence.slot], dtype=np.int64)
            if self._manager.extend_many(slots, np.array([token], dtype=np.int32), now_us):
                self._end(run, "preempted", now_us)
                return
            self._fork_at(run, at, now_us)
        if run.is_over or tokens is None:
            self._end(run, "finished", now_us)
        self._discard()

    def _fork_at(self, run: PoolRun, tokens: int, now_us: int) -> None:
        """Those that were forked from it after so many tokens."""
        for at, forked in run.forks:
            if at == tokens and run.sequence is not None:
                self._fork(run.sequence, forked, now_us)
                self._catch_up(forked, now_us)

    def _fork(self, parent: RunningSequence, run: PoolRun, now_us: int) -> None:
        manager, own = self._manager, run.read.own.domain
        residency = manager.residency(own.owner, own, run.plan.subject_key, None, now_us)
        run.sequence = manager.fork(parent, run, residency, now_us)
        run.sequence.priorities = run.priorities
        self._discard()

    def _end(self, run: PoolRun, cause: str, now_us: int) -> None:
        sequence, run.sequence, run.is_over = run.sequence, None, True
        assert sequence is not None
        self._manager.release(sequence, now_us, cause)
        self._discard()

    def _drop(self, run: PoolRun) -> None:
        run.is_over = True
        _put_on_record(run)
        if run in self._waiting:
            self._waiting.remove(run)

    def _read(self, read: ReadPlan, now_us: int) -> ReadPlan:
        return ReadPlan(
            self._chain(read.own, now_us),
            None if read.segment is None else self._chain(read.segment, now_us),
            read.segment_blocks,
            tuple(self._chain(chain, now_us) for chain in read.grants),
        )

    def _chain(self, chain: Chain, now_us: int) -> Chain:
        domain = chain.domain
        twin = self._twins.get(domain)
        limits = domain.limits._replace(verify_share=0.0, integrity_share=0.0)
        if twin is None or not twin.is_open:
            account, _ = self._pools.account(domain.owner.name, self._table)
            twin = self._twins[domain] = self._manager.domain(
                account,
                label=domain.label,
                idle_us=limits.idle_us,
                absolute_us=limits.absolute_us,
                scrub_within_us=limits.scrub_within_us,
                is_segment=domain.is_segment,
                reach=domain.reach,
            )
        elif twin.limits != limits:
            self._manager.set_limits({twin: limits}, now_us)
        twin.is_withheld = domain.is_withheld
        return Chain(twin, chain.state)

    def _discard(self) -> None:
        """No evidence is kept of what never was."""
        pool = self._manager.pool
        pool.ended.clear()
        pool.receipts.clear()
        pool.released.clear()
        pool.attached.clear()


def _run_of(monitored: OwnerData | None) -> PoolRun | None:
    """Its run; None where it is not monitored, or takes nothing here."""
    run = monitored.run if isinstance(monitored, MonitoredRequest) else None
    return run if isinstance(run, PoolRun) else None


def _put_on_record(run: PoolRun) -> None:
    record, run.record = run.record, None
    if record is not None:
        record()
