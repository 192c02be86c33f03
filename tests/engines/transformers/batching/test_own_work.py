"""Prompts that nobody repeats have no hits, however often their requests are preempted and begin again."""

from __future__ import annotations

import pytest

from kvcustody.allocator.prefix.sequence import RunningSequence
from kvcustody.governance.observability.metrics import worker_status
from standins.engines.transformers.continuous_world import (
    PAGE,
    batching,
    generation,
    governed,
    person,
    policy,
    prompt,
)

PROMPTS = [prompt(50, seed) for seed in range(5)]
ONE_TENANT = "  a: {quota: {guaranteed: 50%, cap: 100%, borrow: true}}"
CROWDED = {"num_blocks": 24, "max_batch_tokens": 128}


def hit_ratio(monkeypatch: pytest.MonkeyPatch) -> float:
    """What a worker says of its hits, as a share of its prompts' tokens, after a run in which some were preempted."""
    preempted: list[str] = []
    how = generation(max_new_tokens=26)
    with governed(config=batching(**CROWDED), text=policy(ONE_TENANT), generate=how) as engine:
        release = engine.custody.release

        def watched(request_id: str, cause: str) -> None:
            if cause == "preempted":
                preempted.append(request_id)
            release(request_id, cause)

        monkeypatch.setattr(engine.custody, "release", watched)
        names = [engine.submit(person("a"), tokens) for tokens in PROMPTS]
        engine.run()
        assert preempted and [len(engine.output(name)) for name in names] == [26] * len(PROMPTS)
        engine.sound()
        status = worker_status(engine.governor.stats(), PAGE)
    assert status["prompt_tokens"] == sum(map(len, PROMPTS)), "each prompt is counted once"
    return status["hit_tokens"] / status["prompt_tokens"]


def test_a_prompt_that_nobody_repeats_is_no_hit_when_its_request_begins_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert hit_ratio(monkeypatch) == 0


def test_the_control_without_the_mark_own_work_is_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same run where no admission keeps how much is its request's own earlier work: over a quarter is a hit."""
    monkeypatch.setattr(RunningSequence, "earlier_blocks", property(lambda _: 0, lambda _, value: None))
    assert hit_ratio(monkeypatch) > 0.25
