"""The governed release of SGLang, and the options that are refused at start, by name.

1. A release outside the range is refused: an engine that would run ungoverned under our flag is worse than one that
   does not start.
2. What keeps KV outside the pool, shares it between processes, or writes to it out of turn is refused by its option.
3. A hook that did not take is refused: SGLang logs a plugin's failure and goes on.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kvcustody.errors import ConfigError

VERSIONS = ("0.5.23",)


class Refused(NamedTuple):
    """An option that is refused unless it has one of these values."""

    option: str
    allowed: tuple[object, ...]
    why: str


_OFF = (None, False, "", 0)
REFUSED = (
    Refused("tp_size", (1,), "each rank schedules for itself, and their clocks would end pages apart"),
    Refused("pp_size", (1,), "a pipeline has several steps in flight"),
    Refused("dp_size", (1, None), "several schedulers would share one worker's name and policy share"),
    Refused("attn_cp_size", (1, None), "a prompt's pages lie on several ranks"),
    Refused("dcp_size", (1, None), "a prompt's pages lie on several ranks"),
    Refused("disable_overlap_schedule", (True,), "a step may still write to pages that the next one hands out"),
    Refused("disaggregation_mode", ("null", None), "KV leaves for another engine, or comes from one"),
    Refused("speculative_algorithm", _OFF, "drafts are written into pages that are never published"),
    Refused("enable_lora", _OFF, "an adapter's identity does not reach the scheduler's keys"),
    Refused("lora_paths", _OFF, "an adapter's identity does not reach the scheduler's keys"),
    Refused("enable_hierarchical_cache", _OFF, "HiCache copies pages to host memory, outside custody"),
    Refused("hicache_storage_backend", _OFF, "HiCache copies pages to a store, out of custody"),
    Refused("enable_lmcache", _OFF, "LMCache copies pages out of custody"),
    Refused("enable_flexkv", _OFF, "FlexKV copies pages out of custody"),
    Refused("enable_unified_cache_external_linker", _OFF, "it copies pages out of custody"),
    Refused("enable_hisparse", _OFF, "HiSparse moves pages to host memory, out of custody"),
    Refused("enable_streaming_session", _OFF, "a session keeps pages between requests without a deadline"),
    Refused("enable_session_radix_cache", _OFF, "a session keeps pages between requests without a deadline"),
    Refused("enable_unified_memory", _OFF, "several kinds of state share one pool"),
    Refused("enable_memory_saver", _OFF, "it releases the pool's memory without zeroing it"),
    Refused("dllm_algorithm", _OFF, "its tokens change after their KV was written"),
    Refused("enable_mixed_chunk", _OFF, "a mixed step has not been proved"),
    Refused("enable_pdmux", _OFF, "two streams write to the pool at once"),
    Refused("elastic_ep_backend", _OFF, "ranks come and go"),
    *(
        Refused(option, _OFF, "requests over gRPC bypass the door and have no identity")
        for option in ("grpc_mode", "smg_grpc_mode", "grpc_port")
    ),
    Refused(
        "kv_events_config",
        _OFF,
        "SGLang's KV events carry token ids in clear (`KVCUSTODY_KV_EVENTS_ENDPOINT` gives events with a scope)",
    ),
    Refused("tokenizer_worker_num", (1, None), "its workers would serve requests that bypass the door"),
    Refused("disable_radix_cache", _OFF, "without a cache there is nothing to govern"),
)

# Overridden, called or hooked: dotted place -> leading parameters after `self`.
SIGNATURES = {
    "sglang.srt.managers.scheduler:Scheduler._add_request_to_queue": ("req", "is_retracted"),
    "sglang.srt.managers.scheduler:Scheduler.run_batch": ("batch",),
    "sglang.srt.managers.scheduler:Scheduler.on_idle": (),
    "sglang.srt.managers.scheduler:Scheduler.get_prefill_adder_class": (),
    "sglang.srt.managers.schedule_policy:PrefillAdder.add_one_req": ("req",),
    "sglang.srt.managers.schedule_policy:PrefillAdder._commit_prefill_admission": ("req", "admission"),
    "sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.checkpoint": ("req", "up_to"),
    "sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.free_kv_row": ("kv", "ranges"),
    "sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.on_release": ("req", "checkpointed"),
    "sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.release_aborted_request": ("handle",),
    "sglang.srt.mem_cache.common:release_kv_cache": ("tree_cache", "checkpoint"),
    "sglang.srt.mem_cache.common:match_kv_cache": ("tree_cache", "token_ids"),
}


def check_version() -> None:
    """Raise `ConfigError` unless this SGLang is a known release with all hooked methods."""
    from sglang.version import __version__

    found = str(__version__)
    if found not in VERSIONS:
        raise ConfigError(
            f"sglang `{found}` is not governed by this kvcustody: it knows {', '.join(VERSIONS)}; install that, or a "
            "kvcustody that knows this one",
            version=found,
        )
    check_signatures(SIGNATURES)


def check_signatures(expected: Mapping[str, tuple[str, ...]]) -> None:
    """Raise `ConfigError` with the first method whose parameters after `self` differ from these."""
    for place, names in expected.items():
        taken = tuple(inspect.signature(_resolve(place)).parameters)[1:]
        if taken[: len(names)] != names:
            raise ConfigError(
                f"`{place}` takes ({', '.join(taken)}), not ({', '.join(names)}): this sglang is not the release that "
                "its version says; install an unmodified one",
                place=place,
            )


def check_options(server_args: Any) -> None:
    """Raise `ConfigError` with the first option that prevents governance (rule 2)."""
    for option, allowed, why in REFUSED:
        value = getattr(server_args, option, None)
        if isinstance(value, (list, tuple, dict)) and not value:
            value = None
        if value not in allowed:
            remedy = "leave it out" if allowed is _OFF else f"set it to `{allowed[0]}`"
            raise ConfigError(f"sglang's `{option}` is `{value}`: {why}; {remedy}", option=option, value=str(value))
    from sglang.srt.environ import envs

    if envs.SGLANG_RUST_SERVER.get():
        raise ConfigError(
            "sglang's Rust server has no middleware, so its requests bypass the door and have no identity; "
            "unset SGLANG_RUST_SERVER"
        )


def check_server(server_args: Any) -> None:
    """Raise `ConfigError` where the HTTP server would warm itself up, because its own requests have no identity."""
    if not server_args.skip_server_warmup:
        raise ConfigError(
            "sglang's `skip_server_warmup` is `False`: the server's requests to itself have no identity, so the door "
            "refuses them and the server ends; start it with `--skip-server-warmup`",
            option="skip_server_warmup",
            value="False",
        )


def check_kind(*, is_hybrid_swa: bool, is_hybrid_ssm: bool, is_dsa: bool) -> None:
    """Raise `ConfigError` for a model whose state is more than one run of KV pages per request."""
    for found, what in (
        (is_hybrid_swa, "sliding windows"),
        (is_hybrid_ssm, "recurrent (Mamba) layers"),
        (is_dsa, "sparse attention with an index of its own"),
    ):
        if found:
            raise ConfigError(f"the model has {what}: their pool's slots are not governed", what=what)


def check_hooks(wanted: Iterable[str], applied: Iterable[str]) -> None:
    """Raise `ConfigError` with the hooks that are not installed (rule 3)."""
    missing = sorted(set(wanted) - set(applied))
    if missing:
        raise ConfigError(
            f"sglang did not take the hooks of kvcustody's plugin: {', '.join(missing)}; is it in `SGLANG_PLUGINS`?",
            missing=missing,
        )


def _resolve(place: str) -> Any:
    module, _, path = place.partition(":")
    try:
        found: Any = __import__(module, fromlist=["_"])
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"sglang has no `{place}`: {error}", place=place) from None
    return found
