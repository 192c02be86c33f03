"""Historic bugs in the vLLM adapter: its own code, the engine port below it, and vLLM's where the adapter relies on it.

`kvcustody conformance --engine kvcustody.testkit.vllm.conformance:engine \
    --mutants kvcustody.testkit.vllm.mutants`
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.request import Request, RequestStatus

from kvcustody.allocator.external.scrub_queue import ScrubOrder
from kvcustody.allocator.pool.memory_protocol import NO_BLOCKS
from kvcustody.allocator.prefix.node import KEY_BYTES
from kvcustody.governance.credentials.scope_token import VerifiedToken
from kvcustody.integrations.events.block_event import BlockEvent, EventScope
from kvcustody.integrations.vllm.connector import GovernedConnector
from kvcustody.integrations.vllm.engine_patch import EngineHandle
from kvcustody.integrations.vllm.scheduler import kv_events as block_events
from kvcustody.integrations.vllm.scheduler.block_pool import GovernedBlockPool
from kvcustody.integrations.vllm.scheduler.cache_manager import GovernedKVCacheManager
from kvcustody.integrations.vllm.scheduler.engine_control import VllmControl
from kvcustody.integrations.vllm.scheduler.governed_request import GovernedRequest, governed_request
from kvcustody.integrations.vllm.scheduler.kv_events import SchedulerBlockEvents
from kvcustody.integrations.vllm.scheduler.scheduler_side import SchedulerSide
from kvcustody.integrations.vllm.scheduler.scheduler_state import SchedulerState
from kvcustody.integrations.vllm.step_messages import ScrubReply, StepReceipt
from kvcustody.integrations.vllm.worker.worker_side import WorkerSide
from kvcustody.testkit.conformance.mutants.governance import ANYWHERE, PORT, unscoped_keys
from kvcustody.testkit.conformance.mutants.runner import Mutant, constant, patch, together
from kvcustody.testkit.conformance.mutants.toys import TOY
from kvcustody.testkit.vllm.modelless_engine import preempt
from kvcustody.testkit.vllm.modelless_workers import SubmittedStep, Workers

# Historic bugs in the methods that move blocks: vLLM's own, the adapter's, and the workers' scrubs.
#
# Each function takes the original and returns its replacement, for `conformance.mutants.patch`; `mutants` lists them.

# -- lifetime ----------------------------------------------------------------------------------------------------------


def published_at_schedule(original: Any) -> Any:
    """Index the block that a chunk only begins together with the blocks that it fills."""

    def cache_blocks(
        self: SingleTypeKVCacheManager, request: Request, num_tokens: int, *args: Any, **more: Any
    ) -> None:
        size = self.block_size
        original(self, request, min(-(-num_tokens // size), request.num_tokens // size) * size, *args, **more)

    return cache_blocks


def frees_one_twice(original: Any) -> Any:
    """Put one block twice into a list of blocks to free."""

    def free_blocks(self: GovernedBlockPool, ordered_blocks: Iterable[Any]) -> None:
        blocks = list(ordered_blocks)
        original(self, [*blocks, *blocks[:1]])

    return free_blocks


def finishes_again(original: Any) -> Any:
    """Make a second abort give up the blocks that the request had at the first."""

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


def releases_again(original: Any) -> Any:
    """Release a preempted request a second time, when it waits again."""

    def release(self: SchedulerState, request: Request) -> None:
        original(self, request)
        governed = governed_request(request)
        if governed is not None and governed.residency is not None:
            self.port.release(governed.residency, "preempted")

    return release


def takes_late_answers(original: Any) -> Any:
    """Count what was in flight at a preemption as if nothing had happened."""

    def preempt_request(self: Scheduler, request: Request, *args: Any, **more: Any) -> None:
        original(self, request, *args, **more)
        request.num_stale_output_tokens, request.drop_stale_output = 0, False

    return preempt_request


# -- scrubs ------------------------------------------------------------------------------------------------------------


def scrubs_at_once(original: Any) -> Any:
    """Make a scrub wait for no step in flight; its answer comes when the step does."""

    def submit(self: Workers, step: SubmittedStep) -> None:
        order = step.scheduled.kv_connector_metadata.order
        for connector in self.governed if order is not None else ():
            side = connector._worker
            side.__dict__.setdefault("early", {})[order.number] = side._scrub(order)
        original(self, step)

    return submit


def answers_early(original: Any) -> Any:
    """Give the answer of `scrubs_at_once` at the order's place in the stream."""

    def scrub(self: WorkerSide, order: ScrubOrder) -> ScrubReply:
        answer: ScrubReply = self.__dict__.get("early", {}).pop(order.number, None) or original(self, order)
        return answer

    return scrub


def remembers(original: Any) -> Any:
    """Make the connector's first call in a step do nothing yet."""

    def handle_preemptions(self: GovernedConnector, kv_connector_metadata: Any) -> None:
        self.__dict__["late"] = kv_connector_metadata

    return handle_preemptions


def scrubs_last(original: Any) -> Any:
    """Do what `remembers` put off after the step's writes."""

    def build_connector_worker_meta(self: GovernedConnector) -> StepReceipt:
        self._worker.execute(self.__dict__["late"])
        receipt: StepReceipt = original(self)
        return receipt

    return build_connector_worker_meta


def first_shard_only(original: Any) -> Any:
    """Make every shard except the first report scrubs that it has not done."""

    def scrub(self: WorkerSide, order: ScrubOrder) -> ScrubReply:
        if self.shard == 0:
            answer: ScrubReply = original(self, order)
            return answer
        assert self.memory is not None
        nothing = self.memory.scrub(0, NO_BLOCKS, 0.0)
        results = [nothing._replace(level="full", verified=len(blocks)) for _, blocks in order.batches]
        return ScrubReply(order.number, self.shard, tuple(results), order.blocks)

    return scrub


# -- quota -------------------------------------------------------------------------------------------------------------


def no_slots(original: Any) -> Any:
    """Report that a request must wait by a failed allocation."""

    def allocate_slots(self: GovernedKVCacheManager, request: Request, *args: Any, **more: Any) -> Any:
        governed = governed_request(request)
        waits = governed is not None and governed.waits_for is not None
        return None if waits else original(self, request, *args, **more)

    return allocate_slots


def preempts_anybody(original: Any) -> Any:
    """Make a request that must wait take the blocks of another tenant's running request."""

    def schedule(self: Scheduler, *args: Any, **more: Any) -> Any:
        waiting = [governed_request(one) for one in self.requests.values() if one not in self.running]
        hungry = {
            governed.principal.tenant for governed in waiting if governed and governed.waits_for and governed.principal
        }
        for one in list(self.running):
            governed = governed_request(one)
            if governed and governed.principal and hungry - {governed.principal.tenant}:
                preempt(self, one)
        return original(self, *args, **more)

    return schedule


# Of the device and the ledger: the same patches as in the toy engines.
_BELOW = ("never scrubbed", "verify skipped", "end not recorded", "receipt not recorded")

# -- keys and identity -------------------------------------------------------------------------------------------------


def _hashed(salt: Any) -> Any:
    """Replace the look-up's keys after they were made with hashes of all tokens up to a block and of `salt`."""

    def make(original: Any) -> Any:
        def begin_look_up(self: SchedulerState, request: Request) -> bool:
            reads = bool(original(self, request))
            size, tokens = self.block_tokens, np.array(request._all_token_ids, dtype="<i4")
            ends = range(size, len(request.block_hashes) * size + 1, size)
            request.block_hashes = [hashlib.sha256(salt(request) + tokens[:end].tobytes()).digest() for end in ends]
            return reads

        return begin_look_up

    return make


def _last_known(original: Any) -> Any:
    """Take a request that cannot be verified for the last verified one."""

    def verify(self: SchedulerSide, request: Request) -> Any:
        answer = original(self, request)
        if isinstance(answer, VerifiedToken):
            self.__dict__["last_known"] = answer
        return self.__dict__.get("last_known", answer)

    return verify


def _without_epochs(original: Any) -> Any:
    """Lose the door's erase epochs on their way to governance."""

    def verify(self: SchedulerSide, request: Request) -> Any:
        answer = original(self, request)
        if isinstance(answer, VerifiedToken):
            answer = answer._replace(hints=answer.hints._replace(epochs=None))
        return answer

    return verify


def _resumed_as_nobody(original: Any) -> Any:
    def resume(self: SchedulerState, governed: GovernedRequest, residency: Any) -> Any:
        self.port.release(residency, "preempted")
        tokens = governed.request._all_token_ids
        again: Any = self.port.admit(None, governed.model, tokens, request_id=governed.request_id)
        governed.residency, governed.reported_tokens = again, len(tokens)
        return again

    return resume


def _attaches_all(original: Any) -> Any:
    """Attach everything that the look-up found."""

    def attachable_tokens(self: SchedulerState, governed: GovernedRequest, found: Any, hit_tokens: int) -> int:
        return hit_tokens

    return attachable_tokens


# -- events ------------------------------------------------------------------------------------------------------------

_NOBODY = EventScope("*", "request", "", 0, 0)


def _of_nobody(original: Any) -> Any:
    return lambda scope, keys, **more: original(_NOBODY, keys, **more)


def _with_tokens(original: Any) -> Any:
    def stored(scope: EventScope, keys: bytes, *, block_tokens: int, **more: Any) -> BlockEvent:
        event: BlockEvent = original(scope, keys, block_tokens=block_tokens, **more)
        return event._replace(tokens=(7,) * (len(keys) // KEY_BYTES * block_tokens))

    return stored


MUTANTS: tuple[Mutant, ...] = (
    *ANYWHERE,
    *PORT,
    *(mutant for mutant in TOY if mutant.fault in _BELOW),
    Mutant("unscoped keys", patch(SchedulerState, "begin_look_up", _hashed(lambda request: b""))),
    Mutant(
        "unscoped keys",
        patch(SchedulerState, "begin_look_up", _hashed(lambda request: request.request_id.encode())),
    ),
    Mutant(
        "scope dropped at look-up",
        together(unscoped_keys, patch(SchedulerState, "attachable_tokens", _attaches_all)),
    ),
    Mutant("no identity falls to a tenant", patch(SchedulerSide, "_verify", _last_known)),
    Mutant("erase epochs ignored", patch(SchedulerSide, "_verify", _without_epochs)),
    Mutant("scope dropped after preemption", patch(SchedulerState, "_resume", _resumed_as_nobody)),
    Mutant("late sweep serves the expired", patch(SchedulerState, "attachable_tokens", _attaches_all)),
    Mutant("uncomputed block published", patch(SingleTypeKVCacheManager, "cache_blocks", published_at_schedule)),
    Mutant("double free in one list", patch(GovernedBlockPool, "free_blocks", frees_one_twice)),
    Mutant("release not idempotent", patch(Scheduler, "finish_requests", finishes_again)),
    Mutant("release not idempotent", patch(SchedulerState, "release", releases_again)),
    Mutant("late answer of a preempted request", patch(Scheduler, "_preempt_request", takes_late_answers)),
    Mutant("order to forget ignored", constant(VllmControl, "evict", None)),
    Mutant(
        "free while in flight",
        together(patch(Workers, "submit", scrubs_at_once), patch(WorkerSide, "_scrub", answers_early)),
    ),
    Mutant(
        "scrub after hand-out",
        together(
            patch(GovernedConnector, "handle_preemptions", remembers),
            patch(GovernedConnector, "build_connector_worker_meta", scrubs_last),
        ),
    ),
    Mutant("scrub of the first shard only", patch(WorkerSide, "_scrub", first_shard_only)),
    Mutant("failed block handed out", constant(VllmControl, "withhold", None)),
    Mutant("TTL does not fire while idle", constant(EngineHandle, "tick", None)),
    Mutant("TTL does not fire while idle", constant(SchedulerSide, "has_work", False)),
    Mutant(
        "quota stalls others",
        together(
            constant(SchedulerSide, "must_wait", False),
            patch(GovernedKVCacheManager, "allocate_slots", no_slots),
        ),
    ),
    Mutant("quota preempts others", patch(Scheduler, "schedule", preempts_anybody)),
    Mutant("scope dropped at event", patch(block_events, "stored", _of_nobody)),
    Mutant("unscoped removal", patch(block_events, "removed", _of_nobody)),
    Mutant("removal not told", constant(SchedulerBlockEvents, "_on_removed", None)),
    Mutant("tokens in events", patch(block_events, "stored", _with_tokens)),
)

_NO_TIER = "a connector that keeps blocks elsewhere is refused (tests/engines/vllm/adapter/test_scheduler.py)"
NOT_APPLICABLE: dict[str, str] = {
    "scope dropped at store": _NO_TIER,
    "scope dropped at prefetch": _NO_TIER,
    "async store of a re-used block": _NO_TIER,
    "tier outlives the deadline": _NO_TIER,
    "erase misses the tier": _NO_TIER,
    "scope dropped at fork": "vLLM has none: `n` samples are requests of their own, under a use of the request's token",
}
