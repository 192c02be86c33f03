"""The pool: physical blocks, their states and generations, and the path back from ended to CLEAN.

    blocks = pool.hand_out(partition, count, account)    # CLEAN to ACTIVE
    pool.end(endings, ACTIVE, now_us)                    # custody is over: FENCED
    pool.reclaim(partition, now_us, bound_us)            # device work has retired: DIRTY
    pool.scrub(partition, at_most)                       # zeroed, with a receipt: CLEAN

- clean + active + cached + fenced + dirty + quarantined = total, at every step (L1); `move` keeps the counts.
- A hand-out that nobody was told of, because what came after it failed, is undone whole (`take_back`).
- Only CLEAN blocks are handed out, and at boot every block is DIRTY (L2).
- A block's generation changes each time it leaves CLEAN; generations come from one pool-wide counter (L3).
- A block becomes CLEAN only with a receipt of every shard. On a memory in stream order, it may also become CLEAN behind
  launches whose receipts follow (`scrubs_in_flight`). A block that does not verify is quarantined for good.
- A block is charged to its account until it is CLEAN again.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.pool.accounting import Account, EndedRun, PoolPartition
from kvcustody.allocator.pool.block_state import (
    ACTIVE,
    CACHED,
    CLEAN,
    DIRTY,
    FENCED,
    NEVER_US,
    QUARANTINED,
    TRANSITIONS,
    Blocks,
    BlockState,
)
from kvcustody.allocator.pool.fence import Fences
from kvcustody.allocator.pool.integrity import BlockSums, SummedMemory
from kvcustody.allocator.pool.memory_protocol import Memory, ScrubResult
from kvcustody.allocator.pool.records import AttachedBlocks, EndingRun, ReleasedBlocks, Scrubbed
from kvcustody.allocator.pool.scrubs_in_flight import ScrubInFlight, ScrubsInFlight, StreamMemory
from kvcustody.errors import HandleError, IsolationError

_ALLOWED = frozenset((int(source), int(target)) for source, target in TRANSITIONS)
_SMALL_MOVE = 4096
_ALL_IN = tuple(bytes([state]) * _SMALL_MOVE for state in BlockState)  # what a correct move's states look like


class Pool:
    """Block state arrays over one `Memory`, cut into partitions. Not thread-safe: one thread owns the state."""

    def __init__(self, memory: Memory, blocks: int, partitions: list[PoolPartition]) -> None:
        assert sum(partition.size for partition in partitions) <= blocks
        self.memory = memory
        self.blocks = blocks
        self.state: NDArray[np.uint8] = np.full(blocks, DIRTY, dtype=np.uint8)
        self.generation: NDArray[np.int64] = np.zeros(blocks, dtype=np.int64)
        self.counts = [0] * len(BlockState)
        self.counts[DIRTY] = blocks
        self.next_generation = 1
        self.fences = Fences()
        self.ended: list[EndedRun] = []
        self.receipts: list[Scrubbed] = []
        self.released: list[ReleasedBlocks] = []
        self.attached: list[AttachedBlocks] = []
        self.stuck_findings: list[EndedRun] = []
        self.sums: BlockSums | None = None
        self.flight = ScrubsInFlight(memory) if isinstance(memory, StreamMemory) else None
        self.partitions: list[PoolPartition] = []
        for partition in partitions:
            self.add_partition(partition)

    def keep_sums(self) -> BlockSums | None:
        """Return the checksums of what is published from now on; None if no memory with bytes is behind the blocks."""
        if self.sums is None and isinstance(self.memory, SummedMemory):
            self.sums = BlockSums(self.memory, self.generation)
        return self.sums

    def add_partition(self, partition: PoolPartition) -> None:
        """Add a new partition; its blocks are DIRTY until they are scrubbed."""
        every = np.arange(partition.first, partition.first + partition.size, dtype=np.int64)
        boot = EndedRun(every, self.generation[every], None, None, "boot", 0, 0, 0)
        partition.dirty.append(boot)
        partition.dirty_blocks = partition.size
        self.partitions.append(partition)

    def move(self, blocks: Blocks, source: int, target: int) -> None:
        """Move blocks between states; no other method does. Raises `IsolationError` if a block is not in `source`."""
        count = len(blocks)
        if not count:
            return
        state = self.state
        states = state[blocks]
        if count <= _SMALL_MOVE:
            differs = states.tobytes() != _ALL_IN[source][:count]
        else:
            differs = bool(np.count_nonzero(states != source))
        if differs or (source, target) not in _ALLOWED:
            raise IsolationError(
                f"blocks cannot move from {BlockState(source).name} to {BlockState(target).name}: found states "
                f"{sorted({BlockState(s).name for s in states.tolist()})}",
                source=source,
                target=target,
            )
        state[blocks] = target
        self.counts[source] -= count
        self.counts[target] += count

    def hand_out(self, partition: PoolPartition, count: int, account: Account) -> Blocks:
        """Take and charge `count` CLEAN blocks, whose existence the caller has checked."""
        assert 0 < count <= partition.clean_count, (count, partition.clean_count)
        ring, head = partition.clean_ring, partition.clean_head
        end = head + count
        if end <= partition.size:
            blocks = ring[head:end].copy()
        else:
            end -= partition.size
            blocks = np.concatenate((ring[head:], ring[:end]))
        self.move(blocks, CLEAN, ACTIVE)
        partition.clean_head = end if end < partition.size else 0
        partition.clean_count -= count
        first = self.next_generation
        self.next_generation = first + count
        self.generation[blocks] = np.arange(first, first + count)
        account.charge(count)
        if self.flight is not None:
            self.flight.hand_out(blocks)
        return blocks

    def take_back(self, partition: PoolPartition, blocks: Blocks, account: Account) -> None:
        """Undo the newest `hand_out` before anybody learned of the blocks: they are as clean as they were."""
        count, last = len(blocks), self.next_generation - 1
        found = self.state[blocks]
        if int(self.generation[blocks[-1]]) != last or np.count_nonzero(found != ACTIVE):
            raise IsolationError("a hand-out cannot be taken back: it is not the newest, or has moved on", blocks=count)
        self.state[blocks] = CLEAN
        self.counts[ACTIVE] -= count
        self.counts[CLEAN] += count
        self.generation[blocks] = 0
        self.next_generation -= count
        ring, size = partition.clean_ring, partition.size
        head = (partition.clean_head - count) % size
        room = size - head
        ring[head : head + count] = blocks[:room]
        ring[: max(0, count - room)] = blocks[room:]
        partition.clean_head = head
        partition.clean_count += count
        account.charge(-count)

    def end(self, ending: list[EndingRun], source: int, now_us: int) -> None:
        """End custodies: FENCED, then waiting for device work up to their fence."""
        blocks = ending[0].blocks if len(ending) == 1 else np.concatenate([run.blocks for run in ending])
        self.move(blocks, source, FENCED)
        generations = self.generation[blocks]
        at = 0
        for run, domain, cause, due_us, fence, ceiling_us in ending:
            account = domain.owner
            to = at + len(run)
            custody = EndedRun(run, generations[at:to], account, domain, cause, due_us, now_us, fence, ceiling_us)
            account.partition.fenced.append(custody)
            at = to

    def is_vacant(self, partition: PoolPartition) -> bool:
        """Return whether the partition has no custody, active or ending: every block is CLEAN, or failed verification.

        What did not verify stays QUARANTINED until teardown. What a fence holds up there may come back, so it is not.
        """
        missing = partition.size - partition.clean_count
        if not missing:
            return True
        if partition.stuck or partition.fenced or partition.dirty or missing == partition.size:
            return False
        states = self.state[partition.first : partition.first + partition.size]
        return int(np.count_nonzero(states == QUARANTINED)) == missing

    def reclaim(self, partition: PoolPartition, now_us: int, bound_us: int) -> None:
        """Move custodies whose fences have retired from FENCED to DIRTY; those past the bound to QUARANTINED."""
        fences = self.fences
        oldest = fences.oldest_open
        if partition.stuck:
            self._recover_stuck(partition, oldest, now_us)
        if not partition.fenced:
            return
        stuck_before = fences.stuck_before(bound_us, now_us) if len(fences) else 0
        waiting: deque[EndedRun] = deque()
        for custody in partition.fenced:
            if custody.fence < oldest:
                custody.retired_us = now_us if custody.fence else custody.ended_us
                self._make_dirty(partition, custody, FENCED)
            elif stuck_before and oldest < stuck_before:
                self.move(custody.blocks, FENCED, QUARANTINED)
                partition.stuck.append(custody)
                self.stuck_findings.append(custody)
            else:
                waiting.append(custody)
        partition.fenced = waiting

    def _recover_stuck(self, partition: PoolPartition, oldest: int, now_us: int) -> None:
        still = []
        for custody in partition.stuck:
            if custody.fence < oldest:
                custody.retired_us = now_us
                self._make_dirty(partition, custody, QUARANTINED)
            else:
                still.append(custody)
        partition.stuck = still

    def _make_dirty(self, partition: PoolPartition, custody: EndedRun, source: int) -> None:
        self.move(custody.blocks, source, DIRTY)
        partition.dirty.append(custody)
        partition.dirty_blocks += len(custody.blocks)
        if custody.domain is not None:
            urgent = custody.due_us + custody.domain.scrub_within_us // 4
            partition.urgent_us = min(partition.urgent_us, urgent)
            pressing = custody.due_us + custody.domain.scrub_within_us // 2
            partition.pressing_us = min(partition.pressing_us, pressing)
        self.ended.append(custody)

    def scrub(self, partition: PoolPartition, at_most: int) -> int:
        """Zero DIRTY blocks, oldest first, in one launch for each verify share and shard; return how many became
        CLEAN.
        """
        batches: dict[tuple[float, Account | None], list[EndedRun]] = {}
        taken = 0
        dirty = partition.dirty
        while dirty and taken < at_most:
            custody = dirty.popleft()
            share = custody.domain.verify_share if custody.domain is not None else 1.0
            if self.sums is not None and self.sums.is_suspect(custody.blocks):
                share = 1.0
            # A sampled launch has one owner, so that its receipt can say how many of the owner's blocks were read.
            owner = custody.account if 0.0 < share < 1.0 else None
            batches.setdefault((share, owner), []).append(custody)
            taken += len(custody.blocks)
        partition.dirty_blocks -= taken
        if not dirty:
            partition.urgent_us = partition.pressing_us = NEVER_US
        cleaned = 0
        while batches:
            (share, owner), batch = next(iter(batches.items()))
            try:
                cleaned += self._scrub_batch(partition, share, batch)
            except Exception:  # the device failed: what is not CLEAN waits, first in line
                for custodies in batches.values():
                    dirty.extendleft(custodies)
                    partition.dirty_blocks += sum(len(custody.blocks) for custody in custodies)
                partition.urgent_us = 0
                raise
            del batches[share, owner]
        return cleaned

    def _scrub_batch(self, partition: PoolPartition, share: float, batch: list[EndedRun]) -> int:
        blocks = batch[0].blocks if len(batch) == 1 else np.concatenate([custody.blocks for custody in batch])
        if self.flight is not None:
            return self._launch_batch(self.flight, partition, share, batch, blocks)
        custodies = tuple(batch)
        failed: list[Blocks] = []
        for shard in range(self.memory.shards):
            result = self.memory.scrub(shard, blocks, share)
            if self.sums is not None:
                result = self.sums.withhold(result, blocks)
            self._record_receipt(shard, result, share, custodies)
            if len(result.failed):
                failed.append(result.failed)
        for custody in batch:
            if custody.account is not None:
                custody.account.charge(-len(custody.blocks))
        if failed:
            bad = np.unique(np.concatenate(failed))
            self.move(bad, DIRTY, QUARANTINED)
            blocks = blocks[~np.isin(blocks, bad)]
        self._make_clean(partition, blocks)
        return len(blocks)

    def _launch_batch(
        self,
        flight: ScrubsInFlight,
        partition: PoolPartition,
        share: float,
        batch: list[EndedRun],
        blocks: Blocks,
    ) -> int:
        """Scrub in stream order: what is not read back is CLEAN, and charged to nobody, from its launch on."""
        clean = ~flight.launch(partition, share, batch, blocks)
        at = 0
        for run in batch:
            to = at + len(run.blocks)
            if run.account is not None:
                run.account.charge(-int(np.count_nonzero(clean[at:to])))
            at = to
        cleaned = blocks[clean]
        self._make_clean(partition, cleaned)
        return len(cleaned)

    def collect(self, *, wait: bool = False) -> int:
        """Take the answers of scrubs in flight, with `wait` all of them; return how many blocks became CLEAN."""
        if self.flight is None:
            return 0
        return sum(self._finish(scrub) for scrub in self.flight.retired(wait=wait))

    def _finish(self, scrub: ScrubInFlight) -> int:
        """Every shard has answered: receipts, and the blocks that were read back become CLEAN or QUARANTINED."""
        results = scrub.results()
        if self.sums is not None:
            results = [self.sums.withhold(result, scrub.held) for result in results]
        for shard, result in enumerate(results):
            self._record_receipt(shard, result, scrub.share, scrub.batch)
        for run in scrub.batch:
            if run.account is not None:
                run.account.charge(-int(np.count_nonzero(np.isin(run.blocks, scrub.held))))
        failed = np.isin(scrub.held, np.unique(np.concatenate([result.failed for result in results])))
        self.move(scrub.held[failed], DIRTY, QUARANTINED)
        verified = scrub.held[~failed]
        self._make_clean(scrub.partition, verified)
        return len(verified)

    def _make_clean(self, partition: PoolPartition, blocks: Blocks) -> None:
        self.move(blocks, DIRTY, CLEAN)
        self.push_clean(partition, np.sort(blocks))  # neighbours are handed out together, and listed shorter

    def _record_receipt(self, shard: int, result: ScrubResult, share: float, custodies: tuple[EndedRun, ...]) -> None:
        """One shard's memory has been overwritten: evidence for governance to write."""
        self.receipts.append(Scrubbed(shard, result, share, custodies))

    def synchronize(self) -> int:
        """Wait for every scrub in flight, if any; return how many blocks became CLEAN."""
        return self.collect(wait=True)

    @staticmethod
    def push_clean(partition: PoolPartition, blocks: Blocks) -> None:
        """Append CLEAN blocks to the partition's ring."""
        size, count = partition.size, len(blocks)
        tail = partition.clean_head + partition.clean_count
        if tail >= size:
            tail -= size
        room = size - tail
        if count <= room:
            partition.clean_ring[tail : tail + count] = blocks
        else:
            partition.clean_ring[tail:] = blocks[:room]
            partition.clean_ring[: count - room] = blocks[room:]
        partition.clean_count += count

    def validate(self, blocks: Blocks, generations: NDArray[np.int64]) -> None:
        """Raise `HandleError` if a (block, generation) handle is stale or out of range (L3)."""
        if len(blocks) and (blocks.min() < 0 or blocks.max() >= self.blocks):
            raise HandleError(f"block `{int(blocks.max())}` is outside the pool of {self.blocks}")
        state = self.state[blocks]
        held = (state == ACTIVE) | (state == CACHED)
        stale = np.flatnonzero((self.generation[blocks] != generations) | ~held)
        if len(stale):
            at = int(stale[0])
            raise HandleError(
                f"handle (block `{int(blocks[at])}`, generation `{int(generations[at])}`) is stale: "
                f"the block is {BlockState(int(state[at])).name} at generation `{int(self.generation[blocks[at]])}`",
                block=int(blocks[at]),
                generation=int(generations[at]),
            )
