"""Copies of a governed engine in host memory: who gets them back, what the answers are, and when they end."""

from __future__ import annotations

from local_engine import BLOCK, LocalEngine
from tier_engines import PREFIX, displace, prompt, tier


def test_own_prompts_come_back_from_the_tier_and_foreign_ones_never(tiered: LocalEngine, plain: LocalEngine):
    before = tier(tiered)
    mine = prompt(1)
    expected = plain.ask(mine, tenant="alpha", max_tokens=24).tokens
    first = tiered.ask(mine, tenant="alpha", max_tokens=24)
    assert (first.cached_tokens, first.tokens) == (0, expected)
    displace(tiered)
    again = tiered.ask(mine, tenant="alpha", max_tokens=24)
    print(tier(tiered))
    assert again.cached_tokens == PREFIX * BLOCK
    assert again.tokens == expected
    assert tier(tiered)["restored_blocks"] - before["restored_blocks"] >= PREFIX
    displace(tiered)
    foreign = tiered.ask(mine, tenant="beta", max_tokens=24)
    assert (foreign.cached_tokens, foreign.tokens) == (0, expected)
    other_subject = tiered.ask(mine, tenant="alpha", subject="other", max_tokens=24)
    assert (other_subject.cached_tokens, other_subject.tokens) == (0, expected)
    assert tiered.governance("check") == []
    assert tiered.governance("scan") == []
