"""A corrupted cached block is recomputed: the governed engine says what the plain one says.

Positive control: where the policy compares nothing, what is served depends on the random values in the cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvcustody.allocator.pool.block_state import QUARANTINED
from kvcustody.audit.kinds import IntegrityMismatch
from standins.engines.transformers.continuous_world import (
    PAGE,
    Governed,
    batching,
    generation,
    governed,
    person,
    plain,
    policy,
    prompt,
)

TOKENS = prompt(6 * PAGE + 3)
INTEGRITY = "integrity: {default: {verify: all}}\n"


def expected(**values: Any) -> list[int]:
    with plain(generate=generation(), config=batching(**values)) as engine:
        name = engine.add(TOKENS)
        engine.run()
        return engine.output(name)


def ask(engine: Governed) -> tuple[list[int], int]:
    """The output, and how many tokens were not computed anew."""
    name = engine.submit(person(), TOKENS)
    engine.run()
    return engine.output(name), engine.reused[name]


def corrupt(engine: Governed, blocks: list[int] | None = None) -> None:
    """Random values over what is cached, or over these blocks of the engine."""
    rows = engine.cache.cache_tensor.view(-1, engine.allocator.bytes_per_block)
    first = engine.custody.blocks.parts[0].first
    at = list(range(first, len(rows))) if blocks is None else blocks
    values = np.random.default_rng(5).standard_normal(len(at) * rows.shape[1] // 4).astype(np.float32)
    rows[at] = torch.from_numpy(values).view(torch.uint8).view(len(at), -1).view(rows.dtype)


@pytest.mark.system("random values in a cache change an answer")
@pytest.mark.parametrize("values", [{}, {"max_batch_tokens": 16}], ids=["one step", "chunked prefill"])
def test_random_values_over_the_cache_are_recomputed(values: dict[str, Any]) -> None:
    with governed(text=policy() + INTEGRITY, config=batching(**values)) as engine:
        assert ask(engine) == (expected(**values), 0)
        assert ask(engine) == (expected(**values), 6 * PAGE)
        corrupt(engine)
        assert ask(engine) == (expected(**values), 0)
        assert ask(engine) == (expected(**values), 6 * PAGE)
        stats = engine.governor.stats().pools[0]
        assert stats.mismatched_blocks == 6 and stats.checked_blocks == 3 * 6
        counted = engine.governor.stats().tenants["a"]
        assert counted.verified_blocks == counted.hit_blocks == 2 * 6, "every hit was present, none unverified"


def test_positive_control_without_the_check_random_values_are_served() -> None:
    with governed(text=policy()) as engine:
        assert ask(engine) == (expected(), 0)
        corrupt(engine)
        output, reused = ask(engine)
        assert output != expected() and reused == 6 * PAGE
        assert engine.governor.stats().pools[0].checked_blocks == 0
        counted = engine.governor.stats().tenants["a"]
        assert (counted.verified_blocks, counted.hit_blocks) == (0, 6)


def test_one_changed_block_is_on_record_zeroed_and_handed_out_again() -> None:
    with governed(text=policy() + INTEGRITY) as engine:
        recorded: list[Any] = []
        submit = engine.governor._ledger.submit
        engine.governor._ledger.submit = lambda events: (recorded.extend(events), submit(events))  # type: ignore[method-assign]
        ask(engine)
        manager = engine.governor.managers[0]
        blocks = next(iter(manager.tree.nodes())).blocks.tolist()
        changed = blocks[2] + engine.custody.blocks.pool_first[0] + engine.custody.blocks.parts[0].first
        corrupt(engine, [changed])
        assert ask(engine) == (expected(), 2 * PAGE)
        for _ in range(3):
            engine.step()
        (leaf,) = [event for event in recorded if isinstance(event, IntegrityMismatch)]
        assert (leaf.tenant, leaf.classification, leaf.requests) == ("a", "low", 0)
        assert [run.blocks.tolist() for run in leaf.runs] == [[blocks[2]]]
        assert manager.pool.counts[QUARANTINED] == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_what_nobody_changed_raises_no_alarm(is_async: bool) -> None:
    with governed(text=policy() + INTEGRITY) as engine:
        engine.custody.is_async = is_async  # its fences, on a device without streams
        for seed in range(12):
            for tokens in (TOKENS, prompt(5 * PAGE + 1, seed), TOKENS[: 3 * PAGE] + prompt(20, seed)):
                engine.submit(person(), tokens)
            engine.run()
        stats = engine.governor.stats().pools[0]
        assert stats.checked_blocks > 100 and stats.mismatched_blocks == 0


@pytest.mark.parametrize("kind", ["sliding", "windows"])
def test_blocks_that_a_window_writes_again_are_no_mismatch(kind: str) -> None:
    with governed(kind) as engine:
        unchecked = ask(engine)
    with governed(kind, text=policy() + INTEGRITY) as engine:
        assert ask(engine) == ask(engine) == unchecked
        assert engine.governor.managers[0].pool.counts[QUARANTINED] == 0
