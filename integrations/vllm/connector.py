"""The connector that vLLM loads: one class for both roles, each of which delegates to its own half.

1. Without tiers it moves no block and loads none: for vLLM it is a connector that never has anything external, so
   nothing of the model's path changes. What it needs of the connector interface is the order of calls.
2. It supports hybrid managers, and does not ask vLLM to deliver or defer anything: `requires_kv_delivery` is False
   whatever role the command line names.
3. With tiers, blocks that come back are loaded asynchronously in vLLM's own way: only their request waits. Blocks that
   a load could not fill are reported as failed, so that vLLM computes them. They are reported by block, or by request
   where a model has several layer groups.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from kvcustody.errors import ConfigError, IsolationError
from kvcustody.governance.observability.logs import configure
from kvcustody.governance.tiers.open_tiers import tier_plan
from kvcustody.integrations.vllm import installed
from kvcustody.integrations.vllm.open_custody import NULL_BLOCK, settings_of
from kvcustody.integrations.vllm.scheduler.scheduler_side import SchedulerSide
from kvcustody.integrations.vllm.step_messages import StepOrder, StepReceipt
from kvcustody.integrations.vllm.tiers.layer_groups import describe_groups
from kvcustody.integrations.vllm.tiers.worker_tiers import WorkerTiers
from kvcustody.integrations.vllm.versions import check_version
from kvcustody.integrations.vllm.worker.first_in_step import wrap_runners
from kvcustody.integrations.vllm.worker.worker_side import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvcustody.allocator.pool.tensor_memory import TensorMemory
    from kvcustody.governance.settings import Settings


class GovernedConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The connector for `--kv-transfer-config '{"kv_connector": "KVCustody", "kv_role": "kv_both"}'`."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None
    ) -> None:
        check_version()
        settings = settings_of(vllm_config)
        configure(settings.log_level, settings.log_format)
        super().__init__(vllm_config, role, kv_cache_config)
        self._cache_config = kv_cache_config
        self.scheduler_side: SchedulerSide | None = None
        self.worker_side: WorkerSide | None = None
        self._pending_orders = 0  # orders that a device has not answered yet
        if role is KVConnectorRole.SCHEDULER:
            _require_plugin()
            self.scheduler_side = SchedulerSide(vllm_config, kv_cache_config, settings)
        else:
            self.worker_side = WorkerSide(
                _shard(vllm_config),
                tuning=settings.scrub_tuning_path,
                null_block=NULL_BLOCK,
                open_tiers=_tiers_opener(vllm_config, settings, describe_groups(kv_cache_config)),
            )
            wrap_runners(self.worker_side.execute)

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether requests need a delivery of KV: False."""
        return False

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self.scheduler_side is not None, "called in the worker's role"
        return self.scheduler_side

    @property
    def _worker(self) -> WorkerSide:
        assert self.worker_side is not None, "called in the scheduler's role"
        return self.worker_side

    # -- scheduler ----------------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """See the interface; releases before 0.32 bind through `plugin` instead."""
        self._kv_cache_manager = kv_cache_manager
        self._scheduler.bind(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Do nothing: the pool is bound with its manager."""

    def on_new_request(self, request: Request) -> None:
        """See the interface."""
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens that a tier would load; `None` for a request that must wait."""
        if self._scheduler.must_wait(request, num_computed_tokens):
            return None, False
        tokens = self._scheduler.restorable_tokens(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """See the interface."""
        if num_external_tokens and self._scheduler.tiers is None:
            raise IsolationError(f"`{num_external_tokens}` tokens of another connector reached a governed pool")
        self._scheduler.after_allocation(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepOrder:
        """See the interface."""
        order = self._scheduler.build_step_order(scheduler_output)
        order.is_idle = not scheduler_output.total_num_scheduled_tokens
        return order

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See the interface."""
        receipt = connector_output.kv_connector_worker_meta
        ours = receipt if isinstance(receipt, StepReceipt) else None
        if ours is not None:
            self._pending_orders = ours.pending_orders
        self._scheduler.receive(ours)
        self._scheduler.keep_loading(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Return False, so that blocks are freed at once; the manager reports it to governance."""
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return as `request_finished` does."""
        return False, None

    def has_pending_push_work(self) -> bool:
        """See the interface. While a device owes answers, one more step without requests fetches them."""
        return self._scheduler.has_work() or self._pending_orders > 0

    def reset_cache(self) -> bool:
        """See the interface."""
        return self._scheduler.reset()

    # -- worker -------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See the interface."""
        self._worker.register(kv_caches, self._blocks())

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: Any) -> None:
        """Register one tensor for all layers (releases before 0.32)."""
        self._worker.register({"all layers": kv_cache}, self._blocks())

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Run the scrubs, unless the runner has done them before everything else in the step."""
        assert isinstance(kv_connector_metadata, StepOrder)
        self._worker.execute(kv_connector_metadata)

    def build_connector_worker_meta(self) -> StepReceipt:
        """See the interface."""
        return self._worker.receipt()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose load has ended."""
        return None, self._worker.finished_loads() or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> base.KVConnectorTransferResults:
        """Return the requests whose load has ended, and, with several layer groups, those that must compute
        everything.
        """
        finished = self._worker.finished_loads()
        return base.KVConnectorTransferResults(finished_recving=finished, failed_recving=self._worker.failed_requests())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks that a load could not fill, where they are of one layer group."""
        return self._worker.failed_blocks()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Do nothing: loads began with the step's order."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request waits for its load, a step does not."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: copies are made of published blocks, with the next step's order."""

    def wait_for_save(self) -> None:
        """Do nothing: nothing is saved here."""

    def shutdown(self) -> None:
        """Close this half; a second call does nothing."""
        if self.scheduler_side is not None:
            self.scheduler_side.close()
        if self.worker_side is not None:
            self.worker_side.close()

    def _blocks(self) -> int:
        config = self._cache_config
        blocks = config.num_blocks if config is not None else self._vllm_config.cache_config.num_gpu_blocks
        return int(blocks)


def _tiers_opener(
    config: VllmConfig, settings: Settings, groups: tuple[str, ...]
) -> Callable[[TensorMemory], WorkerTiers] | None:
    """Return a function that makes a worker's tiers over its cache; None where nothing leaves the device. groups: each
    one's layers.
    """
    plan = tier_plan(settings)
    if plan is None:
        return None
    shard, model = _shard(config), config.model_config

    def open_tiers(memory: TensorMemory) -> WorkerTiers:
        from vllm.version import __version__

        stack = ExitStack()
        return WorkerTiers(
            settings,
            plan,
            memory,
            shard=shard,
            shards=config.parallel_config.world_size,
            software=(f"vllm {__version__} {model.dtype} {config.cache_config.cache_dtype}", *groups),
            groups=max(1, len(groups)),
            clock=settings.open_clock(None, stack),
            stack=stack,
        )

    return open_tiers


def _require_plugin() -> None:
    """Refuse a connector that was named by its module path: it would run with vLLM's own hashes."""
    if not installed.is_installed:
        raise IsolationError(
            "the kvcustody plugin is not loaded in the engine's process: name `kvcustody` in VLLM_PLUGINS, or unset it"
        )


def _shard(config: VllmConfig) -> int:
    """Return this worker's number among its engine's shards, which is the executor's rank.

    Raises `ConfigError` where the rank does not tell them apart (`refuse_ungoverned` has refused what is known to).
    """
    parallel = config.parallel_config
    if parallel.world_size == 1:
        return 0
    rank = int(parallel.rank)
    if not 0 <= rank < parallel.world_size:
        raise ConfigError(
            f"a worker of rank `{rank}` in an engine of `{parallel.world_size}`: its scrubs cannot be "
            "distinguished from another's; start vllm with `--distributed-executor-backend mp` or `ray`",
            rank=rank,
        )
    return rank
