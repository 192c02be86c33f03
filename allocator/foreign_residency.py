"""One request's presence in a pool that its engine allocates by itself: which blocks, and afterwards which it holds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.block import Blocks
from kvcustody.allocator.domain import Domain
from kvcustody.allocator.node import NEVER_US
from kvcustody.allocator.quota import Account
from kvcustody.allocator.residency import Residency

NO_BLOCKS: Blocks = np.empty(0, dtype=np.int64)
NO_BLOCKS.flags.writeable = False


class ForeignResidency(Residency):
    """Its blocks are what it attached and what it was handed, less what it let go of. Opaque to adapters but for
    `request_id`, `tenant` and `publishes`.
    """

    __slots__ = (
        "attached",
        "attached_generations",
        "ceiling_us",
        "dropped",
        "expected",
        "handed",
        "held",
        "held_generations",
        "is_opened",
        "is_running",
        "keys",
        "passed",
        "prompt",
        "publishes",
        "reasons",
        "recorded",
        "recorded_until",
        "request_id",
        "reserved_blocks",
        "state",
        "tenant",
    )

    def __init__(
        self,
        id_: int,
        account: Account,
        domain: Domain,
        principal: object,
        facts: object,
        request_id: object,
        opened_us: int,
    ) -> None:
        super().__init__(id_, account, domain, principal, facts, opened_us)
        self.request_id = request_id
        self.tenant = account.name
        self.attached: Blocks = NO_BLOCKS
        self.attached_generations: NDArray[np.int64] = NO_BLOCKS
        self.handed: list[tuple[Blocks, int]] = []  # each hand-out with its first generation
        self.dropped: Blocks = NO_BLOCKS
        self.passed: list[NDArray[np.int64]] = []  # generations let go of while running
        self.recorded = 0  # hand-outs that the opening lists
        self.recorded_until = 0  # generations below are on record
        self.held: Blocks = NO_BLOCKS
        self.held_generations: NDArray[np.int64] = NO_BLOCKS
        self.ceiling_us = NEVER_US
        self.reserved_blocks = 0
        self.is_running = True
        self.is_opened = False
        self.publishes = True
        # What governance keeps here between arrival and the first block: the prompt, its keys, the running state.
        self.prompt: object = None
        self.keys: object = None
        self.state: object = None
        self.expected: NDArray[np.int32] | int = 0
        self.reasons: tuple[str, ...] = ()

    def blocks(self) -> Blocks:
        """Every block it refers to now."""
        parts = [self.attached, *(blocks for blocks, _ in self.handed)]
        every = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if len(self.dropped):
            every = every[~np.isin(every, self.dropped)]
        return every

    def drop(self, blocks: Blocks) -> None:
        """It no longer refers to `blocks`."""
        self.dropped = np.concatenate((self.dropped, blocks))

    def hold(self, blocks: Blocks, generations: NDArray[np.int64], deadline_us: int) -> None:
        """Keep `blocks` until the deadline."""
        self.held, self.held_generations = blocks, generations
        self.deadline_us = deadline_us
        self.is_held = True
