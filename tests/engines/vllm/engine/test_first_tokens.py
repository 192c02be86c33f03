"""Time to first token: what a client of a whole engine measures, and what the port reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from standins.engines.vllm.deployment import Deployment
from standins.engines.vllm.local_engine import BLOCK, LocalEngine

REQUESTS = 6
STEP_SECONDS = 0.1  # far longer than the way from the engine's process to the client
PROMPT_TOKENS = 4 * BLOCK + 1


def first_token_seconds(engine: LocalEngine, prompts: Sequence[list[int]]) -> list[float]:
    """All asked for at once: what each client waits for its first token."""
    asked: dict[str, float] = {}
    came: dict[str, float] = {}
    for number, tokens in enumerate(prompts):
        began = time.perf_counter()
        name = engine.submit(tokens, tenant="first", max_tokens=1 if number % 2 else 3)
        asked[name] = began
    while engine.engine.has_unfinished_requests():
        for output in engine.engine.step():
            if output.outputs[0].token_ids:
                came.setdefault(output.request_id, time.perf_counter())
    return [came[name] - asked[name] for name in asked]


def test_the_reported_time_to_first_token_is_what_a_client_measures(
    start: Callable[..., LocalEngine], new_deployment: Callable[..., Deployment]
) -> None:
    """With a hit and without, those that wait for their turn and those of one token included."""
    engine = start(deployment=new_deployment())
    prompts = [
        [20 + number, *((53 * number + 7 * at) % 480 + 20 for at in range(1, PROMPT_TOKENS))]
        for number in range(REQUESTS)
    ]
    assert not any(name.startswith("ttft") for name in engine.governance("stats")["serving"])
    engine.rpc("slow_steps", STEP_SECONDS)
    misses = first_token_seconds(engine, prompts)
    hits = first_token_seconds(engine, prompts)
    said = engine.governance("stats")["serving"]
    for theirs, ours in ((misses, "miss"), (hits, "hit")):
        assert min(theirs) >= STEP_SECONDS
        assert said[f"ttft.{ours}.le.inf"] == len(theirs) == REQUESTS
        assert 0.95 <= sum(theirs) / said[f"ttft.{ours}.sum"] <= 1.05, (theirs, said)
    assert engine.governance("check") == []
