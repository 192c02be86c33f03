"""A whole engine of three processes evicts in the policy's order: what is hit of a hot prefix after a scan."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from standins.engines.vllm.deployment import POLICY, Deployment
from standins.engines.vllm.eviction_kinds import KINDS, LOSES_HOT
from standins.engines.vllm.local_engine import BLOCK, BLOCKS, LocalEngine

HOT_TOKENS = 4 * BLOCK


def tokens(count: int, number: int) -> list[int]:
    """A prompt that shares no block with that of another number."""
    return [20 + number, *((number * 53 + 7 * at) % 480 + 20 for at in range(1, count))]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_hot_prefix_survives_a_scan_where_the_policy_says_so(
    start: Callable[..., LocalEngine], new_deployment: Callable[..., Deployment], kind: str
) -> None:
    """The control: under the least recently used, and the first in, not a token of it is left."""
    policy = POLICY.replace("eviction: {policy: lru}", f"eviction: {KINDS[kind]}")
    engine = start(deployment=new_deployment(policy=policy))
    hot = tokens(HOT_TOKENS + 1, 0)
    hits = [engine.ask(hot, tenant="hot").cached_tokens for _ in range(6)]
    assert hits == [0] + [HOT_TOKENS] * 5
    for number in range(1, BLOCKS * BLOCK // 400 + 2):
        engine.ask(tokens(400, number), tenant="hot")
    assert engine.ask(hot, tenant="hot").cached_tokens == (0 if kind in LOSES_HOT else HOT_TOKENS)
    assert engine.governance("check") == []
    assert engine.free_residue() == 0
