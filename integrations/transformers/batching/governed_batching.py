"""Governed continuous batching: a model's own serving loop over a cache whose every block is in custody.

1. The engine's pool is never used: a scheduler from the engine's registry takes the cache into custody before anything
   was allocated. An unsupported version, layout, layer kind, offloading or tensor parallelism is refused.
2. While this is open the model has no other continuous batching: `model.generate_batch` and
   `model.init_continuous_batching` run in it too.
3. Expiry, scrub and evidence continue while no request runs, by the idle loop, or by a timer where no loop runs.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from importlib import import_module, metadata
from itertools import count
from types import TracebackType
from typing import Any, TypeVar

from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import (
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING

from kvcustody.clock import Clock, SystemClock
from kvcustody.errors import ConfigError, HandleError
from kvcustody.governance.erasure.erasure_run import ErasureResult
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.identity.w3c_trace import check_trace
from kvcustody.governance.request import NO_HINTS, Hints
from kvcustody.governance.settings import Settings
from kvcustody.governance.worker.worker import MemoryPlan, Worker, open_worker
from kvcustody.guarding_thread import GuardingThread
from kvcustody.integrations.events.feed import BlockEventPublisher
from kvcustody.integrations.transformers.batching.block_memory import EngineBlocks
from kvcustody.integrations.transformers.batching.custody import BatchCustody
from kvcustody.integrations.transformers.batching.kv_events import (
    BatchingBlockEvents,
    open_events,
)
from kvcustody.integrations.transformers.batching.manager import ACTING, GovernedManager
from kvcustody.integrations.transformers.batching.paged_cache import govern
from kvcustody.integrations.transformers.batching.request_claims import ANONYMOUS, RequestClaim, RequestClaims
from kvcustody.integrations.transformers.batching.scheduler import scheduler_for
from kvcustody.logger import get_logger

T = TypeVar("T")
TICK_SECONDS = 0.1
_log = get_logger(__name__)
_numbers = count(1)


class GovernedBatching:
    """Continuous batching of `model` in custody. Use it as a context manager, or call `close`.

    custody: settings of a worker, which this then opens and closes, or a function from the engine's memory to a
    Governor that the caller closes. model_identity: what conditions K/V values, with the engine's page size as
    `block_tokens`. anonymous: whose requests without a claim are; they reuse nothing, and a policy that does not admit
    this tenant refuses them. publisher: who is told of blocks; where there is none, the setting `kv_events_endpoint`
    opens one. tick_seconds: how often time is looked at while no loop runs; with None the caller calls
    `tick`. Raises `ConfigError` where the engine cannot be governed (rule 1).
    """

    def __init__(
        self,
        model: Any,
        custody: Settings | Callable[[MemoryPlan], Governor],
        model_identity: ModelIdentity,
        *,
        generation_config: GenerationConfig | None = None,
        batching_config: ContinuousBatchingConfig | None = None,
        anonymous: Principal = ANONYMOUS,
        publisher: BlockEventPublisher | None = None,
        clock: Clock | None = None,
        tick_seconds: float | None = TICK_SECONDS,
    ) -> None:
        check_internals()
        self.model = model
        self.claims = RequestClaims(anonymous)
        self.custody: BatchCustody
        self._settings = custody
        self._identity = model_identity
        self._clock = clock or SystemClock()
        self._worker: Worker | None = None
        self._publisher = publisher
        self._events: BatchingBlockEvents | None = None
        self._closed = threading.Event()
        self._scheduler_name = f"kvcustody-{next(_numbers)}"
        config = copy(batching_config) if batching_config is not None else ContinuousBatchingConfig()
        if batching_config is None:
            config.page_size = model_identity.block_tokens
        check_config(model, config, model_identity.block_tokens)
        registry: dict[str, Any] = SCHEDULER_MAPPING
        registry[self._scheduler_name] = scheduler_for(
            config.scheduler_type, self._install, self._deliver_failure, self._end_id
        )
        config.scheduler_type = self._scheduler_name
        try:
            self.manager = self._make_manager(generation_config, config)
            self.manager.batch_processor = self.manager._create_batch_processor()
            self.custody.turn.stream = self.manager.batch_processor.inputs_and_outputs.compute_stream
            self.manager.guard_captures(self.custody.turn)
        except BaseException:
            self._abandon()
            raise
        model._cached_continuous_batching_manager = self.manager
        self._timer: GuardingThread | None = None
        if tick_seconds is not None:
            self._timer = GuardingThread(self._tick_while_stopped, args=(tick_seconds,), name="kvcustody-timer")
            self._timer.start()

    # -- taking the engine into custody -------------------------------------------------------------------------------

    def _make_manager(
        self, generation_config: GenerationConfig | None, config: ContinuousBatchingConfig
    ) -> GovernedManager:
        chosen = copy(generation_config if generation_config is not None else self.model.generation_config)
        if chosen.eos_token_id is None:
            chosen.eos_token_id = -1  # as `init_continuous_batching` does
        manager = GovernedManager(model=self.model, generation_config=chosen, continuous_batching_config=config)
        manager.bind_ids(self.claims)
        check_ranks(manager.distributed_helper.tp_size)
        return manager

    def _install(self, cache: Any) -> BatchCustody:
        """Take the new cache into custody before anything is allocated; the scheduler's constructor calls this."""
        if hasattr(self, "custody"):
            raise ConfigError("a second cache was made for a governed model; close the first one before")
        allocators = check_cache(cache)
        tuning = self._settings.scrub_tuning_path if isinstance(self._settings, Settings) else None
        blocks = EngineBlocks(cache, allocators, self._clock, tuning=tuning)
        blocks.probe()
        governor = self._open(blocks.plan)
        page = int(allocators[0].tokens_per_page)
        if governor.block_tokens != page:
            raise ConfigError(
                f"the Governor's blocks have `{governor.block_tokens}` tokens, the engine's `{page}`; set "
                "`block_tokens` to the page size"
            )
        self.custody = BatchCustody(
            governor,
            self._identity,
            blocks,
            self.claims,
            is_sharing=cache.use_prefix_sharing,
            is_async=bool(self.manager.continuous_batching_config.use_async_batching),
            parameters=lambda: self.model.state_dict(keep_vars=True).values(),
        )
        self._events = self.custody.events = open_events(self._publisher, governor, self._worker, self._settings)
        govern(cache, self.custody)
        _log.info("engine in custody", blocks=blocks.blocks, block_tokens=governor.block_tokens)
        _log.info("model identity", **self._identity.named())
        return self.custody

    def _open(self, plan: MemoryPlan) -> Governor:
        if not isinstance(self._settings, Settings):
            return self._settings(plan)
        self._worker = open_worker(self._settings, plan, clock=self._clock)
        return self._worker.governor

    def _deliver_failure(self, state: Any, error: Exception) -> None:
        self.manager.output_router.fail_and_deliver(state, error)

    def _end_id(self, name: str) -> None:
        self.manager.end(name)

    @property
    def worker(self) -> Worker | None:
        """The open worker from the settings."""
        return self._worker

    # -- requests -----------------------------------------------------------------------------------------------------

    def identify(
        self,
        request_id: str,
        principal: Principal,
        *,
        route: str | None = None,
        hints: Hints = NO_HINTS,
        trace: str = "",
    ) -> None:
        """State the owner of the next request with this id, before `manager.add_request` is called with it.

        `trace`: the W3C trace id that it came with. Raises `IdentityError` where that is none, and where the id is
        claimed or in use already or poses as a forked child.
        """
        self.claims.file(request_id, RequestClaim(principal, route, hints, trace=check_trace(trace) if trace else ""))

    @contextmanager
    def acting(
        self, principal: Principal, *, route: str | None = None, hints: Hints = NO_HINTS, trace: str = ""
    ) -> Iterator[None]:
        """Attribute requests that this thread adds within the block to `principal`, with this trace."""
        token = ACTING.set(RequestClaim(principal, route, hints, trace=check_trace(trace) if trace else ""))
        try:
            yield
        finally:
            ACTING.reset(token)

    def submit(
        self,
        principal: Principal,
        input_ids: Sequence[int],
        *,
        route: str | None = None,
        hints: Hints = NO_HINTS,
        trace: str = "",
        request_id: str | None = None,
        **options: Any,
    ) -> str:
        """Queue a request for `principal` and return its id. `options`: those of the engine's `add_request`.

        Raises `IdentityError` for an id that is claimed or in use or a trace that is none, `HandleError` where the
        engine takes no requests.
        """
        with self.acting(principal, route=route, hints=hints, trace=trace):
            added = self.manager.add_request(list(input_ids), request_id, **options)
        if added is None:
            raise HandleError("the engine takes no requests: its loop has failed or is stopping")
        return added

    def cancel(self, request_id: str) -> None:
        """Cancel a request whose client left; the engine delivers nothing more for it."""
        self.manager.cancel_request(request_id)

    def generate_batch(
        self, principals: Principal | Sequence[Principal], inputs: Sequence[Sequence[int]], **options: Any
    ) -> dict[str, Any]:
        """Run the engine's `generate_batch`, each prompt for its principal. Starts and stops the loop.

        Returns the engine's outputs by request id, in the order of `inputs`, forked children before their parent.
        Raises `HandleError` where the loop is running already: submit instead.
        """
        if self.manager.is_running():
            raise HandleError("the serving loop is running; use `submit` and `manager.get_result`")
        owners = [principals] * len(inputs) if isinstance(principals, Principal) else list(principals)
        self.start()
        try:
            ids = [self.submit(owner, tokens, **options) for owner, tokens in zip(owners, inputs, strict=True)]
            return self.manager.collect(ids)
        finally:
            self.stop()

    # -- running ------------------------------------------------------------------------------------------------------

    def start(self, *, warmup: bool = True) -> None:
        """Start the serving loop."""
        self.manager.switch_to_cb_friendly_attn(
            self.model, self.manager.continuous_batching_config.auto_switch_to_flash
        )
        if warmup and not self.manager.warmed_up:
            self.manager.warmup()
        self.manager.start()

    def stop(self, *, hard: bool = False, timeout_seconds: float | None = None) -> None:
        """Stop the serving loop, after queued requests or at once. The cache stays in custody."""
        if self.manager._generation_thread is not None:
            self.manager.stop(timeout=timeout_seconds, hard_stop=hard)

    def call(self, command: Callable[[Governor], T], timeout_seconds: float | None = 10.0) -> T:
        """Run `command` in the Governor's turn at the next step, and return its answer. Thread-safe."""
        return self.custody.governor.call(command).result(timeout_seconds)

    def weights_changed(self) -> None:
        """Make earlier results unreachable after a change of weights that no count of writes shows (`.data`, a
        kernel).
        """
        with self.custody.turn:
            self.custody.weights_changed()

    def erase(self, selector: Selector) -> ErasureResult:
        """End all custody of a selector; its running requests fail with an error that says so."""
        return self.call(lambda governor: governor.erase(selector))

    def tick(self) -> None:
        """Run expiry, scrub, commands and evidence now, unless the loop runs, which does so itself. Thread-safe."""
        if not self.manager.is_running() or self.manager.background_thread_status._paused:
            with self.custody.turn:
                if not self._closed.is_set():
                    self.custody.tick()

    def _tick_while_stopped(self, seconds: float) -> None:
        while not self._closed.wait(seconds):
            self.tick()

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop, end all custody, zero everything, hand over the evidence; a second call does nothing."""
        if self._closed.is_set():
            return
        self.stop(hard=True)
        self._closed.set()
        if self._timer is not None:
            self._timer.join()
        with self.custody.turn:
            self.custody.release_all("shutdown")
            self.custody.blocks.clear_trash()
            self._abandon()

    def _abandon(self) -> None:
        SCHEDULER_MAPPING.pop(self._scheduler_name, None)
        self.model.__dict__.pop("_cached_continuous_batching_manager", None)
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._events is not None:
            self._events.close()
            self._events = None

    def __enter__(self) -> GovernedBatching:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# Checks of what can be governed: call `check_internals` before anything is opened, the others with the opened parts.
#
# Rules of this section:
# 1. Nothing starts outside the declared range of versions: a changed engine may allocate blocks without our
#    knowledge.
# 2. Inside the range every overridden or called class and signature is compared before the first block moves.
# 3. Governed are one cache tensor on one device, layers with full attention or sliding windows, and no copies of
#    blocks elsewhere. Every unknown part of the engine is refused, with the fix.


def check_config(model: Any, config: Any, block_tokens: int) -> None:
    """Raise `ConfigError` where the batching configuration cannot be governed."""
    if config.cpu_offload_space is None or config.cpu_offload_space > 0:
        raise ConfigError(
            f"cpu_offload_space is `{config.cpu_offload_space}`: what it keeps is not in custody; set it to 0, and "
            "the worker's `host_tier_bytes` to what host memory may take: they go there sealed"
        )
    if config.page_size != block_tokens:
        raise ConfigError(
            f"page_size is `{config.page_size}`, the model identity has block_tokens `{block_tokens}`; "
            "they must be equal"
        )
    if isinstance(getattr(model, "_cached_continuous_batching_manager", None), ContinuousBatchingManager):
        raise ConfigError(
            "the model keeps a continuous batching manager already; call "
            "`model.destroy_cached_continuous_batching_manager()` first"
        )


def check_ranks(ranks: int) -> None:
    """Raise `ConfigError` where the model is spread over several devices."""
    if ranks > 1:
        raise ConfigError(f"tensor parallelism over `{ranks}` ranks is not governed; use one device")


def check_cache(cache: Any) -> list[Any]:
    """Return the allocators of a governable cache.

    Raises:
        ConfigError: the cache cannot be governed.
    """
    if type(cache) is not PagedAttentionCache:
        raise ConfigError(f"a cache of type `{type(cache).__name__}` is not governed; use the engine's own")
    kinds = {name: type(one) for name, one in cache.cache_allocators.items()}
    if not kinds or not set(kinds.values()) <= {FullAttentionCacheAllocator, SlidingAttentionCacheAllocator}:
        raise ConfigError(
            f"layers of kinds `{', '.join(kinds)}` are not governed; only models whose layers have full attention or "
            "sliding windows"
        )
    return list(cache.cache_allocators.values())


FIRST, BEYOND = (5, 19), (5, 25)
RANGE = f">={FIRST[0]}.{FIRST[1]},<{BEYOND[0]}.{BEYOND[1]}"
_ROOT = "transformers.generation.continuous_batching"

# Where, class, method: its parameters after `self`.
_CACHE = {
    "can_store_request_tokens": ("state", "request_len", "dry_run"),
    "compute_free_capacity": ("relative",),
    "count_new_complete_blocks": ("state", "request_len"),
    "count_storable_requests": ("list_blocks_needed",),
    "evict_cached_blocks": (),
    "free_all_requests": ("clear_ledgers",),
    "free_blocks": ("request_id", "no_cache"),
    "mark_complete_blocks": ("state", "complete_blocks"),
    "perform_cache_copy": ("copy_src_and_dst",),
    "prepare_fork_request": ("src_state", "dst_req_ids", "copy_src_and_dst"),
    "reset": (),
    "search_prefix_match": ("request_id", "prompt_ids"),
}
_SCHEDULER = {
    "__init__": ("cache", "safety_margin", "max_requests_per_batch"),
    "_infer_request_tokens": ("state", "request_ids_to_remove_from_waiting"),
    "_try_to_meet_safety_margin": (),
    "add_waiting_request": ("state",),
    "clear_cancelled_requests": (),
    "finish_request": ("request_id",),
    "reset": (),
    "set_request_cancellation": ("request_id",),
    "schedule_batch": ("token_budget", "cache_budget"),
}
_ALLOCATOR = {
    "copy_blocks": ("source_block_ids", "dest_block_ids"),
    "get_read_indices": ("request_id", "past_length", "query_length"),
    "get_write_indices": ("request_id", "past_length", "query_length"),
    "update": ("key_states", "value_states", "layer_idx", "read_index", "write_index"),
}
_MANAGER = {
    "_create_batch_processor": (),
    "add_request": (
        "input_ids",
        "request_id",
        "max_new_tokens",
        "streaming",
        "record_timestamps",
        "eos_token_id",
        "logit_processor_kwargs",
    ),
    "destroy": (),
    "start": (),
    "stop": ("block", "timeout", "keep_for_next_session", "hard_stop"),
}
EXPECTED: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {
    ("cache", "PagedAttentionCache"): _CACHE,
    ("scheduler", "FIFOScheduler"): _SCHEDULER,
    ("scheduler", "PrefillFirstScheduler"): _SCHEDULER,
    ("cache_allocators", "FullAttentionCacheAllocator"): _ALLOCATOR,
    ("cache_allocators", "SlidingAttentionCacheAllocator"): _ALLOCATOR,
    ("continuous_api", "ContinuousBatchingManager"): _MANAGER,
    ("continuous_api", "OutputRouter"): {"fail_and_deliver": ("state", "error")},
    ("requests", "RequestState"): {"create_equivalent_initial_request": ()},
}


def check_internals() -> None:
    """Raise `ConfigError` where the installed transformers is not one that this adapter was written for."""
    installed = metadata.version("transformers")
    found = re.match(r"(\d+)\.(\d+)", installed)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if not FIRST <= version < BEYOND:
        raise ConfigError(
            f"transformers `{installed}` is not known to this adapter, which governs `{RANGE}`; install one of those",
            version=installed,
        )
    for (module, name), methods in EXPECTED.items():
        owner = getattr(_module(module, installed), name, None)
        for method, expected in methods.items():
            actual = _parameters(owner, method)
            if actual != expected:
                raise ConfigError(
                    f"transformers `{installed}`: `{name}.{method}` takes `{actual}`, this adapter knows `{expected}`;"
                    f" install an unmodified release in `{RANGE}`",
                    version=installed,
                )


def _module(name: str, installed: str) -> object:
    try:
        return import_module(f"{_ROOT}.{name}")
    except ImportError as error:
        raise ConfigError(f"transformers `{installed}` has no `{_ROOT}.{name}`: {error}", version=installed) from error


def _parameters(owner: object, method: str) -> tuple[str, ...] | None:
    function = getattr(owner, method, None)
    return None if function is None else tuple(inspect.signature(function).parameters)[1:]
