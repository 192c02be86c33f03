"""The `sglang.srt.plugins` entry point. SGLang calls `register` in every process, before it configures anything.

1. It changes nothing for an engine with another prefix cache: each hook asks whose cache the scheduler has.
2. SGLang logs a plugin's failure and goes on: our backend then is not registered, or finds a hook missing, and the
   engine does not start.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

NAME = "kvcustody"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "end_weight_update",
)
_SERVER = "sglang.srt.entrypoints.http_server"
_IDLE_POLL_MS_MAX = 100


def register() -> None:
    """Register the backend and the hooks."""
    from sglang.srt.mem_cache.registry import register_radix_cache_backend, registered_radix_cache_backends
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME in registered_radix_cache_backends():
        return
    register_radix_cache_backend(NAME, _build)
    for place, (kind, hook) in HOOKS.items():
        HookRegistry.register(place, hook, HookType[kind])


def _build(context: Any) -> Any:
    from sglang.srt.plugins.hook_registry import HookRegistry

    from kvcustody.integrations.sglang.check_engine import check_hooks
    from kvcustody.integrations.sglang.open_custody import build_cache

    check_hooks((place for place in HOOKS if place.startswith((_SCHEDULER, _UPDATER))), HookRegistry._patched)
    return build_cache(context)


def governed_cache(scheduler: Any) -> Any:
    """Return our cache of a scheduler; None where it has another one."""
    cache = getattr(scheduler, "tree_cache", None)
    return cache if getattr(cache, "custody", None) is not None else None


def _bind(_result: Any, scheduler: Any, *_given: Any, **_named: Any) -> None:
    cache = governed_cache(scheduler)
    if cache is not None:
        cache.scheduler = scheduler


def _add_request(original: Callable[..., Any], scheduler: Any, req: Any, *given: Any, **named: Any) -> Any:
    cache = governed_cache(scheduler)
    if cache is not None and not hasattr(req, "kvcustody"):
        cache.scheduler = scheduler
        if cache.custody.is_used(req.rid):
            return None
        refused = cache.admit(req)
        if refused is not None:
            cache.refuse(req, refused)
            return None
    return original(scheduler, req, *given, **named)


def _adder(result: Any, scheduler: Any) -> Any:
    if governed_cache(scheduler) is None:
        return result
    from kvcustody.integrations.sglang.radix_cache import governed_adder

    return governed_adder(result)


def _step(scheduler: Any, *_given: Any, **_named: Any) -> None:
    cache = governed_cache(scheduler)
    if cache is not None:
        cache.custody.step()


def _sleep(original: Callable[..., Any], scheduler: Any) -> Any:
    """Make a sleeping idle scheduler wake for what is due, and for operators' orders."""
    cache, sleeper = governed_cache(scheduler), getattr(scheduler, "idle_sleeper", None)
    if cache is None or sleeper is None or not hasattr(sleeper, "poller"):
        return original(scheduler)
    sleeper.poller.poll(_IDLE_POLL_MS_MAX)
    return None


def _update_weights(original: Callable[..., Any], updater: Any, *given: Any, **named: Any) -> Any:
    """Take note of new weights, also where the update failed half-way or left SGLang's cache unchanged."""
    try:
        return original(updater, *given, **named)
    finally:
        cache = governed_cache(updater.scheduler)
        if cache is not None:
            cache.weights_changed()


def _guard_door(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Make every request to a governed engine's HTTP server pass the identity module."""
    from kvcustody.integrations.sglang.check_engine import check_server
    from kvcustody.integrations.sglang.middleware import check_identity, guard

    server, server_args = sys.modules.get(_SERVER), named.get("server_args", next(iter(given[1:]), None))
    if server is None or getattr(server_args, "radix_cache_backend", None) != NAME:
        return original(*given, **named)
    check_server(server_args)
    check_identity()
    result = original(*given, **named)
    guard(server)
    return result


HOOKS: dict[str, tuple[str, Callable[..., Any]]] = {
    f"{_SCHEDULER}.__init__": ("AFTER", _bind),
    f"{_SCHEDULER}._add_request_to_queue": ("AROUND", _add_request),
    f"{_SCHEDULER}.get_prefill_adder_class": ("AFTER", _adder),
    f"{_SCHEDULER}.run_batch": ("BEFORE", _step),
    f"{_SCHEDULER}.on_idle": ("BEFORE", _step),
    f"{_SCHEDULER}._record_scheduler_state_for_paused_engine": ("BEFORE", _step),
    f"{_SCHEDULER}.maybe_sleep_on_idle": ("AROUND", _sleep),
    **{f"{_UPDATER}.{name}": ("AROUND", _update_weights) for name in _UPDATES},
    "sglang.srt.entrypoints.engine.Engine._launch_subprocesses": ("AROUND", _guard_door),
}
