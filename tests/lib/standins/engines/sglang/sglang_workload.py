"""Work for an engine: many requests of several tenants at once, with shared beginnings, repeats and long prompts."""

from __future__ import annotations

import random
from collections.abc import Callable

TENANTS = ("acme", "beta", "gamma")


def requests(count: int, seed: int = 5) -> list[tuple[str, list[int]]]:
    """(tenant, prompt) pairs; a function of the seed."""
    draw = random.Random(seed)
    beginnings = [[draw.randrange(16, 500) for _ in range(draw.randrange(20, 140))] for _ in range(6)]
    asks: list[tuple[str, list[int]]] = []
    for _ in range(count):
        tenant = draw.choice(TENANTS)
        if asks and draw.random() < 0.2:
            asks.append((tenant, draw.choice(asks)[1]))
            continue
        tail = [draw.randrange(16, 500) for _ in range(draw.randrange(1, 60))]
        asks.append((tenant, draw.choice(beginnings) + tail))
    return asks


def run(engine, work, token: Callable[[str], str], *, at_once: int = 6, count: int = 12) -> list[list[int]]:
    """The answers to all of it, so many at once."""
    answers: list[list[int]] = []
    for first in range(0, len(work), at_once):
        batch = [(prompt, token(tenant)) for tenant, prompt in work[first : first + at_once]]
        answers += [answer.tokens for answer in engine.run_all(batch, count)]
    return answers
