"""Cached K/V that change in a worker's memory are computed anew where the policy says so, and served elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import select

from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events
from standins.engines.vllm.deployment import POLICY, Deployment
from standins.engines.vllm.local_engine import BLOCK, LocalEngine, environment

PROMPT = [*range(100, 100 + 4 * BLOCK), 17]


def asking(verify: str) -> str:
    """A policy that compares such a share."""
    return f"{POLICY}integrity: {{default: {{verify: {verify}}}}}\n"


def change(engine: LocalEngine, block: int, *, rank: int = 0, every: bool = True) -> None:
    """Change what one worker holds of a block."""
    assert sum(engine.rpc("flip_bits", block, rank, every)) > (100 if every else 0)


def cached_block(engine: LocalEngine) -> int:
    """The first that is in vLLM's index."""
    return int(engine.probe("pool")["indexed"].index(True))


def cache_in(engine: LocalEngine, block: int) -> None:
    """Compute the prompt anew until it lies in `block`, among others."""
    for _ in range(40):
        if engine.probe("pool")["indexed"][block]:
            return
        engine.governance("erase", "owner")
        engine.ask(PROMPT, tenant="owner", max_tokens=8)
    raise AssertionError(f"block {block} was not handed out again")


def settled(engine: LocalEngine) -> LocalEngine:
    """Sums are made in the step after the one that filled a block; an idle engine takes it by itself."""
    engine.ask([21, 22, 23], tenant="other", max_tokens=2)
    return engine


def test_what_has_changed_is_computed_anew_on_record_and_withheld_the_second_time(
    start: Callable[..., LocalEngine], new_deployment: Callable[..., Deployment]
) -> None:
    """Two workers hold half of each block: the second one's half changes, by one bit and in every value."""
    deployment = new_deployment(policy=asking("all"))
    with environment({"VLLM_CPU_OMP_THREADS_BIND": "0|1"}):
        engine = start(deployment=deployment, tensor_parallel_size=2)
    uncached = engine.ask(PROMPT, tenant="control", max_tokens=8)
    assert uncached.cached_tokens == 0
    engine.governance("erase", "control")
    assert engine.ask(PROMPT, tenant="owner", max_tokens=8) == uncached
    assert settled(engine).ask(PROMPT, tenant="owner", max_tokens=8).cached_tokens == 4 * BLOCK
    assert engine.governance("stats")["integrity"] == {"checked": 4, "mismatched": 0}

    block = cached_block(engine)
    for times, every in enumerate((False, True), 1):
        cache_in(engine, block)
        change(settled(engine), block, rank=1, every=every)
        answer = engine.ask(PROMPT, tenant="owner", max_tokens=8)
        assert answer.tokens == uncached.tokens
        assert answer.cached_tokens < 4 * BLOCK
        assert engine.governance("stats")["integrity"]["mismatched"] == times
        assert settled(engine).ask(PROMPT, tenant="owner", max_tokens=8).cached_tokens == 4 * BLOCK
        assert engine.governance("stats")["by_state"]["quarantined"] == times - 1
    engine.governance("erase", "owner")
    with pytest.raises(AssertionError, match="was not handed out again"):
        cache_in(engine, block)
    assert engine.governance("check") == []
    engine.close()

    ledger = open_store(deployment.ledger_url)
    with ledger.connect() as connection:
        kinds = [row.kind for row in connection.execute(select(events.c.kind))]
    ledger.dispose()
    assert kinds.count("integrity-mismatch") == 2


def test_control_without_the_policy_it_is_served(
    start: Callable[..., LocalEngine], new_deployment: Callable[..., Deployment]
) -> None:
    engine = start(deployment=new_deployment(policy=asking("none")))
    uncached = engine.ask(PROMPT, tenant="owner", max_tokens=8)
    change(settled(engine), cached_block(engine))
    served = engine.ask(PROMPT, tenant="owner", max_tokens=8)
    assert served.cached_tokens == 4 * BLOCK
    assert served.tokens != uncached.tokens
