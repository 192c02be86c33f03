"""Custody of a pool that an engine such as vLLM allocates itself; the engine reports what it did with block indices.

    pool = ExternalPool(blocks=1024, shards=2)
    pool.hand_out(residency, blocks, domain, now_us)           # the engine gave a request fresh blocks
    pool.attach(residency, blocks, now_us)                     # ... or cached ones, seen by `attachable`
    pool.publish(blocks, before)                               # they are in the engine's prefix cache
    forget = pool.release(residency, "finished", now_us)       # its request ended
    order = pool.order(now_us)                                 # what the coming step must zero first
    pool.scrubbed(order.number, shard, results)                # one shard's answer

The engine must remove from its own prefix cache the blocks that a method returns as a list. The pool takes numbers and
gives events: it knows no policy, SQL or HTTP. Zeroing is *stream-ordered* (docs/build/engine-port.md): a block may be
handed out before its scrub has finished. This is safe because the scrub is enqueued on the engine's stream before
anything else is written.

- A block is handed out only when nobody uses it, that is, when it is neither ACTIVE nor CACHED. Anything else raises
  `IsolationError`.
- A generation changes at each hand-out (L3).
- A block without a reference stays only while it is indexed, held, before its ceiling and in an open domain. Otherwise
  its custody ends, and the engine is instructed to forget it.
- Everything that ended is in the next scrub order, so no step writes to a block before the scrub of what it held.
- A receipt, a hold or an end of an older generation touches no newer one.
- Where a chain's parent ends, its cached descendants end with it (L7).
- A hold lapses once: at its deadline, on erasure, or when a residency of the same principal and domain extends it.
- No deadline is later than the ceiling of what it holds; no hold or new limit moves a ceiling later (L8).
- Readers through a grant get references, not holds; a segment's blocks are held by whoever reads them.
- Without `rank_by` no block has a rank, and without `keep_sums` none a checksum; the path of a request costs nothing
  for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.external.block_ranking import BlockRanking
from kvcustody.allocator.external.block_sums import Comparison, ExternalSums
from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.allocator.external.scrub_queue import ScrubOrder, ScrubQueue
from kvcustody.allocator.pool.accounting import (
    Account,
    Domain,
    DomainFacts,
    DomainLimits,
    EndedRun,
    OwnerData,
    PoolPartition,
)
from kvcustody.allocator.pool.block_state import (
    ACTIVE,
    CACHED,
    CLEAN,
    DIRTY,
    FENCED,
    NEVER_US,
    QUARANTINED,
    Blocks,
    BlockState,
)
from kvcustody.allocator.pool.fence import Fences
from kvcustody.allocator.pool.hold_table import HoldList, HoldTable
from kvcustody.allocator.pool.memory_protocol import NO_BLOCKS, ScrubResult
from kvcustody.allocator.pool.records import ReleasedBlocks, Scrubbed
from kvcustody.allocator.prefix.eviction_policy import EvictionPolicy, Lru
from kvcustody.errors import CapacityError, IsolationError

NO_BLOCK = -1
_CLEAN = bytes([CLEAN])
_FREE = bytes([CLEAN, DIRTY, FENCED])
_HELD = bytes([ACTIVE, CACHED])
_ENDED = bytes([FENCED, DIRTY])
_DOMAINS_MIN = 1024  # domains kept before those without a block are dropped
_FEW_BLOCKS = 8  # up to so many are written one by one: an array operation costs more than that
_ONE = np.int32(1)  # `ufunc.at` takes a twentieth of the time where nothing must be cast
_least = np.minimum.reduce
_due_of = itemgetter(0)


class ExternalPool:
    """Custody of `blocks` physical blocks over `shards` workers. `reserved` indices are never handed to a tenant."""

    def __init__(
        self,
        blocks: int,
        *,
        shards: int = 1,
        bytes_per_block: int = 0,
        reserved: Iterable[int] = (),
        fence_bound_us: int = 30_000_000,
    ) -> None:
        if blocks < 1:
            raise CapacityError(f"a pool needs at least one block, got `{blocks}`", blocks=blocks)
        self.blocks = blocks
        self.bytes_per_block = bytes_per_block
        self.number = 0
        self.reserved: Blocks = np.array(sorted(set(reserved)), dtype=np.int64)
        self.state_bytes = bytearray([DIRTY]) * blocks
        self.state: NDArray[np.uint8] = np.frombuffer(self.state_bytes, dtype=np.uint8)  # the same memory
        self.generation: NDArray[np.int64] = np.zeros(blocks, dtype=np.int64)
        self.refs: NDArray[np.int32] = np.zeros(blocks, dtype=np.int32)
        self.holds: NDArray[np.int32] = np.zeros(blocks, dtype=np.int32)
        self.tag: NDArray[np.int32] = np.zeros(blocks, dtype=np.int32)  # of the block's domain
        self.indexed: NDArray[np.bool_] = np.zeros(blocks, dtype=np.bool_)
        self.ceiling_us: NDArray[np.int64] = np.zeros(blocks, dtype=np.int64)
        self.hold_until_us: NDArray[np.int64] = np.zeros(blocks, dtype=np.int64)
        self.born_us: NDArray[np.int64] = np.zeros(blocks, dtype=np.int64)
        self.released_us: NDArray[np.int64] = np.zeros(blocks, dtype=np.int64)  # when last CACHED
        self.used: NDArray[np.int64] = np.zeros(blocks, dtype=np.int64)  # when last CACHED: the order of eviction
        self.parent: NDArray[np.int64] = np.full(blocks, NO_BLOCK, dtype=np.int64)
        self.children: NDArray[np.int32] = np.zeros(blocks, dtype=np.int32)
        self.next_generation = 1
        self.fences = Fences()
        self.fence_bound_us = fence_bound_us
        self._ending_fence: int | None = None  # of what ends now; None: the newest open one
        self._cached_fence = 0  # the newest fence under which anything became CACHED
        self.only_steps = False  # no device work uses a CACHED block that no request has: fences are of steps alone
        size = blocks - len(self.reserved)
        self.partition = PoolPartition(0, size, 0, 0)
        self.accounts: dict[str, Account] = {}
        self.domains: dict[int, Domain] = {}
        self.hold_table: HoldTable[ExternalResidency] = HoldTable()
        self.queue = ScrubQueue(shards)
        self.unclean_hand_outs = 0  # of blocks whose scrub had not been answered
        self.released: list[ReleasedBlocks] = []
        self.evicted: dict[str, int] = {}
        self.expired_residencies = 0
        self._next_domain = 1
        self._next_residency = 1
        self._holds_by_last_block: dict[
            tuple[int, int], ExternalResidency
        ] = {}  # (last block, generation) -> newest hold that ends there
        self._clock = 0
        self.ranking: BlockRanking | None = None  # None: the least recently used goes first
        self.sums: ExternalSums | None = None  # None: nothing is compared before it is reused
        self.evicting: Callable[[Blocks], None] | None = None  # told what `evict` is about to end
        self.is_held: Callable[[int], bool] | None = None  # by the engine, whether it has told of that or not
        self._are_all_chained = True  # a block is reached only through what it continues
        self._domains_max = _DOMAINS_MIN
        usable = np.setdiff1d(np.arange(blocks, dtype=np.int64), self.reserved)
        self.state[self.reserved] = CLEAN
        self.queue.add_boot(usable)

    # -- set-up -------------------------------------------------------------------------------------------------------

    @property
    def shards(self) -> int:
        """The number of workers, each of which holds a part of every block."""
        return self.queue.shards

    def rank_by(self, policy: Callable[[], EvictionPolicy]) -> None:
        """Order victims by `policy`, created once for each account. Call it before the first block is handed out."""
        assert self.next_generation == 1, "blocks were handed out without a rank"
        self.ranking = None if type(policy()) is Lru else BlockRanking(self, policy)

    def keep_sums(self) -> ExternalSums:
        """Sum what is published from now on, for domains that ask for checksums."""
        if self.sums is None:
            self.sums = self.queue.sums = ExternalSums(self.generation, self.state, self.shards)
        return self.sums

    def tick(self, uses: int = 1) -> int:
        """Return the first of `count` new use numbers; all are greater than every earlier one."""
        first = self._clock + 1
        self._clock += uses
        return first

    def account(
        self,
        name: str,
        *,
        guaranteed: int = 0,
        cap: int | None = None,
        borrow: bool = True,
        residencies: int = 1 << 30,
    ) -> Account:
        """Return the account `name` with these limits in blocks, created on first use."""
        account = self.accounts.get(name)
        if account is None:
            account = self.accounts[name] = Account(name, self.partition)
            self.partition.accounts.append(account)
        account.limit(guaranteed=guaranteed, cap=cap, borrow=borrow, residencies=residencies)
        return account

    def forget_account(self, name: str) -> None:
        """Forget a tenant that is charged for nothing and holds nothing."""
        account = self.accounts[name]
        assert not account.used_blocks, f"tenant `{name}` is charged for {account.used_blocks} blocks"
        account.limit(guaranteed=0, cap=0, borrow=False, residencies=0)
        self.hold_table.forget(account)
        self.partition.accounts.remove(account)
        if self.ranking is not None:
            self.ranking.forget_account(account)
        del self.accounts[name]

    def domain(self, owner: Account, **facts: Unpack[DomainFacts]) -> Domain:
        """Return a new domain charged to `owner`; the pool keeps it while one of its blocks lives."""
        domain = Domain(self._next_domain, owner, **facts)
        self._next_domain += 1
        return domain

    def residency(
        self,
        account: Account,
        domain: Domain,
        principal: Hashable,
        facts: OwnerData | None,
        request_id: Hashable,
        now_us: int,
    ) -> ExternalResidency:
        """Return a new residency without blocks."""
        residency = ExternalResidency(self._next_residency, account, domain, principal, facts, request_id, now_us)
        self._next_residency += 1
        return residency

    # -- what the engine does -----------------------------------------------------------------------------------------

    def hand_out(self, residency: ExternalResidency, blocks: Blocks, domain: Domain, now_us: int) -> None:
        """Give `blocks` to the residency, the only writer from now on."""
        count = len(blocks)
        first = self._claim(blocks, now_us)
        self.state[blocks] = ACTIVE
        self.generation[blocks] = np.arange(first, first + count)
        self.refs[blocks] = 1
        self.tag[blocks] = domain.tag
        # the ceiling of what follows, too (L8)
        residency.ceiling_us = min(now_us + domain.absolute_us, residency.ceiling_us)
        self.ceiling_us[blocks] = residency.ceiling_us
        self.born_us[blocks] = now_us
        self._keep_domain(domain)
        domain.owner.charge(count)
        residency.handed.append((blocks, first))
        if domain is not residency.domain:
            residency.is_mixed = True
            if domain.owner is not residency.account:
                residency.assigned.append((blocks, first, domain))

    def _claim(self, blocks: Blocks, now_us: int) -> int:
        """Check that nobody uses `blocks`; returns the first of as many new generations."""
        states = self.state[blocks]
        found = states.tobytes()
        if found.strip(_FREE):
            self._refuse_hand_out(blocks, states)
        if found.strip(_CLEAN):  # not all are CLEAN: what they held is in the order of this step
            self.queue.may_repeat = True
            self.unclean_hand_outs += 1
            if self.queue.has_fenced:
                self.queue.release_fence(blocks[states == FENCED], now_us)
        if self.ranking is not None:
            self.ranking.handed_out(blocks)
        first = self.next_generation
        self.next_generation = first + len(blocks)
        return first

    def _keep_domain(self, domain: Domain) -> None:
        self.domains[domain.tag] = domain
        if len(self.domains) > self._domains_max:
            self._prune_domains()

    def _refuse_hand_out(self, blocks: Blocks, states: NDArray[np.uint8]) -> None:
        for block, state in zip(blocks.tolist(), states.tolist(), strict=True):
            if state in (ACTIVE, CACHED, QUARANTINED):
                raise IsolationError(
                    f"block `{block}` is {BlockState(state).name} and cannot be handed out: the engine must "
                    "free it and forget its key first",
                    block=block,
                    state=BlockState(state).name,
                )

    def hand_out_each(self, residencies: Sequence[ExternalResidency], blocks: Blocks, now_us: int) -> None:
        """Hand out single blocks in the residencies' own domains: the growth of a decode step."""
        first = self._claim(blocks, now_us)
        tags: list[int] = []
        ceilings: list[int] = []
        for at, residency in enumerate(residencies):
            domain = residency.domain
            tags.append(domain.tag)
            residency.ceiling_us = min(now_us + domain.absolute_us, residency.ceiling_us)
            ceilings.append(residency.ceiling_us)
            domain.owner.charge(1)
            self.domains[domain.tag] = domain
            residency.handed.append((blocks[at : at + 1], first + at))
        if len(tags) > _FEW_BLOCKS:
            self.state[blocks] = ACTIVE
            self.generation[blocks] = np.arange(first, first + len(tags))
            self.refs[blocks] = 1
            self.tag[blocks] = tags
            self.ceiling_us[blocks] = ceilings
            self.born_us[blocks] = now_us
            return
        for at, block in enumerate(blocks.tolist()):
            self.state_bytes[block] = ACTIVE
            self.generation[block] = first + at
            self.refs[block] = 1
            self.tag[block] = tags[at]
            self.ceiling_us[block] = ceilings[at]
            self.born_us[block] = now_us

    def attachable(self, blocks: Blocks, expected: NDArray[np.int32] | int, now_us: int) -> int:
        """Return how many leading blocks may be attached now: in the expected domain, indexed, held, and before their
        ceiling.
        """
        if self._are_held(blocks, expected, now_us):
            return len(blocks)
        fine = (self.tag[blocks] == expected) & self.indexed[blocks] & (self.ceiling_us[blocks] > now_us)
        cached = (self.state[blocks] == CACHED) & (self.hold_until_us[blocks] > now_us)
        fine &= cached | (self.refs[blocks] > 0)
        return len(blocks) if fine.all() else int(fine.argmin())

    def _are_held(self, blocks: Blocks, expected: NDArray[np.int32] | int, now_us: int) -> bool:
        """All of these may be attached, by holds that last: the common answer, for half the work."""
        return bool(
            _least(self.hold_until_us.take(blocks)) > now_us
            and _least(self.ceiling_us.take(blocks)) > now_us
            and b"\0" not in self.indexed.take(blocks).tobytes()
            and not self.state.take(blocks).tobytes().strip(_HELD)
            and (self.tag.take(blocks) == expected).all()
        )

    def restored(self, residency: ExternalResidency, blocks: Blocks, born_us: int, ceiling_us: int) -> None:
        """Record that handed-out `blocks` hold data computed at `born_us` that may live until `ceiling_us`.

        What the residency computes from them lives no longer (L8).
        """
        self.born_us[blocks] = np.minimum(self.born_us[blocks], born_us)
        residency.ceiling_us = min(residency.ceiling_us, ceiling_us)
        own = residency.handed_blocks()
        self.ceiling_us[own] = np.minimum(self.ceiling_us[own], residency.ceiling_us)

    def are_clean(self, blocks: Sequence[int]) -> bool:
        """Return whether every byte of these blocks is zero and nobody uses them. A loop: a step has few such
        blocks.
        """
        state = self.state_bytes
        for block in blocks:  # noqa: SIM110 - a generator costs more than the loop
            if state[block]:
                return False
        return True

    def attach(self, residency: ExternalResidency, blocks: Blocks, now_us: int) -> None:
        """Refer to cached or running blocks. Raises `IsolationError` if a block is neither."""
        states = self.state[blocks]
        if states.tobytes().strip(_HELD):
            at = int(np.flatnonzero((states != ACTIVE) & (states != CACHED))[0])
            raise IsolationError(
                f"block `{int(blocks[at])}` is {BlockState(int(states[at])).name} and cannot be attached",
                block=int(blocks[at]),
            )
        self.state[blocks] = ACTIVE
        self.refs[blocks] += 1
        if self.ranking is not None:
            self.ranking.attached(blocks, now_us)
        residency.ceiling_us = min(residency.ceiling_us, int(self.ceiling_us[blocks[-1]]))
        if (self.tag[blocks] != residency.domain.tag).any():
            residency.is_mixed = True
        generations = self.generation[blocks]
        if len(residency.attached):
            blocks = np.concatenate((residency.attached, blocks))
            generations = np.concatenate((residency.attached_generations, generations))
        residency.attached, residency.attached_generations = blocks, generations

    def publish(
        self,
        blocks: Blocks,
        before: int = NO_BLOCK,
        *,
        chained: bool = True,
        depths: Sequence[int] | None = None,
    ) -> None:
        """Record that `blocks` are in the engine's index. Each continues the one before it; the first continues
        `before`.

        `depths`: their places in the prompt, where those do not follow from `before`.
        """
        self.indexed[blocks] = True
        if self.ranking is not None:
            self.ranking.published(blocks, before, depths)
        if self.sums is not None:
            self._sum(blocks, self.sums)
        if not chained:
            self._are_all_chained = False
            return
        parents = blocks[:-1]
        self.parent[blocks[1:]] = parents
        self.children[parents] += 1
        if before >= 0:
            self.parent[blocks[0]] = before
            self.children[before] += 1

    def publish_each(self, blocks: Sequence[int], before: Sequence[int]) -> None:
        """Publish single blocks; `before[i]` is the block that `blocks[i]` continues, or -1."""
        if self.ranking is not None:
            self.ranking.published_each(blocks, before)
        if self.sums is not None:
            self._sum(np.array(blocks, dtype=np.int64), self.sums)
        if len(blocks) > _FEW_BLOCKS:
            which, parents = np.array(blocks, dtype=np.int64), np.array(before, dtype=np.int64)
            self.indexed[which] = True
            self.parent[which] = parents
            np.add.at(self.children, parents[parents >= 0], _ONE)
            return
        for block, parent in zip(blocks, before, strict=True):
            self.indexed[block] = True
            self.parent[block] = parent
            if parent >= 0:
                self.children[parent] += 1

    def _sum(self, blocks: Blocks, sums: ExternalSums) -> None:
        """Of what was published: what belongs to domains that ask for checksums."""
        sums.publish(blocks[self._integrity_shares(blocks) > 0])

    def _integrity_shares(self, blocks: Blocks) -> NDArray[np.float64]:
        """By block: the share that its own domain asks for."""
        tags, places = np.unique(self.tag[blocks], return_inverse=True)
        shares: NDArray[np.float64] = np.array([self.domains[tag].integrity_share for tag in tags.tolist()])
        return shares[places]

    def compare(self, blocks: Blocks, reader: Domain, now_us: int) -> Comparison | None:
        """Draw some of `blocks` for comparison, by the stricter of their domain's share and the reader's.

        None: nobody asks for it.
        """
        if self.sums is None:
            return None
        shares = self._integrity_shares(blocks)
        if not reader.integrity_share and not shares.any():
            return None
        return self.sums.ask(blocks, shares > 0, np.maximum(shares, reader.integrity_share), now_us)

    def continuations(self, blocks: Blocks) -> Blocks:
        """Return `blocks` and every indexed block computed from them; every indexed block if the chains are unknown."""
        indexed: Blocks = np.flatnonzero(self.indexed)
        if not self._are_all_chained:
            return np.union1d(indexed, blocks)
        found, wave = blocks, blocks
        while len(wave):
            wave = indexed[np.isin(self.parent[indexed], wave) & ~np.isin(indexed, found)]
            found = np.concatenate((found, wave))
        return found

    def withdraw(self, blocks: Blocks, cause: str, now_us: int) -> list[int]:
        """Make these blocks unattachable; unused ones end. Return the blocks that the engine must forget."""
        forget: list[int] = blocks[self.indexed[blocks] & (self.state[blocks] == ACTIVE)].tolist()
        self.indexed[forget] = False
        return forget + self.end_cached(blocks, cause, now_us)

    def unpublish(self, blocks: Blocks, cause: str, now_us: int) -> list[int]:
        """Record that the engine forgot these blocks; return descendants that it must forget too (L7)."""
        unused = blocks[(self.state[blocks] == CACHED) & self.indexed[blocks]]
        self.indexed[blocks] = False
        if not len(unused):
            return []
        self.evicted[cause] = self.evicted.get(cause, 0) + len(unused)
        return self._end_cached(unused, cause, now_us, now_us, engine_knows=True)

    def release_blocks(self, residency: ExternalResidency, blocks: Blocks, now_us: int) -> list[int]:
        """Release some blocks of a running residency; return the blocks that the engine must forget."""
        mine = np.isin(blocks, residency.blocks())
        if not mine.all():
            self._refuse_release(residency, blocks[~mine])
        generations = self.generation[blocks]
        self.released.append(ReleasedBlocks(residency, blocks, generations, residency.recorded_until, now_us))
        residency.passed.append(generations)
        residency.drop(generations)
        return self.decref(blocks, "passed", now_us)

    def release(self, residency: ExternalResidency, cause: str, now_us: int, fence: int | None = None) -> list[int]:
        """End the residency's request; hold what the policy allows. Return the blocks that the engine must forget.

        fence: the newest that was open when it ended (0: none), where that is not now.
        """
        blocks = residency.blocks()
        residency.is_running = False
        if not len(blocks):
            return []
        if self.ranking is not None and residency.priorities:
            self.ranking.prioritise(residency.handed_blocks(), residency.priorities)
        self._place_hold(residency, blocks, now_us)
        self._ending_fence = fence
        forget = self.decref(blocks, cause, now_us)
        self._ending_fence = None
        return forget

    def _refuse_release(self, residency: ExternalResidency, blocks: Blocks) -> None:
        raise IsolationError(
            f"request `{residency.request_id}` does not hold block `{int(blocks[0])}`", block=int(blocks[0])
        )

    def decref(self, blocks: Blocks, cause: str, now_us: int) -> list[int]:
        """Give back one reference on each of `blocks`."""
        refs = self.refs[blocks] - 1
        if int(refs.min()) < 0:
            raise IsolationError(f"block `{int(blocks[int(refs.argmin())])}` was released twice")
        self.refs[blocks] = refs
        last = blocks[refs == 0] if refs.any() else blocks
        if not len(last):
            return []
        used = self.tick()
        stays = self.indexed[last] & (self.holds[last] > 0) & (self.ceiling_us[last] > now_us)
        still_held = last[stays]
        self.state[still_held] = CACHED
        self.used[still_held] = used
        self.released_us[still_held] = now_us
        if self.ranking is not None and len(still_held):
            self.ranking.cached(still_held, now_us)
        self._cached_fence = max(self._cached_fence, self._fence_now())
        if len(still_held) == len(last):
            return []
        gone = last[~stays]
        passed = self.ceiling_us[gone] <= now_us
        dues = np.full(len(gone), now_us)
        if not passed.any():
            return self._end(gone, cause, dues, now_us)
        forget = self._end(gone[passed], "ceiling", dues[passed], now_us)
        return forget + (self._end(gone[~passed], cause, dues[~passed], now_us) if not passed.all() else [])

    # -- steps --------------------------------------------------------------------------------------------------------

    def order(self, now_us: int) -> ScrubOrder | None:
        """Return the scrubs that the coming step must run first: everything that ended and whose fences have
        retired.
        """
        if self.queue.has_fenced:
            self.queue.reclaim(self.fences, now_us)
        return self.queue.order() if self.queue.has_dirty else None

    def scrubbed(self, number: int, shard: int, results: Sequence[ScrubResult]) -> Blocks:
        """Take one shard's answer to an order. With the last shard's, blocks become CLEAN; return those that failed."""
        done, failed = self.queue.answer(number, shard, results)
        if done is not None:
            blocks, generations = done
            states, now = self.state[blocks], self.generation[blocks]
            if states.tobytes().strip(_ENDED) or now.tobytes() != generations.tobytes():
                blocks = blocks[(now == generations) & ((states == FENCED) | (states == DIRTY))]
            self.state[blocks] = CLEAN
        if len(failed):
            unused = failed[(self.state[failed] != ACTIVE) & (self.state[failed] != CACHED)]
            self.state[unused] = QUARANTINED
        return failed

    def take_scrubbed(self) -> list[Scrubbed]:
        """Return the evidence of the launches answered since the last call."""
        return self.queue.take_scrubbed()

    # -- holds --------------------------------------------------------------------------------------------------------

    def _place_hold(self, residency: ExternalResidency, blocks: Blocks, now_us: int) -> None:
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
        self._holds_by_last_block[int(held[-1]), int(residency.held_generations[-1])] = residency

    def _holdable(self, tags: NDArray[np.int32], account: Account) -> NDArray[np.bool_]:
        """Readers through a grant get references, not holds; a segment's blocks are held by whoever reads them."""
        fine = {
            tag
            for tag in set(tags.tolist())
            if (domain := self.domains.get(tag)) is not None and (domain.owner is account or domain.is_segment)
        }
        return np.isin(tags, list(fine))

    def _replace_extended(self, residency: ExternalResidency, held: Blocks) -> None:
        """The hold that this residency extends, of the same principal and domain, is no longer needed.

        Unless it keeps more: a sliding window goes on without the blocks that it has passed.
        """
        if not len(residency.attached):
            return
        older = self._holds_by_last_block.get((int(residency.attached[-1]), int(residency.attached_generations[-1])))
        if older is None or not older.is_held or older.principal != residency.principal:
            return
        if older.domain is not residency.domain:
            return
        kept = older.held[self.generation[older.held] == older.held_generations]
        if not np.array_equal(kept, held[: len(kept)]) and not np.isin(kept, held).all():
            return
        self._remove_hold(older)
        self.holds[kept] -= 1

    def _remove_hold(self, hold: ExternalResidency) -> None:
        self.hold_table.remove(hold)
        last = (int(hold.held[-1]), int(hold.held_generations[-1]))
        if self._holds_by_last_block.get(last) is hold:
            del self._holds_by_last_block[last]

    def lapse(self, hold: ExternalResidency, cause: str, now_us: int, due_us: int | None = None) -> list[int]:
        """End one hold. Blocks without another hold end, due at `due_us` (else now) or with their last hold.

        Returns what the engine must forget.
        """
        self._remove_hold(hold)
        states = self.state[hold.held]
        valid = (self.generation[hold.held] == hold.held_generations) & ((states == ACTIVE) | (states == CACHED))
        held = hold.held if valid.all() else hold.held[valid]
        left = self.holds[held] - 1
        self.holds[held] = left
        over = held[(left == 0) & (self.state[held] == CACHED)]
        if not len(over):
            return []
        return self._end_cached(over, cause, now_us if due_us is None else due_us, now_us)

    def is_due(self, now_us: int) -> bool:
        """Return whether a sweep now would lapse a hold."""
        return self.hold_table.is_due(now_us)

    def sweep(self, now_us: int, at_most: int) -> list[int]:
        """Lapse at most so many holds whose deadline has passed. Return the blocks that the engine must forget."""
        forget: list[int] = []
        for _ in range(at_most):
            hold = self.hold_table.take_due(self.partition, now_us)
            if hold is None:
                break
            self.expired_residencies += 1
            forget += self.lapse(hold, "expired", now_us)
        return forget

    def enforce_residency_cap(self, account: Account, now_us: int) -> list[int]:
        """Lapse the oldest holds of an account that exceeds its cap."""
        forget: list[int] = []
        holds = self.hold_table.of(account)
        while len(holds) > account.residency_cap:
            oldest = holds.oldest
            assert oldest is not None
            forget += self.lapse(oldest, "residencies", now_us)
        return forget

    # -- eviction -----------------------------------------------------------------------------------------------------

    def victims(self, count: int, now_us: int, account: Account | None = None) -> list[int]:
        """Return CACHED blocks to end first, in the policy's order: of `account`, or of accounts beyond their
        guarantee.

        An empty list where the least recently used goes first and no account has a guarantee: then the engine's own
        order is as good.
        """
        guarantees = self.partition.common_blocks != self.partition.size
        if self.ranking is None and account is None and not guarantees:
            return []
        candidates = np.flatnonzero(self.state == CACHED)
        if self.ranking is not None:
            return self._ranked_victims(self.ranking, candidates, count, now_us, account)
        if account is None:
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

    def _ranked_victims(
        self, ranking: BlockRanking, candidates: Blocks, count: int, now_us: int, account: Account | None
    ) -> list[int]:
        """In the policy's order, account by account: what one tenant's blocks are worth moves no other's.

        Without `account`, whoever is furthest over its guarantee gives first, and those within theirs last of all.
        """
        tags = self.tag[candidates]
        of: dict[Account, list[int]] = {}
        for tag in np.unique(tags).tolist():
            of.setdefault(self.domains[tag].owner, []).append(tag)
        over = {one: one.used_blocks - one.guaranteed_blocks for one in of if account in (None, one)}
        victims: list[int] = []
        for one, blocks in sorted(over.items(), key=lambda each: each[1], reverse=True):
            left = count - len(victims)
            share = left if blocks <= 0 or len(over) == 1 else min(left, blocks)
            if share > 0:
                own = candidates if len(of) == 1 else candidates[np.isin(tags, of[one])]
                victims += ranking.victims(one, own, share, now_us).tolist()
        return victims

    def evict(self, victims: Blocks, cause: str, now_us: int) -> list[int]:
        """End the blocks that `victims` chooses. Return the blocks that the engine must forget."""
        if self.evicting is not None and len(victims):
            self.evicting(victims)
        if self.ranking is not None and len(victims):
            self.ranking.evicted(victims)
        return self.end_cached(victims, cause, now_us)

    def end_cached(self, blocks: Blocks, cause: str, now_us: int, due_us: int | None = None) -> list[int]:
        """End CACHED blocks by our own decision, due at `due_us` or now. Return the blocks that the engine must
        forget.
        """
        cached = blocks[self.state[blocks] == CACHED]
        if not len(cached):
            return []
        self.evicted[cause] = self.evicted.get(cause, 0) + len(cached)
        return self._end_cached(cached, cause, now_us if due_us is None else due_us, now_us)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _end(
        self,
        blocks: Blocks,
        cause: str,
        dues: NDArray[np.int64],
        now_us: int,
        *,
        engine_knows: bool = False,
    ) -> list[int]:
        """End the custody of unreferenced blocks and, as unreachable, of their cached descendants.

        dues: when each was due, never later in a chain than before it. Returns the indexed ones among them, which the
        engine must forget; with `engine_knows`, `blocks` excepted.
        """
        known = self.indexed[blocks]
        if not engine_knows and not known.any():  # it was never in the index: nothing continues it, nobody forgets it
            self._end_runs(blocks, cause, dues, now_us)
            return []
        forget: list[int] = [] if engine_knows else blocks[known].tolist()
        self._remove_from_index(blocks)
        self._end_runs(blocks, cause, dues, now_us)
        wave = self._take_descendants(blocks)
        while len(wave):
            forget += wave.tolist()
            dues = self._due_times(wave, now_us)  # until now it could be reached, while it was held
            self._remove_from_index(wave)
            self._end_runs(wave, "unreachable", dues, now_us)
            wave = self._take_descendants(wave)
        return forget

    def _end_cached(
        self, blocks: Blocks, cause: str, due_us: int, now_us: int, *, engine_knows: bool = False
    ) -> list[int]:
        """`_end` of CACHED blocks: none was due before its last release, nor after the end of its last hold."""
        return self._end(blocks, cause, self._due_times(blocks, due_us), now_us, engine_knows=engine_knows)

    def _due_times(self, blocks: Blocks, due_us: int) -> NDArray[np.int64]:
        dues: NDArray[np.int64] = np.minimum(self.hold_until_us[blocks], due_us)
        return np.maximum(dues, self.released_us[blocks])

    def _remove_from_index(self, blocks: Blocks) -> None:
        """What ends is nobody's child and nobody's hold any more; a hand-out finds it so."""
        parents = self.parent[blocks]
        parents = parents[parents >= 0]
        if len(parents):
            np.subtract.at(self.children, parents, _ONE)
            self.parent[blocks] = NO_BLOCK
        self.indexed[blocks] = False
        if self.ranking is not None:
            bare = np.unique(parents[(self.children[parents] == 0) & self.indexed[parents]])
            if len(bare):
                self.ranking.childless(bare)
        self.holds[blocks] = 0
        self.hold_until_us[blocks] = 0

    def _take_descendants(self, ended: Blocks) -> Blocks:
        """CACHED blocks that continue one of those that ended.

        One that the engine holds was hit behind another copy of what it continues, and its attach is still to be told.
        """
        left = ended[self.children[ended] > 0]
        if not len(left):
            return NO_BLOCKS
        self.children[left] = 0
        cached = np.flatnonzero(self.state == CACHED)
        orphans: Blocks = cached[np.isin(self.parent[cached], left)]
        self.parent[orphans] = NO_BLOCK
        if self.is_held is not None and len(orphans):
            held = np.array([self.is_held(block) for block in orphans.tolist()], dtype=np.bool_)
            return orphans[~held]
        return orphans

    def _prune_domains(self) -> None:
        live = set(np.unique(self.tag[(self.state != CLEAN) & (self.state != DIRTY)]).tolist())
        live.update(custody.domain.tag for custody in self.queue.custodies() if custody.domain is not None)
        self.domains = {tag: domain for tag, domain in self.domains.items() if tag in live}
        self._domains_max = max(_DOMAINS_MIN, 2 * len(self.domains))

    def _end_runs(self, blocks: Blocks, cause: str, dues: NDArray[np.int64], now_us: int) -> None:
        """A run for each domain, ceiling and due time among `blocks`, the earliest due first."""
        cached = self.only_steps and self.state[blocks[0]] == CACHED
        fence = self._cached_fence if cached else self._fence_now()
        self.state[blocks] = FENCED
        tags, ceilings = self.tag[blocks], self.ceiling_us[blocks]
        changes = (tags[1:] != tags[:-1]) | (ceilings[1:] != ceilings[:-1]) | (dues[1:] != dues[:-1])
        starts = [0, *(np.flatnonzero(changes) + 1).tolist()]
        facts = zip(dues[starts].tolist(), tags[starts].tolist(), ceilings[starts].tolist(), strict=True)
        alike: dict[tuple[int, int, int], list[Blocks]] = {}
        for of_run, start, end in zip(facts, starts, [*starts[1:], len(blocks)], strict=True):
            alike.setdefault(of_run, []).append(blocks[start:end])
        for due, tag, ceiling_us in sorted(alike, key=_due_of):
            runs = alike[due, tag, ceiling_us]
            run = runs[0] if len(runs) == 1 else np.concatenate(runs)
            self._end_alike(run, tag, ceiling_us, cause, due, now_us, fence)

    def _fence_now(self) -> int:
        """Return the newest device work that may use blocks which a request releases now."""
        return self.fences.newest_open if self._ending_fence is None else self._ending_fence

    def _end_alike(
        self, blocks: Blocks, tag: int, ceiling_us: int, cause: str, due_us: int, now_us: int, fence: int
    ) -> None:
        """End blocks of one domain and one ceiling."""
        domain, generations = self.domains[tag], self.generation[blocks]
        owner = domain.owner
        owner.charge(-len(blocks))
        self.queue.add(EndedRun(blocks, generations, owner, domain, cause, due_us, now_us, fence, ceiling_us))

    # -- limits -------------------------------------------------------------------------------------------------------

    def set_limits(
        self, changed: Mapping[Domain, DomainLimits], now_us: int
    ) -> dict[Account, HoldList[ExternalResidency]]:
        """Set new limits for live domains; a ceiling or deadline only ever moves earlier.

        Returns the accounts of which a hold now ends earlier, with all their holds.
        """
        shorter: dict[int, int] = {}
        for domain, limits in changed.items():
            shorter[domain.tag] = max(0, domain.idle_us - limits.idle_us)
            domain.idle_us, domain.absolute_us, domain.scrub_within_us = limits[:3]
            domain.verify_share, domain.integrity_share = limits[3:]
            if limits.integrity_share:
                sums = self.keep_sums()
                published = np.flatnonzero(self.indexed & (self.tag == domain.tag))
                sums.publish(sums.missing(published))
            if domain.absolute_us < NEVER_US:
                mine = np.flatnonzero(self.tag == domain.tag)
                self.ceiling_us[mine] = np.minimum(
                    self.ceiling_us[mine], np.maximum(self.born_us[mine] + domain.absolute_us, now_us)
                )
        self._lower_descendants()
        narrowed: dict[Account, HoldList[ExternalResidency]] = {}
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
        """Recompute every block's latest hold deadline after holds lapsed or moved out of order."""
        self.hold_until_us[:] = 0
        for account in self.accounts.values():
            for hold in self.hold_table.of(account):
                valid = hold.held[self.generation[hold.held] == hold.held_generations]
                self.hold_until_us[valid] = np.maximum(self.hold_until_us[valid], hold.deadline_us)

    # -- counts --------------------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Return the number of blocks in each state, without the reserved ones."""
        numbers = np.bincount(self.state, minlength=len(BlockState)).tolist()
        numbers[CLEAN] -= len(self.reserved)
        waiting = self._fenced_blocks()
        numbers[DIRTY] += numbers[FENCED] - waiting
        numbers[FENCED] = waiting
        return {state.name.lower(): numbers[state] for state in BlockState}

    def _fenced_blocks(self) -> int:
        """Blocks that ended and wait for a fence; a row says FENCED until its scrub is answered."""
        fenced = self.queue.fenced()
        return sum(
            int(np.count_nonzero((self.generation[blocks] == generations) & (self.state[blocks] == FENCED)))
            for blocks, generations in fenced
        )
