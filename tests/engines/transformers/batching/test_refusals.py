"""What is not understood is refused before anything runs, with what to change; each check is tripped once."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest
from structlog.testing import CapturingLogger
from transformers.generation.continuous_batching import cache as engine_cache
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import (
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING

from kvcustody.clock import VirtualClock
from kvcustody.errors import ConfigError, IsolationError
from kvcustody.integrations.transformers.batching import governed_batching as internals
from kvcustody.integrations.transformers.batching.governed_batching import GovernedBatching, check_ranks
from standins.engines.transformers.continuous_world import (
    IDENTITY,
    PAGE,
    batching,
    generation,
    govern,
    governed,
    model,
    person,
    policy,
    prompt,
)


def open_one(kind: str = "llama", **values: Any) -> GovernedBatching:
    clock = VirtualClock()
    return GovernedBatching(
        model(kind),
        govern(policy(), clock),
        IDENTITY,
        generation_config=generation(),
        batching_config=batching(**values),
        clock=clock,
    )


def test_the_engine_says_which_models_keys_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    log = CapturingLogger()
    monkeypatch.setattr("kvcustody.integrations.transformers.batching.governed_batching._log", log)
    with open_one():
        pass
    (said,) = [call.kwargs for call in log.calls if call.args == ("model identity",)]
    assert (said["model_digest"], said["block_tokens"]) == (IDENTITY.digest.hex(), PAGE)


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        ("llama", {"cpu_offload_space": 0.5}, "cpu_offload_space is `0.5`"),
        ("llama", {"cpu_offload_space": None}, "set it to 0"),
        ("llama", {"page_size": 2 * PAGE}, "page_size is `16`"),
        ("llama", {"scheduler_type": "mine"}, "scheduler `mine` is not governed"),
    ],
)
def test_configurations_that_leave_custody(kind: str, values: dict[str, Any], words: str) -> None:
    before = dict(SCHEDULER_MAPPING)
    with pytest.raises(ConfigError, match=words):
        open_one(kind, **values)
    assert before == SCHEDULER_MAPPING


def test_a_kind_of_layers_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_one("sliding"):
        pass

    class Chunked(SlidingAttentionCacheAllocator):
        layer_type = "chunked_attention"

    monkeypatch.setitem(engine_cache.ATTN_TYPE_TO_ALLOCATOR, "sliding_attention", Chunked)
    with pytest.raises(ConfigError, match="layers of kinds `full_attention, sliding_attention`"):
        open_one("sliding")


def test_a_cache_that_holds_no_two_blocks() -> None:
    with pytest.raises(ConfigError, match="give it more memory"):
        open_one("sliding", num_blocks=1)


@pytest.mark.parametrize("version", ["5.18.1", "4.57.1", "5.25.0", "6.0.0", "unknown"])
def test_unknown_versions(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(ConfigError, match=f"transformers `{version}` is not known to this adapter"):
        open_one()


def test_a_method_that_changed_or_went(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.check_internals()
    with monkeypatch.context() as changed:
        changed.setattr(PagedAttentionCache, "free_blocks", lambda self, request_id: None)
        with pytest.raises(ConfigError, match=r"`PagedAttentionCache.free_blocks` takes"):
            open_one()
    with monkeypatch.context() as gone:
        gone.delattr(PagedAttentionCache, "evict_cached_blocks")
        with pytest.raises(ConfigError, match=r"`PagedAttentionCache.evict_cached_blocks` takes `None`"):
            open_one()
    monkeypatch.setitem(internals.EXPECTED, ("cache_manager", "BlockManager"), {})
    with pytest.raises(ConfigError, match="has no"):
        open_one()


def _shifted(original: Callable[..., list[int]]) -> Callable[..., list[int]]:
    return lambda self, *operands: [index - self.block_physical_stride for index in original(self, *operands)]


def test_a_layout_that_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    original = FullAttentionCacheAllocator.get_write_indices
    monkeypatch.setattr(FullAttentionCacheAllocator, "get_write_indices", _shifted(original))
    monkeypatch.setattr(internals, "EXPECTED", {})
    with pytest.raises(ConfigError, match="do not lie where this adapter expects them"):
        open_one()


def test_several_ranks() -> None:
    check_ranks(1)
    with pytest.raises(ConfigError, match="over `2` ranks"):
        check_ranks(2)


def test_a_cache_that_is_not_the_engines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(PagedAttentionCache):
        pass

    monkeypatch.setattr("transformers.generation.continuous_batching.continuous_api.PagedAttentionCache", Other)
    with pytest.raises(ConfigError, match="a cache of type `Other`"):
        open_one()


def test_a_model_that_batches_already() -> None:
    with governed() as engine:
        with pytest.raises(ConfigError, match="keeps a continuous batching manager already"):
            GovernedBatching(
                engine.batching.model, govern(policy(), engine.clock), IDENTITY, batching_config=batching()
            )
        with pytest.raises(ConfigError, match="a second cache"):
            engine.manager.batch_processor = None
            engine.manager._create_batch_processor()
        engine.manager.batch_processor = engine.processor
        engine.submit(person(), prompt(9))
        engine.run()


def test_a_governor_with_blocks_of_another_size() -> None:
    clock = VirtualClock()
    make = govern(policy(), clock)
    with pytest.raises(ConfigError, match="the engine's `16`"):
        GovernedBatching(
            model(),
            make,
            type(IDENTITY)(**{**{n: getattr(IDENTITY, n) for n in _names()}, "block_tokens": 16}),
            batching_config=batching(page_size=16),
        )


def _names() -> list[str]:
    return [name for name in type(IDENTITY).__dataclass_fields__ if name != "digest"]


def test_the_engines_own_pool_is_sealed() -> None:
    with governed() as engine:
        for act in (
            lambda: engine.cache.pool.allocate_sector(0),
            lambda: engine.allocator.pool.get_free_blocks(0, 1),
            lambda: engine.allocator.allocate_cache_to_request("x", 0, 9),
            lambda: engine.cache.count_storable_requests([]),
        ):
            with pytest.raises(IsolationError):
                act()
        del engine.allocator.block_table["x"]
