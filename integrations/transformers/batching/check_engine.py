"""What can be taken into custody: call `check_internals` before anything is opened, the others with what was opened.

1. Outside the declared range of versions nothing starts: an engine that changed may hand out blocks behind our back.
2. Inside the range every class and signature that is overridden or called is compared before the first block moves.
3. One cache tensor on one device, layers of full attention and of sliding windows only, no copy of blocks outside it.
   Every part of the engine that is not understood is refused, with what to change.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module, metadata
from typing import Any

from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import (
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from kvcustody.errors import ConfigError


def check_config(model: Any, config: Any, block_tokens: int) -> None:
    """Raise `ConfigError` where the batching configuration cannot be governed."""
    if config.cpu_offload_space is None or config.cpu_offload_space > 0:
        raise ConfigError(
            f"cpu_offload_space is `{config.cpu_offload_space}`: what it keeps is not in custody; set it to 0, and "
            "the worker's `host_tier_bytes` to what host memory may take: they go there sealed"
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


def check_cache(cache: Any) -> list[Any]:
    """The allocators of a cache that can be governed, else `ConfigError`."""
    if type(cache) is not PagedAttentionCache:
        raise ConfigError(f"a cache of type `{type(cache).__name__}` is not governed; use the engine's own")
    kinds = {name: type(one) for name, one in cache.cache_allocators.items()}
    if not kinds or not set(kinds.values()) <= {FullAttentionCacheAllocator, SlidingAttentionCacheAllocator}:
        raise ConfigError(
            f"layers of kinds `{', '.join(kinds)}` are not governed; only models whose layers have full attention or "
            "sliding windows"
        )
    return list(cache.cache_allocators.values())


FIRST, BEYOND = (5, 19), (5, 25)
RANGE = f">={FIRST[0]}.{FIRST[1]},<{BEYOND[0]}.{BEYOND[1]}"
_ROOT = "transformers.generation.continuous_batching"

# Where, class, method: its parameters after `self`.
_CACHE = {
    "can_store_request_tokens": ("state", "request_len", "dry_run"),
    "compute_free_capacity": ("relative",),
    "count_new_complete_blocks": ("state", "request_len"),
    "count_storable_requests": ("list_blocks_needed",),
    "evict_cached_blocks": (),
    "free_all_requests": ("clear_ledgers",),
    "free_blocks": ("request_id", "no_cache"),
    "mark_complete_blocks": ("state", "complete_blocks"),
    "perform_cache_copy": ("copy_src_and_dst",),
    "prepare_fork_request": ("src_state", "dst_req_ids", "copy_src_and_dst"),
    "reset": (),
    "search_prefix_match": ("request_id", "prompt_ids"),
}
_SCHEDULER = {
    "__init__": ("cache", "safety_margin", "max_requests_per_batch"),
    "_infer_request_tokens": ("state", "request_ids_to_remove_from_waiting"),
    "_try_to_meet_safety_margin": (),
    "add_waiting_request": ("state",),
    "clear_cancelled_requests": (),
    "finish_request": ("request_id",),
    "reset": (),
    "set_request_cancellation": ("request_id",),
    "schedule_batch": ("token_budget", "cache_budget"),
}
_ALLOCATOR = {
    "copy_blocks": ("source_block_ids", "dest_block_ids"),
    "get_read_indices": ("request_id", "past_length", "query_length"),
    "get_write_indices": ("request_id", "past_length", "query_length"),
    "update": ("key_states", "value_states", "layer_idx", "read_index", "write_index"),
}
_MANAGER = {
    "_create_batch_processor": (),
    "add_request": (
        "input_ids",
        "request_id",
        "max_new_tokens",
        "streaming",
        "record_timestamps",
        "eos_token_id",
        "logit_processor_kwargs",
    ),
    "destroy": (),
    "start": (),
    "stop": ("block", "timeout", "keep_for_next_session", "hard_stop"),
}
EXPECTED: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {
    ("cache", "PagedAttentionCache"): _CACHE,
    ("scheduler", "FIFOScheduler"): _SCHEDULER,
    ("scheduler", "PrefillFirstScheduler"): _SCHEDULER,
    ("cache_allocators", "FullAttentionCacheAllocator"): _ALLOCATOR,
    ("cache_allocators", "SlidingAttentionCacheAllocator"): _ALLOCATOR,
    ("continuous_api", "ContinuousBatchingManager"): _MANAGER,
    ("continuous_api", "OutputRouter"): {"fail_and_deliver": ("state", "error")},
    ("requests", "RequestState"): {"create_equivalent_initial_request": ()},
}


def check_internals() -> None:
    """Raise `ConfigError` where the installed transformers is not one that this adapter was written for."""
    installed = metadata.version("transformers")
    found = re.match(r"(\d+)\.(\d+)", installed)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if not FIRST <= version < BEYOND:
        raise ConfigError(
            f"transformers `{installed}` is not known to this adapter, which governs `{RANGE}`; install one of those",
            version=installed,
        )
    for (module, name), methods in EXPECTED.items():
        owner = getattr(_module(module, installed), name, None)
        for method, expected in methods.items():
            actual = _parameters(owner, method)
            if actual != expected:
                raise ConfigError(
                    f"transformers `{installed}`: `{name}.{method}` takes `{actual}`, this adapter knows `{expected}`;"
                    f" install an unmodified release in `{RANGE}`",
                    version=installed,
                )


def _module(name: str, installed: str) -> object:
    try:
        return import_module(f"{_ROOT}.{name}")
    except ImportError as error:
        raise ConfigError(f"transformers `{installed}` has no `{_ROOT}.{name}`: {error}", version=installed) from error


def _parameters(owner: object, method: str) -> tuple[str, ...] | None:
    function = getattr(owner, method, None)
    return None if function is None else tuple(inspect.signature(function).parameters)[1:]
