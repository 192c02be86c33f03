"""Quantised cache layers in place: fp8 states, their scales, and the full-precision view, all in the slab.

1. The arithmetic is that of transformers' `Fp8QuantizedLayer`: one scale a layer and side, frozen at the first
   update.
2. Full-precision states exist in one work area that the layers take turns in; the next layer overwrites it, the end
   zeroes it. No dequantised copy is left to torch's allocator.
3. Nothing is re-quantised: states are appended as they come, so no older quantised copy is ever superseded.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from kvcustody.integrations.transformers.classic.buffer import Buffer
from kvcustody.integrations.transformers.classic.dynamic_static_layers import GovernedLayer, States, cropped
from kvcustody.integrations.transformers.classic.residency import CacheResidency

FP8 = torch.float8_e4m3fn
SCALES_BYTES = 64  # two float32 values, in a region of their own


class WorkArea:
    """Full-precision K and V of the current layer: `wide` in float32, `narrow` in the model's own type.

    wide: one buffer, or two (K, V) where the model computes in float32 and `narrow` is empty. narrow: K and V.
    """

    def __init__(self, wide: list[Buffer], narrow: list[Buffer]) -> None:
        self._wide = wide
        self._narrow = narrow

    def open(self, side: int, states: torch.Tensor) -> None:
        """Lay side 0 (K) or 1 (V) out for states of [batch, heads, tokens, width]."""
        self.wide(side).shape_like(states, torch.float32)
        if self._narrow:
            self._narrow[side].shape_like(states)

    def wide(self, side: int) -> Buffer:
        """Return a side's float32 buffer; both sides share one where the result is narrower."""
        return self._wide[side % len(self._wide)]

    def narrowed(self, side: int, count: int) -> torch.Tensor:
        """Return the first `count` tokens of `wide` in the model's type."""
        if not self._narrow:
            return self.wide(side).read(0, count)
        self._narrow[side].write(0, self.wide(side).read(0, count))
        return self._narrow[side].read(0, count)

    def drop_tensors(self) -> None:
        """Forget every view of the slab."""
        for buffer in (*self._wide, *self._narrow):
            buffer.drop_tensors()


class GovernedFp8Layer(GovernedLayer, DynamicLayer):  # type: ignore[no-untyped-call]
    """`Fp8QuantizedLayer` in a reservation."""

    def govern_quantized(
        self,
        residency: CacheResidency,
        keys: Buffer,
        values: Buffer,
        scales: torch.Tensor,
        work: WorkArea,
    ) -> None:
        """Put the layer in custody. scales: uint8 region of `SCALES_BYTES`."""
        self.govern(residency, keys, values)
        self._scales: torch.Tensor | None = scales[:8].view(torch.float32)
        self._work = work

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Lay the buffers out for states of [batch, heads, tokens, width], quantised to one byte a value."""
        with self._residency:
            self._open(key_states, value_states, FP8)
            self.keys = self.values = torch.empty(0, dtype=self.dtype, device=self.device)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> States:
        """Append, and return all states dequantised (the first call returns them as given).

        The views are good until the next layer's update. Raises `CapacityError` beyond the reservation and
        `HandleError` once the cache has ended.
        """
        with self._residency:
            is_first = not self._tokens
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            states = (key_states, value_states)
            for buffer, one in zip(self._buffers, states, strict=True):
                buffer.check_room(self._tokens, one)
            for side in (0, 1):
                self._append(side, states[side], is_first=is_first)
            self._tokens += key_states.shape[-2]
            if is_first:
                return states
            return self._dequantized(0), self._dequantized(1)

    def _append(self, side: int, states: torch.Tensor, *, is_first: bool) -> None:
        """Quantise `states` in the work area, without another copy."""
        assert self._scales is not None
        self._work.open(side, states)
        wide, scale, count = self._work.wide(side), self._scales[side], states.shape[-2]
        wide.write(0, states)
        values = wide.read(0, count)
        if is_first:
            values.abs_()
            tiny = torch.finfo(torch.float32).tiny
            scale.copy_((values.amax() / torch.finfo(FP8).max).clamp(min=tiny))
            wide.write(0, states)
        self._buffers[side].write(self._tokens, values.div_(scale))

    def _dequantized(self, side: int) -> torch.Tensor:
        assert self._scales is not None
        wide = self._work.wide(side)
        wide.write(0, self._buffers[side].read(0, self._tokens))
        wide.read(0, self._tokens).mul_(self._scales[side])
        return self._work.narrowed(side, self._tokens)

    def get_seq_length(self) -> int:
        """Return the number of tokens in the cache."""
        return self._tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens (0 or negative) and zero them."""
        count = cropped(tokens_to_remove)
        with self._residency:
            kept = max(0, self._tokens - count)
            if self.is_initialized:
                for buffer in self._buffers:
                    buffer.erase(kept, self._tokens)
            self._tokens = kept

    def _show(self) -> None:
        """Do nothing: transformers reads no `keys` of a quantised layer."""

    def drop_tensors(self) -> None:
        """Drop every view of the slab after the residency has ended."""
        super().drop_tensors()
        self._scales = None
        self._work.drop_tensors()
