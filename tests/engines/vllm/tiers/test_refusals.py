"""What cannot be copied under custody is refused at start, by the name of what stands in the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcustody.errors import ConfigError
from kvcustody.integrations.vllm.tiers.layer_groups import CopiedGroup, tier_groups
from kvcustody.integrations.vllm.tiers.tier_conditions import refuse_tiers
from standins.engines.vllm.scheduler_rig import Rig

BLOCK_TOKENS = 16
FULL, WINDOW, MAMBA = "FullAttentionManager", "SlidingWindowManager", "MambaManager"


def config(policy: str = "recompute", backend: str | None = "mp", nnodes: int = 1) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy=policy),
        parallel_config=SimpleNamespace(distributed_executor_backend=backend, nnodes=nnodes),
    )


def manager(*names: str, scheduler_block: int = BLOCK_TOKENS, **facts: Any) -> Any:
    """A cache manager whose layer groups have managers of these names; windows of 33 tokens."""
    facts = {"block_size": BLOCK_TOKENS, "use_eagle": False, "sliding_window": 33} | facts
    singles = [type(name, (), facts)() for name in names]
    return SimpleNamespace(
        coordinator=SimpleNamespace(single_type_managers=singles, scheduler_block_size=scheduler_block)
    )


def test_engines_on_one_machine_may_have_tiers():
    for backend in (None, "mp", "uni"):
        refuse_tiers(config(backend=backend), has_others=False)


def test_full_attention_alone_and_beside_windows_may_be_copied():
    assert tier_groups(manager(FULL), BLOCK_TOKENS) == (CopiedGroup(0, None),)
    assert tier_groups(manager(WINDOW, FULL, WINDOW), BLOCK_TOKENS) == (
        CopiedGroup(0, 2),
        CopiedGroup(1, None),
        CopiedGroup(2, 2),
    )


@pytest.mark.parametrize(
    ("given", "has_others", "named"),
    [
        (config("fail"), False, "kv_load_failure_policy` is `fail`"),
        (config(), True, "another connector"),
        (config(backend="ray"), False, "`ray`"),
        (config(nnodes=2), False, "`2` machines"),
    ],
)
def test_what_stands_in_the_way_is_named(given: Any, has_others: bool, named: str):
    with pytest.raises(ConfigError, match=named):
        refuse_tiers(given, has_others=has_others)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (manager(MAMBA), "`MambaManager`"),
        (manager(FULL, MAMBA), "`FullAttentionManager`, `MambaManager`; only full attention"),
        (manager(WINDOW), "`SlidingWindowManager`; only full attention"),
        (manager(FULL, WINDOW, block_size=32), r"blocks are of `\[32\]` tokens"),
        (manager(FULL, WINDOW, scheduler_block=32), "blocks are of"),
        (manager(FULL, WINDOW, use_eagle=True), "drafter"),
        (manager(FULL, WINDOW, extra_retained_tokens=3), "drafter"),
    ],
)
def test_layers_that_cannot_be_copied_are_named(given: Any, named: str):
    with pytest.raises(ConfigError, match=named):
        tier_groups(given, BLOCK_TOKENS)


def test_an_engine_whose_failed_loads_end_requests_does_not_start(model, monkeypatch):
    monkeypatch.setenv("KVCUSTODY_HOST_TIER_BYTES", "1MiB")
    with pytest.raises(ConfigError, match="kv_load_failure_policy"):
        Rig(model, monkeypatch)
