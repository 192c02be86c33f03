"""The custodian of one Governor's classic caches: admits them, looks at their deadlines on a timer, and ends them.

1. A cache is one request to the Governor: quota, decision, runs, ends and receipts are those of any other request.
2. Nothing is looked up or published: the request has one token and asks for the rest as room, so it has no keys.
3. An ended cache is zero, and its evidence with the ledger's queue, when `end` or `step` returns.
4. One lock serialises the Governor. The garbage collector, which may run anywhere, never takes it: it leaves a note.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from types import TracebackType

import torch

from kvcustody.errors import AdmissionError, ConfigError, LedgerUnavailable
from kvcustody.governance.admission_outcome import Admission, Deferred
from kvcustody.governance.decisions.access_plan import Plan
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.request import NO_HINTS, Hints
from kvcustody.guarding_thread import GuardingThread
from kvcustody.integrations.transformers.classic.residency import CacheResidency
from kvcustody.integrations.transformers.classic.slab_memory import SlabMemory, SlabSize
from kvcustody.logger import get_logger
from kvcustody.policies.document.model import Action, Tier

_log = get_logger(__name__)


class Custodian:
    """Keeps the classic caches of one Governor, whose pools are `SlabMemory`. A context manager.

    While it is open it owns the Governor: other threads send their commands through `governor.call`. `tick_seconds`
    is how often the timer looks at deadlines and commands; None leaves that to calls of `step`.
    """

    def __init__(self, governor: Governor, *, tick_seconds: float | None = 0.05) -> None:
        if not governor.managers:
            raise ConfigError("the policy gives no tenant a pool of its own yet: name one with a guarantee")
        for manager in governor.managers:
            _slab_memory(manager.pool.memory)
        self.governor = governor
        self.lock = threading.RLock()
        self.now_us = governor.clock.now_us
        self._table = governor.table
        self._live: dict[object, CacheResidency] = {}
        self._dropped: deque[object] = deque()  # handles of collected caches: appended by the collector, any thread
        self._stop = threading.Event()
        self._timer: GuardingThread | None = None
        if tick_seconds is not None:
            self._timer = GuardingThread(
                _tick,
                args=(weakref.ref(self), self._stop, tick_seconds),
                name="kvcustody-caches",
            )
            self._timer.start()

    def open(
        self,
        principal: Principal,
        model: ModelIdentity,
        devices: Sequence[tuple[torch.device, int]],
        *,
        used_by: torch.device,
        route: str | None = None,
        hints: Hints = NO_HINTS,
        offloads: bool = False,
    ) -> CacheResidency:
        """Admit one cache with a slab of at least so many bytes on each of `devices`.

        Raises `AdmissionError` where the policy, a quota, the pool or the ledger does not admit it now, and
        `DeviceError` where a device has no memory left. With `offloads`, the policy must allow plain host memory.
        """
        with self.lock:
            self._collect()
            if offloads:
                self._check_offload(principal, model, route, hints)
            size = self.governor.managers[0].pool.memory.bytes_per_block
            sizes = [SlabSize(-(-count // size), device, used_by) for device, count in devices]
            admission = self._admit(principal, model, sum(one.rows for one in sizes), route, hints)
            running = self.governor.running[admission.request_id]
            plan = running.residency.facts
            assert isinstance(plan, Plan)
            owed = self.governor.table.obligations(plan.tenant, plan.level)
            residency = CacheResidency(self, admission.request_id, running, owed)
            try:
                residency.slabs = _slab_memory(plan.manager.pool.memory).bind(admission.blocks, sizes)
            except BaseException:
                self.governor.release(residency.handle, "aborted")
                self._scrub_ended()
                raise
            self._live[residency.handle] = residency
            return residency

    def _admit(
        self, principal: Principal, model: ModelIdentity, blocks: int, route: str | None, hints: Hints
    ) -> Admission:
        room = blocks * self.governor.block_tokens - 1  # rule 2
        outcome = self.governor.admit(principal, model, [0], route=route, hints=hints, lookahead_tokens=room)
        if isinstance(outcome, Admission):
            return outcome
        is_deferred = isinstance(outcome, Deferred)
        verb = "has to wait: try again" if is_deferred else "was refused"
        raise AdmissionError(
            f"a cache of `{blocks}` blocks {verb}: `{outcome.reason}`",
            reason=outcome.reason,
            is_deferred=is_deferred,
            blocks=blocks,
        )

    def _check_offload(self, principal: Principal, model: ModelIdentity, route: str | None, hints: Hints) -> None:
        """The policy permits to offload, and allows copies in host memory as they are here: not encrypted."""
        plan = self.governor.plan_of(principal, model, route, hints)
        if plan is None:
            return  # nor is it admitted
        try:
            decision = self.governor.authorize(Action.OFFLOAD, plan)
        except LedgerUnavailable:
            raise AdmissionError(
                "a cache has to wait: try again: `ledger`", reason="ledger", is_deferred=True
            ) from None
        owed = self.governor.table.obligations(plan.tenant, plan.level)
        if not decision.permitted or Tier.HOST not in owed.tiers or owed.encrypt:
            raise AdmissionError(
                f"classification `{plan.classification}`: the policy does not allow plain copies in host memory "
                f"(`{decision.reasons[0]}`)",
                reason="offload",
                is_deferred=False,
            )

    def watch(self, residency: CacheResidency, cache: object) -> None:
        """End `residency` when `cache` is collected."""
        finalizer = weakref.finalize(cache, self._dropped.append, residency.handle)
        finalizer.atexit = False

    def end(self, residency: CacheResidency, cause: str) -> bool:
        """Zero `residency` and end its custody; False where it had ended already (rule 3)."""
        with self.lock:
            if not self.governor.release(residency.handle, cause):
                return False
            residency.ended_by = cause
            self._scrub_ended()
            return True

    def step(self) -> int:
        """Commands, deadlines, collected caches, scrub and evidence; returns how many caches ended."""
        with self.lock:
            before = len(self._live)
            self._collect()
            if self.governor.table is not self._table:
                self._rebind()
            now_us = self.now_us()
            for residency in list(self._live.values()):
                cause = residency.overdue(now_us)
                if cause is not None and self.governor.release(residency.handle, cause):
                    residency.ended_by = cause
            self.governor.step()
            self._scrub_ended()
            return before - len(self._live)

    def _collect(self) -> None:
        """Release what the garbage collector has dropped: it may run anywhere, so it only leaves a note."""
        while self._dropped:
            self.governor.release(self._dropped.popleft(), "collected")

    def _rebind(self) -> None:
        self._table = self.governor.table
        for residency in self._live.values():
            plan = residency.plan
            residency.bind(self._table.obligations(plan.tenant, plan.level))

    def _scrub_ended(self) -> None:
        """Zero what has ended, now rather than when a launch is worth it, and hand over the evidence (rule 3)."""
        ended = [residency for residency in self._live.values() if not residency.is_running()]
        for residency in ended:
            del self._live[residency.handle]
            residency.ended_by = residency.ended_by or "released by the governor"
            residency.drop_tensors()
        now_us = self.now_us()
        for manager in self.governor.managers:
            for partition in manager.pool.partitions:
                manager.pool.reclaim(partition, now_us, manager.options.fence_bound_us)
                if partition.dirty_blocks:
                    manager.pool.scrub(partition, partition.dirty_blocks)
        self.governor.step()

    def close(self) -> None:
        """Stop the timer and end every cache; a second time changes nothing."""
        self._stop.set()
        if self._timer is not None and self._timer is not threading.current_thread():
            self._timer.join()
        with self.lock:
            self._collect()
            for residency in list(self._live.values()):
                self.end(residency, "shutdown")

    def __enter__(self) -> Custodian:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _tick(custodian: weakref.ref[Custodian], stop: threading.Event, seconds: float) -> None:
    """The timer: it must outlive any one failure, since deadlines hang on it."""
    while not stop.wait(seconds):
        alive = custodian()
        if alive is None:
            return
        try:
            alive.step()
        except Exception as error:
            _log.error("caches could not be stepped", error=str(error))
        del alive


def _slab_memory(memory: object) -> SlabMemory:
    if not isinstance(memory, SlabMemory):
        raise ConfigError(
            f"this governor's pool is a `{type(memory).__name__}`: for classic caches, open a worker with "
            "`SlabMemory.plan`"
        )
    return memory
