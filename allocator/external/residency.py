"""One request's presence in a pool that its engine allocates itself: its blocks, and later the blocks it holds.

`ExternalPool.residency` makes one; the pool's methods take it back with the blocks that the engine used for it."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.external.block_sums import Comparison
from kvcustody.allocator.pool.accounting import Account, Domain, OwnerData
from kvcustody.allocator.pool.block_state import NEVER_US, Blocks
from kvcustody.allocator.pool.memory_protocol import NO_BLOCKS
from kvcustody.allocator.pool.residency import Residency
from kvcustody.allocator.prefix.block_priority import BlockPriority


class ExternalResidency(Residency):
    """A request's blocks: those it attached and those it was handed, without those it released. Adapters may only read
    `request_id`, `tenant` and `publishes`.
    """

    __slots__ = (
        "active_since_us",
        "asked_us",
        "assigned",
        "attached",
        "attached_generations",
        "began_us",
        "ceiling_us",
        "compared_blocks",
        "comparison",
        "computes_us",
        "deferred_for",
        "dropped",
        "earlier",
        "expected",
        "granted_blocks",
        "handed",
        "held",
        "held_generations",
        "is_mixed",
        "is_opened",
        "is_reserved",
        "is_resumed",
        "is_running",
        "keys",
        "monitored",
        "passed",
        "priorities",
        "prompt_tokens",
        "publishes",
        "queue",
        "reasons",
        "receipt",
        "recorded",
        "recorded_until",
        "request_id",
        "reserved_blocks",
        "segment_blocks",
        "segment_domain",
        "stale_blocks",
        "tenant",
    )

    def __init__(
        self,
        id_: int,
        account: Account,
        domain: Domain,
        principal: Hashable,
        facts: OwnerData | None,
        request_id: Hashable,
        opened_us: int,
    ) -> None:
        super().__init__(id_, account, domain, principal, facts, opened_us)
        self.request_id = request_id
        self.tenant = account.name
        self.attached: Blocks = NO_BLOCKS
        self.attached_generations: NDArray[np.int64] = NO_BLOCKS
        self.handed: list[tuple[Blocks, int]] = []  # each hand-out with its first generation
        self.assigned: list[tuple[Blocks, int, Domain]] = []  # hand-outs of others' domains that no leaf says
        self.dropped: NDArray[np.int64] = NO_BLOCKS  # generations: a block may come back to the same request
        self.earlier: NDArray[np.int64] = NO_BLOCKS  # generations that it had before it was preempted
        self.is_resumed = False  # it began once and was preempted
        self.passed: list[NDArray[np.int64]] = []  # generations let go of while running
        self.recorded = 0  # hand-outs that the opening lists
        self.recorded_until = 0  # generations below are on record
        self.held: Blocks = NO_BLOCKS
        self.held_generations: NDArray[np.int64] = NO_BLOCKS
        self.ceiling_us = NEVER_US
        self.reserved_blocks = 0
        self.is_running = True
        self.is_opened = False
        self.is_mixed = False  # some of its blocks are in another domain than its own
        self.publishes = True
        self.priorities: tuple[BlockPriority, ...] = ()  # of what it writes
        self.is_reserved = False
        self.began_us = opened_us  # when it got its first block
        self.computes_us = opened_us  # when a tier had filled what it was to fill
        self.active_since_us = -1  # the same of the request's first residency: it may have been preempted since
        self.asked_us = opened_us  # when the request came, before it waited for anything
        self.queue = 0  # requests that were here when it came
        self.receipt: tuple[str, bool] | None = None  # of its way here, until its opening is on record
        self.deferred_for: tuple[str, ...] = ()  # reasons for which it was told to wait
        self.prompt_tokens = 0  # that its first token waits for; 0 once it has come
        # What governance finds at look-up: its keys, the domains of its leading blocks, and why.
        self.keys: OwnerData | None = None
        self.monitored: OwnerData | None = None  # what governance would have decided, where it is not obeyed
        self.expected: NDArray[np.int32] | int = 0
        self.comparison: Comparison | None = None  # what it waits for, or waited
        self.stale_blocks = 0  # that the engine found, and that may not be attached any more
        self.compared_blocks = 0  # of those attached, found as they were published
        self.reasons: tuple[str, ...] = ()
        self.segment_blocks = 0
        self.segment_domain: Domain | None = None
        self.granted_blocks = 0  # leading blocks whose keys are another owner's: attached, or nothing is published

    @property
    def reads_own_alone(self) -> bool:
        """Whether its look-up found readable blocks only in its own domain."""
        return not isinstance(self.expected, np.ndarray)

    @property
    def earlier_blocks(self) -> int:
        """How many attached blocks it already had before it was preempted."""
        return int(np.isin(self.attached_generations, self.earlier).sum()) if len(self.earlier) else 0

    def blocks(self) -> Blocks:
        """Return every block that it refers to now."""
        parts = [self.attached, *(blocks for blocks, _ in self.handed)]
        every = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if len(self.dropped):
            handed = [np.arange(first, first + len(blocks)) for blocks, first in self.handed]
            every = every[~np.isin(np.concatenate([self.attached_generations, *handed]), self.dropped)]
        return every

    def handed_blocks(self) -> Blocks:
        """Return those of `blocks()` that it was handed, not attached."""
        if not self.handed:
            return NO_BLOCKS
        every = np.concatenate([blocks for blocks, _ in self.handed])
        if len(self.dropped):
            handed = [np.arange(first, first + len(blocks)) for blocks, first in self.handed]
            every = every[~np.isin(np.concatenate(handed), self.dropped)]
        return every

    def generations(self) -> NDArray[np.int64]:
        """Return the generation of each of `blocks()`."""
        handed = [np.arange(first, first + len(blocks)) for blocks, first in self.handed]
        every = np.concatenate([self.attached_generations, *handed])
        return every[~np.isin(every, self.dropped)] if len(self.dropped) else every

    def drop(self, generations: NDArray[np.int64]) -> None:
        """Drop the references to the blocks with these generations."""
        self.dropped = np.concatenate((self.dropped, generations))

    def hold(self, blocks: Blocks, generations: NDArray[np.int64], deadline_us: int) -> None:
        """Keep `blocks` until the deadline."""
        self.held, self.held_generations = blocks, generations
        self.deadline_us = deadline_us
        self.is_held = True
