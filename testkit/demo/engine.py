"""The facts about an engine that an attack may see: the same four for each request in every engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float32]

VICTIM, ATTACKER = "victim", "attacker"


class Served(NamedTuple):
    """One request, served. `found` and `left` are the first layer's K and V of its last new block, [values of a block],
    as they were when the block was handed out and when the prompt had been computed; empty where it got no new block.
    """

    cached_tokens: int  # as the engine reports
    computed_tokens: int  # as the device was told to
    block: int  # the engine's number of its last new block, -1 for none
    nonzero_bytes: int  # of all layers, in that block, before the first write
    found: Values
    left: Values


class Engine(Protocol):
    """A real engine, plain or governed."""

    block_tokens: int

    def serve(self, tenant: str, prompts: Sequence[Sequence[int]], salt: str | None = None) -> list[Served]:
        """Run the prompts together on behalf of a tenant, each for one token; `salt` is the client's `cache_salt`."""

    def close(self) -> None:
        """End the engine and everything that belongs to it."""
