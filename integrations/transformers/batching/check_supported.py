"""What can be taken into custody: every part of the engine that is not understood is refused, with what to change.

O1  One cache tensor on one device, layers of full attention only, no copy of blocks outside it.
"""

from __future__ import annotations

from typing import Any

from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from kvcustody.errors import ConfigError


def check_config(model: Any, config: Any, block_tokens: int) -> None:
    """Raise `ConfigError` where the batching configuration cannot be governed."""
    if config.cpu_offload_space is None or config.cpu_offload_space > 0:
        raise ConfigError(
            f"cpu_offload_space is `{config.cpu_offload_space}`: blocks in host memory are not in custody; set it to 0"
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


def check_cache(cache: Any) -> Any:
    """The one allocator of a cache that can be governed, else `ConfigError`."""
    if type(cache) is not PagedAttentionCache:
        raise ConfigError(f"a cache of type `{type(cache).__name__}` is not governed; use the engine's own")
    kinds = {name: type(one) for name, one in cache.cache_allocators.items()}
    if list(kinds.values()) != [FullAttentionCacheAllocator]:
        raise ConfigError(
            f"layers of kinds `{', '.join(kinds)}` are not governed; only models whose layers all have full attention"
        )
    (allocator,) = cache.cache_allocators.values()
    return allocator
