"""What a replay says of a pool that is too small: hits by where they came from, with a tier and without."""

from __future__ import annotations

from typing import NamedTuple


class TierRow(NamedTuple):
    """One setup. Tokens of prompts, and those of them that were found on the device or came back from the tier."""

    setup: str
    input_tokens: int
    device_tokens: int
    host_tokens: int

    @property
    def prefill_avoided(self) -> float:
        """Share of the prompt tokens whose prefill was not needed."""
        return (self.device_tokens + self.host_tokens) / self.input_tokens if self.input_tokens else 0.0
