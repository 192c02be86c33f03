"""Governed engines with tiers: a policy that lets `internal` leave, and a pool that holds few prompts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig

from standins.engines.vllm.deployment import CONNECTOR, POLICY, Deployment
from standins.engines.vllm.local_engine import BLOCK, LocalEngine

BLOCKS = 40  # of the pool: two prompts and their answers
PREFIX = 12  # blocks of a prompt
OBJECT = 4  # blocks in an object
SECONDS = 20.0

TIER_POLICY = POLICY.replace(
    "offload: {internal: never, brief: never, restricted: never}",
    "offload: {internal: {tiers: [host, nvme], encrypt: required}, "
    "brief: {tiers: [host, nvme], encrypt: required}, short: {tiers: [host, nvme], encrypt: required}, "
    "restricted: never}",
)
for _before, _after in (  # `short` lives for ten seconds in all
    ("[internal, brief, restricted]", "[internal, brief, short, restricted]"),
    ("  - {tenant: brief, as: brief}", "  - {tenant: brief, as: brief}\n  - {tenant: short, as: short}"),
    ("  brief: {quota", "  short: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}\n  brief: {quota"),
    ("  brief:      {idle", "  short:      {idle: 6s, absolute: 10s, active_max: 1m}\n  brief:      {idle"),
):
    assert TIER_POLICY.count(_before) == 1, _before
    TIER_POLICY = TIER_POLICY.replace(_before, _after)
TIER_POLICY = TIER_POLICY.replace(  # copies of tenants that the policy names are found again after a restart
    "  default: {quota", "  alpha: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}\n  default: {quota"
)
assert TIER_POLICY.count("alpha") == 1


def connector(**settings: Any) -> KVTransferConfig:
    """Ours, with these settings of its tiers."""
    extra = {
        "host_tier_bytes": 64 << 20,
        "tier_object_blocks": OBJECT,
        "tier_staging_buffers": 32,
        "tier_timeout_ms": 5000,
        "tier_transfers": "always",  # this model computes in no time
        **settings,
    }
    return KVTransferConfig(**CONNECTOR, kv_load_failure_policy="recompute", kv_connector_extra_config=extra)


def options(**settings: Any) -> dict[str, Any]:
    """What an engine with tiers is started with."""
    return {"kv_transfer_config": connector(**settings), "num_gpu_blocks_override": BLOCKS}


def prompt(seed: int, blocks: int = PREFIX) -> list[int]:
    """`blocks` whole blocks that no other seed shares, and one token."""
    return [(seed * 131 + at * (seed % 7 + 3) + at // 29) % 480 + 20 for at in range(blocks * BLOCK)] + [17]


def displace(engine: LocalEngine, tenant: str = "churner", rounds: int = 4) -> None:
    """Other work takes the whole pool."""
    for _ in range(rounds):
        place = next(_places)
        engine.ask(prompt(1000 + place), tenant=tenant, max_tokens=2)


def tier(engine: LocalEngine, name: str = "") -> dict[str, Any]:
    """What the engine says of one tier, or of the only one."""
    tiers = engine.governance("stats")["tiers"]
    if name:
        return tiers[name]
    (only,) = tiers.values()
    return only


def tier_name(engine: LocalEngine) -> str:
    """The only tier of an engine."""
    (name,) = engine.governance("stats")["tiers"]
    return str(name)


def fault(engine: LocalEngine, kind: str, seconds: float = 0.0) -> list[int]:
    """Make the only tier of an engine misbehave, or behave again (`tier_fault` of the probe)."""
    return engine.rpc("tier_fault", tier_name(engine), kind, seconds)


def nvme(folder: Path) -> dict[str, Any]:
    """Settings of an engine whose copies go to files of `folder` alone."""
    return {"host_tier_bytes": 0, "nvme_tier_path": str(folder), "nvme_tier_bytes": 256 << 20}


def deployment_with(folder: Path, policy: str = TIER_POLICY) -> Deployment:
    """A deployment whose policy lets copies be."""
    return Deployment(folder, policy=policy)


_places = itertools.count()
