"""The decode table: lengths, capacities and pending tokens of all running sequences. It has one array for each field,
so that a decode step over a whole batch is a few array operations.

- computed <= length <= capacity, in tokens; a sequence at capacity gets a block before its next token.
- The tokens of the last, partial block wait in `pending`; when the block fills, its key is made and they are gone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.pool.block_state import NEVER_US
from kvcustody.allocator.prefix.sequence import RunningSequence


class DecodeTable:
    """Slots of running sequences. Arrays double when every slot is taken."""

    def __init__(self, block_tokens: int, slots: int = 256) -> None:
        self.block_tokens = block_tokens
        self.length: NDArray[np.int64] = np.zeros(slots, dtype=np.int64)
        self.capacity: NDArray[np.int64] = np.zeros(slots, dtype=np.int64)
        self.computed: NDArray[np.int64] = np.zeros(slots, dtype=np.int64)
        self.active_until: NDArray[np.int64] = np.full(slots, NEVER_US, dtype=np.int64)
        self.pending: NDArray[np.int32] = np.zeros((slots, block_tokens), dtype=np.int32)
        self.sequences: list[RunningSequence | None] = [None] * slots
        self._free = list(range(slots - 1, -1, -1))
        self._earliest_us = NEVER_US  # no sequence overruns before

    def add(self, sequence: RunningSequence, tokens: int, tail: bytes) -> None:
        """Give `sequence` a slot; `tail` holds the int32 token ids of its partial last block."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        sequence.slot = slot
        self.length[slot] = tokens
        self.computed[slot] = 0
        self.capacity[slot] = sequence.block_count * self.block_tokens
        until = sequence.active_until_us
        self.active_until[slot] = until
        self._earliest_us = min(self._earliest_us, until)
        if tail:
            values = np.frombuffer(tail, dtype=np.int32)
            self.pending[slot, : len(values)] = values
        self.sequences[slot] = sequence

    def remove(self, sequence: RunningSequence) -> None:
        """Give the slot back and wipe its pending tokens."""
        slot = sequence.slot
        self.sequences[slot] = None
        self.length[slot] = self.capacity[slot] = self.computed[slot] = 0
        self.active_until[slot] = NEVER_US
        self.pending[slot].fill(0)
        self._free.append(slot)
        sequence.slot = -1

    def overrunning(self, now_us: int) -> list[RunningSequence]:
        """Return sequences that have been ACTIVE longer than their policy allows."""
        if now_us < self._earliest_us:
            return []
        over = np.flatnonzero(self.active_until <= now_us)
        self._earliest_us = int(self.active_until.min(initial=NEVER_US))
        found = (self.sequences[slot] for slot in over.tolist())
        return [sequence for sequence in found if sequence is not None]

    def _grow(self) -> None:
        slots = len(self.sequences)
        self._free = list(range(2 * slots - 1, slots - 1, -1))
        self.length = np.concatenate((self.length, np.zeros(slots, dtype=np.int64)))
        self.capacity = np.concatenate((self.capacity, np.zeros(slots, dtype=np.int64)))
        self.computed = np.concatenate((self.computed, np.zeros(slots, dtype=np.int64)))
        self.active_until = np.concatenate((self.active_until, np.full(slots, NEVER_US, dtype=np.int64)))
        self.pending = np.concatenate((self.pending, np.zeros_like(self.pending)))
        self.sequences.extend([None] * slots)
