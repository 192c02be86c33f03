"""What historic bugs make of the methods that move blocks: vLLM's own, the adapter's, and the workers' scrubs.

Each takes the original and answers what stands in its place, for `conformance.mutants.patch`; `mutants` lists them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.request import Request, RequestStatus

from kvcustody.allocator.external.scrub_queue import ScrubOrder
from kvcustody.allocator.pool.memory_protocol import NO_BLOCKS
from kvcustody.integrations.vllm.connector import GovernedConnector
from kvcustody.integrations.vllm.scheduler.block_pool import GovernedBlockPool
from kvcustody.integrations.vllm.scheduler.cache_manager import GovernedKVCacheManager
from kvcustody.integrations.vllm.scheduler.governed_request import governed_request
from kvcustody.integrations.vllm.scheduler.scheduler_state import SchedulerState
from kvcustody.integrations.vllm.step_messages import ScrubReply, StepReceipt
from kvcustody.integrations.vllm.worker.worker_side import WorkerSide
from kvcustody.testkit.vllm.modelless_engine import preempt
from kvcustody.testkit.vllm.modelless_workers import SubmittedStep, Workers

# -- lifetime ----------------------------------------------------------------------------------------------------------


def published_at_schedule(original: Any) -> Any:
    """The block that a chunk only begins is indexed with those that it fills."""

    def cache_blocks(
        self: SingleTypeKVCacheManager, request: Request, num_tokens: int, *args: Any, **more: Any
    ) -> None:
        size = self.block_size
        original(self, request, min(-(-num_tokens // size), request.num_tokens // size) * size, *args, **more)

    return cache_blocks


def frees_one_twice(original: Any) -> Any:
    """One block is twice in a list of blocks to free."""

    def free_blocks(self: GovernedBlockPool, ordered_blocks: Iterable[Any]) -> None:
        blocks = list(ordered_blocks)
        original(self, [*blocks, *blocks[:1]])

    return free_blocks


def finishes_again(original: Any) -> Any:
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


def releases_again(original: Any) -> Any:
    """A preempted request is released a second time, when it waits again."""

    def release(self: SchedulerState, request: Request) -> None:
        original(self, request)
        governed = governed_request(request)
        if governed is not None and governed.residency is not None:
            self.port.release(governed.residency, "preempted")

    return release


def takes_late_answers(original: Any) -> Any:
    """What was in flight at a preemption counts as if nothing had happened."""

    def preempt_request(self: Scheduler, request: Request, *args: Any, **more: Any) -> None:
        original(self, request, *args, **more)
        request.num_stale_output_tokens, request.drop_stale_output = 0, False

    return preempt_request


# -- scrubs ------------------------------------------------------------------------------------------------------------


def scrubs_at_once(original: Any) -> Any:
    """A scrub waits for no step that is in flight; the answer comes when the step does."""

    def submit(self: Workers, step: SubmittedStep) -> None:
        order = step.scheduled.kv_connector_metadata.order
        for connector in self.governed if order is not None else ():
            side = connector._worker
            side.__dict__.setdefault("early", {})[order.number] = side._scrub(order)
        original(self, step)

    return submit


def answers_early(original: Any) -> Any:
    """The answer of `scrubs_at_once` is told where the order stands in the stream."""

    def scrub(self: WorkerSide, order: ScrubOrder) -> ScrubReply:
        answer: ScrubReply = self.__dict__.get("early", {}).pop(order.number, None) or original(self, order)
        return answer

    return scrub


def remembers(original: Any) -> Any:
    """The connector's first call of a step does nothing yet."""

    def handle_preemptions(self: GovernedConnector, kv_connector_metadata: Any) -> None:
        self.__dict__["late"] = kv_connector_metadata

    return handle_preemptions


def scrubs_last(original: Any) -> Any:
    """What `remembers` put off is done behind the step's writes."""

    def build_connector_worker_meta(self: GovernedConnector) -> StepReceipt:
        self._worker.execute(self.__dict__["late"])
        receipt: StepReceipt = original(self)
        return receipt

    return build_connector_worker_meta


def first_shard_only(original: Any) -> Any:
    """Every shard but the first says that it has scrubbed."""

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
    """A request that must wait is told so by a failed allocation."""

    def allocate_slots(self: GovernedKVCacheManager, request: Request, *args: Any, **more: Any) -> Any:
        governed = governed_request(request)
        waits = governed is not None and governed.waits_for is not None
        return None if waits else original(self, request, *args, **more)

    return allocate_slots


def preempts_anybody(original: Any) -> Any:
    """A request that must wait takes the blocks of another tenant's that runs."""

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
