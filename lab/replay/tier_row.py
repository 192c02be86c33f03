"""A replay's row about a pool that is too small: hits by their source, with a tier and without."""

from __future__ import annotations

from typing import NamedTuple


class TierRow(NamedTuple):
    """One setup: its prompt tokens, and those found on the device or restored from the tier."""

    setup: str
    input_tokens: int
    device_tokens: int
    host_tokens: int

    @property
    def prefill_avoided(self) -> float:
        """The share of prompt tokens whose prefill was not needed."""
        return (self.device_tokens + self.host_tokens) / self.input_tokens if self.input_tokens else 0.0
