"""The blocks of a pool that an engine allocates by itself, as arrays: their states, their ends and their way to CLEAN.

The engine says what it did with block indices; this keeps custody of them. Numbers in, events out: it knows no policy,
SQL or HTTP. Zeroing is *stream-ordered* (design §6): a block may be handed out while its scrub is still on its way,
because the scrub is enqueued on the engine's stream before anything else is written.

X1  Everything that ended is in the next scrub order, so no step writes to a block before the scrub of what it held.
X2  A receipt, a hold or an end of an older generation touches no newer one.
X3  Where a chain's parent ends, its cached descendants end with it (L7).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.external.residency import NO_BLOCKS, ForeignResidency
from kvcustody.allocator.external.scrub_queue import ScrubOrder, ScrubQueue
from kvcustody.allocator.pool.accounting import Account, Domain, DomainFacts, EndedRun, PoolPartition
from kvcustody.allocator.pool.block_state import (
    ACTIVE,
    CACHED,
    CLEAN,
    DIRTY,
    FENCED,
    QUARANTINED,
    Blocks,
    BlockState,
)
from kvcustody.allocator.pool.fence import Fences
from kvcustody.allocator.pool.hold_table import HoldTable
from kvcustody.allocator.pool.memory_protocol import ScrubResult
from kvcustody.allocator.pool.records import LetGo, Scrubbed
from kvcustody.errors import CapacityError

NO_BLOCK = -1
_ENDED = bytes([FENCED, DIRTY])
_DOMAINS_MIN = 1024  # domains kept before those without a block are dropped


class ForeignBlocks:
    """State of `blocks` physical blocks over `shards` workers. `reserved` indices are never anybody's."""

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
            raise CapacityError(f"a pool needs at least one block, not `{blocks}`", blocks=blocks)
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
        self.used: NDArray[np.int64] = np.zeros(
            blocks, dtype=np.int64
        )  # when last CACHED: the order of eviction
        self.parent: NDArray[np.int64] = np.full(blocks, NO_BLOCK, dtype=np.int64)
        self.children: NDArray[np.int32] = np.zeros(blocks, dtype=np.int32)
        self.next_generation = 1
        self.fences = Fences()
        self.fence_bound_us = fence_bound_us
        self._ending_fence: int | None = None  # of what ends now; None: the newest open one
        self._cached_fence = 0  # the newest fence under which anything became CACHED
        self.only_steps = (
            False  # no device work uses a CACHED block that no request has: fences are of steps alone
        )
        size = blocks - len(self.reserved)
        self.partition = PoolPartition(0, size, 0, 0)
        self.accounts: dict[str, Account] = {}
        self.domains: dict[int, Domain] = {}
        self.hold_table: HoldTable[ForeignResidency] = HoldTable()
        self.queue = ScrubQueue(shards)
        self.let_go_events: list[LetGo] = []
        self.evicted: dict[str, int] = {}
        self.expired_residencies = 0
        self._next_domain = 1
        self._next_residency = 1
        self._tips: dict[
            tuple[int, int], ForeignResidency
        ] = {}  # (last block, generation) -> newest hold that ends there
        self._clock = 0
        self._domains_max = _DOMAINS_MIN
        usable = np.setdiff1d(np.arange(blocks, dtype=np.int64), self.reserved)
        self.state[self.reserved] = CLEAN
        self.queue.add_boot(usable)

    # -- set-up -------------------------------------------------------------------------------------------------------

    @property
    def shards(self) -> int:
        """Workers that each hold a part of every block."""
        return self.queue.shards

    def account(
        self,
        name: str,
        *,
        guaranteed: int = 0,
        cap: int | None = None,
        borrow: bool = True,
        residencies: int = 1 << 30,
    ) -> Account:
        """The account of `name`, made on first use, with these limits in blocks."""
        account = self.accounts.get(name)
        if account is None:
            account = self.accounts[name] = Account(name, self.partition)
            self.partition.accounts.append(account)
        account.limit(guaranteed=guaranteed, cap=cap, borrow=borrow, residencies=residencies)
        return account

    def domain(self, owner: Account, **facts: Unpack[DomainFacts]) -> Domain:
        """A new domain charged to `owner`; the pool keeps it while one of its blocks lives."""
        domain = Domain(self._next_domain, owner, **facts)
        self._next_domain += 1
        return domain

    def residency(
        self,
        account: Account,
        domain: Domain,
        principal: object,
        facts: object,
        request_id: object,
        now_us: int,
    ) -> ForeignResidency:
        """A new residency without blocks."""
        residency = ForeignResidency(
            self._next_residency, account, domain, principal, facts, request_id, now_us
        )
        self._next_residency += 1
        return residency

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _end(self, blocks: Blocks, cause: str, due_us: int, now_us: int, *, told: bool = False) -> list[int]:
        """End the custody of unreferenced blocks and, as unreachable, of their cached descendants (X3).

        Returns the indexed ones among them, which the engine must forget; with `told`, it knows of `blocks` itself.
        """
        known = self.indexed[blocks]
        if not told and not known.any():  # it was never in the index: nothing continues it, nobody forgets it
            self._end_flat(blocks, cause, due_us, now_us)
            return []
        forget: list[int] = [] if told else blocks[known].tolist()
        self._leave_index(blocks)
        self._end_flat(blocks, cause, due_us, now_us)
        wave = self._orphans(blocks)
        while len(wave):
            forget += wave.tolist()
            dues = self._dues(wave, now_us)  # until now it could be reached, while it was held
            self._leave_index(wave)
            for due in np.unique(dues).tolist():
                self._end_flat(wave[dues == due], "unreachable", due, now_us)
            wave = self._orphans(wave)
        return forget

    def _end_cached(
        self, blocks: Blocks, cause: str, due_us: int, now_us: int, *, told: bool = False
    ) -> list[int]:
        """`_end` of CACHED blocks: none was due before its last release, nor after the end of its last hold.

        Never later in a chain than before it, so that of several due times the earlier ones end first.
        """
        dues = self._dues(blocks, due_us)
        forget: list[int] = []
        for due in np.unique(dues).tolist():
            forget += self._end(blocks[dues == due], cause, due, now_us, told=told)
        return forget

    def _dues(self, blocks: Blocks, due_us: int) -> NDArray[np.int64]:
        dues: NDArray[np.int64] = np.minimum(self.hold_until_us[blocks], due_us)
        return np.maximum(dues, self.released_us[blocks])

    def _leave_index(self, blocks: Blocks) -> None:
        """What ends is nobody's child and nobody's hold any more; a hand-out finds it so."""
        parents = self.parent[blocks]
        parents = parents[parents >= 0]
        if len(parents):
            np.subtract.at(self.children, parents, 1)
            self.parent[blocks] = NO_BLOCK
        self.indexed[blocks] = False
        self.holds[blocks] = 0
        self.hold_until_us[blocks] = 0

    def _orphans(self, ended: Blocks) -> Blocks:
        """CACHED blocks that continue one of those that ended."""
        left = ended[self.children[ended] > 0]
        if not len(left):
            return NO_BLOCKS
        self.children[left] = 0
        cached = np.flatnonzero(self.state == CACHED)
        orphans: Blocks = cached[np.isin(self.parent[cached], left)]
        self.parent[orphans] = NO_BLOCK
        return orphans

    def _prune_domains(self) -> None:
        live = set(np.unique(self.tag[(self.state != CLEAN) & (self.state != DIRTY)]).tolist())
        live.update(custody.domain.tag for custody in self.queue.custodies() if custody.domain is not None)
        self.domains = {tag: domain for tag, domain in self.domains.items() if tag in live}
        self._domains_max = max(_DOMAINS_MIN, 2 * len(self.domains))

    def _end_flat(self, blocks: Blocks, cause: str, due_us: int, now_us: int) -> None:
        cached = self.only_steps and self.state[blocks[0]] == CACHED
        fence = self._cached_fence if cached else self._fence_now()
        self.state[blocks] = FENCED
        tags, ceilings = self.tag[blocks], self.ceiling_us[blocks]
        first, ceiling_us = int(tags[0]), int(ceilings[0])
        if len(blocks) == 1 or not ((tags != first) | (ceilings != ceiling_us)).any():
            self._end_alike(blocks, first, ceiling_us, cause, due_us, now_us, fence)
            return
        for tag, ceiling_us in dict.fromkeys(zip(tags.tolist(), ceilings.tolist(), strict=True)):
            chosen = blocks[(tags == tag) & (ceilings == ceiling_us)]
            self._end_alike(chosen, tag, ceiling_us, cause, due_us, now_us, fence)

    def _fence_now(self) -> int:
        """The newest device work that may use what a request gives back now."""
        return self.fences.newest_open if self._ending_fence is None else self._ending_fence

    def _end_alike(
        self, blocks: Blocks, tag: int, ceiling_us: int, cause: str, due_us: int, now_us: int, fence: int
    ) -> None:
        """End blocks of one domain and one ceiling."""
        domain, generations = self.domains[tag], self.generation[blocks]
        owner = domain.owner
        owner.charge(-len(blocks))
        self.queue.add(EndedRun(blocks, generations, owner, domain, cause, due_us, now_us, fence, ceiling_us))

    # -- steps --------------------------------------------------------------------------------------------------------

    def order(self, now_us: int) -> ScrubOrder | None:
        """The scrubs that the coming step must do first: everything that ended and whose fences have retired (X1)."""
        if self.queue.has_fenced:
            self.queue.reclaim(self.fences, now_us)
        return self.queue.order() if self.queue.has_dirty else None

    def scrubbed(self, number: int, shard: int, results: Sequence[ScrubResult]) -> Blocks:
        """One shard's answer to an order. Blocks become CLEAN with the last shard's; returns those that failed."""
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
        """Evidence of the answered launches since the last call."""
        return self.queue.take_scrubbed()

    # -- counts --------------------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Blocks by state, without the reserved ones."""
        numbers = np.bincount(self.state, minlength=len(BlockState)).tolist()
        numbers[CLEAN] -= len(self.reserved)
        waiting = self._waiting()
        numbers[DIRTY] += numbers[FENCED] - waiting
        numbers[FENCED] = waiting
        return {state.name.lower(): numbers[state] for state in BlockState}

    def _waiting(self) -> int:
        """Blocks that ended and wait for a fence; a row says FENCED until its scrub is answered."""
        fenced = self.queue.fenced()
        return sum(
            int(np.count_nonzero((self.generation[blocks] == generations) & (self.state[blocks] == FENCED)))
            for blocks, generations in fenced
        )
