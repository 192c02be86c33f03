"""The block manager: admission, publication, decoding, forks and release over one pool.

Numbers in, events out: it knows no policy, SQL or HTTP. One thread owns it. Times are boot-time microseconds and are
always passed in.

B1  Attach happens before allocation, so making room can never take the path that is about to be used.
B2  Release is idempotent: a sequence leaves its slot once, whatever order finish, abort and preemption come in (L4).
B3  A request that cannot be served changes nothing for anybody else (M3).
"""

from __future__ import annotations

from kvcustody.allocator.manager.running import ManagerRunning
from kvcustody.allocator.pool.accounting import Account, PoolPartition
from kvcustody.allocator.prefix.sequence import Sequence


class BlockManager(ManagerRunning):
    """Blocks of one pool, from hand-out to CLEAN."""

    # -- release ------------------------------------------------------------------------------------------------------

    def release(self, sequence: Sequence, now_us: int, cause: str) -> bool:
        """End a sequence; its residency holds what policy allows. False where it had already ended (B2)."""
        slot = sequence.slot
        if slot < 0:
            return False
        computed = int(self.decode.computed[slot])
        if sequence.spans and sequence.spans[0].keys:
            self.publication.publish(sequence, computed // self.options.block_tokens, now_us)
        self.decode.leave(sequence)
        if sequence.shared_tail is not None:
            self._forked -= 1
        fence = sequence.fence
        if fence and fence < self.pool.fences.oldest_open:
            fence = 0
        if sequence.published < sequence.block_count or sequence.duplicates or sequence.windows:
            self.publication.end_private(sequence, cause, now_us, fence)
        residency = sequence.residency
        may_hold = residency.may_hold and residency.domain.cacheable and residency.domain.is_open
        hold = residency if may_hold else None
        self.tree.release(sequence.leaf, hold, now_us, cause, fence)
        if hold is not None and len(self.hold_table.of(hold.account)) > hold.account.residency_cap:
            self._lapse_oldest(hold.account, now_us)
        return True

    def _lapse_oldest(self, account: Account, now_us: int) -> None:
        """Live residencies are capped per tenant; the oldest lapses first."""
        oldest = self.hold_table.of(account).oldest
        assert oldest is not None
        self.tree.lapse(oldest, "residency-cap", now_us)
        self.tree.flush(now_us)

    # -- time ---------------------------------------------------------------------------------------------------------

    def sweep(self, now_us: int, at_most: int | None = None) -> int:
        """Lapse holds that are past their deadline, a bounded number at a time; returns how many lapsed.

        Each partition has its share of the number, whatever falls due elsewhere.
        """
        limit, blocks = self.options.sweep_batch if at_most is None else at_most, self.pool.blocks
        lapsed = 0
        for partition in self.pool.partitions:
            share = limit if partition.size == blocks else -(-limit * partition.size // blocks)
            lapsed += self._sweep(partition, share, now_us)
        if lapsed:
            self.tree.flush(now_us)
            self.expired_residencies += lapsed
        return lapsed

    def _sweep(self, partition: PoolPartition, at_most: int, now_us: int) -> int:
        for lapsed in range(at_most):
            residency = self.hold_table.take_due(partition, now_us)
            if residency is None:
                return lapsed
            self.tree.lapse(residency, "expired", now_us)
        return at_most

    def step(self, now_us: int) -> list[Sequence]:
        """Expiry, reclaim, scrub and reserve; returns sequences that have been ACTIVE longer than allowed."""
        self.sweep(now_us)
        for partition in self.pool.partitions:
            self.space.keep_reserve(partition, now_us)
        return self.decode.overrunning(now_us)

    def teardown(self, now_us: int) -> None:
        """End all custody and zero every block; nothing is running any more."""
        for account in self.accounts.values():
            for residency in list(self.hold_table.of(account)):
                self.tree.lapse(residency, "shutdown", now_us)
        self.tree.flush(now_us)
        for fence in range(1, self.pool.fences.last + 1):
            self.pool.fences.retire(fence)
        for partition in self.pool.partitions:
            self.pool.reclaim(partition, now_us, self.options.fence_bound_us)
            self.pool.scrub(partition, partition.dirty_blocks)
        self.pool.settle()
