"""Time to first token: what clients of the engine's own loop measure, and what is reported."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kvcustody.clock import SystemClock
from standins.engines.transformers.continuous_world import Governed, generation, governed, person, prompt

REQUESTS = 6
FORWARD_SECONDS = 0.05  # far longer than what a client's own thread takes to be told
PROMPT_TOKENS = 40


def slow(engine: Governed) -> None:
    """Every forward takes at least so long."""
    engine.batching.model.register_forward_pre_hook(lambda *_: time.sleep(FORWARD_SECONDS))


def first_token_seconds(engine: Governed, prompts: Sequence[list[int]]) -> list[float]:
    """All asked for at once: what each client waits for its first streamed token."""
    asked: dict[str, float] = {}
    came: dict[str, float] = {}
    for tokens in prompts:
        began = time.perf_counter()
        asked[engine.submit(person(), tokens, streaming=True)] = began
    over = 0
    while over < len(prompts):
        result: Any = engine.manager.get_result(timeout=30)
        now = time.perf_counter()
        assert result is not None and result.error is None
        if result.generated_tokens:
            came.setdefault(result.request_id, now)
        over += result.is_finished()
    return [came[name] - asked[name] for name in asked]


def test_the_reported_time_to_first_token_is_what_clients_measure() -> None:
    """With a hit and without, those that wait for their turn included."""
    prompts = [prompt(PROMPT_TOKENS, seed) for seed in range(REQUESTS)]
    with governed(generate=generation(max_new_tokens=3), clock=SystemClock(), tick_seconds=None) as engine:
        slow(engine)
        engine.batching.start(warmup=False)
        misses = first_token_seconds(engine, prompts)
        hits = first_token_seconds(engine, prompts)
        engine.batching.stop()
        measures = engine.governor.measures
        measures.figures()
        for theirs, ours in ((misses, measures.first_without_hit), (hits, measures.first_with_hit)):
            assert min(theirs) >= FORWARD_SECONDS
            assert ours.total == len(theirs) == REQUESTS
            assert REQUESTS * FORWARD_SECONDS <= ours.sum <= sum(theirs), "a client is told later than we measure"
