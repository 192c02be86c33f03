"""The vLLM releases that the adapter knows, their differences, and the checks before it governs one.

1. A release outside the range is refused at start, with what to do about it: an engine that would run ungoverned
   under our flag is worse than one that does not start.
2. Inside the range too, every class that is swapped and every method that is overridden is compared with what this
   file says it takes. A fork or a patched build that differs is refused by name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from kvcustody.errors import ConfigError
from kvcustody.governance.worker.known_engines import VLLM_BELOW, VLLM_OLDEST


class VllmVersion(NamedTuple):
    """A vLLM release as far as the adapter is concerned."""

    major: int
    minor: int
    text: str

    @property
    def counts_hashes(self) -> bool:
        """Whether blocks enter the index only as far as the request has hashes; before, as far as it has tokens."""
        return (self.major, self.minor) >= (0, 33)


# Overridden or called: dotted place -> names of the parameters after `self`, as every release of the range has them.
# A release may add parameters with a default behind these.
_SIGNATURES: dict[str, tuple[str, ...]] = {
    "vllm.v1.core.block_pool:BlockPool.get_new_blocks": ("num_blocks",),
    "vllm.v1.core.block_pool:BlockPool.touch": ("blocks",),
    "vllm.v1.core.block_pool:BlockPool.free_blocks": ("ordered_blocks",),
    "vllm.v1.core.block_pool:BlockPool.evict_blocks": ("block_ids",),
    "vllm.v1.core.block_pool:BlockPool.reset_prefix_cache": (),
    "vllm.v1.core.block_pool:BlockPool.cache_full_blocks": (
        "request",
        "blocks",
        "num_cached_blocks",
        "num_full_blocks",
        "block_size",
        "kv_cache_group_id",
        "block_mask",
    ),
    "vllm.v1.core.block_pool:BlockPool.cache_partial_block": ("request", "block", "num_tokens"),
    "vllm.v1.core.block_pool:BlockPool._maybe_evict_cached_block": ("block",),
    "vllm.v1.core.block_pool:BlockPool._insert_block_hash": (
        "block_hash_with_group_id",
        "block",
        "num_tokens",
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks": ("request",),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.prefix_cache_lookup_enabled": ("request",),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.free": ("request",),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.pop_blocks_for_free": ("request",),
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.find_longest_cache_hit": (
        "block_hashes",
        "max_cache_hit_length",
    ),
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.cache_blocks": ("request", "num_computed_tokens"),
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.popleft": (),
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.popleft_n": ("n",),
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.remove": ("block",),
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.prepend_n": ("blocks",),
    "vllm.v1.core.sched.scheduler:Scheduler.finish_requests": ("request_ids", "finished_status"),
    "vllm.v1.core.sched.scheduler:Scheduler.has_requests": (),
    "vllm.v1.core.sched.scheduler:Scheduler._connector_finished": ("request",),
    "vllm.v1.core.sched.scheduler:Scheduler.add_request": ("request",),
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": ("scheduler_output", "model_runner_output"),
    "vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache": (),
    "vllm.v1.executor.abstract:Executor.execute_model": ("scheduler_output",),
    "vllm.lora.worker_manager:WorkerLoRAManager._load_adapter": ("lora_request",),
    "vllm.v1.engine.core:EngineCore.collective_rpc": ("method",),
    # the model runners' `execute_model` is checked where they are loaded: `worker.first_in_step`
    "vllm.v1.engine.core:EngineCore.add_request": ("request",),
    "vllm.v1.engine.core:EngineCore.abort_requests": ("request_ids",),
    "vllm.v1.engine.core:EngineCore.shutdown": (),
}


def check_version(installed: str | None = None) -> VllmVersion:
    """Return the running vLLM's version.

    Raises:
        ConfigError: it is outside the range, or a method differs.
    """
    version = read_version(installed if installed is not None else _installed())
    if not VLLM_OLDEST <= (version.major, version.minor) < VLLM_BELOW:
        raise ConfigError(
            f"vllm `{version.text}` is not governed by this kvcustody: it knows {_text(VLLM_OLDEST)} up to, but not, "
            f"{_text(VLLM_BELOW)}; install a vllm in that range, or a kvcustody that knows this one",
            version=version.text,
        )
    if installed is None:
        check_signatures()
    return version


def read_version(text: str) -> VllmVersion:
    """Return `0.32.0+cpu` as numbers.

    Raises:
        ConfigError: the text is no version, as in a build from a bare checkout.
    """
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ConfigError(f"vllm says that its version is `{text}`; install a released vllm", version=text)
    return VllmVersion(int(match[1]), int(match[2]), text)


def running_version() -> VllmVersion:
    """Return the running vLLM's version, unchecked."""
    return read_version(_installed())


def check_signatures(expected: dict[str, tuple[str, ...]] | None = None) -> None:
    """Raises `ConfigError` that names the first method of vLLM that is missing or takes something else (rule 2)."""
    for place, names in (_SIGNATURES if expected is None else expected).items():
        function = _resolve(place)
        parameters = list(inspect.signature(function).parameters.values())[1:]
        found = [parameter.name for parameter in parameters]
        added = [p for p in parameters[len(names) :] if p.default is p.empty and p.kind not in _VARIADIC]
        partial = place.endswith("cache_partial_block")  # overridden with *args: what follows does not matter
        if tuple(found[: len(names)]) != names or (added and not partial):
            raise ConfigError(
                f"`{place}` takes ({', '.join(found)}), not ({', '.join(names)}): this vllm is not the release that "
                "its version says; install an unmodified one",
                place=place,
            )


def check_leading(place: str, names: tuple[str, ...]) -> None:
    """Raise `ConfigError` unless the method of vLLM takes these parameters first."""
    found = list(inspect.signature(_resolve(place)).parameters)[1:]
    if tuple(found[: len(names)]) != names:
        raise ConfigError(f"`{place}` takes ({', '.join(found)}), not ({', '.join(names)}, …)", place=place)


def check_type(thing: object, expected: type, what: str) -> None:
    """Raises `ConfigError` unless `thing` is exactly an `expected`: a subclass may override what governance needs."""
    if type(thing) is not expected:
        raise ConfigError(
            f"{what} is a `{type(thing).__module__}.{type(thing).__qualname__}`, not vllm's own "
            f"`{expected.__qualname__}`: another plugin has replaced it; remove that plugin or kvcustody",
            found=type(thing).__qualname__,
        )


def swap_class(thing: Any, to: type) -> None:
    """Make `thing` an instance of `to`, without a higher cost per attribute.

    CPython moves the attributes of a swapped object into a dict that shares its keys with the class, which its
    specialised instructions do not read: each attribute takes four times as long. In a dict of its own they are fast.
    """
    thing.__class__ = to
    thing.__dict__ = dict(thing.__dict__)


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _installed() -> str:
    from vllm.version import __version__

    return str(__version__)


def _resolve(place: str) -> Callable[..., Any]:
    module, _, path = place.partition(":")
    try:
        found: Any = __import__(module, fromlist=["_"])
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"vllm has no `{place}`: {error}; install a release in the range", place=place) from None
    return found  # type: ignore[no-any-return]


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
