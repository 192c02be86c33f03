"""The custodian of one Governor's classic caches: it admits them, checks their deadlines on a timer, and ends them.

1. A cache is one request to the Governor: quota, decision, runs, ends and receipts are those of any other request.
2. Nothing is looked up or published: the request has one token and asks for the rest as room, so it has no keys.
3. An ended cache is zero, and its evidence with the ledger's queue, when `end` or `step` returns.
4. One lock serialises the Governor. The garbage collector, which may run anywhere, never takes it: it leaves a note.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvcustody.allocator.pool.memory_protocol import NO_BLOCKS, ScrubResult
from kvcustody.allocator.pool.tensor_memory import TensorMemory
from kvcustody.clock import Clock, SystemClock
from kvcustody.errors import AdmissionError, ConfigError, DeviceError, IsolationError, LedgerUnavailable
from kvcustody.governance.admission_outcome import Admission, Deferred
from kvcustody.governance.decisions.access_plan import Plan
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.request import NO_HINTS, Hints
from kvcustody.governance.worker.worker import MemoryPlan
from kvcustody.guarding_thread import GuardingThread
from kvcustody.integrations.transformers.classic.residency import CacheResidency
from kvcustody.kernels.streams import outside_captures
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
            raise ConfigError("the policy gives no tenant its own pool yet: name one with a guarantee")
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
        """Admit one cache with a slab of at least that many bytes on each of `devices`.

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
        """Require that the policy permits offloading, and unencrypted copies in host memory."""
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
        """Zero `residency` and end its custody; return False where it had ended already (rule 3)."""
        with self.lock:
            if not self.governor.release(residency.handle, cause):
                return False
            residency.ended_by = cause
            self._scrub_ended()
            return True

    def step(self) -> int:
        """Run commands, deadlines, collected caches, scrub and evidence; return how many caches ended."""
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
        """Release caches that the garbage collector dropped; it may run anywhere, so it only leaves a note."""
        while self._dropped:
            self.governor.release(self._dropped.popleft(), "collected")

    def _rebind(self) -> None:
        self._table = self.governor.table
        for residency in self._live.values():
            plan = residency.plan
            residency.bind(self._table.obligations(plan.tenant, plan.level))

    def _scrub_ended(self) -> None:
        """Zero ended caches now instead of waiting for a larger launch, and hand over the evidence (rule 3)."""
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
        """Stop the timer and end every cache; a second call does nothing."""
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
    """Run the timer, which must survive any failure because deadlines depend on it."""
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


# Slabs: memory that exists only while a classic cache is in custody, and that the pool sees as blocks.
#
# A classic cache needs contiguous tensors, and the pool allocates scattered blocks. So a block here is a charge of
# `bytes_per_block`, bound at admission to one row of the cache's own slab (docs/build/adr/0006-classic-caches.md).
#
# Rules of this section:
# 1. A block has bytes from `bind` until a scrub has zeroed them, and has read them back where requested.
# 2. A slab serves one cache and is never reused for another: a stale view of an ended cache reads zeros.
# 3. A row that does not become zero stays bound, and its slab with it: such memory never returns to torch's
#    allocator.
# 4. A slab is zeroed only after every GPU stream that uses it has finished, so no write follows the zeros. While an
#    engine of this process records a graph, zeroing waits, because waiting for the whole device would break the
#    recording.

BLOCK_BYTES = 64 << 10
_LEVELS = ("unread", "launched", "retired", "sampled", "full")  # weakest first


class SlabSize(NamedTuple):
    """A slab to make: `rows` blocks on `device`; `used_by` is the device whose streams write it."""

    rows: int
    device: torch.device
    used_by: torch.device


class _Slab:
    """A bound slab: its memory, the device that writes it, and the number of unscrubbed rows."""

    __slots__ = ("bound_rows", "memory", "used_by")

    def __init__(self, memory: TensorMemory, used_by: torch.device) -> None:
        self.memory = memory
        self.used_by = used_by
        self.bound_rows = memory.blocks


class SlabMemory:
    """A `Memory` of `blocks` charges of `bytes_per_block`; a block has bytes only while it is bound.

    `stuck` is for fault injection in tests: blocks that refuse to become zero.
    """

    def __init__(self, blocks: int, bytes_per_block: int = BLOCK_BYTES, *, clock: Clock | None = None) -> None:
        if bytes_per_block < 1 or bytes_per_block % 64:
            raise ConfigError(
                f"bytes_per_block `{bytes_per_block}` is not a multiple of 64",
                bytes_per_block=bytes_per_block,
            )
        self.shards = 1
        self.blocks = blocks
        self.bytes_per_block = bytes_per_block
        self.stuck: set[int] = set()
        self._clock = clock or SystemClock()
        self._slab_of: NDArray[np.int64] = np.full(blocks, -1, dtype=np.int64)
        self._row_of: NDArray[np.int64] = np.zeros(blocks, dtype=np.int64)
        self._slabs: dict[int, _Slab] = {}
        self._next_slab = 0
        self._scrubbed_past = 0  # by slabs that are gone, as their devices counted
        self._unbound_scrubbed = 0  # blocks that had no bytes behind them

    @classmethod
    def plan(
        cls,
        bytes_max: int,
        *,
        bytes_per_block: int = BLOCK_BYTES,
        device: str = "cpu",
        clock: Clock | None = None,
    ) -> MemoryPlan:
        """Return the memory plan for a worker whose classic caches take at most `bytes_max` bytes together."""
        blocks = bytes_max // bytes_per_block
        if blocks < 1:
            raise ConfigError(f"bytes_max `{bytes_max}` is less than one block of `{bytes_per_block}` bytes")
        return MemoryPlan(lambda count: cls(count, bytes_per_block, clock=clock), blocks, 1, bytes_per_block, device)

    def bind(self, blocks: NDArray[np.int64], sizes: Sequence[SlabSize]) -> list[torch.Tensor]:
        """Bind `blocks` to zeroed bytes: one uint8 tensor [rows * bytes_per_block] for each size.

        Raises `DeviceError` where a device has no room, and `IsolationError` for a bound block; then nothing is bound.
        """
        assert sum(size.rows for size in sizes) == len(blocks)
        if (self._slab_of[blocks] >= 0).any():
            raise IsolationError("a block was handed out while another cache's bytes are behind it")
        tensors = [self._make(size) for size in sizes]
        first = 0
        for size, tensor in zip(sizes, tensors, strict=True):
            mine = blocks[first : first + size.rows]
            memory = TensorMemory.wrap([[tensor]], clock=self._clock)
            self._slabs[self._next_slab] = _Slab(memory, size.used_by)
            self._slab_of[mine] = self._next_slab
            self._row_of[mine] = np.arange(size.rows)
            self._next_slab += 1
            first += size.rows
        return [tensor.view(-1) for tensor in tensors]

    def _make(self, size: SlabSize) -> torch.Tensor:
        pinned = size.device.type == "cpu" and size.used_by.type == "cuda"
        try:
            with torch.inference_mode(False):  # an inference tensor could not be zeroed by another thread
                return torch.zeros(
                    (size.rows, self.bytes_per_block),
                    dtype=torch.uint8,
                    device=size.device,
                    pin_memory=pinned,
                )
        except (RuntimeError, AssertionError) as error:
            count = size.rows * self.bytes_per_block
            raise DeviceError(
                f"cannot allocate a cache of `{count}` bytes on `{size.device}`: {str(error).splitlines()[0]}",
                bytes=count,
                device=str(size.device),
            ) from error

    @property
    def bound_bytes(self) -> int:
        """The bytes that are bound to blocks now."""
        return sum(slab.memory.blocks for slab in self._slabs.values()) * self.bytes_per_block

    def scrub(self, shard: int, blocks: NDArray[np.int64], verify_share: float) -> ScrubResult:
        """Zero `blocks`, read back the requested share, and release the rows that are zero (rule 1, rule 3)."""
        assert shard == 0
        owners = self._slab_of[blocks]
        results = [
            self._scrub_slab(int(number), blocks[owners == number], verify_share)
            for number in np.unique(owners[owners >= 0])
        ]
        bare = int((owners < 0).sum())
        if bare:  # before a first `bind`: nothing is there to write or read, and the result says so
            self._unbound_scrubbed += bare
            now = self._clock.now_us()
            results.append(ScrubResult("none", "none", 0, now, now, "unread", 0, NO_BLOCKS))
        return _merged(results)

    def _scrub_slab(self, number: int, blocks: NDArray[np.int64], verify_share: float) -> ScrubResult:
        slab, rows = self._slabs[number], self._row_of[blocks]
        if self.stuck:
            slab.memory.stuck = {(0, int(row)) for row in rows[np.isin(blocks, list(self.stuck))]}
        with outside_captures():
            if slab.used_by.type == "cuda":
                torch.cuda.synchronize(slab.used_by)  # rule 4
            result = slab.memory.scrub(0, rows, verify_share)
        bad = np.isin(rows, result.failed)
        clean = blocks[~bad]
        self._slab_of[clean] = -1
        slab.bound_rows -= len(clean)
        if not slab.bound_rows:
            self._scrubbed_past += slab.memory.scrubbed(0)
            del self._slabs[number]
        return result._replace(failed=blocks[bad])

    def copy(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Refuse to copy: classic caches are never forked.

        Raises:
            DeviceError: always, for any block.
        """
        if len(source) or len(target):
            raise DeviceError("blocks of classic caches are not copied: open another cache instead of a fork")

    def scrubbed(self, shard: int) -> int:
        """Return blocks scrubbed since the start: bound ones by their devices' count, and those without bytes."""
        assert shard == 0
        live = sum(slab.memory.scrubbed(0) for slab in self._slabs.values())
        return self._unbound_scrubbed + self._scrubbed_past + live


def _merged(results: Sequence[ScrubResult]) -> ScrubResult:
    """Return one result for a launch over several slabs; its level is the weakest among them."""
    if len(results) == 1:
        return results[0]
    return ScrubResult(
        _joined(result.method for result in results),
        _joined(result.device for result in results),
        sum(result.bytes for result in results),
        min(result.started_us for result in results),
        max(result.ended_us for result in results),
        min((result.level for result in results), key=_LEVELS.index),
        sum(result.verified for result in results),
        np.concatenate([result.failed for result in results]),
    )


def _joined(names: Iterable[str]) -> str:
    return "+".join(sorted(set(names)))
