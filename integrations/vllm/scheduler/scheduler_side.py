"""The scheduler's half of the connector: admission, deferral, orders to the workers, receipts, and the wake-up timer.

One step, in the order of vLLM's calls:

    on_new_request*  ->  must_wait / after_allocation*  ->  build_step_order  ->  (step leaves)  ->  run_deferred_work
                                                                                       |
    receive (the step has retired: replies of scrubs)  <-------------------------------+


1. A request's token is taken from it on arrival, verified, and kept nowhere: no event, log or hash of vLLM's ever sees
   it. Without a valid one the request runs, reads nothing and publishes nothing. Hints that an orchestrator gave it are
   dropped, and its session is bound to its owner, however it came here. Neither can move or keep a block. A second
   request under an id that is in use is not queued, and gets no answer.
2. A request that must wait is answered `(None, False)`, and vLLM skips only this request. It never waits in
   `allocate_slots`, where it would stall or preempt others.
3. A step's order leaves with the step, after everything that the step moved was reported to the port.
4. An idle engine is stepped while something is due, and woken for what comes due later.
5. A step does not wait for anything that can be done while the workers compute. It waits only for two kinds of scrub:
   of a block that it hands out and that is not zero yet, and of one whose deadline is near. Where nobody calls
   `run_deferred_work`, the next step first does all of that work.
6. Copies for tiers are made by the step behind the one that computed their blocks, before its scrubs
   (`scheduler_tiers`).
7. A request that ends while a connector beside ours loads it keeps its blocks until that load is over. This does not
   depend on what the connector reports about its saves, because LMCache's reports at once that they are over
   (https://github.com/LMCache/LMCache/pull/4939).
8. vLLM removes failed loads first, then attaches the others. So a copy that became due during its load is reported as
   failed before that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import compress
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.errors import ConfigError, IdentityError, IsolationError
from kvcustody.governance.admission_outcome import AdmissionRefused
from kvcustody.governance.credentials.scope_token import Rejected, VerifiedToken
from kvcustody.governance.edge.windowed_token import PREFIX
from kvcustody.governance.identity.w3c_trace import is_trace, trace_in
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.request import LATENCY_CLASSES, NO_HINTS, read_kinds
from kvcustody.governance.tiers.heirs import TierHolder
from kvcustody.governance.tiers.open_tiers import TierPlan, tier_names, tier_plan
from kvcustody.governance.tiers.scope_salts import ScopeDirectory, ScopeSalts
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.governance.worker.plugins import open_root_key
from kvcustody.guarding_thread import GuardingThread
from kvcustody.integrations.content.custom_params import KINDS, LATENCY, MARKS, TRACE
from kvcustody.integrations.vllm import open_custody as opening
from kvcustody.integrations.vllm.foreign_connectors import (
    CopiesBeside,
    has_foreign_connectors,
    refuse_foreign_connectors,
)
from kvcustody.integrations.vllm.model_identity import Models
from kvcustody.integrations.vllm.scheduler.block_pool import governed_pool
from kvcustody.integrations.vllm.scheduler.cache_manager import governed_manager
from kvcustody.integrations.vllm.scheduler.engine_control import EngineProcess, VllmControl
from kvcustody.integrations.vllm.scheduler.extra_content import extras_of
from kvcustody.integrations.vllm.scheduler.governed_request import (
    ATTRIBUTE,
    GovernedRequest,
    governed_request,
)
from kvcustody.integrations.vllm.scheduler.scheduler_state import SchedulerState
from kvcustody.integrations.vllm.step_messages import StepOrder, StepReceipt
from kvcustody.integrations.vllm.tiers.copy_plans import Fetching
from kvcustody.integrations.vllm.tiers.layer_groups import ONE_GROUP, CopiedGroup, tier_groups
from kvcustody.integrations.vllm.tiers.scheduler_handover import PEER, TICKET
from kvcustody.integrations.vllm.tiers.scheduler_tiers import SchedulerTiers
from kvcustody.integrations.vllm.tiers.tier_conditions import refuse_tiers
from kvcustody.logger import get_logger
from kvcustody.policies.document.token_priorities import KindRange

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request

    from kvcustody.allocator.external.scrub_queue import ScrubOrder
    from kvcustody.governance.external.engine_port import EnginePort
    from kvcustody.governance.identity.principal import Principal
    from kvcustody.governance.orphans.scans import Scanned
    from kvcustody.governance.settings import Settings
    from kvcustody.integrations.events.feed import BlockEventPublisher

TRANSFER = "kvcustody"  # where `kv_transfer_params` carry a token that is too long for `cache_salt`
_LONGEST_WAIT_SECONDS = 3600.0  # a wall clock that was set says no more than this
_DEADLINE_STEPS = 4  # what has to be scrubbed within so many steps does not wait for the next one's
_log = get_logger(__name__)


class SchedulerSide:
    """Governance of one engine process. It exists before vLLM's manager does; `bind` completes it."""

    def __init__(self, config: VllmConfig, cache: KVCacheConfig, settings: Settings) -> None:
        self._config = config
        self._cache = cache
        self.settings = settings
        opening.refuse_ungoverned(config, settings)
        self._tier_plan = tier_plan(settings)
        self.tiers: SchedulerTiers | None = None
        self.control = VllmControl()
        self.port: EnginePort
        self.state: SchedulerState
        self.timer: WakeTimer
        self._opened: opening.OpenedCustody | None = None
        self._models: Models
        self._order: ScrubOrder | None = None  # leaves with the next step
        self._last_cached: CachedRequestData | None = None  # what the last step handed to requests that run
        self._unclean_hand_outs = 0  # of the pool, as of the last step
        self._deferred_work_done = False
        self._salts_open = ExitStack()
        self._ended_loading: set[str] = set()  # requests (rule 7)
        self._built_us = 0
        self._max_model_tokens = int(config.model_config.max_model_len)

    # -- set-up -------------------------------------------------------------------------------------------------------

    def bind(self, manager: KVCacheManager) -> None:
        """Govern vLLM's manager and pool; a second call does nothing.

        Raises:
            CustodyError: they cannot be governed.
        """
        if self._opened is not None:
            return
        block_tokens = int(manager.block_pool.hash_block_size)
        names, groups = tuple(tier_names(self.settings)), ONE_GROUP
        plan = opening.plan_of(self._config, self._cache, manager, block_tokens, names)
        if self._tier_plan is not None:
            refuse_tiers(self._config, has_others=has_foreign_connectors(self._config))
            groups = tier_groups(manager, block_tokens)
        state = SchedulerState(manager, block_tokens)
        self.control.state = self.state = state
        opened = self._opened = opening.open_custody(self.settings, plan, self.control)
        self.port = state.port = opened.port
        self.port.count_tokens(state.tokens_of)
        self._models = state.models = Models(self._config, block_tokens)
        state.admit_again = self.admit_again
        self.timer = WakeTimer(opened.clock, self.control.wake)
        governed_pool(manager.block_pool, state)
        governed_manager(manager, state)
        if self._tier_plan is not None:
            self._open_tiers(self._tier_plan, names, groups, opened, plan.shards)
        if self.settings.publishes_kv_events:
            self._open_publisher(opened)

    def _open_tiers(
        self,
        plan: TierPlan,
        names: tuple[str, ...],
        groups: tuple[CopiedGroup, ...],
        opened: opening.OpenedCustody,
        shards: int,
    ) -> None:
        """Open the settings' tiers for copies.

        Raises:
            CustodyError: says what cannot be opened.
        """
        shred = ShredKeys.open(plan.shred_keys, open_root_key(self.settings), opened.clock)
        state = self.state
        incarnation = "" if opened.worker is None else opened.worker.writer.incarnation
        with ExitStack() as stack:
            stack.callback(shred.close)
            tiers = SchedulerTiers(
                names,
                self.port,
                shred,
                object_blocks=plan.object_blocks,
                block_tokens=state.block_tokens,
                shards=shards,
                groups=groups,
                always=plan.moves_always,
                holder=TierHolder(self.settings.worker_name, self.settings.placement_group, incarnation),
                settings=self.settings,
                remote=plan.remote,
            )
            stack.pop_all()  # from now on the tiers close it
        self.tiers = state.deferred.tiers = tiers
        erasures = self.port.erasures
        erasures.tiers += tiers.directories.values()
        if opened.worker is not None:
            erasures.destroy_returned(opened.worker.completed)
        self.port.tiers.copies = tiers

    def _open_publisher(self, opened: opening.OpenedCustody) -> None:
        """Open the publisher of block events for the settings.

        Raises:
            ConfigError: the address cannot be bound.
        """
        from kvcustody.integrations.events.publisher import open_publisher

        publisher = open_publisher(
            self.settings,
            revision=opened.port.table.revision,
            incarnation=opened.worker.writer.incarnation if opened.worker is not None else "",
            rank=int(self._config.parallel_config.data_parallel_rank),
        )
        assert publisher is not None, "somebody is told"
        self.publish_to(publisher, publisher.close)

    def publish_to(self, publisher: BlockEventPublisher, close: Callable[[], None] | None = None) -> None:
        """Publish the block events of every step to `publisher`. Call it before any request arrives.

        Raises `IsolationError` where something is in vLLM's index already.
        """
        from kvcustody.integrations.vllm.scheduler.kv_events import SchedulerBlockEvents

        state = self.state
        state.events = SchedulerBlockEvents(
            state.pool,
            self.port,
            publisher,
            with_tokens=self.settings.kv_events_tokens == "published",
            groups=len(state.groups),
            close=close,
        )
        self.port.event_figures = state.events.figures

    def bind_scheduler(self, scheduler: Scheduler) -> None:
        """Bind the complete scheduler's manager, unless that has happened, and report its frees as they come.

        vLLM may defer frees for connectors that write into blocks outside the model's stream. This one never does, and
        the port's fences order the scrub behind steps in flight.
        """
        refuse_foreign_connectors(scheduler.vllm_config, self.settings.vllm_connectors_allowed)
        self.bind(scheduler.kv_cache_manager)
        self.state.keys_early = has_foreign_connectors(scheduler.vllm_config)
        self.state.port.tiers.copies_leave = self.state.keys_early
        if not self.state.keys_early:
            self.port.pool.only_steps = True
            scheduler._connector_finished = self._hand_off
        else:
            self._open_salts(scheduler.vllm_config)
            scheduler._free_request = self._noting_loads(scheduler._free_request)
        self.control.scheduler = scheduler
        scheduler.add_request = self._without_used_ids(scheduler)
        scheduler.reset_prefix_cache = self._with_new_keys(scheduler.reset_prefix_cache)
        scheduler.defer_block_free = False
        if self.tiers is not None:
            scheduler.update_from_output = self._without_late_loads(scheduler.update_from_output)

    def _open_salts(self, config: VllmConfig) -> None:
        """Give a connector beside ours the domains' salts; the settings say where others find their owners.

        Raises `ConfigError` where what it copies would rest in clear under a profile that isolates.
        """
        assert self._opened is not None
        with ExitStack() as stack:
            shred = ShredKeys.open(self.settings.shred_keys_path, open_root_key(self.settings), self._opened.clock)
            stack.callback(shred.close)
            keys = SealKeys(self.port.keyring, shred)
            stack.callback(keys.close)
            directory, path = None, self.settings.scope_salts_path
            sealed = self.port.tiers.are_copies_sealed = CopiesBeside(config, path, shred, self._opened.clock)
            if sealed.clear and self.port.table.policy.profile.isolating:
                raise ConfigError(
                    f"{sealed.clear} stores KV blocks unencrypted, or does not show that it seals them, which profile "
                    f"`{self.port.table.policy.profile.value}` does not allow (docs/reference/engines/lmcache.md)"
                )
            if path is not None:
                directory = ScopeDirectory(path, keys)
                stack.callback(directory.close)
            self.state.salts = ScopeSalts(keys, directory)
            self._salts_open = stack.pop_all()

    def _noting_loads(self, free: Callable[..., Any]) -> Callable[..., Any]:
        """Replace `Scheduler._free_request`, which must delay where a load has not ended."""

        def noted(request: Request, delay_free_blocks: bool = False) -> Any:
            if delay_free_blocks:
                self._ended_loading.add(request.request_id)
            return free(request, delay_free_blocks=delay_free_blocks)

        return noted

    def _without_late_loads(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """Replace `Scheduler.update_from_output`: loaded blocks that are due by now were not loaded (rule 8)."""

        def updated(scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
            output = model_runner_output.kv_connector_output
            receipt = None if output is None else output.kv_connector_worker_meta
            if isinstance(receipt, StepReceipt) and receipt.copies and self.tiers is not None:
                late = self.tiers.drop_late(receipt.copies)
                if late.blocks:
                    output.invalid_block_ids = late.blocks | (output.invalid_block_ids or set())
                if late.requests:
                    output.failed_recving = late.requests | (output.failed_recving or set())
            answer = update(scheduler_output, model_runner_output)
            if output is not None and (output.invalid_block_ids or output.failed_recving):
                self._tell_less()
            return answer

        return updated

    def _tell_less(self) -> None:
        """Correct the cached tokens of requests whose load failed or was late: vLLM had counted the planned load."""
        scheduler = self.control.scheduler
        assert scheduler is not None
        for request_id in scheduler.failed_recving_kv_req_ids:
            request = scheduler.requests.get(request_id)
            noted = getattr(request, "prefill_stats", None)
            if request is not None and noted:
                local = min(noted.num_local_cached_tokens, request.num_computed_tokens)
                noted.set(noted.num_prompt_tokens, local, request.num_computed_tokens - local)

    def keep_loading(self, output: KVConnectorOutput) -> None:
        """Take the workers' finished connector work, without saves of requests that still load, or are gone (rule
        7).
        """
        scheduler = self.control.scheduler
        if self.state.keys_early and scheduler is not None and output.finished_sending:
            kept = scheduler.requests.keys() - self._ended_loading
            output.finished_sending = kept & output.finished_sending
        self._ended_loading.difference_update(output.finished_recving or ())

    def bind_engine(self, engine: EngineProcess) -> None:
        """Bind the complete engine: idle work can be done from now on."""
        self.control.engine = engine

    # -- requests -----------------------------------------------------------------------------------------------------

    def _without_used_ids(self, scheduler: Scheduler) -> Callable[[Request], Any]:
        """Replace `Scheduler.add_request`, which treats a second request with an id as the first one's next input.

        It is dropped unless its owner is the first one's: any answer under the id would reach that one's client.
        """
        add = scheduler.add_request

        def added(request: Request) -> Any:
            first = scheduler.requests.get(request.request_id)
            if first is not None and not self._continues(first, request):
                self.port.attempts.note("id-in-use")
                _log.error("request dropped", request=request.request_id, reason="its id is another request's")
                return None
            return add(request)

        return added

    def _continues(self, first: Request, request: Request) -> bool:
        """Return whether `request` is further input of a vLLM session that began with `first`."""
        governed, verified = governed_request(first), self._verify(request)
        if getattr(first, "streaming_queue", None) is None or governed is None:
            return False
        if isinstance(verified, VerifiedToken):
            return verified.principal == governed.principal
        return verified.reason == "missing"

    def on_new_request(self, request: Request) -> None:
        """Determine a request's principal (rule 1) and its permanent limits."""
        verified, trace = self._verify(request), self._trace(request)
        kinds, latency = self._kinds(request), self._latency(request)
        if isinstance(verified, VerifiedToken):
            hints = verified.hints._replace(kinds=kinds, latency=latency)
            principal = verified.principal
        else:
            principal, hints = None, NO_HINTS
            self.port.attempts.note(verified.reason)
            _log.warning("no identity", request=request.request_id, reason=verified.reason)
        self._bind(request, principal)
        extras = extras_of(request, self.state.block_tokens)
        if extras.unkeyed is not None:
            _log.info("not reusable", request=request.request_id, reason=extras.unkeyed)
        model = self._models.of(request.lora_request)
        groups, changes = len(self.state.groups), self._models.changes
        governed = GovernedRequest(request, principal, hints, model, extras, groups, trace, changes)
        setattr(request, ATTRIBUTE, governed)
        request.block_hashes = []
        request._block_hasher = None
        governed.skips_reading = bool(request.skip_reading_prefix_cache)
        request.skip_reading_prefix_cache = False  # vLLM would not let such a request be deferred
        self.state.requests[request.request_id] = governed
        self._hand_over(request, governed)
        self._admit(governed)

    def _hand_over(self, request: Request, governed: GovernedRequest) -> None:
        """Note the worker for which the request is prefilled, or that prefilled it."""
        peer, ticket = _take(request, PEER), _take(request, TICKET)
        handover = None if self.tiers is None else self.tiers.handover
        if handover is None or governed.principal is None:
            return
        governed.hands_to = handover.peer_of(peer, (request.kv_transfer_params or {}).get("do_remote_decode"))
        if isinstance(ticket, str):
            governed.fetching = Fetching(ticket)

    def _kinds(self, request: Request) -> tuple[KindRange, ...]:
        """Return the kinds of content from the caller and the door; values that the door would refuse are ignored."""
        given, marks = _take(request, KINDS), _take(request, MARKS)
        return _kinds_in(given or (), is_marked=False) + _kinds_in(marks or (), is_marked=True)

    def _latency(self, request: Request) -> str:
        """Return the caller's latency class; values that the door would refuse are ignored."""
        given = _take(request, LATENCY)
        return given if isinstance(given, str) and given in LATENCY_CLASSES else ""

    def _trace(self, request: Request) -> str:
        """Return the trace from the middleware, or from vLLM, which forwards headers where it sends spans; else
        empty.
        """
        trace = _take(request, TRACE)
        if is_trace(trace):
            return str(trace)
        headers = getattr(request, "trace_headers", None)
        return trace_in(headers) if headers else ""

    def _bind(self, request: Request, principal: Principal | None) -> None:
        """Bind the request's other statements to vLLM and to connectors beside ours (rule 1)."""
        if getattr(request, "kv_hints", None) is not None:
            request.kv_hints = None
            _log.warning("kv hints dropped", request=request.request_id)
        given = getattr(request, "session_id", None)
        if given is not None:
            assert self._opened is not None
            owners = self._opened.tokens.owners
            request.session_id = owners.bound(principal, given) if principal is not None else None

    def _verify(self, request: Request) -> VerifiedToken | Rejected:
        salt, request.cache_salt = request.cache_salt, None
        assert self._opened is not None
        transfer, windowed = _take(request, TRANSFER), self._opened.windowed
        if windowed is not None and transfer is None and isinstance(salt, str) and salt.startswith(PREFIX):
            return windowed.verify(salt)
        return self._opened.tokens.verify(salt, transfer)

    def _admit(self, governed: GovernedRequest, *, is_scheduling: bool = False) -> None:
        request = governed.request
        tokens = request._all_token_ids
        try:
            answer = self.port.admit(
                governed.principal,
                governed.model,
                tokens,
                request_id=request.request_id,
                hints=governed.hints,
                extras=governed.extras.frames,
                max_tokens=max(0, min(request.max_tokens, self._max_model_tokens - len(tokens))),
                groups=len(self.state.groups),
                keyed=governed.extras.unkeyed is None and self.state.caching,
                trace=governed.trace,
                asked_us=self._asked_us(request),
            )
        except (ConfigError, IdentityError) as error:
            answer = AdmissionRefused(request.request_id, error.message)
        if isinstance(answer, AdmissionRefused):
            _log.error("request refused", request=request.request_id, reason=answer.reason)
            end = self.control.end_behind_step if is_scheduling else self.control.end
            end([request.request_id], answer.reason, RequestStatus.FINISHED_ERROR)
        else:
            governed.residency = answer
            governed.reported_tokens = len(tokens)

    def admit_again(self, governed: GovernedRequest) -> None:
        """Admit waiting requests again after weights or adapters changed.

        It has no blocks. Where it is refused by now, it ends behind this step.
        """
        governed.model_changes = self._models.changes
        model, residency = self._models.of(governed.request.lora_request), governed.residency
        if residency is None or model == governed.model:
            return
        self.port.release(residency, "preempted")
        governed.model, governed.residency = model, None
        self._admit(governed, is_scheduling=True)

    def _asked_us(self, request: Request) -> int:
        """Return when the client's request reached vLLM, in boot time; it may have waited since."""
        now_us = self.port.clock.now_us()
        waited = time.time() - request.arrival_time
        return now_us - int(min(max(waited, 0.0), _LONGEST_WAIT_SECONDS) * MICROSECONDS)

    def _hand_off(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Replace `Scheduler._connector_finished`: it returns a ticket for another worker's decode, and holds no
        blocks.
        """
        governed, tiers = governed_request(request), self.tiers
        if governed is None or tiers is None or tiers.handover is None:
            return False, None
        return False, tiers.handover.offer(request, governed)

    def must_wait(self, request: Request, computed_tokens: int) -> bool:
        """Return whether only `request` must be skipped now (rule 2)."""
        governed, tiers = governed_request(request), self.tiers
        if governed is None or governed.waits_for is not None:
            return True
        if tiers is None:
            return False
        handover = tiers.handover if governed.fetching is not None else None
        if handover is not None and handover.must_wait(request, governed, computed_tokens):
            return True
        return tiers.must_look(request, governed, computed_tokens // self.state.block_tokens)

    def restorable_tokens(self, request: Request, computed_tokens: int) -> int:
        """Return how many tokens behind a hit of `computed_tokens` a tier would load."""
        return self.state.restorable_tokens(request, computed_tokens)

    def after_allocation(self, request: Request, restored_tokens: int = 0) -> None:
        """Report a waiting request's blocks, `restored_tokens` of which a tier fills."""
        self.state.after_allocation(request, restored_tokens)

    # -- steps --------------------------------------------------------------------------------------------------------

    def build_step_order(self, output: SchedulerOutput) -> StepOrder:
        """Return the order for the step that vLLM has just scheduled (rule 3)."""
        port, deferred = self.port, self.state.deferred
        if getattr(output, "kv_cache_block_copies", None):
            raise IsolationError("vllm copies blocks although no partial block is ever cached; not governed")
        self.control.building = output.num_scheduled_tokens
        now_us, before_us = port.clock.now_us(), self._built_us
        self.state.note_first_tokens(now_us)
        self._built_us = now_us
        cached = output.scheduled_cached_reqs
        if (
            not self._deferred_work_done
            or deferred.scrub_within_us < (now_us - before_us) * _DEADLINE_STEPS
            or port.pool.queue.may_repeat  # the port heard already of a block that was handed out dirty
            or deferred.has_unlisted_growth
            or (deferred.has_unreported_changes and not self._hands_out_clean_blocks_only(cached.new_block_ids))
        ):
            self._flush(cached)
        else:
            self._last_cached = cached
        deferred.has_unlisted_growth = False
        order, self._order = self._order, None
        self._deferred_work_done = False
        unclean = port.pool.unclean_hand_outs
        must_follow, self._unclean_hand_outs = unclean != self._unclean_hand_outs, unclean
        sums = port.sum_order()
        port.settle_sums()
        made = StepOrder(order=order, step=port.fence(now_us), must_follow=must_follow, sums=sums)
        if self.tiers is not None:
            made.copies = self.tiers.take_jobs()
            self.tiers.settle()
        return made

    def _hands_out_clean_blocks_only(self, grown: Sequence[Sequence[Sequence[int]] | None]) -> bool:
        """Return whether every block allocated in this step is CLEAN, so that nothing has to be scrubbed for it."""
        deferred = self.state.deferred
        if not self.state.simple:
            return False
        are_clean = self.port.pool.are_clean
        for allocation in deferred.allocations:
            if not are_clean(allocation.handed):
                return False
        return are_clean([block for new in filter(None, grown) for block in new[0]])

    def run_deferred_work(self) -> None:
        """Do what may follow a step: called when the step has left, and when the engine becomes idle."""
        if self._opened is None:
            return
        grown, self._last_cached = self._last_cached, None
        self._flush(grown, evict_ahead=True)
        self.port.settle_sums()
        if self.tiers is not None:
            self.tiers.settle()
        self._deferred_work_done = True
        self.state.defer_inserts()

    def _flush(self, grown: CachedRequestData | None, *, evict_ahead: bool = False) -> None:
        """Make the deferred calls, let the port act, and keep its scrubs for the next step's order."""
        state, port = self.state, self.port
        state.deferred.flush(None if grown is None else list(compress(grown.req_ids, grown.new_block_ids)))
        if evict_ahead:
            state.evictor.evict_ahead()
        if self._order is not None:  # it never left: one order for both
            port.pool.queue.withdraw(self._order)
        self._order = port.step()
        if state.events is not None:
            state.events.publish_pending()

    def receive(self, receipt: StepReceipt | None) -> None:
        """Take the workers' receipts for one step, which has retired."""
        if receipt is not None:
            for adapter in receipt.adapters:
                self._models.read_by_worker(*adapter)
            self.port.retire(receipt.step)
            if receipt.answers:
                self.state.deferred.record_scrub_replies(receipt.answers)
            for reply in receipt.compared:
                self.state.stop_publishing(self.port.compared(reply.order, reply.shard, reply.differing))
            if self.tiers is not None and receipt.copies:
                self.tiers.receive(receipt.copies)
        self.control.after_step()

    def has_work(self) -> bool:
        """Return whether there is work; vLLM asks before it becomes idle (rule 4)."""
        if not self.state.deferred.is_empty:
            self.run_deferred_work()
        tiers = self.tiers
        if self._order is not None or self.port.has_work() or self.control.has_outputs:
            return True
        if tiers is not None and tiers.has_work:
            return True
        dues = (self.port.next_due_us(), None if tiers is None else tiers.next_due_us())
        self.timer.arm(min((due for due in dues if due is not None), default=None))
        return self.port.has_work()  # a command that came meanwhile woke the timer before it was armed for later

    def _with_new_keys(self, reset: Callable[..., Any]) -> Callable[..., Any]:
        """Replace `Scheduler.reset_prefix_cache`, which leaves what tiers and other connectors have."""

        def done(*given: Any, **named: Any) -> Any:
            self.reset()
            return reset(*given, **named)

        return done

    def reset(self) -> bool:
        """Drop the engine's caches, as after new weights: nothing computed before may be reached."""
        self._models.reloaded()
        return True

    def recover(self) -> Scanned:
        """Scan and repair completely between steps, and compare with the ledger where the worker can read it."""
        worker = self._opened.worker if self._opened is not None else None
        return self.port.scan_and_recover() if worker is None else worker.recover()

    def close(self) -> None:
        """End all custody and close the ledger; the last order runs while the workers still live."""
        opened, self._opened = self._opened, None
        if opened is None:
            return
        self.timer.close()
        if self._order is not None:
            self.port.pool.queue.withdraw(self._order)
        engine = self.control.engine
        if opened.worker is not None:
            opened.worker.close(engine.last_order if engine is not None else None)
        else:
            opened.port.close()
        if self.tiers is not None:
            self.tiers.close()
        if self.state.events is not None:
            self.state.events.close()
        self._salts_open.close()


def _take(request: Request, field: str) -> object:
    """Take a value out of a request's parameters, so that no later code sees it; None where it is absent."""
    params = request.kv_transfer_params
    if not isinstance(params, dict) or field not in params:
        return None
    request.kv_transfer_params = {name: value for name, value in params.items() if name != field} or None
    return params[field]


def _kinds_in(given: object, *, is_marked: bool) -> tuple[KindRange, ...]:
    """Return the carried spans; none where one of them is malformed."""
    try:
        return read_kinds([KindRange(first, last, kind, is_marked) for first, last, kind in given])  # type: ignore[attr-defined]
    except (TypeError, ValueError, ConfigError):
        return ()


# A timer that makes an idle engine take a step when the next hold lapses.
#
# Rules of this section:
# 1. It holds no lock during its call, and setting it is cheap and idempotent: an engine sets it whenever it becomes
#    idle.

LATEST_SECONDS = 3600.0


class WakeTimer:
    """Calls `on_due` at the set time, on its own thread, which starts with the first call of `arm`."""

    def __init__(self, clock: Clock, wake: Callable[[], None]) -> None:
        self._clock = clock
        self.on_due = wake
        self._due_us: int | None = None
        self._changed = threading.Condition()
        self._thread: GuardingThread | None = None
        self._closed = False

    def arm(self, due_us: int | None) -> None:
        """Wake the engine at `due_us` on the boot-time clock, which replaces an earlier time. None: never."""
        if due_us == self._due_us:
            return
        with self._changed:
            self._due_us = due_us
            if self._thread is None and due_us is not None and not self._closed:
                self._thread = GuardingThread(self._run, name="kvcustody-wake")
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Stop; nothing is woken afterwards."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                due_us = self._due_us
                if due_us is None:
                    self._changed.wait()
                    continue
                left = (due_us - self._clock.now_us()) / MICROSECONDS
                if left > 0:
                    self._changed.wait(min(left, LATEST_SECONDS))
                    continue
                self._due_us = None
                self._changed.release()
                try:
                    self.on_due()
                finally:
                    self._changed.acquire()
