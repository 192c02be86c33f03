"""The classes that TensorRT-LLM imports by name. Never run on TensorRT-LLM itself: written after its documentation.

    kv_connector_config:
      connector_module: kvcustody.integrations.tensorrt_llm.connector
      connector_scheduler_class: CustodyConnectorScheduler
      connector_worker_class: CustodyConnectorWorker

1. This module needs TensorRT-LLM; nothing else here does.
2. Loads and saves are part of their step: nothing is asynchronous, so no block is freed while it is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import (
    KvCacheConnectorScheduler,
    KvCacheConnectorWorker,
)

from kvcustody.errors import ConfigError
from kvcustody.integrations.tensorrt_llm.engine_protocol import EngineRequest, ScheduledStep, StepOrders
from kvcustody.integrations.tensorrt_llm.open_custody import shared_custody

if TYPE_CHECKING:
    import torch


class CustodyConnectorScheduler(KvCacheConnectorScheduler):  # type: ignore[misc]
    """The `connector_scheduler_class`."""

    def __init__(self, llm_args: Any) -> None:
        self.half = shared_custody(llm_args).scheduler
        super().__init__(llm_args)

    def get_num_new_matched_tokens(self, request: EngineRequest, num_computed_tokens: int) -> tuple[int, bool]:
        """See the interface; never asynchronous."""
        return self.half.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: EngineRequest, block_ids: list[int]) -> None:
        """See the interface."""
        self.half.allocated(request.request_id, block_ids)

    def build_connector_meta(self, scheduler_output: ScheduledStep) -> StepOrders:
        """See the interface."""
        return self.half.orders(scheduler_output)

    def request_finished(self, request: EngineRequest, cache_block_ids: list[int]) -> bool:
        """See the interface; the engine may free the blocks at once."""
        self.half.finished(request)
        return False


class CustodyConnectorWorker(KvCacheConnectorWorker):  # type: ignore[misc]
    """The `connector_worker_class`."""

    def __init__(self, llm_args: Any) -> None:
        self.half = shared_custody(llm_args).worker
        super().__init__(llm_args)

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """See the interface."""
        self.half.register(kv_cache_tensor)

    def register_kv_cache_layout(self, layout: Any) -> None:
        """See the interface. Raises `ConfigError` for what one tensor does not describe."""
        pool = layout.as_single_pool_tensor()
        if pool is None:
            raise ConfigError("TensorRT-LLM's cache has several pools or layer groups: they are not governed")
        self.half.register(pool)

    def start_load_kv(self, stream: Any) -> None:
        """See the interface; complete when it returns."""
        self.half.load(self.get_connector_meta())

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Return at once: every layer is there."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Do nothing: blocks are read when all layers are there."""

    def wait_for_save(self, stream: Any) -> None:
        """See the interface."""
        self.half.save(self.get_connector_meta(), stream)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Return nothing: no transfer is asynchronous."""
        return [], []
