"""A model's layer groups as tiers see them: the blocks of each that a hit needs, and their copies' keys.

    groups = tier_groups(manager, block_tokens)
    first = group.first_needed(depth, end)        # of a hit of `end` blocks, of which `depth` are there
    group.keys(keys)                              # of the same part of a chain

1. Each group of a part of a chain is an object of its own. Its keys are the chain's, put through a digest with the
   group's number: they name the object and are bound into its seal, so that one group's copy opens as no other's. The
   first group's are the chain's own. Which layers are in which group is part of the layout (`describe_groups`).
2. Full attention needs every block before the hit's end; a sliding window the last ones that it reaches. A hit ends
   where objects of all groups end: where `tier_object_blocks` says, and where vLLM stops to keep a window's blocks
   (`prefix_cache_retention_interval`), which is at the end of a prompt for one.
3. A model that vLLM would need more of for a hit is refused at start by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvcustody.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

NO_KEY = bytes(32)
_SETTINGS = "`host_tier_bytes` and `nvme_tier_path`"
_FULL, _WINDOW = "FullAttentionManager", "SlidingWindowManager"


class CopiedGroup(NamedTuple):
    """One group. `window_blocks`: how many blocks before its end a hit needs; None: all."""

    number: int = 0
    window_blocks: int | None = None

    def first_needed(self, depth: int, end: int) -> int:
        """Return the first block that a hit ending at `end` needs in this group, behind `depth` available ones."""
        return depth if self.window_blocks is None else max(depth, end - self.window_blocks)

    def key(self, key: bytes) -> bytes:
        """Return the key by which a block in this group is named and sealed (rule 1)."""
        if not self.number or key == NO_KEY:
            return key
        number = self.number.to_bytes(4, "little")
        return hashlib.blake2b(number + key, digest_size=32, person=b"kvc layer group").digest()

    def keys(self, keys: Sequence[bytes]) -> bytes:
        """Return these keys for consecutive blocks."""
        return b"".join(map(self.key, keys) if self.number else keys)


ONE_GROUP: tuple[CopiedGroup, ...] = (CopiedGroup(),)


def tier_groups(manager: KVCacheManager, block_tokens: int) -> tuple[CopiedGroup, ...]:
    """Return the groups of vLLM's manager.

    Raises:
        ConfigError: a group cannot be copied (rule 3).
    """
    coordinator = manager.coordinator
    singles = coordinator.single_type_managers
    names = [type(single).__name__ for single in singles]
    if set(names) - {_FULL, _WINDOW} or _FULL not in names:
        why = (
            "only full attention, alone or beside sliding windows, is copied: other layers' states have no "
            "fixed position in a prompt"
        )
        raise _refused(names, why)
    if len(singles) > 1:
        _refuse_several(manager, names, block_tokens)
    return tuple(
        CopiedGroup(number, -(-(single.sliding_window - 1) // block_tokens) if name == _WINDOW else None)
        for number, (single, name) in enumerate(zip(singles, names, strict=True))
    )


def _refuse_several(manager: KVCacheManager, names: list[str], block_tokens: int) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    coordinator = manager.coordinator
    singles = coordinator.single_type_managers
    sizes = sorted({int(single.block_size) for single in singles})
    if sizes != [block_tokens] or coordinator.scheduler_block_size != block_tokens:
        raise _refused(names, f"their blocks are of `{sizes}` tokens, and copies of one size are kept")
    if any(single.use_eagle or getattr(single, "extra_retained_tokens", 0) for single in singles):
        raise _refused(names, "with a drafter that reads the cache, a hit needs blocks beyond its end")
    if not hasattr(base, "KVConnectorTransferResults"):
        raise _refused(names, "this vllm cannot compute again what a load of several groups did not bring")


def _refused(names: list[str], why: str) -> ConfigError:
    return ConfigError(f"tiers: this model's layers are managed by `{'`, `'.join(names)}`; {why}; unset {_SETTINGS}")


def describe_groups(cache: KVCacheConfig | None) -> tuple[str, ...]:
    """Return the layers by group for the layout; nothing for a single group."""
    groups = [] if cache is None else cache.kv_cache_groups
    if len(groups) < 2:
        return ()
    return tuple(
        f"{type(group.kv_cache_spec).__name__} {getattr(group.kv_cache_spec, 'sliding_window', None)} "
        + " ".join(group.layer_names)
        for group in groups
    )
