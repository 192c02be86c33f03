"""The scheduler's half of the connector: admission, deferral, orders to the workers, receipts.

S1 A request's token is taken from it on arrival, verified, and kept nowhere: no event, log or hash of vLLM's ever
   sees it. Without a valid one the request runs, reads nothing and publishes nothing.
S2 A request that must wait is answered `(None, False)`: vLLM skips it alone. It never waits in `allocate_slots`,
   where it would stall or preempt others.
S3 A step's order leaves with the step, after everything that the step moved was told to the port.
S4 An idle engine is stepped while something is due, and woken for what comes due later.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from typing import TYPE_CHECKING, Any

import structlog
from vllm.v1.request import RequestStatus

from kvcustody.errors import ConfigError, IdentityError, IsolationError
from kvcustody.governance.outcome import Refused
from kvcustody.governance.request import NO_HINTS
from kvcustody.governance.scope_token import Verified
from kvcustody.integrations.vllm import opening
from kvcustody.integrations.vllm.books import Books
from kvcustody.integrations.vllm.engine_control import VllmControl
from kvcustody.integrations.vllm.extras import extras_of
from kvcustody.integrations.vllm.governed_request import ATTRIBUTE, GovernedRequest, governed
from kvcustody.integrations.vllm.manager import governed_manager
from kvcustody.integrations.vllm.messages import StepOrder, StepReceipt
from kvcustody.integrations.vllm.model import Models
from kvcustody.integrations.vllm.pool import governed_pool
from kvcustody.integrations.vllm.wake import WakeTimer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvcustody.governance.engine_port import EnginePort
    from kvcustody.governance.settings import Settings
    from kvcustody.integrations.vllm.block_events import Publisher
    from kvcustody.integrations.vllm.engine import EngineHandle

TRANSFER = "kvcustody"  # where `kv_transfer_params` carry a token that is too long for `cache_salt`
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
        self.books: Books
        self.timer: WakeTimer
        self._opened: opening.Opened | None = None
        self._models: Models
        self._max_model_tokens = int(config.model_config.max_model_len)

    # -- set-up -------------------------------------------------------------------------------------------------------

    def bind(self, manager: KVCacheManager) -> None:
        """Govern vLLM's manager and pool; a second time changes nothing. Raises a `CustodyError` if it cannot."""
        if self._opened is not None:
            return
        block_tokens = int(manager.block_pool.hash_block_size)
        plan = opening.plan_of(self._config, self._cache, manager, block_tokens)
        books = Books(manager, block_tokens)
        self.control.books = self.books = books
        opened = self._opened = opening.open_custody(self.settings, plan, self.control)
        self.port = books.port = opened.port
        self._models = Models(self._config, block_tokens)
        self.timer = WakeTimer(opened.clock, self.control.wake)
        governed_pool(manager.block_pool, books)
        governed_manager(manager, books)
        if self.settings.kv_events_endpoint:
            self._open_publisher(opened)

    def _open_publisher(self, opened: opening.Opened) -> None:
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

    def publish_to(self, publisher: Publisher, close: Callable[[], None] | None = None) -> None:
        """Hand the block events of every step to `publisher` from now on. Call it before any request arrives.

        Raises `IsolationError` where something is in vLLM's index already.
        """
        from kvcustody.integrations.vllm.block_events import BlockEvents

        books = self.books
        books.events = BlockEvents(
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
        self.control.scheduler = scheduler
        scheduler.defer_block_free = False

    def bind_engine(self, engine: EngineHandle) -> None:
        """The engine is complete: idle work can be done from now on."""
        self.control.engine = engine

    # -- requests -----------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Who a request is from (S1), and what it may ever do."""
        verified = self._verify(request)
        valid = isinstance(verified, Verified)
        principal, hints = (verified.principal, verified.hints) if valid else (None, NO_HINTS)
        if not valid:
            _log.warning("no identity", request=request.request_id, reason=verified.reason)
        extras = extras_of(request, self.books.block_tokens)
        if extras.unkeyed is not None:
            _log.info("not reusable", request=request.request_id, reason=extras.unkeyed)
        model = self._models.of(request.lora_request)
        mine = GovernedRequest(request, principal, hints, model, extras, len(self.books.groups))
        setattr(request, ATTRIBUTE, mine)
        request.block_hashes = []
        request._block_hasher = None
        mine.skips_reading = bool(request.skip_reading_prefix_cache)
        request.skip_reading_prefix_cache = False  # vLLM would not let such a request be deferred
        self.books.requests[request.request_id] = mine
        self._admit(mine)

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
            )
        except (ConfigError, IdentityError) as error:
            answer = Refused(request.request_id, error.message)
        if isinstance(answer, Refused):
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
        books, control, port = self.books, self.control, self.port
        if getattr(output, "kv_cache_block_copies", None):
            raise IsolationError("vllm copies blocks although no partial block is ever cached; not governed")
        if books.has_unsettled:
            cached = output.scheduled_cached_reqs
            books.settle(list(compress(cached.req_ids, cached.new_block_ids)))
        control.building = output.num_scheduled_tokens
        order = StepOrder(order=port.step(), step=port.fence())
        if books.events is not None:
            books.events.tell()
        return order

    def receive(self, receipt: StepReceipt | None) -> None:
        """What the workers did in one step; the step has retired."""
        control = self.control
        if receipt is not None:
            self.port.retire(receipt.step)
            for answer in receipt.answers:
                self.port.scrubbed(answer.order, answer.shard, answer.results, answer.device_blocks)
        control.after_step()

    def has_work(self) -> bool:
        """Asked by vLLM when it would go idle (S4)."""
        if self.port.has_work() or self.control.has_outputs:
            return True
        self.timer.arm(self.port.next_due_us())
        return False

    def reset(self) -> bool:
        """The engine's caches are dropped, as after new weights: nothing computed before may be reached."""
        self._models.reloaded()
        return True

    def close(self) -> None:
        """End all custody and close the ledger; the last order runs while the workers still live."""
        opened, self._opened = self._opened, None
        if opened is None:
            return
        self.timer.close()
        engine = self.control.engine
        if opened.worker is not None:
            opened.worker.close(engine.last_order if engine is not None else None)
        else:
            opened.port.close()
        if self.books.events is not None:
            self.books.events.end()
