"""The tensors of a replay: a small model's KV cache whose values name their writer, so that leaks are detected.

1. A token's K is a function of its id and position, its V of the tenant that computed it; neither is ever zero.
2. A block is checked to be zero when it is handed out, before anything is written (a sample, or all).
3. What a request found in the cache is read back and compared: K with its own prompt, V with its own tenant, unless
   it came through a grant or a segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvcustody.allocator.pool.tensor_memory import TensorMemory, TensorSpec
from kvcustody.clock import Clock
from kvcustody.errors import ConfigError
from kvcustody.kernels.segment import Layout

_VALUES = 1024
"""Values 1 to 1024 are exact in float16."""


@dataclass(frozen=True, slots=True)
class ReplayCacheShape:
    """The KV layout of the model for which the replay stands in."""

    layers: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_tokens: int = 16

    @property
    def spec(self) -> TensorSpec:
        """The layout in the allocator's terms."""
        return TensorSpec(self.layers, self.kv_heads, self.head_dim, self.block_tokens, torch.float16)


class PatternCache:
    """Layer tensors [2, blocks, block_tokens, kv_heads, head_dim], and the memory that the pool manages."""

    def __init__(self, blocks: int, shape: ReplayCacheShape, *, device: str, clock: Clock) -> None:
        if device not in ("cpu", "cuda"):
            raise ConfigError(f"unknown device `{device}`; use cpu or cuda", device=device)
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device `cuda`: torch sees no GPU here; use --device cpu", device=device)
        self.shape = shape
        self.device = torch.device(device)
        try:
            self._layers = [
                torch.empty(shape.spec.shape(blocks), dtype=shape.spec.dtype, device=self.device)
                for _ in range(shape.layers)
            ]
        except RuntimeError:
            raise ConfigError(f"a pool of {blocks:,} blocks does not fit into the memory of `{device}`") from None
        self.memory = TensorMemory.wrap(
            [self._layers], layout=Layout.KV_BLOCKS, block_tokens=shape.block_tokens, clock=clock
        )
        self.checked_blocks = 0
        self.residue_bytes = 0
        self.read_tokens = 0
        self.wrong_tokens = 0

    def check_handed_out(self, blocks: NDArray[np.int64]) -> None:
        """Count the non-zero bytes of newly allocated blocks (rule 2)."""
        if len(blocks):
            self.checked_blocks += len(blocks)
            self.residue_bytes += self.memory.nonzero_bytes(blocks)

    def write(self, table: NDArray[np.int64], tokens: NDArray[np.int32], first: int, tenant: int) -> None:
        """Write the K/V of `tokens`, at positions from `first` on, into the blocks of `table` (the whole
        sequence's).
        """
        if not len(tokens):
            return
        slots, keys = self._slots(table, tokens, first)
        width = self.shape.kv_heads * self.shape.head_dim
        rows = torch.empty((2, len(tokens), width), dtype=keys.dtype, device=self.device)
        rows[0] = keys[:, None]
        rows[1] = 1 + tenant
        words = rows.view(torch.int64)  # whole rows are moved as words: several times faster than element by element
        for layer in self._layers:
            flat = layer.view(2, -1, width).view(torch.int64)
            flat[0].index_copy_(0, slots, words[0])
            flat[1].index_copy_(0, slots, words[1])

    def check_found(self, table: NDArray[np.int64], tokens: NDArray[np.int32], readable: Sequence[int]) -> None:
        """Read back the blocks found for a prompt's first `tokens`, for a reader who may read `readable` (rule 3)."""
        if not len(tokens):
            return
        slots, keys = self._slots(table, tokens, 0)
        flat = self._layers[-1].view(2, -1, self.shape.kv_heads, self.shape.head_dim)
        wrong = (flat[0, slots, 0, 0] != keys) | (flat[0, slots, -1, -1] != keys)
        owners = torch.tensor([1 + tenant for tenant in readable], dtype=flat.dtype, device=self.device)
        wrong |= ~torch.isin(flat[1, slots, 0, 0], owners)
        self.read_tokens += len(tokens)
        self.wrong_tokens += int(wrong.sum())

    def _slots(
        self, table: NDArray[np.int64], tokens: NDArray[np.int32], first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        position = np.arange(first, first + len(tokens), dtype=np.int64)
        size = self.shape.block_tokens
        slots = table[position // size] * size + position % size
        keys = 1 + (tokens.astype(np.int64) * 31 + position * 17) % _VALUES
        return (
            torch.from_numpy(slots).to(self.device),
            torch.from_numpy(keys.astype(np.float16)).to(self.device),
        )
