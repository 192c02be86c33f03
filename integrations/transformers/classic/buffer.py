"""K or V of one layer, written in place: rows of tokens over one region of a cache's slab.

1. Nothing is ever appended by making a longer copy; the region is all the memory a layer has.
2. What leaves the rows (cropped tokens, dropped batch rows, a window that moved on) is overwritten or zeroed there.
3. A copy that an operation cannot do without is zeroed before it is freed, also where the operation fails.
"""

from __future__ import annotations

import torch

from kvcustody.errors import CapacityError

ALIGNMENT_BYTES = 64


def region_bytes(batch: int, heads: int, tokens: int, width: int, dtype: torch.dtype) -> int:
    """Return how many bytes of a slab a buffer of this shape takes."""
    exact = batch * heads * tokens * width * dtype.itemsize
    return -(-exact // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Buffer:
    """`rows`: [batch, heads, capacity, width] over `region` (uint8), once `shape` has been called.

    With `token_major` the tokens are outermost in memory, so that a run of them is one contiguous copy.
    """

    def __init__(self, region: torch.Tensor, capacity_tokens: int, *, token_major: bool = False) -> None:
        self.region = region
        self.capacity_tokens = capacity_tokens
        self.by_token: torch.Tensor | None = None  # [capacity, batch, heads, width], contiguous
        self.token_major = token_major
        self.rows = torch.empty(0)
        self._takes = (0, 0, 0)  # batch, heads, width

    def shape(self, batch: int, heads: int, width: int, dtype: torch.dtype) -> None:
        """Lay the rows out.

        Raises:
            CapacityError: they exceed the reservation.
        """
        needed = region_bytes(batch, heads, self.capacity_tokens, width, dtype)
        if needed > len(self.region):
            raise CapacityError(
                f"`{batch}` rows of `{heads}` heads of `{width}` `{dtype}` need `{needed}` bytes for "
                f"`{self.capacity_tokens}` tokens, and `{len(self.region)}` are reserved: open the cache with "
                "the right `batch_size`, `dtype` or `kv_shape`",
                bytes=needed,
            )
        self._takes = (batch, heads, width)
        count = batch * heads * self.capacity_tokens * width
        flat = self.region[: count * dtype.itemsize].view(dtype)
        if self.token_major:
            self.by_token = flat.view(self.capacity_tokens, batch, heads, width)
            self.rows = self.by_token.permute(1, 2, 0, 3)
        else:
            self.rows = flat.view(batch, heads, self.capacity_tokens, width)

    def shape_like(self, states: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """Lay the rows out for states of [batch, heads, tokens, width], as `shape` does."""
        batch, heads, _, width = states.shape
        self.shape(batch, heads, width, dtype or states.dtype)

    def check_room(self, first: int, states: torch.Tensor) -> int:
        """Return where `states` would end if they were written from token `first` on.

        Raises `CapacityError` beyond the reservation, or for another batch, head count or width than the rows have.
        """
        batch, heads, count, width = states.shape
        if (batch, heads, width) != self._takes:
            raise CapacityError(
                f"states of shape `{tuple(states.shape)}` do not continue a cache of `{self._takes[0]}` rows, "
                f"`{self._takes[1]}` heads and width `{self._takes[2]}`",
                shape=tuple(states.shape),
            )
        last = first + count
        if last > self.capacity_tokens:
            raise CapacityError(
                f"`{last}` tokens in a cache reserved for `{self.capacity_tokens}`: open it with a larger `max_tokens`",
                tokens=last,
                capacity_tokens=self.capacity_tokens,
            )
        return last

    def write(self, first: int, states: torch.Tensor) -> None:
        """Write `states` from token `first` on. Raises as `check_room` does, before anything is written."""
        self.put(first, self.check_room(first, states), states)

    def put(self, first: int, last: int, states: torch.Tensor) -> None:
        """Write where `check_room` has returned `last`."""
        self.rows.narrow(2, first, last - first).copy_(states.detach() if states.requires_grad else states)

    def read(self, first: int, last: int) -> torch.Tensor:
        """Return a view of the tokens [first, last)."""
        return self.rows.narrow(2, first, last - first)

    def erase(self, first: int, last: int) -> None:
        """Zero the tokens [first, last)."""
        self.rows[:, :, first:last].zero_()

    def move(self, first: int, last: int) -> None:
        """Move the tokens [first, last) to the front, and zero their former place."""
        count = last - first
        if first >= count:
            self.rows[:, :, :count].copy_(self.rows[:, :, first:last])
        else:
            copied = self.rows[:, :, first:last].clone()
            try:
                self.rows[:, :, :count].copy_(copied)
            finally:
                copied.zero_()
        self.erase(count, last)

    def gather(self, indices: torch.Tensor, last: int) -> None:
        """Make batch row i a copy of row `indices[i]`, over the tokens [0, last)."""
        heads, width, dtype = self.rows.shape[1], self.rows.shape[3], self.rows.dtype
        chosen = self.rows[:, :, :last].index_select(0, indices.to(self.rows.device))
        try:
            if len(chosen) != len(self.rows):
                self.wipe()
                self.shape(len(chosen), heads, width, dtype)
            self.rows[:, :, :last].copy_(chosen)
        finally:
            chosen.zero_()

    def wipe(self) -> None:
        """Zero the whole region."""
        self.region.zero_()

    def drop_tensors(self) -> None:
        """Drop the region; its owner zeroes the slab."""
        self.region = self.rows = torch.empty(0)
        self.by_token = None


def carve(slab: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    """Cut `slab` into regions of these sizes in bytes, each a multiple of `ALIGNMENT_BYTES`."""
    assert sum(counts) <= len(slab) and not any(count % ALIGNMENT_BYTES for count in counts)
    regions, at = [], 0
    for count in counts:
        regions.append(slab[at : at + count])
        at += count
    return regions
