"""Who holds which block of an engine's own pool after its requests ended, until when, and what goes first.

H1  A hold lapses once: at its deadline, on erasure, or when a residency of the same principal and domain extends it.
H2  No deadline is later than the ceiling of what it holds; no hold or new limit moves a ceiling later (L8).
H3  Readers through a grant get references, not holds; a segment's blocks are held by whoever reads them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.external.block_arrays import ForeignBlocks
from kvcustody.allocator.external.residency import ForeignResidency
from kvcustody.allocator.pool.accounting import Account, Domain, DomainLimits
from kvcustody.allocator.pool.block_state import ACTIVE, CACHED, NEVER_US, Blocks
from kvcustody.allocator.pool.hold_table import HoldList


class ForeignHolds(ForeignBlocks):
    """The holds of ended residencies, their deadlines, and the order of eviction."""

    # -- holds --------------------------------------------------------------------------------------------------------

    def _place_hold(self, residency: ForeignResidency, blocks: Blocks, now_us: int) -> None:
        domain = residency.domain
        if not (domain.cacheable and domain.is_open and residency.publishes):
            return
        indexed = self.indexed[blocks]
        held = blocks if indexed.all() else blocks[indexed]
        idle_us = domain.idle_us
        if residency.is_mixed:
            held = held[self._holdable(self.tag[held], residency.account)]
            idle_us = min((self.domains[tag].idle_us for tag in set(self.tag[held].tolist())), default=0)
        if not len(held):
            return
        deadline = min(now_us + idle_us, int(self.ceiling_us[held].min()))
        if deadline <= now_us:
            return
        self._replace_extended(residency, held)
        residency.hold(held, self.generation[held], deadline)
        self.holds[held] += 1
        self.hold_until_us[held] = np.maximum(self.hold_until_us[held], deadline)
        self.hold_table.add(residency)
        self._tips[int(held[-1]), int(residency.held_generations[-1])] = residency

    def _holdable(self, tags: NDArray[np.int32], account: Account) -> NDArray[np.bool_]:
        """Readers through a grant get references, not holds; a segment's blocks are held by whoever reads them."""
        fine = {
            tag
            for tag in set(tags.tolist())
            if (domain := self.domains.get(tag)) is not None
            and (domain.owner is account or domain.is_segment)
        }
        return np.isin(tags, list(fine))

    def _replace_extended(self, residency: ForeignResidency, held: Blocks) -> None:
        """The hold that this residency extends, of the same principal and domain, is no longer needed.

        Unless it keeps more: a sliding window goes on without the blocks that it has passed.
        """
        if not len(residency.attached):
            return
        older = self._tips.get((int(residency.attached[-1]), int(residency.attached_generations[-1])))
        if older is None or not older.is_held or older.principal != residency.principal:
            return
        if older.domain is not residency.domain:
            return
        kept = older.held[self.generation[older.held] == older.held_generations]
        if not np.array_equal(kept, held[: len(kept)]) and not np.isin(kept, held).all():
            return
        self._forget(older)
        self.holds[kept] -= 1

    def _forget(self, hold: ForeignResidency) -> None:
        self.hold_table.remove(hold)
        tip = (int(hold.held[-1]), int(hold.held_generations[-1]))
        if self._tips.get(tip) is hold:
            del self._tips[tip]

    def lapse(self, hold: ForeignResidency, cause: str, now_us: int, due_us: int | None = None) -> list[int]:
        """End one hold; blocks that nothing else keeps end, due at `due_us` (else now) or with their last hold.

        Returns what the engine must forget.
        """
        self._forget(hold)
        states = self.state[hold.held]
        valid = (self.generation[hold.held] == hold.held_generations) & (
            (states == ACTIVE) | (states == CACHED)
        )
        held = hold.held if valid.all() else hold.held[valid]
        left = self.holds[held] - 1
        self.holds[held] = left
        over = held[(left == 0) & (self.state[held] == CACHED)]
        if not len(over):
            return []
        return self._end_cached(over, cause, now_us if due_us is None else due_us, now_us)

    def is_due(self, now_us: int) -> bool:
        """A sweep now would lapse something."""
        due_us = self.hold_table.next_due_us()
        return due_us is not None and due_us <= now_us

    def sweep(self, now_us: int, at_most: int) -> list[int]:
        """Lapse holds whose deadline has passed, at most so many. Returns what the engine must forget."""
        forget: list[int] = []
        for _ in range(at_most):
            hold = self.hold_table.take_due(self.partition, now_us)
            if hold is None:
                break
            self.expired_residencies += 1
            forget += self.lapse(hold, "expired", now_us)
        return forget

    def over_residencies(self, account: Account, now_us: int) -> list[int]:
        """Lapse the oldest holds of an account that has more than its cap."""
        forget: list[int] = []
        holds = self.hold_table.of(account)
        while len(holds) > account.residency_cap:
            oldest = holds.oldest
            assert oldest is not None
            forget += self.lapse(oldest, "residencies", now_us)
        return forget

    # -- eviction -----------------------------------------------------------------------------------------------------

    def victims(self, count: int, account: Account | None = None) -> list[int]:
        """CACHED blocks to end first, oldest use first: of `account`, or of accounts that are over their guarantee.

        An empty list where no account has a guarantee: then the engine's own order is as good.
        """
        candidates = np.flatnonzero(self.state == CACHED)
        if account is None:
            if self.partition.common_blocks == self.partition.size:
                return []
            over = [tag for tag, domain in self.domains.items() if domain.owner.charged_over_blocks() > 0]
            candidates = candidates[np.isin(self.tag[candidates], over)]
        else:
            own = [tag for tag, domain in self.domains.items() if domain.owner is account]
            candidates = candidates[np.isin(self.tag[candidates], own)]
        if len(candidates) > count:
            # Children before parents: a release gives one `used` to a chain, so later generations go first.
            order = np.lexsort((-self.generation[candidates], self.used[candidates]))[:count]
            candidates = candidates[order]
        return [int(block) for block in candidates]

    def end_cached(self, blocks: Blocks, cause: str, now_us: int, due_us: int | None = None) -> list[int]:
        """End CACHED blocks by our own decision, due at `due_us` or now. Returns what the engine must forget."""
        cached = blocks[self.state[blocks] == CACHED]
        if not len(cached):
            return []
        self.evicted[cause] = self.evicted.get(cause, 0) + len(cached)
        return self._end_cached(cached, cause, now_us if due_us is None else due_us, now_us)

    # -- limits -------------------------------------------------------------------------------------------------------

    def set_limits(
        self, changed: Mapping[Domain, DomainLimits], now_us: int
    ) -> dict[Account, HoldList[ForeignResidency]]:
        """New limits for live domains; a ceiling or deadline only ever moves earlier (allocator.limits, N1–N3).

        Returns the accounts of which a hold now ends earlier, with all their holds.
        """
        shorter: dict[int, int] = {}
        for domain, limits in changed.items():
            shorter[domain.tag] = max(0, domain.idle_us - limits.idle_us)
            domain.idle_us, domain.absolute_us, domain.scrub_within_us, domain.verify_share = limits
            if domain.absolute_us < NEVER_US:
                mine = np.flatnonzero(self.tag == domain.tag)
                self.ceiling_us[mine] = np.minimum(
                    self.ceiling_us[mine], np.maximum(self.born_us[mine] + domain.absolute_us, now_us)
                )
        self._lower_descendants()
        narrowed: dict[Account, HoldList[ForeignResidency]] = {}
        for hold in [hold for account in self.accounts.values() for hold in self.hold_table.of(account)]:
            valid = hold.held[self.generation[hold.held] == hold.held_generations]
            if not len(valid):
                continue
            earlier = max((shorter.get(tag, 0) for tag in set(self.tag[valid].tolist())), default=0)
            deadline = max(now_us, min(hold.deadline_us - earlier, int(self.ceiling_us[valid].min())))
            if deadline < hold.deadline_us:
                self.hold_table.shorten(hold, deadline)
                narrowed[hold.account] = self.hold_table.of(hold.account)
        self.recount_holds()
        return narrowed

    def _lower_descendants(self) -> None:
        """No ceiling above its parent's (L8): in waves, as many as the longest chain is deep at most."""
        while True:
            live = np.flatnonzero((self.state == CACHED) | (self.state == ACTIVE))
            live = live[self.parent[live] >= 0]
            parents = self.parent[live]
            above = self.ceiling_us[live] > self.ceiling_us[parents]
            if not above.any():
                return
            self.ceiling_us[live[above]] = self.ceiling_us[parents[above]]

    def recount_holds(self) -> None:
        """Find every block's latest hold deadline again, after holds lapsed or moved out of their turn."""
        self.hold_until_us[:] = 0
        for account in self.accounts.values():
            for hold in self.hold_table.of(account):
                valid = hold.held[self.generation[hold.held] == hold.held_generations]
                self.hold_until_us[valid] = np.maximum(self.hold_until_us[valid], hold.deadline_us)
