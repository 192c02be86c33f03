"""A running sequence: its block table, its attached blocks, and the blocks it has written but not published.

- table = attached and published blocks (its path in the tree, root to leaf) ‖ its own blocks, in token order.
- Only whole blocks of computed, accepted tokens are published; the partial tail never is (L10).
- A duplicate of a canonical block serves its sequence until release, and is then FENCED (L10).
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from kvcustody.allocator.pool.accounting import Account, Domain, OwnerData
from kvcustody.allocator.pool.block_state import EMPTY, NEVER_US, Blocks
from kvcustody.allocator.prefix.block_priority import BlockPriority
from kvcustody.allocator.prefix.key_chain import HashState
from kvcustody.allocator.prefix.node import Node, PathResidency


class Span:
    """Blocks [first, last) of the prompt that this sequence writes into one domain, with the keys known so far."""

    __slots__ = ("domain", "first", "keys", "last", "start", "state")

    def __init__(self, domain: Domain, first: int, last: int, start: int, keys: bytes, state: HashState | None) -> None:
        self.domain = domain
        self.first = first  # prompt depth of keys[0]
        self.last = last
        self.start = start  # chain depth of keys[0]
        self.keys = keys
        self.state = state  # stands after the last key; None where reuse is off


class RunningSequence:
    """One request between admission and release. Positions are in blocks unless a name says tokens."""

    __slots__ = (
        "account",
        "active_until_us",
        "admitted_blocks",
        "asked_us",
        "block_count",
        "ceiling_us",
        "domain",
        "duplicates",
        "earlier_blocks",
        "extra_written",
        "fence",
        "first_generation",
        "hit_blocks",
        "id",
        "leaf",
        "monitored",
        "passed",
        "pool",
        "priorities",
        "prompt_tokens",
        "published",
        "recorded_until",
        "residency",
        "restored_blocks",
        "shared_tail",
        "slot",
        "spans",
        "table",
        "tail_tokens",
        "window_first",
        "windows",
    )

    def __init__(self, id_: Hashable, residency: PathResidency, pool: int) -> None:
        self.id = id_
        self.account: Account = residency.account
        self.domain: Domain = residency.domain
        self.residency = residency
        self.pool = pool  # the number of the pool that its blocks are in
        self.first_generation = 0  # of its own blocks at admission, which have consecutive ones
        self.recorded_until = 0  # the generation after them: what was handed out later is another record's
        self.admitted_blocks = 0  # its block count at admission, while it was handed nothing more
        self.leaf: Node | None = None
        self.monitored: OwnerData | None = None  # what governance would have decided, where it is not obeyed
        self.slot = -1
        self.table: Blocks = EMPTY
        self.block_count = 0
        self.hit_blocks = 0
        self.earlier_blocks = 0  # of them, its own work before it was preempted, or its parent's
        self.ceiling_us = NEVER_US  # of what it publishes, where a tier filled blocks of it: none of that lives longer
        self.restored_blocks = 0  # behind the hit, filled from a tier
        self.tail_tokens = 0  # behind those, of the block that is not full
        self.asked_us = 0  # when it was first asked for: before its blocks were there
        self.prompt_tokens = 0  # that its first token waits for; 0 once it has come
        self.published = 0  # blocks of the path: attached or published
        self.spans: list[Span] = []
        self.duplicates: list[tuple[Blocks, Domain]] = []
        self.shared_tail: Node | None = None
        self.fence = 0
        self.active_until_us = 0
        self.windows: list[Blocks] = []  # own blocks per sliding-window group
        self.window_first: list[int] = []  # prompt depth of the first of them
        # Handed out but no longer in the table, with generations: replaced by a fork's copy, or in a window.
        self.extra_written: list[tuple[Blocks, Blocks]] = []
        self.passed: list[Blocks] = []  # generations of what it let go of before its end
        self.priorities: tuple[BlockPriority, ...] = ()  # of what it publishes

    @property
    def blocks(self) -> Blocks:
        """The block table, in token order."""
        return self.table[: self.block_count]

    def shares(self, first: int, last: int) -> list[tuple[int, int, Domain]]:
        """Return the blocks [first, last) that this sequence wrote, cut by the domain that owns them."""
        parts: list[tuple[int, int, Domain]] = []
        for span in self.spans:
            until = min(span.last, last)
            if until > first:
                parts.append((first, until, span.domain))
                first = until
        if last > first:
            parts.append((first, last, self.domain))
        return parts

    def foreign_blocks(self, *, first: int = 0) -> dict[Domain, int]:
        """Return by domain how many blocks of its path, from `first` on, belong to another domain than its own."""
        counts: dict[Domain, int] = {}
        node = self.leaf
        while node is not None:
            count = min(node.length, node.depth + node.length - first)
            if node.domain is not self.domain and count > 0:
                counts[node.domain] = counts.get(node.domain, 0) + count
            node = node.parent
        return counts

    def stop_publishing(self) -> None:
        """Publish nothing more of the sequence and leave no hold; it may continue to run."""
        for span in self.spans:
            span.keys, span.state = b"", None
        self.residency.may_hold = False

    def append(self, blocks: Blocks) -> None:
        """Extend the table; capacity doubles, so a decoding sequence copies its table rarely."""
        count = self.block_count + len(blocks)
        if count > len(self.table):
            grown = np.empty(max(count, 2 * len(self.table)), dtype=np.int64)
            grown[: self.block_count] = self.table[: self.block_count]
            self.table = grown
        self.table[self.block_count : count] = blocks
        self.block_count = count
