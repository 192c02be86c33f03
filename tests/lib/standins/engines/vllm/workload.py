"""Work that frees blocks in every way that vLLM knows, the same for a governed and a plain engine.

- It is a function of its seed: prompts of several chunks, shared prefixes, short and long answers, requests that are
   aborted while they wait, within a prompt and within an answer; and more running work than the pool holds.
"""

from __future__ import annotations

from random import Random

from standins.engines.vllm.local_engine import BLOCK, LocalEngine

TENANTS = ("red", "green", "blue")


def churn(engine: LocalEngine, *, seed: int, requests: int = 40) -> dict[str, int]:
    """Run it until the engine is idle; how often each way of freeing was taken."""
    random = Random(seed)
    counts = {"finished": 0, "aborted": 0, "chunked": 0, "preempted": 0, "cached_tokens": 0}
    engine.probe("preemptions")
    heads = {tenant: _tokens(random, 3 * BLOCK) for tenant in TENANTS}
    for _ in range(requests):
        tenant = random.choice(TENANTS)
        length = random.choice((5, 40, 90, 300))
        prompt = heads[tenant] * (random.random() < 0.5) + _tokens(random, length)
        counts["chunked"] += len(prompt) > 256
        request_id = engine.submit(prompt, tenant=tenant, max_tokens=random.choice((1, 20, 90)))
        for _ in range(random.choice((0, 1, 3))):
            _note(counts, engine.step())
        if random.random() < 0.25:
            engine.abort(request_id)
            counts["aborted"] += 1
    _note(counts, engine.finish())
    counts["preempted"] = len(engine.probe("preemptions"))
    return counts


def outgrow(engine: LocalEngine) -> int:
    """Eight tenants whose answers together outgrow the pool while they run; how often vLLM preempted."""
    engine.probe("preemptions")
    for number in range(8):
        prompt = [(number * 61 + at) % 480 + 20 for at in range(200)]
        engine.submit(prompt, tenant=f"grower-{number}", max_tokens=150)
    done = engine.finish()
    assert [len(answer.tokens) for answer in done.values()] == [150] * 8
    return len(engine.probe("preemptions"))


def _note(counts: dict[str, int], answers: dict) -> None:
    for answer in answers.values():
        if answer.reason == "length":
            counts["finished"] += 1
            counts["cached_tokens"] += answer.cached_tokens


def _tokens(random: Random, count: int) -> list[int]:
    return [random.randrange(20, 500) for _ in range(count)]
