"""A process that uses caches and waits to be searched. It reads one order per line on stdin and writes one answer per
line on stdout.

Orders: `fill KIND SEED governed|plain`, then `end`. The states it feeds are made in place in one buffer and zeroed
there after each update. So any copy that a search finds is the cache's.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch

from standins.engines.transformers.classic_world import gemma, llama, open_world, plain_cache

# A prompt, decoding, a turn longer than two of gemma's windows (so that a copy is lent), decoding.
STEPS = (24, *(1,) * 30, 19, *(1,) * 10)
HEADS, WIDTH = 2, 16


def model_of(kind: str) -> Any:
    return gemma() if kind.startswith("sliding") else llama()


def kind_of(kind: str) -> str:
    return {"sliding": "dynamic", "sliding-static": "static"}.get(kind, kind)


def feed(cache: Any, seed: int) -> None:
    """The same states for every layer, a prompt and then token by token."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.empty(max(STEPS) * HEADS * WIDTH)
    for count in STEPS:
        step = states[: count * HEADS * WIDTH].view(1, HEADS, count, WIDTH)
        step.normal_(generator=generator)
        for layer in range(len(cache.layers)):
            cache.update(step, step, layer)
        step.zero_()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, open_world(Path(folder)) as world:
        cache: Any = None
        for line in sys.stdin:
            order = line.split()
            if order[0] == "fill":
                _, kind, seed, mode = order
                model = model_of(kind)
                cache = (
                    world.open(kind_of(kind), model=model)
                    if mode == "governed"
                    else plain_cache(kind_of(kind), model.config)
                )
                feed(cache, int(seed))
            elif mode == "governed":
                cache.end()
            if order[0] == "end":
                cache = None
            print("done", flush=True)


if __name__ == "__main__":
    main()
