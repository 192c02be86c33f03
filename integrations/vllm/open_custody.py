"""Opens a port from vLLM's configuration: settings, the pool's plan, the model's identity.

1. Settings come from the environment and the settings file, as everywhere, and from `kv_connector_extra_config`, whose
   names are those of docs/reference/settings.md. Every process of an engine reads the same.
2. The start is refused where the configuration would do one of these:
   - publish token ids;
   - exchange the cache's memory under a running engine;
   - leave a scrub without an answer, or write before it;
   - bypass the door.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvcustody.clock import Clock
from kvcustody.errors import ConfigError
from kvcustody.governance.credentials.scope_token import ScopeTokens
from kvcustody.governance.edge.windowed_token import WindowedTokens
from kvcustody.governance.external.engine_control import EngineControl
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.governance.settings import Settings, load_settings
from kvcustody.governance.worker.engine_worker import EnginePlan, EngineWorker, open_engine_worker
from kvcustody.integrations.identity.from_settings import check_issuers, open_verifier, open_windowed

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

NULL_BLOCK = 0  # the first that vLLM's pool takes, for itself


class OpenedCustody(NamedTuple):
    """The open parts of the scheduler's side. `worker` is None where a test built the port itself."""

    port: EnginePort
    tokens: ScopeTokens
    clock: Clock
    worker: EngineWorker | None = None
    windowed: WindowedTokens | None = None


Opener = Callable[[Settings, EnginePlan, EngineControl], OpenedCustody]


def open_custody(settings: Settings, plan: EnginePlan, control: EngineControl) -> OpenedCustody:
    """Open ledger, keys, policy and the verifier of tokens.

    Raises:
        CustodyError: says what is wrong.
    """
    worker = open_engine_worker(settings, plan, control)
    try:
        check_issuers(settings, worker.port.table.policy.issuers)
        clock, policy = worker.clock, worker.port.table.policy
        windowed = open_windowed(settings, clock, policy)
        return OpenedCustody(worker.port, open_verifier(settings, clock), clock, worker, windowed)
    except BaseException:
        worker.close()
        raise


def settings_of(config: VllmConfig) -> Settings:
    """Return this engine's settings (rule 1)."""
    transfer = config.kv_transfer_config
    return load_settings(**(transfer.kv_connector_extra_config if transfer is not None else {}))


def plan_of(
    config: VllmConfig,
    cache: KVCacheConfig,
    manager: KVCacheManager,
    block_tokens: int,
    tiers: tuple[str, ...] = (),
) -> EnginePlan:
    """Return vLLM's pool; its null block is not governed.

    Raises:
        ConfigError: the null block is not the first.
    """
    null_block = manager.block_pool.null_block.block_id
    if null_block != NULL_BLOCK:
        raise ConfigError(f"vllm's null block is `{null_block}`, workers zero `{NULL_BLOCK}`", block=null_block)
    parallel = config.parallel_config
    tensors = cache.kv_cache_tensors
    sizes = {tensor.size for tensor in tensors}
    shared = len(sizes) == 1 and hasattr(tensors[0], "layers")  # one allocation that every tensor names
    size = next(iter(sizes)) if shared else sum(tensor.size for tensor in tensors)
    return EnginePlan(
        blocks=cache.num_blocks,
        block_tokens=block_tokens,
        shards=parallel.world_size,
        bytes_per_block=size // cache.num_blocks,
        device=str(config.device_config.device_type),
        reserved=(NULL_BLOCK,),
        can_sum=True,
        tiers=tiers,
    )


def refuse_ungoverned(config: VllmConfig, settings: Settings) -> None:
    """Raise `ConfigError` for a part of vLLM that would bypass governance (rule 2)."""
    from vllm import envs

    events = config.kv_events_config
    if events is not None and events.enable_kv_cache_events and settings.kv_events_tokens != "published":
        raise ConfigError(
            "vllm's own KV events carry prompt token ids in clear; turn them off (`--kv-events-config`), or set "
            "`kv_events_tokens` to `published`"
        )
    if getattr(config.model_config, "enable_sleep_mode", False):
        raise ConfigError(
            "sleep mode releases the cache's memory and later maps other memory that has not been zeroed; start "
            "vllm without `--enable-sleep-mode`"
        )
    if getattr(config.model_config, "enable_cumem_allocator", False):
        raise ConfigError(
            "with the cumem allocator vllm can release the cache's memory while it runs "
            "(`release_kv_cache_memory`), without zeroing it; start vllm without `--enable-cumem-allocator`"
        )
    if (
        getattr(envs, "VLLM_USE_RUST_FRONTEND", False) and not settings.windowed_token_seconds
    ):  # older releases have none
        raise ConfigError(
            "vllm's Rust front end loads no `--middleware`, so its requests bypass the door and have no "
            "identity; unset VLLM_USE_RUST_FRONTEND, or set `windowed_token_seconds` here and at the door "
            "before it"
        )
    parallel = config.parallel_config
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise ConfigError(
            f"with the external launcher each of `{parallel.world_size}` processes schedules for itself and sees one "
            "worker's scrubs alone, so no block's scrub would ever be complete; start vllm with "
            "`--distributed-executor-backend mp` or `ray`",
            world_size=parallel.world_size,
        )
    if getattr(config.cache_config, "mamba_cache_mode", "none") == "align" and getattr(
        config, "use_v2_model_runner", False
    ):
        raise ConfigError(
            "vllm's V2 model runner moves recurrent state into new blocks before a step's attention "
            "(`mamba_cache_mode` `align`, the default with prefix caching); our scrubs come before that, which has not "
            "been proved on a device yet; set VLLM_USE_V2_MODEL_RUNNER=0"
        )
