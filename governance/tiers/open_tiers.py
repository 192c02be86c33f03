"""Opens the tiers of a worker's settings, in their order of use: `host`, `nvme`, `remote`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvcustody.clock import Clock
from kvcustody.errors import ConfigError, CustodyError, KeyringError
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.root_key_wrapping import WrappingPort
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.settings import Settings
from kvcustody.governance.tiers.copies.index import TierTerms
from kvcustody.governance.tiers.heirs import TierHolder
from kvcustody.governance.tiers.seal.object_layout import object_bytes
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.governance.tiers.staging import Staging
from kvcustody.governance.tiers.stores.file_store import FileStore
from kvcustody.governance.tiers.stores.guarded_store import GuardedStore
from kvcustody.governance.tiers.stores.node_arenas import open_host_arena
from kvcustody.governance.tiers.stores.open_remote import RemotePlan, open_remote
from kvcustody.governance.tiers.stores.store_protocol import TierStore
from kvcustody.governance.tiers.tier import SealedTier
from kvcustody.governance.tiers.tier_rules import TierRules
from kvcustody.policies.document.model import Policy, Tier
from kvcustody.policies.workbench.lint.without_effect import needs_store


class BlockShape(NamedTuple):
    """A block's shape for those who copy it: bytes on each of `shards`, and tokens."""

    bytes_per_block: int
    shards: int
    block_tokens: int

    @property
    def layout(self) -> bytes:
        """A digest; copies with another layout are not ours."""
        return hashlib.sha256(b"kvcustody/pool-blocks@1" + repr(tuple(self)).encode()).digest()


class TierPlan(NamedTuple):
    """The tiers to open. 0 bytes, no path, or None: not that one."""

    shred_keys: Path
    host_bytes: int = 0
    nvme_path: Path | None = None
    nvme_bytes: int = 0
    object_blocks: int = 16
    staging_buffers: int = 2
    timeout_seconds: float = 0.25
    moves_always: bool = False
    remote: RemotePlan | None = None


def tier_names(settings: Settings) -> list[str]:
    """Return the configured tiers by the policy's names."""
    named = (
        (Tier.HOST, settings.host_tier_bytes),
        (Tier.NVME, settings.nvme_tier_path),
        (Tier.REMOTE, settings.remote_tier_url),
    )
    return [tier.value for tier, is_set in named if is_set]


def tier_plan(settings: Settings) -> TierPlan | None:
    """Return the tiers of the settings; None: no tier. Raises `ConfigError` that names the setting."""
    if not tier_names(settings):
        return None
    if settings.nvme_tier_path is not None and not settings.nvme_tier_bytes:
        raise ConfigError("setting `nvme_tier_bytes`: set the capacity of the folder `nvme_tier_path`")
    return TierPlan(
        settings.shred_keys_path,
        settings.host_tier_bytes,
        settings.nvme_tier_path,
        settings.nvme_tier_bytes,
        settings.tier_object_blocks,
        settings.tier_staging_buffers,
        settings.tier_timeout_ms / 1000,
        settings.tier_transfers == "always",
        remote_plan(settings) if settings.remote_tier_url else None,
    )


def remote_plan(settings: Settings) -> RemotePlan:
    """Return the remote store of the settings. Raises `ConfigError` that names the missing setting."""
    if not settings.remote_tier_bytes:
        raise ConfigError("setting `remote_tier_bytes`: set the capacity of this worker in the remote store")
    if settings.worker_name == Settings.model_fields["worker_name"].default:
        raise ConfigError("setting `worker_name`: give each worker of a remote tier its own name: its objects carry it")
    heir_of = tuple(name.strip() for name in settings.remote_tier_heir_of.split(",") if name.strip())
    if settings.worker_name in heir_of:
        raise ConfigError("setting `remote_tier_heir_of`: names this worker, which finds its own copies without it")
    pairs = [part.strip().partition("=") for part in settings.remote_tier_labels.split(",") if part.strip()]
    return RemotePlan(
        settings.remote_tier_url,
        settings.remote_tier_bytes,
        settings.remote_tier_endpoint,
        settings.remote_tier_region,
        settings.remote_tier_secret_path,
        settings.remote_tier_timeout_ms / 1000,
        settings.remote_tier_in_flight,
        tuple((name, value) for name, _, value in pairs),
        heir_of,
    )


def refuse_absent_store(policy: Policy, tiers: Collection[str]) -> None:
    """Raise `ConfigError` where a classification may go only to `remote` and there is no such store."""
    if Tier.REMOTE not in tiers and any(needs_store(policy)):
        raise ConfigError(
            "setting `remote_tier_url`: the policy offloads to `remote` alone, and no store is named; set it, or give "
            "the classification another tier"
        )


def open_tiers(
    plan: TierPlan,
    shape: BlockShape,
    keyring: Keyring,
    port: WrappingPort,
    clock: Clock,
    stack: ExitStack,
    rules: TierRules,
    holder: TierHolder | None = None,
) -> list[SealedTier]:
    """Open the tiers; `stack` closes what they share. `holder`: the process that has them.

    Raises `ConfigError` that names the setting that cannot be had.
    """
    stores: dict[str, TierStore] = {}
    opening = stack.enter_context(ExitStack())  # what is open when another cannot be is closed again
    if plan.host_bytes:
        with _setting("host_tier_bytes"):
            stores["host_tier_bytes"] = open_host_arena(plan.host_bytes)
    if plan.nvme_path is not None:
        with _setting("nvme_tier_path"):
            files = FileStore(plan.nvme_path, plan.nvme_bytes)
        store = GuardedStore(files, seconds=plan.timeout_seconds, clock=clock)
        opening.callback(store.close)
        stores["nvme_tier_path"] = store
    block_bytes = shape.bytes_per_block * shape.shards
    if plan.remote is not None:
        with _setting("remote_tier_url"):
            if holder is None:
                raise ConfigError("it needs a process that holds its objects")
            largest = object_bytes(plan.object_blocks * block_bytes, enclosed=True, checked=False)
            far = open_remote(plan.remote, worker=holder.worker, object_bytes_max=largest, clock=clock)
        opening.callback(far.close)
        stores["remote_tier_url"] = far
    with _setting("shred_keys_path"):
        shred = ShredKeys.open(plan.shred_keys, port, clock)
        stack.callback(shred.close)
        keys = SealKeys(keyring, shred)
        stack.callback(keys.close)
        _check_root_key(keys, plan.shred_keys)
    with _setting("tier_staging_buffers"):
        staging = Staging(plan.staging_buffers, plan.object_blocks * block_bytes)
    stack.callback(staging.close)
    tiers: list[SealedTier] = []
    for setting, kept in reversed(stores.items()):  # the lowest first: it takes what the one above has no room for
        terms = TierTerms(
            shape.layout,
            block_bytes,
            shape.block_tokens,
            partial(rules.limit, Tier(kept.kind)),
            rules.share,
            rules.tenants,
            plan.object_blocks,
            withholds=_withholds(rules, plan, kept),
            holder=holder,
        )
        lower = tiers[0] if tiers else None
        with _setting(setting):
            tiers.insert(0, SealedTier(kept, keys, shred, staging, clock, terms, lower))
    opening.pop_all()  # from now on each is its tier's
    return tiers


def _withholds(rules: TierRules, plan: TierPlan, store: TierStore) -> Callable[[DomainLabel], bool]:
    """What stays out of a tier: in a remote one also domains with whose labels the store does not agree."""
    if plan.remote is None or store.kind != Tier.REMOTE:
        return rules.withholds
    place = plan.remote.place
    return lambda label: rules.withholds(label) or not rules.agrees(label, place)


def _check_root_key(keys: SealKeys, path: Path) -> None:
    try:
        keys.catalogue()
    except KeyringError:
        raise ConfigError(
            f"shred keys `{path}`: cannot be opened with this root key; give the matching file",
            path=path,
        ) from None


@contextmanager
def _setting(name: str) -> Iterator[None]:
    """What cannot be had is told with the setting that asks for it."""
    try:
        yield
    except CustodyError as error:
        raise ConfigError(f"setting `{name}`: {error.message}", **error.operands) from None
