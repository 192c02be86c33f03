"""vLLM's own scheduler and cache manager evict in the policy's order, whatever kind it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from standins.engines.vllm.eviction_kinds import KINDS, LOSES_HOT
from standins.engines.vllm.scheduler_rig import Rig, prompt

HOT_TOKENS = 128


def hot_after_scan(engine: Rig, tokens: int = 300) -> int:
    """Tokens that are hit of a prefix that was used six times, after more than the pool of prompts used once."""
    hot = prompt(HOT_TOKENS + 1)
    assert [engine.ask(hot, "alpha", n=2) for _ in range(6)] == [0] + [HOT_TOKENS] * 5
    for seed in range(1, 6):
        assert engine.ask(prompt(tokens, seed), "alpha", n=2) == 0
    hit = engine.ask(hot, "alpha", n=2)
    engine.verify()
    return hit


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_hot_prefix_survives_a_scan_where_the_policy_says_so(
    rig: Callable[..., Rig], kind: str, windows: bool
) -> None:
    """The control: under the least recently used, and the first in, not a token of it is left."""
    one = rig(blocks=110 if windows else 70, eviction=KINDS[kind], windows=windows)
    assert hot_after_scan(one) == (0 if kind in LOSES_HOT else HOT_TOKENS)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_crowded_pool_stays_right_under_each_kind(rig: Callable[..., Rig], kind: str) -> None:
    """Chunked prefill, preemption, decoding; a tenant with a guarantee beside one without."""
    engine = rig(blocks=34, eviction=KINDS[kind], asynchronous=True, defers=True, alpha=30)
    for round_ in range(4):
        for seed in range(6):
            engine.add(prompt(60 + 17 * seed, seed % 4), "alpha" if seed % 2 else "beta", n=9 + round_)
        engine.run()
    engine.verify()
    assert sum(engine.port.pool.evicted.values()) > 0


def test_without_a_kind_nothing_is_ranked(rig: Callable[..., Rig]) -> None:
    """The least recently used is vLLM's own order: no array, and no order of ours, on the way of a request."""
    assert rig().port.pool.ranking is None
    assert rig(eviction=KINDS["lfu"]).port.pool.ranking is not None


def test_what_a_caller_says_of_its_content_leaves_first(rig: Callable[..., Rig]) -> None:
    """A pasted log used again and again leaves before prompts used once; the control says nothing, or nothing sound."""
    eviction = "{policy: priority, priority: 40, kinds: {pasted_log: 0}}"
    log = prompt(HOT_TOKENS + 1)
    for kinds, kept in (([[0, 999, "pasted_log"]], 0), (None, HOT_TOKENS), ([[9, 0, 7], "x"], HOT_TOKENS)):
        engine = rig(blocks=70, eviction=eviction)
        for seed in range(1, 4):
            engine.ask(prompt(300, seed), "alpha", n=2)
        engine.ask(log, "alpha", n=2, kinds=kinds)
        engine.ask(log, "alpha", n=2, kinds=kinds)
        engine.ask(prompt(300, 9), "alpha", n=2)
        assert engine.ask(log, "alpha", n=2, kinds=kinds) == kept
        engine.verify()


def test_what_the_door_marked_stays_and_a_caller_only_lowers_it(rig: Callable[..., Rig]) -> None:
    """A system prompt outlasts newer prompts; the controls have no mark, a malformed one, or the caller's word."""
    eviction = "{policy: priority, priority: 40, kinds: {system_prompt: 90, pasted_log: 0}}"
    system, mark = prompt(HOT_TOKENS + 1), [[0, HOT_TOKENS, "system_prompt"]]
    for named, kept in (
        ({"marks": mark}, HOT_TOKENS),
        ({}, 0),
        ({"marks": [[9, 0, "system_prompt"]]}, 0),
        ({"kinds": mark}, 0),
        ({"marks": mark, "kinds": [[0, HOT_TOKENS, "pasted_log"]]}, 0),
    ):
        engine = rig(blocks=70, eviction=eviction)
        for _ in range(2):
            engine.ask(system, "alpha", n=2, **named)
        for seed in range(1, 6):
            engine.ask(prompt(300, seed), "alpha", n=2)
        assert engine.ask(system, "alpha", n=2) == kept, named
        engine.verify()
