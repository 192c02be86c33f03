"""Sliding-window cache layers that write in place into a residency's slab.

1. A layer returns what the class that it replaces returns: the window before the states, and the states.
2. The buffers have room for about two windows, so that the window moves to the front once a window, not at each token.
3. Where the buffers cannot hold a chunk beside the window, the one copy that is needed is lent to the forward pass. It
   is zeroed at the layer's next use or at the end, whichever comes first.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticSlidingWindowLayer

from kvcustody.errors import CapacityError
from kvcustody.integrations.transformers.classic.dynamic_static_layers import (
    GovernedLayer,
    States,
    cropped,
    describe,
)


class _Window(GovernedLayer):
    """A sliding window over buffers for about two windows: tokens [start, end) are kept, and appending slides it.

    When the room is used up, the window moves to the front.
    """

    _start = 0
    record_past = False
    window_tokens: int  # W: a token sees the W - 1 before it

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> States:
        """Append the states; return the earlier window and the states."""
        self._residency.zero_lent(id(self))
        count, past, keep = key_states.shape[-2], self._tokens - self._start, self.window_tokens - 1
        capacity = self._buffers[0].capacity_tokens
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer.check_room(-count, states)
        if self._tokens + count > capacity:
            room = min(past, capacity - count)
            if room < min(past, keep):
                return self._replace(key_states, value_states)
            for buffer in self._buffers:
                buffer.move(self._tokens - room, self._tokens)
            self._start, self._tokens = 0, room
        self._write(self._tokens, key_states, value_states)
        first = max(self._start, self._tokens - keep)
        self._tokens += count
        if not self.record_past:
            self._start = max(self._start, self._tokens - keep)
        keys, values = (buffer.read(first, self._tokens) for buffer in self._buffers)
        return keys, values

    def _replace(self, key_states: torch.Tensor, value_states: torch.Tensor) -> States:
        """Handle a chunk larger than the buffers' room: keep its end, lend the whole (rule 3)."""
        past = min(self._tokens - self._start, self.window_tokens - 1)
        kept = self._buffers[0].capacity_tokens if self.record_past else self.window_tokens - 1
        full = []
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            whole = states
            if past:
                window = buffer.read(self._tokens - past, self._tokens)
                whole = torch.cat([window, states.detach()], dim=-2)
                self._residency.lend(id(self), whole)
            buffer.erase(0, self._tokens)
            buffer.write(0, whole[:, :, max(0, whole.shape[-2] - kept) :])
            full.append(whole)
        self._start, self._tokens = 0, min(kept, past + key_states.shape[-2])
        return full[0], full[1]

    def _show(self) -> None:
        self.keys, self.values = (buffer.read(self._start, self._tokens) for buffer in self._buffers)

    def _restart(self) -> None:
        super()._restart()
        self._start = 0


class GovernedDynamicSlidingLayer(_Window, DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """`DynamicSlidingWindowLayer` in place."""

    @property
    def window_tokens(self) -> int:  # type: ignore[override]
        """The window, in tokens."""
        return int(self.sliding_window)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Lay the buffers out for states of [batch, heads, tokens, width]."""
        with self._residency:
            self._open(key_states, value_states)
            self._sliding_window_tensor = self._sliding_window_tensor.to(self.device)
            self._show()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> States:
        """Append; return the window before the states, and the states."""
        with self._residency:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            result = self._append(key_states, value_states)
            self.cumulative_length += key_states.shape[-2]
            self._show()
            return result

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens and zero them; beyond the window only while earlier tokens are recorded."""
        count = cropped(tokens_to_remove)
        if self.cumulative_length >= self.sliding_window and not self.record_past:
            super().crop(tokens_to_remove)  # raises what transformers raises
            return
        with self._residency:
            if not self.is_initialized:
                return
            count = min(count, self.cumulative_length)
            length, end = self.cumulative_length - count, self._tokens - count
            if end - self._start < min(self.window_tokens - 1, length):
                raise CapacityError(
                    f"cannot take `{count}` tokens back: fewer are recorded beyond the window", tokens=count
                )
            for buffer in self._buffers:
                buffer.erase(end, self._tokens)
            self.cumulative_length, self._tokens = length, end
            self._start = max(self._start, end - self.window_tokens + 1)
            self._show()

    def _restart(self) -> None:
        super()._restart()
        self.cumulative_length = 0


class GovernedStaticSlidingLayer(_Window, StaticSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """`StaticSlidingWindowLayer` in place: it shows a whole window, with zeros for unwritten tokens."""

    @property
    def window_tokens(self) -> int:  # type: ignore[override]
        """The window, in tokens."""
        return int(self.max_cache_len)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Lay the buffers out for states of [batch, heads, tokens, width]."""
        with self._residency:
            self._open(key_states, value_states)
            describe(self, key_states, value_states)
            self._show()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> States:
        """Append; return the window and the states, padded to a window where there is less."""
        with self._residency:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            keys, values = self._append(key_states, value_states)
            self.cumulative_length_int += key_states.shape[-2]
            self.cumulative_length.fill_(min(self.cumulative_length_int, self.max_cache_len))
            if self.cumulative_length_int <= self.max_cache_len and self._start == 0:
                keys, values = (buffer.read(0, self.max_cache_len) for buffer in self._buffers)
            self._show()
            return keys, values

    def _restart(self) -> None:
        super()._restart()
        self.cumulative_length.zero_()
        self.cumulative_length_int = 0
