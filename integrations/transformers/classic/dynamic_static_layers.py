"""Dynamic and static cache layers that write in place into a residency's slab.

1. A layer returns what the class that it replaces returns, as views of its buffers, with the same values and masks.
2. Every operation that touches data is one use of the residency: under its lock, and refused once it has ended.
3. Updates are never compiled: a graph would skip the lock and the deadlines. Static layers still report that they are
   compileable, because transformers chooses their masks by it. A compiled model breaks its graph at each update.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, StaticLayer

from kvcustody.errors import CapacityError, ConfigError
from kvcustody.integrations.transformers.classic.buffer import Buffer
from kvcustody.integrations.transformers.classic.residency import CacheResidency

States = tuple[torch.Tensor, torch.Tensor]


class GovernedLayer:
    """Shared code of all governed layers: two buffers, batch operations in place, and an end."""

    keys: torch.Tensor | None
    values: torch.Tensor | None
    is_initialized: bool

    def govern(self, residency: CacheResidency, keys: Buffer, values: Buffer) -> None:
        """Put the layer in custody, before its first use."""
        self._residency = residency
        self._buffers = (keys, values)
        self._tokens = 0  # that the buffers hold

    def _open(self, key_states: torch.Tensor, value_states: torch.Tensor, kept_as: torch.dtype | None = None) -> None:
        """Lay the buffers out for the model's states, in their type or in `kept_as`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            if buffer.region.device != states.device and not buffer.token_major:
                raise ConfigError(
                    f"states on `{states.device}` for a cache on `{buffer.region.device}`: open it with `device`",
                    device=str(states.device),
                )
            buffer.shape_like(states, kept_as)
        self.is_initialized = True

    def _write(self, first: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        keys, values = self._buffers
        last = values.check_room(first, value_states)  # both before either, so that a refusal changes nothing
        if keys.check_room(first, key_states) != last:
            raise CapacityError(f"`{key_states.shape[-2]}` tokens of keys with `{value_states.shape[-2]}` of values")
        keys.put(first, last, key_states)
        values.put(first, last, value_states)

    def _show(self) -> None:
        """Publish the views that transformers reads as `keys` and `values`."""
        keys, values = self._buffers
        self.keys, self.values = keys.read(0, self._tokens), values.read(0, self._tokens)

    def _gather(self, indices: torch.Tensor) -> None:
        with self._residency:
            if self.is_initialized and self._tokens:
                for buffer in self._buffers:
                    buffer.gather(indices, self._tokens)
                self._show()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the batch rows for beam search."""
        self._gather(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row `repeats` times; they must fit the reservation."""
        rows = len(self._buffers[0].rows)
        self._gather(torch.arange(rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these batch rows and zero the others."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self._gather(indices)

    def reset(self) -> None:
        """Zero everything and start over; the reservation and its deadlines stay."""
        with self._residency:
            for buffer in self._buffers:
                buffer.wipe()
            self._tokens = 0
            self._restart()

    def _restart(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False

    def offload(self) -> None:
        """Do nothing: a governed layer stays where it was opened."""

    def prefetch(self) -> None:
        """Do nothing: see `offload`."""

    def drop_tensors(self) -> None:
        """Drop every view of the slab after the residency has ended."""
        for buffer in self._buffers:
            buffer.drop_tensors()
        self._tokens = 0
        self._restart()


class GovernedDynamicLayer(GovernedLayer, DynamicLayer):  # type: ignore[no-untyped-call]
    """`DynamicLayer` in a reservation: it grows by writing, up to `max_tokens`."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Lay the buffers out for states of [batch, heads, tokens, width]."""
        with self._residency:
            self._open(key_states, value_states)
            self._show()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> States:
        """Append `key_states` and `value_states`, [batch, heads, tokens, width]; return views of all tokens.

        Raises `CapacityError` beyond the reservation and `HandleError` once the cache has ended.
        """
        with self._residency:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            self._write(self._tokens, key_states, value_states)
            self._tokens += key_states.shape[-2]
            self._show()
            assert self.keys is not None and self.values is not None
            return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens (0 or negative) and zero them."""
        count = cropped(tokens_to_remove)
        with self._residency:
            if count and self.is_initialized:
                kept = max(0, self._tokens - count)
                for buffer in self._buffers:
                    buffer.erase(kept, self._tokens)
                self._tokens = kept
                self._show()


class GovernedStaticLayer(GovernedLayer, StaticLayer):  # type: ignore[no-untyped-call]
    """`StaticLayer` over a reservation: it always shows all `max_tokens`, with zeros for unwritten ones."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Lay the buffers out for states of [batch, heads, tokens, width]."""
        with self._residency:
            self._open(key_states, value_states)
            describe(self, key_states, value_states)
            self._show()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> States:
        """Write at the current length and return the whole buffers. Raises as `GovernedDynamicLayer.update` does."""
        with self._residency:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            self._write(self._tokens, key_states, value_states)
            self._tokens += key_states.shape[-2]
            self.cumulative_length.fill_(self._tokens)
            assert self.keys is not None and self.values is not None
            return self.keys, self.values

    def _show(self) -> None:
        self.keys, self.values = (buffer.rows for buffer in self._buffers)

    def _restart(self) -> None:
        super()._restart()
        self.cumulative_length.zero_()


def describe(layer: StaticLayer, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
    """Set the attributes that transformers reads from an initialised static layer."""
    layer.batch_size, layer.num_heads = key_states.shape[:2]
    layer.k_head_dim, layer.v_head_dim = key_states.shape[-1], value_states.shape[-1]
    layer.cumulative_length = layer.cumulative_length.to(key_states.device)


def cropped(tokens_to_remove: int) -> int:
    """Return how many tokens `crop` removes.

    Raises:
        ConfigError: the argument is positive.
    """
    if tokens_to_remove > 0:
        raise ConfigError(f"crop takes 0 or the negative number of tokens to remove, not `{tokens_to_remove}`")
    return -tokens_to_remove
