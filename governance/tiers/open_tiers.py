"""The tiers that a worker's settings ask for, opened in the order in which they are used: `host`, then `nvme`."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvcustody.clock import Clock
from kvcustody.errors import ConfigError
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.root_key_wrapping import WrappingPort
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.settings import Settings
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.governance.tiers.staging import Staging
from kvcustody.governance.tiers.stores.file_store import FileStore
from kvcustody.governance.tiers.stores.guarded_store import GuardedStore
from kvcustody.governance.tiers.stores.host_arena import HostArena
from kvcustody.governance.tiers.stores.store_protocol import TierStore
from kvcustody.governance.tiers.tier import SealedTier, TierTerms
from kvcustody.governance.tiers.tier_rules import TierRules
from kvcustody.policies.document.model import Tier


class BlockShape(NamedTuple):
    """What a block is, for those who copy it: bytes on each of `shards`, tokens."""

    bytes_per_block: int
    shards: int
    block_tokens: int

    @property
    def layout(self) -> bytes:
        """A digest: copies of another shape are not ours."""
        return hashlib.sha256(b"kvcustody/pool-blocks@1" + repr(tuple(self)).encode()).digest()


class TierPlan(NamedTuple):
    """What to open. Bytes of 0, and no path: not that one."""

    shred_keys: Path
    host_bytes: int = 0
    nvme_path: Path | None = None
    nvme_bytes: int = 0
    object_blocks: int = 16
    staging_buffers: int = 2
    timeout_seconds: float = 0.25


def tier_names(settings: Settings) -> list[str]:
    """The tiers that are set, as the policy names them."""
    named = ((Tier.HOST, settings.host_tier_bytes), (Tier.NVME, settings.nvme_tier_path))
    return [tier.value for tier, is_set in named if is_set]


def tier_plan(settings: Settings) -> TierPlan | None:
    """What the settings ask for; None: no tier. Raises `ConfigError` that names the setting."""
    if not settings.host_tier_bytes and settings.nvme_tier_path is None:
        return None
    if settings.nvme_tier_path is not None and not settings.nvme_tier_bytes:
        raise ConfigError("setting `nvme_tier_bytes`: say how much the folder `nvme_tier_path` may hold")
    return TierPlan(
        settings.shred_keys_path,
        settings.host_tier_bytes,
        settings.nvme_tier_path,
        settings.nvme_tier_bytes,
        settings.tier_object_blocks,
        settings.tier_staging_buffers,
        settings.tier_timeout_ms / 1000,
    )


def open_tiers(
    plan: TierPlan,
    shape: BlockShape,
    keyring: Keyring,
    port: WrappingPort,
    clock: Clock,
    stack: ExitStack,
    rules: TierRules,
) -> list[SealedTier]:
    """Open them; `stack` lets go of what they share. Raises `ConfigError` that says what cannot be had."""
    stores: list[TierStore] = []
    if plan.host_bytes:
        stores.append(HostArena(plan.host_bytes))
    if plan.nvme_path is not None:
        files = FileStore(plan.nvme_path, plan.nvme_bytes)
        stores.append(GuardedStore(files, seconds=plan.timeout_seconds, clock=clock))
    shred = ShredKeys.open(plan.shred_keys, port, clock)
    stack.callback(shred.close)
    keys = SealKeys(keyring, shred)
    stack.callback(keys.close)
    block_bytes = shape.bytes_per_block * shape.shards
    staging = Staging(plan.staging_buffers, plan.object_blocks * block_bytes)
    stack.callback(staging.close)
    tiers: list[SealedTier] = []
    for store in reversed(stores):  # the lowest first: it takes what the one above has no room for
        terms = TierTerms(
            shape.layout,
            block_bytes,
            shape.block_tokens,
            partial(rules.limit, Tier(store.kind)),
            rules.share,
            rules.tenants,
            plan.object_blocks,
        )
        lower = tiers[0] if tiers else None
        tiers.insert(0, SealedTier(store, keys, shred, staging, clock, terms, lower))
    return tiers
