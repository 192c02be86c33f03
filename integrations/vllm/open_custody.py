"""From vLLM's configuration to an open port: settings, the pool's plan, the model's identity, who may connect.

1. Settings come from the environment and the settings file, as everywhere, and from `kv_connector_extra_config`,
   whose names are those of docs/operate/settings.md. Every process of an engine reads the same.
2. A connector beside ours is refused unless the settings name a passed conformance run of its very code: an external
   tier keeps blocks out of custody, and some hash tokens without any scope.
3. What would publish token ids, exchange the cache's memory under a running engine, leave a scrub without an answer, or
   write before it, is refused at start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcustody.clock import Clock
from kvcustody.errors import ConfigError
from kvcustody.governance.external.engine_control import EngineControl
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.governance.settings import Settings, load_settings
from kvcustody.governance.tokens.scope_token import ScopeTokens
from kvcustody.governance.worker.engine_worker import EnginePlan, EngineWorker, open_engine_worker
from kvcustody.integrations.identity.from_settings import check_issuers, open_verifier
from kvcustody.integrations.vllm.conformance_record import check_record, load_subject

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

NAME = "KVCustody"
NULL_BLOCK = 0  # the first that vLLM's pool takes, for itself
_MULTI = "MultiConnector"
_VETOED = {  # whatever a record says
    "LMCacheConnectorV1": "keeps blocks without their salt, so one tenant gets another's; use LMCache's server and its "
    "`LMCacheMPConnector` (docs/start/lmcache.md)",
}


class OpenedCustody(NamedTuple):
    """What the scheduler's side stands on. `worker` is None where a test built the port itself."""

    port: EnginePort
    tokens: ScopeTokens
    clock: Clock
    worker: EngineWorker | None = None


Opener = Callable[[Settings, EnginePlan, EngineControl], OpenedCustody]


def open_custody(settings: Settings, plan: EnginePlan, control: EngineControl) -> OpenedCustody:
    """Open ledger, keys, policy and the verifier of tokens. Raises a `CustodyError` that says what is wrong."""
    worker = open_engine_worker(settings, plan, control)
    try:
        check_issuers(settings, worker.port.table.policy.issuers)
        return OpenedCustody(worker.port, open_verifier(settings, worker.clock), worker.clock, worker)
    except BaseException:
        worker.close()
        raise


def settings_of(config: VllmConfig) -> Settings:
    """This engine's settings (rule 1)."""
    transfer = config.kv_transfer_config
    return load_settings(**(transfer.kv_connector_extra_config if transfer is not None else {}))


def plan_of(
    config: VllmConfig,
    cache: KVCacheConfig,
    manager: KVCacheManager,
    block_tokens: int,
    tiers: tuple[str, ...] = (),
) -> EnginePlan:
    """The pool that vLLM brings; its null block is nobody's. Raises `ConfigError` where it is not the first."""
    null_block = manager.block_pool.null_block.block_id
    if null_block != NULL_BLOCK:
        raise ConfigError(
            f"vllm's null block is `{null_block}`, workers zero `{NULL_BLOCK}`", block=null_block
        )
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
    """Raises `ConfigError` for a part of vLLM that would act behind governance's back (rule 3)."""
    events = config.kv_events_config
    if events is not None and events.enable_kv_cache_events and settings.kv_events_tokens != "published":
        raise ConfigError(
            "vllm's own KV events carry prompt token ids in clear; turn them off (`--kv-events-config`), or set "
            "`kv_events_tokens` to `published`"
        )
    if getattr(config.model_config, "enable_sleep_mode", False):
        raise ConfigError(
            "sleep mode gives the cache's memory away and takes other memory back, which nobody has zeroed; start "
            "vllm without `--enable-sleep-mode`"
        )
    if getattr(config.model_config, "enable_cumem_allocator", False):
        raise ConfigError(
            "with the cumem allocator vllm can give the cache's memory away while it runs (`release_kv_cache_memory`), "
            "which nobody has zeroed then; start vllm without `--enable-cumem-allocator`"
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


def has_foreign_connectors(config: VllmConfig) -> bool:
    """Whether another connector runs beside ours."""
    return bool(_foreign_connectors(config))


def _foreign_connectors(config: VllmConfig) -> list[Mapping[str, Any]]:
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector != _MULTI:
        return []
    children = transfer.kv_connector_extra_config.get("connectors", ())
    return [child for child in children if child.get("kv_connector") != NAME]


def refuse_foreign_connectors(config: VllmConfig, allowed: str) -> None:
    """Raises `ConfigError` that names the first connector that is not allowed beside ours, and why (rule 2).

    allowed: `NAME=RECORD#DIGEST`, separated by commas: the record of a passed run of the conformance kit.
    config: the engine's, not the copy that a connector among several is given, which names that connector alone.
    """
    foreign = _foreign_connectors(config)
    if not foreign:
        return
    if config.kv_transfer_config.kv_connector_extra_config["connectors"][0] in foreign:
        raise ConfigError(
            f"`{NAME}` is not the first of the connectors: it takes tokens and hints from a request before another "
            "sees them; name it first",
            connector=NAME,
        )
    records = _records(allowed)
    for child in foreign:
        name = str(child.get("kv_connector"))
        if name in _VETOED:
            raise ConfigError(f"connector `{name}` {_VETOED[name]}", connector=name)
        if name not in records:
            raise ConfigError(
                f"connector `{name}` keeps KV blocks outside this engine, where no deadline, scrub or scope reaches "
                "them; remove it, or list the record of its passed conformance run in `vllm_connectors_allowed`",
                connector=name,
            )
        check_record(*records[name], _connector_class(child))


def _records(allowed: str) -> dict[str, tuple[str, str]]:
    records = {}
    for entry in filter(None, map(str.strip, allowed.split(","))):
        name, _, where = entry.partition("=")
        path, _, digest = where.rpartition("#")
        if not (name and path and digest):
            raise ConfigError(
                f"`vllm_connectors_allowed`: `{entry}` is not `NAME=RECORD#DIGEST`; the conformance kit writes the "
                "record and prints its digest (`--record`)",
                entry=entry,
            )
        records[name.strip()] = (path.strip(), digest.strip())
    return records


def _connector_class(child: Mapping[str, Any]) -> type:
    """The class that vLLM would load for this entry of `connectors`."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    name, module = str(child.get("kv_connector")), child.get("kv_connector_module_path")
    try:
        if module is not None:
            return load_subject(f"{module}:{name}")
        found: type = KVConnectorFactory.get_connector_class_by_name(name)
    except ValueError as error:
        raise ConfigError(f"connector `{name}`: {error}", connector=name) from error
    return found
