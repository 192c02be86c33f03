"""Continuous batching with a pool that is too small and tiers beside it: own hits come back, and no output changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvcustody.governance.erasure.selector import Selector
from standins.engines.transformers.continuous_world import (
    Governed,
    batching,
    generation,
    governed,
    person,
    plain,
    policy,
    prompt,
)

POLICY = (
    policy()
    .replace("low: never", "low: {tiers: [host, nvme], encrypt: required}")
    .replace("guaranteed: 25%", "guaranteed: 0%")
)
SMALL = {"num_blocks": 32, "max_batch_tokens": 64}


def tiers(kind: str, folder: Path) -> dict[str, Any]:
    return {"host_bytes": 8 << 20} if kind == "host" else {"nvme_path": folder / "tier", "nvme_bytes": 8 << 20}


def restored(engine: Governed) -> int:
    assert engine.governor.offload is not None
    return sum(use.restored_blocks for use in engine.governor.offload.transfers.uses())


def ask(engine: Governed, whose: str, tokens: list[int]) -> tuple[int, list[int]]:
    """Tokens that were found, and the answer."""
    name = engine.submit(person(whose), tokens)
    engine.run()
    return engine.reused[name], engine.output(name)


def crowd(engine: Governed, seed: int) -> None:
    for number in range(4):
        ask(engine, "b", prompt(216, 100 * seed + number))


@pytest.mark.parametrize("kind", ["host", "nvme"])
def test_own_hits_come_back_from_a_tier_and_foreign_ones_do_not(kind: str, tmp_path: Path) -> None:
    mine = prompt(136, 7)
    with plain(config=batching(**SMALL)) as engine:
        name = engine.add(mine)
        engine.run()
        expected = engine.output(name)
    with governed(text=POLICY, config=batching(**SMALL), tiers=tiers(kind, tmp_path)) as engine:
        assert ask(engine, "a", mine) == (0, expected)
        crowd(engine, 1)
        assert ask(engine, "b", mine) == (0, expected), "another tenant, the same prompt"
        crowd(engine, 2)
        assert restored(engine) == 0
        found, answer = ask(engine, "a", mine)
        assert found == 128 and restored(engine) >= 4 and answer == expected
        engine.batching.erase(Selector("a", "ada"))
        crowd(engine, 3)
        assert ask(engine, "a", mine) == (0, expected), "after an erasure"


def test_without_a_tier_it_is_computed_again() -> None:
    with governed(text=POLICY, config=batching(**SMALL)) as engine:
        ask(engine, "a", prompt(136, 7))
        crowd(engine, 1)
        assert ask(engine, "a", prompt(136, 7))[0] < 64


def test_logits_are_equal_bit_for_bit_after_a_restore(tmp_path: Path) -> None:
    """The last position's scores of the same prompt: from blocks that stayed, and from blocks that were away."""
    mine = prompt(136, 7)
    with governed(text=POLICY, config=batching(**SMALL), tiers=tiers("host", tmp_path)) as engine:
        scores: list[torch.Tensor] = []
        inner = engine.manager.model.lm_head

        def keep(_: object, __: object, out: torch.Tensor) -> None:
            scores.append(out.detach().clone())

        ask(engine, "a", mine)
        logits = []
        for away in (False, True):
            if away:
                crowd(engine, 1)
            handle = inner.register_forward_hook(keep)
            scores.clear()
            reused, _ = ask(engine, "a", mine)
            handle.remove()
            assert reused == 128 and scores
            logits.append(torch.cat([one.reshape(-1, one.shape[-1]) for one in scores]))
        assert restored(engine) > 0
        assert torch.equal(*logits)


@pytest.mark.system("a long run with tiers changes an answer")
@pytest.mark.parametrize("requests", [120, pytest.param(600, marks=pytest.mark.soak)])
def test_no_output_changes_over_many_requests(requests: int, tmp_path: Path) -> None:
    """Two tenants that come back to a few beginnings, in batches; a third of all blocks come from the tier."""
    drawn = np.random.default_rng(11)
    asked = [
        (
            "ab"[int(drawn.integers(2))],
            prompt(72, int(drawn.integers(8))) + prompt(int(drawn.integers(4, 40)), at),
        )
        for at in range(requests)
    ]
    generate = generation(max_new_tokens=4)
    with plain(generate=generate, config=batching(**SMALL)) as engine:
        expected = []
        for _, tokens in asked:
            name = engine.add(tokens)
            engine.run()
            expected.append(engine.output(name))
    with governed(text=POLICY, generate=generate, config=batching(**SMALL), tiers=tiers("host", tmp_path)) as engine:
        answers = []
        for at in range(0, requests, 3):
            names = [engine.submit(person(whose), tokens) for whose, tokens in asked[at : at + 3]]
            engine.run()
            answers += [engine.output(name) for name in names]
        assert restored(engine) > requests, "void: hardly anything came from the tier"
    assert answers == expected
