"""What cannot be copied under custody is refused at start, by the name of what stands in the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_rig import Rig

from kvcustody.errors import ConfigError
from kvcustody.integrations.vllm.tiers.tier_conditions import refuse_tiers

FULL = ["FullAttentionManager"]


def config(policy: str = "recompute", backend: str | None = "mp", nnodes: int = 1) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy=policy),
        parallel_config=SimpleNamespace(distributed_executor_backend=backend, nnodes=nnodes),
    )


def test_one_group_of_full_attention_on_one_machine_may_be_copied():
    for backend in (None, "mp", "uni"):
        refuse_tiers(config(backend=backend), FULL, has_others=False)


@pytest.mark.parametrize(
    ("given", "groups", "has_others", "named"),
    [
        (config("fail"), FULL, False, "kv_load_failure_policy` is `fail`"),
        (config(), FULL, True, "another connector"),
        (config(), [*FULL, "SlidingWindowManager"], False, "`FullAttentionManager`, `SlidingWindowManager`"),
        (config(), ["MambaManager"], False, "`MambaManager`"),
        (config(backend="ray"), FULL, False, "`ray`"),
        (config(nnodes=2), FULL, False, "`2` machines"),
    ],
)
def test_what_stands_in_the_way_is_named(given: Any, groups: list[str], has_others: bool, named: str):
    with pytest.raises(ConfigError, match=named):
        refuse_tiers(given, groups, has_others=has_others)


def test_an_engine_whose_failed_loads_end_requests_does_not_start(model, monkeypatch):
    monkeypatch.setenv("KVCUSTODY_HOST_TIER_BYTES", "1MiB")
    with pytest.raises(ConfigError, match="kv_load_failure_policy"):
        Rig(model, monkeypatch)
