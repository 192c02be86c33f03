"""What a prompt costs to compute: linear in its tokens for the weights, quadratic for attention over what came before.

The figures are an estimate from shapes, not a measurement: Llama-3.1-8B (8.03e9 weights, 32 layers, 4096 wide) at
400 TFLOP/s, about what an H100 reaches in a long prefill. The ratio between the two parts, not the speed, decides
which policy saves more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from streams import Stream

WEIGHTS, LAYERS, WIDTH, FLOPS = 8.03e9, 32, 4096, 400e12


def seconds(tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds to compute the first `tokens` tokens of a prompt: 2 × weights each, and 4 × layers × width a pair."""
    flops = 2 * WEIGHTS * tokens + 2 * LAYERS * WIDTH * tokens * tokens
    cost: NDArray[np.float64] = flops / FLOPS
    return cost


def block_seconds(stream: Stream) -> NDArray[np.float64]:
    """Seconds to compute the first n blocks of a prompt, by n."""
    return seconds(np.arange(stream.longest + 1, dtype=np.float64) * stream.block_tokens)
