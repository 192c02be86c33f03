"""The scheduler's half of the connector: admission, deferral, orders to the workers, receipts.

S1 A request's token is taken from it on arrival, verified, and kept nowhere: no event, log or hash of vLLM's ever
   sees it. Without a valid one the request runs, reads nothing and publishes nothing.
S2 A request that must wait is answered `(None, False)`: vLLM skips it alone. It never waits in `allocate_slots`,
   where it would stall or preempt others.
S3 A step's order leaves with the step, after everything that the step moved was told to the port.
S4 An idle engine is stepped while something is due, and woken for what comes due later.
S5 A step waits for nothing that can be done while the workers compute: only for the scrub of a block that it hands out
   before it is zero, and for one whose deadline is near. Where nobody calls `attend`, the next step does it all first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

import structlog
from vllm.v1.request import RequestStatus

from kvcustody.errors import ConfigError, IdentityError, IsolationError
from kvcustody.governance.admission_outcome import AdmissionRefused
from kvcustody.governance.identity.w3c_trace import is_trace, trace_in
from kvcustody.governance.request import NO_HINTS
from kvcustody.governance.tokens.scope_token import VerifiedToken
from kvcustody.integrations.vllm import open_custody as opening
from kvcustody.integrations.vllm.model_identity import Models
from kvcustody.integrations.vllm.scheduler.block_pool import governed_pool
from kvcustody.integrations.vllm.scheduler.cache_manager import governed_manager
from kvcustody.integrations.vllm.scheduler.engine_control import EngineProcess, VllmControl
from kvcustody.integrations.vllm.scheduler.extra_content import extras_of
from kvcustody.integrations.vllm.scheduler.governed_request import ATTRIBUTE, GovernedRequest, governed
from kvcustody.integrations.vllm.scheduler.request_state import SchedulerState
from kvcustody.integrations.vllm.scheduler.wake_timer import WakeTimer
from kvcustody.integrations.vllm.step_messages import StepOrder, StepReceipt

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvcustody.allocator.external.scrub_queue import ScrubOrder
    from kvcustody.governance.external.engine_port import EnginePort
    from kvcustody.governance.orphans.scans import Scanned
    from kvcustody.governance.settings import Settings
    from kvcustody.integrations.vllm.scheduler.kv_events import StepPublisher

TRANSFER = "kvcustody"  # where `kv_transfer_params` carry a token that is too long for `cache_salt`
TRACE = "kvcustody_trace"  # where they carry the trace that the request came to the door with
_DEADLINE_STEPS = 4  # what has to be scrubbed within so many steps does not wait for the next one's
_log = structlog.get_logger(__name__)


class SchedulerSide:
    """Governance of one engine process. It exists before vLLM's manager does; `bind` completes it."""

    def __init__(self, config: VllmConfig, cache: KVCacheConfig, settings: Settings) -> None:
        self._config = config
        self._cache = cache
        self.settings = settings
        opening.refuse_ungoverned(config, settings)
        self.control = VllmControl()
        self.port: EnginePort
        self.books: SchedulerState
        self.timer: WakeTimer
        self._opened: opening.OpenedCustody | None = None
        self._models: Models
        self._order: ScrubOrder | None = None  # leaves with the next step
        self._grown: CachedRequestData | None = None  # what the last step handed to requests that run
        self._is_attended = False
        self._built_us = 0
        self._max_model_tokens = int(config.model_config.max_model_len)

    # -- set-up -------------------------------------------------------------------------------------------------------

    def bind(self, manager: KVCacheManager) -> None:
        """Govern vLLM's manager and pool; a second time changes nothing. Raises a `CustodyError` if it cannot."""
        if self._opened is not None:
            return
        block_tokens = int(manager.block_pool.hash_block_size)
        plan = opening.plan_of(self._config, self._cache, manager, block_tokens)
        books = SchedulerState(manager, block_tokens)
        self.control.books = self.books = books
        opened = self._opened = opening.open_custody(self.settings, plan, self.control)
        self.port = books.port = opened.port
        self._models = Models(self._config, block_tokens)
        self.timer = WakeTimer(opened.clock, self.control.wake)
        governed_pool(manager.block_pool, books)
        governed_manager(manager, books)
        if self.settings.kv_events_endpoint:
            self._open_publisher(opened)

    def _open_publisher(self, opened: opening.OpenedCustody) -> None:
        """The settings ask for block events. Raises `ConfigError` where their address cannot be bound."""
        from kvcustody.integrations.events.publisher import open_publisher

        publisher = open_publisher(
            self.settings,
            revision=opened.port.table.revision,
            incarnation=opened.worker.writer.incarnation if opened.worker is not None else "",
            rank=int(self._config.parallel_config.data_parallel_rank),
        )
        assert publisher is not None, "an endpoint is set"
        self.publish_to(publisher, publisher.close)

    def publish_to(self, publisher: StepPublisher, close: Callable[[], None] | None = None) -> None:
        """Hand the block events of every step to `publisher` from now on. Call it before any request arrives.

        Raises `IsolationError` where something is in vLLM's index already.
        """
        from kvcustody.integrations.vllm.scheduler.kv_events import SchedulerBlockEvents

        books = self.books
        books.events = SchedulerBlockEvents(
            books.pool,
            self.port,
            publisher,
            with_tokens=self.settings.kv_events_tokens == "published",
            groups=len(books.groups),
            close=close,
        )

    def bind_scheduler(self, scheduler: Scheduler) -> None:
        """The scheduler is complete: bind its manager, if that has not happened, and take its frees as they come.

        vLLM may defer frees for connectors that write into blocks outside the model's stream. This one never does, and
        the port's fences order the scrub behind steps in flight.
        """
        opening.refuse_foreign_connectors(scheduler.vllm_config, self.settings.vllm_connectors_allowed)
        self.bind(scheduler.kv_cache_manager)
        self.books.keys_early = opening.has_foreign_connectors(scheduler.vllm_config)
        if not self.books.keys_early:
            self.port.pool.only_steps = True
            scheduler._connector_finished = _nothing_to_hand_off
        self.control.scheduler = scheduler
        scheduler.defer_block_free = False

    def bind_engine(self, engine: EngineProcess) -> None:
        """The engine is complete: idle work can be done from now on."""
        self.control.engine = engine

    # -- requests -----------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Who a request is from (S1), and what it may ever do."""
        verified, trace = self._verify(request), self._trace(request)
        valid = isinstance(verified, VerifiedToken)
        principal, hints = (verified.principal, verified.hints) if valid else (None, NO_HINTS)
        if not valid:
            _log.warning("no identity", request=request.request_id, reason=verified.reason)
        extras = extras_of(request, self.books.block_tokens)
        if extras.unkeyed is not None:
            _log.info("not reusable", request=request.request_id, reason=extras.unkeyed)
        model = self._models.of(request.lora_request)
        mine = GovernedRequest(request, principal, hints, model, extras, len(self.books.groups), trace)
        setattr(request, ATTRIBUTE, mine)
        request.block_hashes = []
        request._block_hasher = None
        mine.skips_reading = bool(request.skip_reading_prefix_cache)
        request.skip_reading_prefix_cache = False  # vLLM would not let such a request be deferred
        self.books.requests[request.request_id] = mine
        self._admit(mine)

    def _trace(self, request: Request) -> str:
        """The trace that the door saw, or vLLM, which hands its headers on where it sends spans itself; else empty."""
        params = request.kv_transfer_params
        if isinstance(params, dict) and TRACE in params:
            rest = dict(params)
            trace = rest.pop(TRACE)
            request.kv_transfer_params = rest or None
            if is_trace(trace):
                return str(trace)
        headers = getattr(request, "trace_headers", None)
        return trace_in(headers) if headers else ""

    def _verify(self, request: Request) -> Any:
        salt, request.cache_salt = request.cache_salt, None
        transfer = None
        if isinstance(request.kv_transfer_params, dict) and TRANSFER in request.kv_transfer_params:
            rest = dict(request.kv_transfer_params)
            transfer = rest.pop(TRANSFER)
            request.kv_transfer_params = rest or None
        assert self._opened is not None
        return self._opened.tokens.verify(salt, transfer)

    def _admit(self, mine: GovernedRequest) -> None:
        request = mine.request
        tokens = request._all_token_ids
        try:
            answer = self.port.admit(
                mine.principal,
                mine.model,
                tokens,
                request_id=request.request_id,
                hints=mine.hints,
                extras=mine.extras.frames,
                max_tokens=max(0, min(request.max_tokens, self._max_model_tokens - len(tokens))),
                groups=len(self.books.groups),
                keyed=mine.extras.unkeyed is None and self.books.caching,
                trace=mine.trace,
            )
        except (ConfigError, IdentityError) as error:
            answer = AdmissionRefused(request.request_id, error.message)
        if isinstance(answer, AdmissionRefused):
            _log.error("request refused", request=request.request_id, reason=answer.reason)
            self.control.end([request.request_id], answer.reason, RequestStatus.FINISHED_ERROR)
        else:
            mine.residency = answer

    def waits(self, request: Request) -> bool:
        """Whether `request` alone must be skipped now (S2)."""
        mine = governed(request)
        return mine is None or mine.waits_for is not None

    def placed(self, request: Request) -> None:
        """A waiting request has its blocks."""
        self.books.placed(request)

    # -- steps --------------------------------------------------------------------------------------------------------

    def build(self, output: SchedulerOutput) -> StepOrder:
        """The order of the step that vLLM has just scheduled (S3)."""
        port, journal = self.port, self.books.journal
        if getattr(output, "kv_cache_block_copies", None):
            raise IsolationError("vllm copies blocks although no partial block is ever cached; not governed")
        self.control.building = output.num_scheduled_tokens
        now_us, before_us = port.clock.now_us(), self._built_us
        self._built_us = now_us
        cached = output.scheduled_cached_reqs
        if (
            not self._is_attended
            or journal.scrub_within_us < (now_us - before_us) * _DEADLINE_STEPS
            or port.pool.queue.may_repeat  # the port heard already of a block that was handed out dirty
            or (journal.is_behind and not self._hands_out_zeroes(cached.new_block_ids))
        ):
            self._tell(cached)
        else:
            self._grown = cached
        order, self._order = self._order, None
        self._is_attended = False
        return StepOrder(order=order, step=port.fence(now_us))

    def _hands_out_zeroes(self, grown: Sequence[Any]) -> bool:
        """Every block that this step hands out is CLEAN already, so nothing has to be scrubbed for it."""
        journal = self.books.journal
        if not self.books.simple:
            return False
        are_clean = self.port.pool.are_clean
        for placed in journal.placed:
            if not are_clean(placed.handed):
                return False
        return are_clean([block for new in filter(None, grown) for block in new[0]])

    def attend(self) -> None:
        """What need not be done before a step leaves: called when it has left, and when the engine goes idle (S5)."""
        if self._opened is None:
            return
        grown, self._grown = self._grown, None
        self._tell(grown, ahead=True)
        self._is_attended = True
        self.books.put_off()

    def _tell(self, grown: CachedRequestData | None, *, ahead: bool = False) -> None:
        """Tell the port everything, let it act, and keep the order of scrubs that has to leave with the next step."""
        books, port = self.books, self.port
        books.journal.settle(None if grown is None else list(compress(grown.req_ids, grown.new_block_ids)))
        if ahead:
            books.room.ahead()
        if self._order is not None:  # it never left: one order for both
            port.pool.queue.withdraw(self._order)
        self._order = port.step()
        if books.events is not None:
            books.events.tell()

    def receive(self, receipt: StepReceipt | None) -> None:
        """What the workers did in one step; the step has retired."""
        if receipt is not None:
            self.port.retire(receipt.step)
            if receipt.answers:
                self.books.journal.answer(receipt.answers)
        self.control.after_step()

    def has_work(self) -> bool:
        """Asked by vLLM when it would go idle (S4)."""
        if not self.books.journal.is_empty:
            self.attend()
        if self._order is not None or self.port.has_work() or self.control.has_outputs:
            return True
        self.timer.arm(self.port.next_due_us())
        return False

    def reset(self) -> bool:
        """The engine's caches are dropped, as after new weights: nothing computed before may be reached."""
        self._models.reloaded()
        return True

    def recover(self) -> Scanned:
        """Between steps: a full scan with repair, joined with the ledger where the worker can read it."""
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
        if self.books.events is not None:
            self.books.events.end()


def _nothing_to_hand_off(_request: Request) -> tuple[bool, None]:
    """Stands for `Scheduler._connector_finished`, which lists a request's blocks for connectors that want them."""
    return False, None
