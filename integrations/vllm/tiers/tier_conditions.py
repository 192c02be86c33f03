"""The conditions under which blocks of a vLLM engine may go to tiers.

Each condition is refused at start by name: a failed load that would end its request, another connector beside ours,
workers on several machines. What a model's layers must be is in `layer_groups`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcustody.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SETTINGS = "`host_tier_bytes` and `nvme_tier_path`"
_ONE_MACHINE = (None, "mp", "uni")


def refuse_tiers(config: VllmConfig, *, has_others: bool) -> None:
    """Raise `ConfigError` for an engine whose blocks cannot leave it under custody.

    has_others: another connector runs beside ours.
    """
    policy = getattr(config.kv_transfer_config, "kv_load_failure_policy", None)
    if policy != "recompute":
        raise ConfigError(
            f"tiers: `kv_load_failure_policy` is `{policy}`, so a copy that does not open would end its request; set "
            'it in `--kv-transfer-config` ("kv_load_failure_policy": "recompute"), or unset ' + _SETTINGS
        )
    if has_others:
        raise ConfigError(
            "tiers: beside another connector vllm loads from one and saves to all; remove the other, or unset "
            + _SETTINGS
        )
    parallel = config.parallel_config
    backend = parallel.distributed_executor_backend
    if backend not in _ONE_MACHINE or getattr(parallel, "nnodes", 1) > 1:
        raise ConfigError(
            f"tiers: workers of `{backend}` on `{getattr(parallel, 'nnodes', 1)}` machines do not share the keyring's "
            f"files; use `--distributed-executor-backend mp` on one machine, or unset {_SETTINGS}"
        )
