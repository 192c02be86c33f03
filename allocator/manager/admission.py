"""Admission: what a prompt reuses, and blocks for the rest."""

from __future__ import annotations

import numpy as np

from kvcustody.allocator.manager.make_room import POOL_FULL
from kvcustody.allocator.manager.parts import ManagerParts
from kvcustody.allocator.pool.block_state import NEVER_US, Blocks
from kvcustody.allocator.prefix.key_chain import keys_of
from kvcustody.allocator.prefix.longest_prefix import PrefixMatch, Prompt, ReadPlan, find
from kvcustody.allocator.prefix.node import PathResidency
from kvcustody.allocator.prefix.sequence import Sequence
from kvcustody.allocator.prefix.sliding_window import EMPTY


class ManagerAdmission(ManagerParts):
    """Begins sequences (B1, B3)."""

    def find(self, plan: ReadPlan, prompt: Prompt, now_us: int) -> PrefixMatch:
        """The longest prefix that `plan` lets this prompt reuse; changes nothing."""
        return find(self.tree, plan, prompt, now_us)

    def begin(
        self,
        id_: object,
        found: PrefixMatch,
        prompt: Prompt,
        residency: PathResidency,
        now_us: int,
        *,
        active_us: int = NEVER_US,
        lookahead_tokens: int = 0,
        can_preempt: bool = False,
    ) -> Sequence | str:
        """Attach what was found and allocate the rest; returns the reason where there is no room (B1, B3)."""
        tree = self.tree
        total = -(-(prompt.tokens + lookahead_tokens) // self.options.block_tokens)
        partition = residency.account.partition
        over = partition.over_blocks
        sequence = Sequence(id_, residency.account, residency.domain, residency)
        leaf = found.leaf
        parts: list[Blocks] = []
        if leaf is not None:
            if found.position < leaf.length:
                leaf = tree.split(leaf, found.position)
            parts = tree.attach(leaf, now_us)
        if over < partition.over_blocks > partition.common_blocks and not can_preempt:
            refused: str | None = POOL_FULL  # reviving this much cache would eat into a guarantee (Q3)
        else:
            refused = self._allocate(sequence, found, parts, total, now_us, can_preempt)
        if refused is not None:
            if leaf is not None:
                tree.release(leaf, None, now_us, "deferred")
            return refused
        sequence.leaf = leaf
        sequence.hit_blocks = sequence.published = found.hit_blocks
        if now_us + active_us < NEVER_US:
            sequence.active_until_us = now_us + active_us
        else:
            sequence.active_until_us = NEVER_US
        self._key(sequence, found, prompt)
        self.decode.enter(sequence, prompt.tokens, prompt.data[prompt.whole * self.block_bytes :])
        return sequence

    def _allocate(
        self,
        sequence: Sequence,
        found: PrefixMatch,
        parts: list[Blocks],
        total: int,
        now_us: int,
        can_preempt: bool,
    ) -> str | None:
        """Hand out what each span needs, to the account that owns the span."""
        spans = found.spans
        if len(spans) == 1:
            wanted = [(spans[0].domain.owner, total - found.hit_blocks)] if total > found.hit_blocks else []
        else:
            wanted = [
                (span.domain.owner, min(span.last, total) - span.first)
                for span in spans
                if min(span.last, total) > span.first
            ]
        groups = 1 + len(self.options.windows)
        if len(wanted) == 1:
            refused = self.space.ensure(wanted[0][0], wanted[0][1] * groups, now_us, can_preempt)
        else:
            refused = self.space.ensure_all(wanted, groups, now_us, can_preempt)
        if refused is not None:
            return refused
        parts.reverse()
        sequence.first_generation = self.pool.next_generation
        for account, count in wanted:
            parts.append(self._take(account, count))
        sequence.table = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else EMPTY
        sequence.block_count = sequence.admitted_blocks = len(sequence.table)
        if self.options.windows:
            self.publication.open_windows(sequence, wanted, found.hit_blocks, self._take)
        sequence.recorded_until = self.pool.next_generation
        sequence.spans = found.spans
        return None

    def _key(self, sequence: Sequence, found: PrefixMatch, prompt: Prompt) -> None:
        """Make the keys of the part that will be written; they are published when they are computed."""
        span = found.spans[-1]
        if span.state is None or not span.domain.cacheable:
            span.state = None
            return
        first, keys = span.first, b""
        if found.pending_key is not None:
            keys = found.pending_key
            first += 1
        span.keys = keys + keys_of(
            span.state, prompt.data, first, prompt.whole, prompt.block_bytes, prompt.extras
        )
