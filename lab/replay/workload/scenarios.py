"""Three workloads for which a pool is too small or its blocks too large, to show what an operator sees.

    kvcustody replay --trace-format thrash               # or oom, or fragmentation

1. One tenant sends everything, internal data, in sessions of its own: what happens is of the pool, not of a policy.
2. Nothing is drawn: the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvcustody.clock import MICROSECONDS
from kvcustody.lab.replay.traces.model import TraceRequest
from kvcustody.lab.replay.workload.labels import Label
from kvcustody.lab.replay.workload.model import Job


class Scenario(NamedTuple):
    """A workload, and the pool for which it is made."""

    title: str
    pool_blocks: int
    block_tokens: int
    jobs: Callable[[], list[Job]]


def _thrash() -> list[Job]:
    """Make prompts of 1.25 times the pool that repeat in turn, so that each is evicted before it comes again."""
    prompts, blocks = 20, 16
    assert prompts * blocks == 1.25 * SCENARIOS["thrash"].pool_blocks
    return [_job(at, at % prompts, blocks, 16, 4) for at in range(4 * prompts)]


def _oom() -> list[Job]:
    """Make thirty requests within three seconds whose answers grow together; the pool has room for a few of them."""
    return [_job(at, at, 20, 16, 160, every_us=MICROSECONDS // 10) for at in range(30)]


def _fragmentation() -> list[Job]:
    """Make prompts of 20 tokens and answers of 12, in blocks of 256."""
    return [_job(at, at, 0, 256, 12, tail_tokens=20) for at in range(60)]


SCENARIOS = {
    "thrash": Scenario("Prompts of 1.25 times the pool", 256, 16, _thrash),
    "oom": Scenario("More requests than the pool has room for", 256, 16, _oom),
    "fragmentation": Scenario("Short requests in long blocks", 256, 256, _fragmentation),
}


def _job(
    at: int,
    prompt: int,
    blocks: int,
    block_tokens: int,
    answer: int,
    *,
    tail_tokens: int = 1,
    every_us: int = MICROSECONDS,
) -> Job:
    """Return the request number `at`: that many whole blocks of prompt, and a tail."""
    ids = np.arange(blocks, dtype=np.int64) + prompt * blocks
    tokens = blocks * block_tokens + tail_tokens
    request = TraceRequest(at * every_us, tokens, answer, ids, prompt, prompt, 0, at)
    return request, Label(0, "user", prompt, "internal")
