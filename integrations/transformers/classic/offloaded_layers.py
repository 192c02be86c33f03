"""Offloaded cache layers: the states are in a host slab, with two alternating staging areas on the device.

1. The host slab and the staging areas are one residency's: both are zeroed, verified and receipted at its end.
2. Tokens are outermost in both, so a transfer is one contiguous copy and needs no temporary on either side.
3. A step writes its own tokens to the host, never the whole layer back. The next layer is fetched ahead on a separate
   stream, which waits for whatever still reads or writes that memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from kvcustody.integrations.transformers.classic.buffer import Buffer
from kvcustody.integrations.transformers.classic.dynamic_static_layers import GovernedLayer, States, cropped


class OffloadStaging:
    """Two device areas for (K, V). The area used last is never filled next."""

    def __init__(self, areas: list[tuple[Buffer, Buffer]], device: torch.device) -> None:
        self._areas = areas
        self._holds: list[GovernedOffloadedLayer | None] = [None, None]
        self._last = 1
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def of(self, layer: GovernedOffloadedLayer) -> tuple[Buffer, Buffer]:
        """Return the area that holds all of `layer`; it is fetched now unless it was fetched ahead."""
        area = 1 - self._last
        if self._holds[area] is not layer:
            self._fetch(layer, area)
        self._wait()
        self._last = area
        return self._areas[area]

    def fetch_ahead(self, layer: GovernedOffloadedLayer) -> None:
        """Fill the other area with `layer`, after all earlier work on the device."""
        with self._on_copy_stream():
            self._fetch(layer, 1 - self._last)

    def invalidate(self) -> None:
        """Discard the staged content, because the host's rows are about to change. Waits for transfers."""
        self._holds = [None, None]
        if self._stream is not None:
            torch.cuda.synchronize(self._device)

    def _fetch(self, layer: GovernedOffloadedLayer, area: int) -> None:
        for buffer, home in zip(self._areas[area], layer.home, strict=True):
            batch, heads, _, width = home.rows.shape
            buffer.shape(batch, heads, width, home.rows.dtype)
            assert buffer.by_token is not None and home.by_token is not None
            count = layer.tokens
            buffer.by_token[:count].copy_(home.by_token[:count], non_blocking=True)
        self._holds[area] = layer

    def _on_copy_stream(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def _wait(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def drop_tensors(self) -> None:
        """Forget every view of the slab."""
        self._holds = [None, None]
        for area in self._areas:
            for buffer in area:
                buffer.drop_tensors()


class GovernedOffloadedLayer(GovernedLayer, DynamicLayer):  # type: ignore[no-untyped-call]
    """A dynamic layer whose states live on the host. `keys` and `values` are views of the host slab."""

    def stage(self, staging: OffloadStaging) -> None:
        """Set the layer's staging; `follow` sets the next layer."""
        self._staging = staging
        self._next: GovernedOffloadedLayer = self

    def follow(self, following: GovernedOffloadedLayer) -> None:
        """Fetch `following` ahead at each update."""
        self._next = following

    @property
    def home(self) -> tuple[Buffer, Buffer]:
        """The K and V buffers on the host."""
        return self._buffers

    @property
    def tokens(self) -> int:
        """The number of tokens on the host."""
        return self._tokens

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Lay the host buffers out for states of [batch, heads, tokens, width]."""
        with self._residency:
            self._open(key_states, value_states)
            self._show()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> States:
        """Append, and return device views of all tokens, valid until the layer after the next one updates.

        Raises `CapacityError` beyond the reservation and `HandleError` once the cache has ended.
        """
        with self._residency:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            states, first = (key_states, value_states), self._tokens
            for buffer, one in zip(self.home, states, strict=True):
                buffer.check_room(first, one)
            last = first + key_states.shape[-2]
            staged = self._staging.of(self)
            for buffer, home, one in zip(staged, self.home, states, strict=True):
                buffer.write(first, one)
                assert buffer.by_token is not None and home.by_token is not None
                home.by_token[first:last].copy_(buffer.by_token[first:last], non_blocking=True)
            self._tokens = last
            self._show()
            if self._next is not self and self._next.is_initialized:
                self._staging.fetch_ahead(self._next)
            return staged[0].read(0, last), staged[1].read(0, last)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens (0 or negative) and zero them."""
        count = cropped(tokens_to_remove)
        with self._residency:
            self._staging.invalidate()
            if count and self.is_initialized:
                kept = max(0, self._tokens - count)
                for buffer in self.home:
                    buffer.erase(kept, self._tokens)
                self._tokens = kept
                self._show()

    def _gather(self, indices: torch.Tensor) -> None:
        with self._residency:
            self._staging.invalidate()
            super()._gather(indices)

    def reset(self) -> None:
        """Zero everything and start over; the reservation and its deadlines stay."""
        with self._residency:
            self._staging.invalidate()
            super().reset()

    def drop_tensors(self) -> None:
        """Drop every view of the slabs after the residency has ended."""
        super().drop_tensors()
        self._staging.drop_tensors()
