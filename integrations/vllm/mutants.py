"""Historic bugs in the vLLM adapter: its own code, the engine port below it, and vLLM's where the adapter relies on it.

`python -m kvcustody.integrations.conformance --engine kvcustody.integrations.vllm.conformance:engine \
    --mutants kvcustody.integrations.vllm.mutants`
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.request import Request, RequestStatus

from kvcustody.allocator.memory import NO_BLOCKS
from kvcustody.allocator.scrub_queue import ScrubOrder
from kvcustody.governance.scope_token import Verified
from kvcustody.integrations.conformance.mutants import Mutant, constant, patch, together
from kvcustody.integrations.conformance.mutants_of_governance import ANYWHERE, PORT, unscoped_keys
from kvcustody.integrations.conformance.mutants_of_toys import TOY
from kvcustody.integrations.vllm.bare_engine import preempt
from kvcustody.integrations.vllm.bare_workers import Step, Workers
from kvcustody.integrations.vllm.books import Books
from kvcustody.integrations.vllm.connector import GovernedConnector
from kvcustody.integrations.vllm.engine import EngineHandle
from kvcustody.integrations.vllm.engine_control import VllmControl
from kvcustody.integrations.vllm.governed_request import GovernedRequest, governed
from kvcustody.integrations.vllm.manager import GovernedKVCacheManager
from kvcustody.integrations.vllm.messages import Answer, StepReceipt
from kvcustody.integrations.vllm.pool import GovernedBlockPool
from kvcustody.integrations.vllm.scheduler_side import SchedulerSide
from kvcustody.integrations.vllm.worker_side import WorkerSide

# Of the device and the ledger: the same patches as in the toy engines.
_BELOW = ("never scrubbed", "verify skipped", "end not recorded", "receipt not recorded")

# -- keys and identity -------------------------------------------------------------------------------------------------


def _hashed(salt: Any) -> Any:
    """After the look-up's keys were made, hashes take their place: of all tokens up to a block, and of `salt`."""

    def make(original: Any) -> Any:
        def begin_look_up(self: Books, request: Request) -> bool:
            reads = bool(original(self, request))
            size, tokens = self.block_tokens, np.array(request._all_token_ids, dtype="<i4")
            ends = range(size, len(request.block_hashes) * size + 1, size)
            request.block_hashes = [
                hashlib.sha256(salt(request) + tokens[:end].tobytes()).digest() for end in ends
            ]
            return reads

        return begin_look_up

    return make


def _last_known(original: Any) -> Any:
    """Who cannot be verified is taken for the last one who could."""

    def verify(self: SchedulerSide, request: Request) -> Any:
        answer = original(self, request)
        if isinstance(answer, Verified):
            self.__dict__["last_known"] = answer
        return self.__dict__.get("last_known", answer)

    return verify


def _resumed_as_nobody(original: Any) -> Any:
    def resume(self: Books, mine: GovernedRequest, residency: Any) -> Any:
        self.port.release(residency, "preempted")
        tokens = mine.request._all_token_ids
        again: Any = self.port.admit(None, mine.model, tokens, request_id=mine.request_id)
        mine.residency, mine.told_tokens = again, len(tokens)
        return again

    return resume


def _attaches_all(original: Any) -> Any:
    """What the look-up found is attached."""

    def attachable_tokens(self: Books, mine: GovernedRequest, found: Any, hit_tokens: int) -> int:
        return hit_tokens

    return attachable_tokens


# -- lifetime ----------------------------------------------------------------------------------------------------------


def _published_at_schedule(original: Any) -> Any:
    """The block that a chunk only begins is indexed with those that it fills."""

    def cache_blocks(
        self: SingleTypeKVCacheManager, request: Request, num_tokens: int, *args: Any, **more: Any
    ) -> None:
        size = self.block_size
        original(self, request, min(-(-num_tokens // size), request.num_tokens // size) * size, *args, **more)

    return cache_blocks


def _frees_one_twice(original: Any) -> Any:
    def free_blocks(self: GovernedBlockPool, ordered_blocks: Iterable[Any]) -> None:
        blocks = list(ordered_blocks)
        original(self, [*blocks, *blocks[:1]])

    return free_blocks


def _finishes_again(original: Any) -> Any:
    """A second abort gives up the blocks that the request had at the first."""

    def finish_requests(self: Scheduler, request_ids: Any, finished_status: RequestStatus) -> Any:
        had = self.__dict__.setdefault("had", {})
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids or self.requests)
        manager = self.kv_cache_manager
        over = [one for one in ids if one in had]
        had |= {one: manager.get_blocks(one).blocks[0] for one in ids if one in self.requests}
        done = original(self, ids, finished_status)
        for one in over:
            manager.block_pool.free_blocks(had[one])
        return done

    return finish_requests


def _releases_again(original: Any) -> Any:
    """A preempted request is released a second time, when it waits again."""

    def release(self: Books, request: Request) -> None:
        original(self, request)
        mine = governed(request)
        if mine is not None and mine.residency is not None:
            self.port.release(mine.residency, "preempted")

    return release


def _takes_late_answers(original: Any) -> Any:
    """What was in flight at a preemption counts as if nothing had happened."""

    def preempt_request(self: Scheduler, request: Request, *args: Any, **more: Any) -> None:
        original(self, request, *args, **more)
        request.num_stale_output_tokens, request.drop_stale_output = 0, False

    return preempt_request


# -- scrubs ------------------------------------------------------------------------------------------------------------


def _scrubs_at_once(original: Any) -> Any:
    """A scrub waits for no step that is in flight; the answer comes when the step does."""

    def submit(self: Workers, step: Step) -> None:
        order = step.scheduled.kv_connector_metadata.order
        for connector in self.connectors if order is not None else ():
            side = connector._worker
            side.__dict__.setdefault("early", {})[order.number] = side._scrub(order)
        original(self, step)

    return submit


def _answers_early(original: Any) -> Any:
    def scrub(self: WorkerSide, order: ScrubOrder) -> Answer:
        answer: Answer = self.__dict__.get("early", {}).pop(order.number, None) or original(self, order)
        return answer

    return scrub


def _remembers(original: Any) -> Any:
    def handle_preemptions(self: GovernedConnector, kv_connector_metadata: Any) -> None:
        self.__dict__["late"] = kv_connector_metadata

    return handle_preemptions


def _scrubs_last(original: Any) -> Any:
    def build_connector_worker_meta(self: GovernedConnector) -> StepReceipt:
        self._worker.obey(self.__dict__["late"])
        receipt: StepReceipt = original(self)
        return receipt

    return build_connector_worker_meta


def _first_shard_only(original: Any) -> Any:
    def scrub(self: WorkerSide, order: ScrubOrder) -> Answer:
        if self.shard == 0:
            answer: Answer = original(self, order)
            return answer
        assert self.memory is not None
        nothing = self.memory.scrub(0, NO_BLOCKS, 0.0)
        results = [nothing._replace(level="full", verified=len(blocks)) for _, blocks in order.batches]
        return Answer(order.number, self.shard, tuple(results), order.blocks)

    return scrub


# -- quota -------------------------------------------------------------------------------------------------------------


def _no_slots(original: Any) -> Any:
    """A request that must wait is told so by a failed allocation."""

    def allocate_slots(self: GovernedKVCacheManager, request: Request, *args: Any, **more: Any) -> Any:
        mine = governed(request)
        waits = mine is not None and mine.waits_for is not None
        return None if waits else original(self, request, *args, **more)

    return allocate_slots


def _preempts_anybody(original: Any) -> Any:
    """A request that must wait takes the blocks of another tenant's that runs."""

    def schedule(self: Scheduler, *args: Any, **more: Any) -> Any:
        waiting = [governed(one) for one in self.requests.values() if one not in self.running]
        hungry = {mine.principal.tenant for mine in waiting if mine and mine.waits_for and mine.principal}
        for one in list(self.running):
            mine = governed(one)
            if mine and mine.principal and hungry - {mine.principal.tenant}:
                preempt(self, one)
        return original(self, *args, **more)

    return schedule


MUTANTS: tuple[Mutant, ...] = (
    *ANYWHERE,
    *PORT,
    *(mutant for mutant in TOY if mutant.fault in _BELOW),
    Mutant("unscoped keys", patch(Books, "begin_look_up", _hashed(lambda request: b""))),
    Mutant(
        "unscoped keys", patch(Books, "begin_look_up", _hashed(lambda request: request.request_id.encode()))
    ),
    Mutant(
        "scope dropped at look-up", together(unscoped_keys, patch(Books, "attachable_tokens", _attaches_all))
    ),
    Mutant("no identity falls to a tenant", patch(SchedulerSide, "_verify", _last_known)),
    Mutant("scope dropped after preemption", patch(Books, "_resume", _resumed_as_nobody)),
    Mutant("late sweep serves the expired", patch(Books, "attachable_tokens", _attaches_all)),
    Mutant(
        "uncomputed block published", patch(SingleTypeKVCacheManager, "cache_blocks", _published_at_schedule)
    ),
    Mutant("double free in one list", patch(GovernedBlockPool, "free_blocks", _frees_one_twice)),
    Mutant("release not idempotent", patch(Scheduler, "finish_requests", _finishes_again)),
    Mutant("release not idempotent", patch(Books, "release", _releases_again)),
    Mutant("late answer of a preempted request", patch(Scheduler, "_preempt_request", _takes_late_answers)),
    Mutant("order to forget ignored", constant(VllmControl, "evict", None)),
    Mutant(
        "free while in flight",
        together(patch(Workers, "submit", _scrubs_at_once), patch(WorkerSide, "_scrub", _answers_early)),
    ),
    Mutant(
        "scrub after hand-out",
        together(
            patch(GovernedConnector, "handle_preemptions", _remembers),
            patch(GovernedConnector, "build_connector_worker_meta", _scrubs_last),
        ),
    ),
    Mutant("scrub of the first shard only", patch(WorkerSide, "_scrub", _first_shard_only)),
    Mutant("failed block handed out", constant(VllmControl, "withhold", None)),
    Mutant("TTL does not fire while idle", constant(EngineHandle, "tick", None)),
    Mutant("TTL does not fire while idle", constant(SchedulerSide, "has_work", False)),
    Mutant(
        "quota stalls others",
        together(
            constant(SchedulerSide, "waits", False),
            patch(GovernedKVCacheManager, "allocate_slots", _no_slots),
        ),
    ),
    Mutant("quota preempts others", patch(Scheduler, "schedule", _preempts_anybody)),
)

_NO_TIER = "a connector that keeps blocks elsewhere is refused (test_adapter_scheduler)"
_NO_EVENTS = "no block events are published"
NOT_APPLICABLE: dict[str, str] = {
    "scope dropped at store": _NO_TIER,
    "scope dropped at prefetch": _NO_TIER,
    "async store of a re-used block": _NO_TIER,
    "tier outlives the deadline": _NO_TIER,
    "erase misses the tier": _NO_TIER,
    "scope dropped at fork": "vLLM has none: `n` samples are requests of their own, under a use of the request's token",
    "scope dropped at event": _NO_EVENTS,
    "unscoped removal": _NO_EVENTS,
    "removal not told": _NO_EVENTS,
    "tokens in events": _NO_EVENTS,
}
