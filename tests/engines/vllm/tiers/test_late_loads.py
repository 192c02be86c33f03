"""A copy whose ceiling passes while a worker loads it is computed: time is looked at again before vLLM attaches it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from standins.engines.vllm.local_engine import BLOCK, LocalEngine
from standins.engines.vllm.tier_engines import (
    OBJECT,
    PREFIX,
    TIER_POLICY,
    deployment_with,
    displace,
    fault,
    options,
    prompt,
    tier,
)

LIVES = 20.0  # seconds, all that is `short`'s
MARGIN = 3.0
POLICY = TIER_POLICY.replace("idle: 6s, absolute: 10s", f"idle: {LIVES:.0f}s, absolute: {LIVES:.0f}s")
assert POLICY != TIER_POLICY


def test_what_a_load_outlasts_is_computed(start: Callable[..., LocalEngine], tmp_path: Path) -> None:
    engine = start(deployment=deployment_with(tmp_path, POLICY), **options())
    engine.ask(prompt(900), tenant="alpha")
    displace(engine)
    for seed, is_slow in ((6, False), (7, True)):
        mine, began = prompt(seed), time.monotonic()
        first = engine.ask(mine, tenant="short", max_tokens=2)
        displace(engine)
        assert time.monotonic() - began < LIVES - MARGIN, "void: the machine is too slow"
        time.sleep(max(0.0, LIVES - MARGIN - (time.monotonic() - began)) if is_slow else 0.0)
        before = tier(engine)["restored_blocks"]
        fault(engine, "slow", 3 * MARGIN * OBJECT / PREFIX) if is_slow else None
        again = engine.ask(mine, tenant="short", max_tokens=2)
        fault(engine, "none")
        assert (time.monotonic() - began > LIVES) is is_slow
        expected = (0, 0) if is_slow else (PREFIX * BLOCK, PREFIX)
        assert (again.cached_tokens, tier(engine)["restored_blocks"] - before) == expected
        assert again.tokens == first.tokens
    assert engine.governance("check") == []
