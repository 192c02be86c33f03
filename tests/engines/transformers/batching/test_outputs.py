"""Governance changes no output: the governed engine against the plain one, token for token."""

from __future__ import annotations

from typing import Any

import pytest

from standins.engines.transformers.continuous_world import (
    PAGE,
    Driver,
    batching,
    generation,
    governed,
    model,
    person,
    plain,
    prompt,
)

LENGTHS = (33, 64, 7, 100, 40, PAGE)
PROMPTS = [prompt(tokens, seed) for seed, tokens in enumerate(LENGTHS)] + [prompt(33, 0) + prompt(20, 5)]


def outputs(engine: Driver, add: Any) -> dict[str, list[int]]:
    """Two rounds of all prompts, the second on a warm cache; outputs by the order of asking, forks by number."""
    tokens_by_name: dict[str, list[int]] = {}
    for turn in range(2):
        names = [add(tokens) for tokens in PROMPTS]
        engine.run()
        for at, name in enumerate(names):
            for result in engine.results:
                if result.partition("__child#")[0] == name:
                    tokens_by_name[f"{turn}/{at}{result.removeprefix(name)}"] = engine.output(result)
    return tokens_by_name


def both(kind: str = "llama", **values: Any) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    generate = generation(**values.pop("generate", {}))
    with plain(kind, generate=generate, config=batching(**values)) as engine:
        expected = outputs(engine, engine.add)
    with governed(kind, generate=generate, config=batching(**values)) as engine:
        found = outputs(engine, lambda tokens: engine.submit(person(), tokens))
    return found, expected


@pytest.mark.parametrize(
    ("kind", "scheduler", "do_sample"),
    [
        ("llama", "fifo", False),
        ("qwen", "prefill_first", False),
        ("qwen", "fifo", True),
        ("sliding", "fifo", False),
        ("windows", "prefill_first", False),
        ("wide", "fifo", True),
        ("narrow", "fifo", False),
    ],
)
def test_outputs_are_the_plain_engines(kind: str, scheduler: str, do_sample: bool) -> None:
    found, expected = both(kind, scheduler_type=scheduler, generate={"do_sample": do_sample})
    assert found == expected and len(expected) == 2 * len(PROMPTS)


@pytest.mark.system("a prompt that is cut otherwise gives another answer")
@pytest.mark.parametrize(
    "values",
    [{"allow_block_sharing": False}, {"max_batch_tokens": 16}, {"max_batch_tokens": 512, "num_blocks": 128}],
    ids=["prefix caching off", "chunked prefill", "one batch"],
)
@pytest.mark.parametrize("kind", ["llama", "sliding", "windows"])
def test_outputs_do_not_depend_on_how_the_prompt_is_cut(kind: str, values: dict[str, Any]) -> None:
    found, expected = both(kind, **values)
    assert found == expected


@pytest.mark.parametrize("kind", ["llama", "windows"])
def test_several_sequences_for_one_prompt(kind: str) -> None:
    found, expected = both(kind, generate={"num_return_sequences": 3, "do_sample": True}, num_blocks=256)
    assert found == expected and len(expected) == 3 * 2 * len(PROMPTS)
    assert found["0/0"] != found["0/0__child#0"]  # they are not one sequence three times


@pytest.mark.system
def test_generate_batch_and_the_models_own_entry_point() -> None:
    plainly = model().generate_batch(PROMPTS, generation_config=generation(), continuous_batching_config=batching())
    expected = [result.generated_tokens for result in plainly.values()]
    with governed() as engine:
        ours = engine.batching.generate_batch(person(), PROMPTS)
        assert [result.generated_tokens for result in ours.values()] == expected
        with engine.batching.acting(person("b")):
            theirs = engine.batching.model.generate_batch(PROMPTS, generation_config=generation())
        assert [result.generated_tokens for result in theirs.values()] == expected
        tenant_counters = engine.governor.tenant_counters
        assert tenant_counters["a"].requests == tenant_counters["b"].requests == len(PROMPTS)
        refused = engine.batching.model.generate_batch(PROMPTS[:1], generation_config=generation())
        assert all("not in the policy" in result.error for result in refused.values())
        engine.sound()


def test_a_batch_with_forks_returns_children_before_their_parent() -> None:
    with governed(generate=generation(num_return_sequences=2, do_sample=True)) as engine:
        found = engine.batching.generate_batch([person("a"), person("b")], PROMPTS[:2])
        names = list(found)
        assert [name.endswith("__child#0") for name in names] == [True, False, True, False]
        assert all(len(result.generated_tokens) == 8 for result in found.values())


def test_the_serving_loop_serves_while_it_runs() -> None:
    with governed() as engine:
        engine.batching.start()
        names = [engine.batching.submit(person(), tokens) for tokens in PROMPTS]
        served = {}
        while len(served) < len(names):
            result = engine.manager.get_result(timeout=60)
            assert result is not None
            served[result.request_id] = result.generated_tokens
        engine.batching.stop()
        with governed() as other:
            again = [other.submit(person(), tokens) for tokens in PROMPTS]
            other.run()
            assert [served[name] for name in names] == [other.output(name) for name in again]
        engine.sound()


@pytest.mark.parametrize("kind", ["sliding", "windows"])
def test_a_model_with_windows_reuses_nothing_and_keeps_nothing(kind: str) -> None:
    """Its blocks are written again in place: nobody is given them, and none outlives its request."""
    with governed(kind) as engine:
        for _ in range(2):
            name = engine.submit(person(), prompt(50))
            engine.run()
            assert engine.reused[name] == 0
            account = engine.governor.managers[0].accounts["a"]
            assert (account.active_blocks, account.cached_blocks) == (0, 0)


@pytest.mark.parametrize("kind", ["sliding", "windows"])
def test_preempted_requests_of_a_model_with_windows_say_the_same(kind: str) -> None:
    generate, config = generation(max_new_tokens=60), batching(num_blocks=28)
    prompts = [prompt(40 + seed, seed) for seed in range(4)]
    with plain(kind, generate=generate, config=batching(num_blocks=256)) as engine:
        names = [engine.add(tokens) for tokens in prompts]
        engine.run()
        expected = [engine.output(name) for name in names]
    preempted: list[str] = []
    with governed(kind, generate=generate, config=config) as engine:
        released = engine.custody.release
        engine.custody.release = lambda name, cause, **more: (  # type: ignore[method-assign]
            preempted.append(name) if cause == "preempted" else None,
            released(name, cause, **more),
        )
        names = [engine.submit(person(), tokens) for tokens in prompts]
        engine.run()
        assert [engine.output(name) for name in names] == expected
    assert preempted
