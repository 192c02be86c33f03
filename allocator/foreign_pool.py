"""The blocks of a pool that an engine allocates by itself: their states, references, holds and ends, as arrays.

The engine says what it did with block indices; this keeps custody of them. Numbers in, events out: it knows no policy,
SQL or HTTP. Zeroing is *stream-ordered* (design §6): a block may be handed out while its scrub is still on its way,
because the scrub is enqueued on the engine's stream before anything else is written.

X1  A block is handed out only when nobody uses it: not ACTIVE, not CACHED. Anything else raises `IsolationError`.
X2  Everything that ended is in the next scrub order, so no step writes to a block before the scrub of what it held.
X3  A generation changes at each hand-out (L3); a receipt, a hold or an end of an older generation touches no newer one.
X4  A block whose last reference is gone stays only while it is indexed, held, before its ceiling and in an open domain;
    else its custody ends and the engine is told to forget it. No hold or attach moves a ceiling (L8).
X5  Where a chain's parent ends, its cached descendants end with it (L7).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.block import ACTIVE, CACHED, CLEAN, DIRTY, FENCED, QUARANTINED, Blocks, BlockState
from kvcustody.allocator.domain import Domain
from kvcustody.allocator.eviction import EvictionQueue, Lru
from kvcustody.allocator.fence import Fences
from kvcustody.allocator.foreign_residency import NO_BLOCKS, ForeignResidency
from kvcustody.allocator.limits import Limits
from kvcustody.allocator.memory import ScrubResult
from kvcustody.allocator.node import NEVER_US
from kvcustody.allocator.pool import Custody, LetGo, Partition, Scrubbed
from kvcustody.allocator.quota import Account
from kvcustody.allocator.scrub_queue import ScrubOrder, ScrubQueue
from kvcustody.errors import CapacityError, IsolationError

_NO_BLOCK = -1
_DOMAINS_MIN = 1024  # domains kept before those without a block are dropped


class ForeignPool:
    """Custody of `blocks` physical blocks over `shards` workers. `reserved` indices are never anybody's."""

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
        self.state: NDArray[np.uint8] = np.full(blocks, DIRTY, dtype=np.uint8)
        self.generation: NDArray[np.int64] = np.zeros(blocks, dtype=np.int64)
        self.refs: NDArray[np.int32] = np.zeros(blocks, dtype=np.int32)
        self.holds: NDArray[np.int32] = np.zeros(blocks, dtype=np.int32)
        self.tag: NDArray[np.int32] = np.zeros(blocks, dtype=np.int32)  # of the block's domain
        self.indexed: NDArray[np.bool_] = np.zeros(blocks, dtype=np.bool_)
        self.hold_until_us: NDArray[np.int64] = np.zeros(blocks, dtype=np.int64)
        self.ceiling_us: NDArray[np.int64] = np.zeros(blocks, dtype=np.int64)
        self.born_us: NDArray[np.int64] = np.zeros(blocks, dtype=np.int64)
        self.used: NDArray[np.int64] = np.zeros(
            blocks, dtype=np.int64
        )  # when last CACHED: the order of eviction
        self.parent: NDArray[np.int64] = np.full(blocks, _NO_BLOCK, dtype=np.int64)
        self.parent_generation: NDArray[np.int64] = np.zeros(blocks, dtype=np.int64)
        self.children: NDArray[np.int32] = np.zeros(blocks, dtype=np.int32)
        self.next_generation = 1
        self.fences = Fences()
        self.fence_bound_us = fence_bound_us
        size = blocks - len(self.reserved)
        self.partition = Partition(0, size, 0, 0)
        self.accounts: dict[str, Account] = {}
        self.domains: dict[int, Domain] = {}
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
        partition = self.partition
        if account is None:
            account = self.accounts[name] = Account(name, partition, EvictionQueue(Lru()))
            partition.accounts.append(account)
        partition.over_blocks -= account.over_blocks()
        partition.charged_over -= account.charged_over_blocks()
        partition.common_blocks += account.guaranteed_blocks - guaranteed
        account.guaranteed_blocks = guaranteed
        account.cap_blocks = partition.size if cap is None else min(cap, partition.size)
        account.borrow = borrow
        account.residency_cap = residencies
        partition.over_blocks += account.over_blocks()
        partition.charged_over += account.charged_over_blocks()
        return account

    def domain(
        self,
        owner: Account,
        *,
        label: object = None,
        idle_us: int = NEVER_US,
        absolute_us: int = NEVER_US,
        scrub_within_us: int = NEVER_US,
        verify_share: float = 0.0,
        is_segment: bool = False,
    ) -> Domain:
        """A new domain charged to `owner`; the pool keeps it while one of its blocks lives."""
        domain = Domain(
            self._next_domain,
            owner,
            label=label,
            idle_us=idle_us,
            absolute_us=absolute_us,
            scrub_within_us=scrub_within_us,
            verify_share=verify_share,
            is_segment=is_segment,
        )
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

    # -- what the engine does -----------------------------------------------------------------------------------------

    def hand_out(self, residency: ForeignResidency, blocks: Blocks, domain: Domain, now_us: int) -> None:
        """`blocks` are the residency's from now on, written by it alone (X1, X3)."""
        states = self.state[blocks]
        if states.tobytes().strip(_FREE):
            self._refuse_hand_out(blocks, states)
        if (states == FENCED).any():
            self.queue.release_fence(blocks[states == FENCED], now_us)
        count = len(blocks)
        first = self.next_generation
        self.next_generation = first + count
        self.state[blocks] = ACTIVE
        self.generation[blocks] = np.arange(first, first + count)
        self.refs[blocks] = 1
        self.tag[blocks] = domain.tag
        self.ceiling_us[blocks] = min(now_us + domain.absolute_us, residency.ceiling_us)
        self.born_us[blocks] = now_us
        self.holds[blocks] = 0
        self.parent[blocks] = _NO_BLOCK
        self.children[blocks] = 0
        self.domains[domain.tag] = domain
        if len(self.domains) > self._domains_max:
            self._prune_domains()
        domain.owner.charge(count)
        residency.handed.append((blocks, first))

    def _refuse_hand_out(self, blocks: Blocks, states: NDArray[np.uint8]) -> None:
        for block, state in zip(blocks.tolist(), states.tolist(), strict=True):
            if state in (ACTIVE, CACHED, QUARANTINED):
                raise IsolationError(
                    f"block `{block}` is {BlockState(state).name} and cannot be handed out: the engine must "
                    "free it and forget its key first",
                    block=block,
                    state=BlockState(state).name,
                )

    def hand_out_each(self, residencies: Sequence[ForeignResidency], blocks: Blocks, now_us: int) -> None:
        """`hand_out` of one block each, in the residencies' own domains: the growth of a decode step."""
        states = self.state[blocks]
        if states.tobytes().strip(_FREE):
            self._refuse_hand_out(blocks, states)
        if (states == FENCED).any():
            self.queue.release_fence(blocks[states == FENCED], now_us)
        count = len(blocks)
        first = self.next_generation
        self.next_generation = first + count
        self.state[blocks] = ACTIVE
        self.generation[blocks] = np.arange(first, first + count)
        self.refs[blocks] = 1
        self.born_us[blocks] = now_us
        self.holds[blocks] = 0
        self.parent[blocks] = _NO_BLOCK
        self.children[blocks] = 0
        tags, ceilings = [], []
        for number, residency in enumerate(residencies):
            domain = residency.domain
            tags.append(domain.tag)
            ceilings.append(min(now_us + domain.absolute_us, residency.ceiling_us))
            domain.owner.charge(1)
            self.domains[domain.tag] = domain
            residency.handed.append((blocks[number : number + 1], first + number))
        self.tag[blocks] = tags
        self.ceiling_us[blocks] = ceilings

    def attachable(self, blocks: Blocks, expected: NDArray[np.int32] | int, now_us: int) -> int:
        """How many leading blocks may be attached now: in the expected domain, indexed, held, before their ceiling."""
        fine = (self.tag[blocks] == expected) & self.indexed[blocks] & (self.ceiling_us[blocks] > now_us)
        idle = self.refs[blocks] == 0
        if idle.any():
            fine &= ~idle | ((self.state[blocks] == CACHED) & (self.hold_until_us[blocks] > now_us))
        if fine.all():
            return len(blocks)
        return int(fine.argmin())

    def attach(self, residency: ForeignResidency, blocks: Blocks, now_us: int) -> None:
        """References on cached or running blocks. Raises `IsolationError` where one is neither."""
        states = self.state[blocks]
        if states.tobytes().strip(_HELD):
            at = int(np.flatnonzero((states != ACTIVE) & (states != CACHED))[0])
            raise IsolationError(
                f"block `{int(blocks[at])}` is {BlockState(int(states[at])).name} and cannot be attached",
                block=int(blocks[at]),
            )
        self.state[blocks] = ACTIVE
        self.refs[blocks] += 1
        ceiling = int(self.ceiling_us[blocks[-1]])
        residency.ceiling_us = min(residency.ceiling_us, ceiling)
        residency.attached = (
            blocks if not len(residency.attached) else np.concatenate((residency.attached, blocks))
        )
        residency.attached_generations = self.generation[residency.attached]

    def publish(self, blocks: Blocks, before: int = _NO_BLOCK, *, chained: bool = True) -> None:
        """`blocks` are in the engine's index; each continues the one before it, the first continues `before`."""
        self.indexed[blocks] = True
        if not chained:
            self.parent[blocks] = _NO_BLOCK
            return
        self.parent[blocks[0]] = before
        self.parent[blocks[1:]] = blocks[:-1]
        parents = blocks[:-1] if before < 0 else np.concatenate(([before], blocks[:-1]))
        if len(parents):
            self.parent_generation[blocks[-len(parents) :]] = self.generation[parents]
            self.children[parents] += 1

    def publish_each(self, blocks: Blocks, before: Blocks) -> None:
        """`publish` of one block each; `before[i]` is the block that `blocks[i]` continues, or -1."""
        self.indexed[blocks] = True
        chained = before >= 0
        if not chained.all():
            blocks, before = blocks[chained], before[chained]
        self.parent[blocks] = before
        self.parent_generation[blocks] = self.generation[before]
        np.add.at(self.children, before, 1)

    def unpublish(self, blocks: Blocks, cause: str, now_us: int) -> list[int]:
        """The engine forgot these; returns further blocks that it must forget too (descendants, X5)."""
        known = blocks[self.indexed[blocks]]
        self.indexed[known] = False
        unused = known[self.state[known] == CACHED]
        if not len(unused):
            return []
        self.evicted[cause] = self.evicted.get(cause, 0) + len(unused)
        return self._end(unused, cause, now_us, now_us, told=True)

    def let_go(self, residency: ForeignResidency, blocks: Blocks, now_us: int) -> list[int]:
        """A running residency gives some of its blocks back; returns what the engine must forget."""
        mine = np.isin(blocks, residency.blocks())
        if not mine.all():
            self._refuse_release(residency, blocks[~mine])
        self.let_go_events.append(
            LetGo(residency, blocks, self.generation[blocks], residency.recorded_until, now_us)
        )
        residency.passed.append(self.generation[blocks])
        residency.drop(blocks)
        return self._unreference(blocks, "passed", now_us)

    def release(self, residency: ForeignResidency, cause: str, now_us: int) -> list[int]:
        """The residency's request ended; holds what policy allows. Returns what the engine must forget (X4)."""
        blocks = residency.blocks()
        residency.is_running = False
        if not len(blocks):
            return []
        self._place_hold(residency, blocks, now_us)
        return self._unreference(blocks, cause, now_us)

    def _refuse_release(self, residency: ForeignResidency, blocks: Blocks) -> None:
        raise IsolationError(
            f"request `{residency.request_id}` does not hold block `{int(blocks[0])}`", block=int(blocks[0])
        )

    def _unreference(self, blocks: Blocks, cause: str, now_us: int) -> list[int]:
        refs = self.refs[blocks] - 1
        if refs.size and int(refs.min()) < 0:
            raise IsolationError(f"block `{int(blocks[int(refs.argmin())])}` was released twice")
        self.refs[blocks] = refs
        last = blocks[refs == 0]
        if not len(last):
            return []
        self._clock += 1
        stays = self.indexed[last] & (self.holds[last] > 0) & (self.ceiling_us[last] > now_us)
        kept = last[stays]
        if len(kept):
            self.state[kept] = CACHED
            self.used[kept] = self._clock
        if len(kept) == len(last):
            return []
        gone = last[~stays]
        passed = self.ceiling_us[gone] <= now_us
        if passed.any():
            forget = self._end(gone[passed], "ceiling", now_us, now_us)
            rest = gone[~passed]
            return forget + (self._end(rest, cause, now_us, now_us) if len(rest) else [])
        return self._end(gone, cause, now_us, now_us)

    # -- holds --------------------------------------------------------------------------------------------------------

    def _place_hold(self, residency: ForeignResidency, blocks: Blocks, now_us: int) -> None:
        domain = residency.domain
        if not (domain.cacheable and domain.is_open and residency.publishes):
            return
        held = blocks[self.indexed[blocks]]
        tags = self.tag[held]
        if len(tags) and bool((tags != domain.tag).any()):
            held = held[self._holdable(tags, residency.account)]
        if not len(held):
            return
        idle = min(self.domains[tag].idle_us for tag in set(self.tag[held].tolist()))
        deadline = min(now_us + idle, int(self.ceiling_us[held].min()))
        if deadline <= now_us:
            return
        self._replace_extended(
            residency, int(residency.attached[-1]) if len(residency.attached) else _NO_BLOCK
        )
        residency.hold(held, self.generation[held], deadline)
        self.holds[held] += 1
        np.maximum(self.hold_until_us[held], deadline, out=(until := np.empty(len(held), dtype=np.int64)))
        self.hold_until_us[held] = until
        account = residency.account
        account.partition.wheel.add(residency)
        account.residencies.add(residency)
        last = int(held[-1])
        self._tips[last, int(self.generation[last])] = residency

    def _holdable(self, tags: NDArray[np.int32], account: Account) -> NDArray[np.bool_]:
        """Readers through a grant get references, not holds; a segment's blocks are held by whoever reads them."""
        fine = {
            tag
            for tag in set(tags.tolist())
            if (domain := self.domains.get(tag)) is not None
            and (domain.owner is account or domain.is_segment)
        }
        return np.isin(tags, list(fine))

    def _replace_extended(self, residency: ForeignResidency, attached_last: int) -> None:
        """The hold that this residency extends, of the same principal and domain, is no longer needed."""
        if attached_last < 0:
            return
        older = self._tips.get((attached_last, int(self.generation[attached_last])))
        if older is None or not older.is_held or older.principal != residency.principal:
            return
        if older.domain is residency.domain:
            self._forget(older)
            valid = self.generation[older.held] == older.held_generations
            self.holds[older.held[valid]] -= 1

    def _forget(self, hold: ForeignResidency) -> None:
        hold.is_held = False
        hold.account.partition.wheel.remove(hold)
        hold.account.residencies.remove(hold)
        tip = (int(hold.held[-1]), int(hold.held_generations[-1]))
        if self._tips.get(tip) is hold:
            del self._tips[tip]

    def lapse(self, hold: ForeignResidency, cause: str, now_us: int) -> list[int]:
        """End one hold; blocks without another hold or reference end. Returns what the engine must forget."""
        self._forget(hold)
        valid = self.generation[hold.held] == hold.held_generations
        held = hold.held if valid.all() else hold.held[valid]
        left = self.holds[held] - 1
        self.holds[held] = left
        over = held[(left == 0) & (self.state[held] == CACHED)]
        if not len(over):
            return []
        if cause != "expired":
            return self._end(over, cause, now_us, now_us)
        forget: list[int] = []
        dues = self.hold_until_us[over]  # the latest of its holds, whichever of them was swept last
        for due in np.unique(dues).tolist():
            forget += self._end(over[dues == due], cause, due, now_us)
        return forget

    def sweep(self, now_us: int, at_most: int) -> list[int]:
        """Lapse holds whose deadline has passed, at most so many. Returns what the engine must forget."""
        forget: list[int] = []
        wheel = self.partition.wheel
        for _ in range(at_most):
            hold = wheel.take_due(now_us)
            if hold is None:
                break
            assert isinstance(hold, ForeignResidency)
            self.expired_residencies += 1
            forget += self.lapse(hold, "expired", now_us)
        return forget

    def over_residencies(self, account: Account, now_us: int) -> list[int]:
        """Lapse the oldest holds of an account that has more than its cap."""
        forget: list[int] = []
        while len(account.residencies) > account.residency_cap:
            oldest = account.residencies.oldest
            assert isinstance(oldest, ForeignResidency)
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

    def end_cached(self, blocks: Blocks, cause: str, now_us: int) -> list[int]:
        """End CACHED blocks by our own decision. Returns what the engine must forget."""
        cached = blocks[self.state[blocks] == CACHED]
        if not len(cached):
            return []
        self.evicted[cause] = self.evicted.get(cause, 0) + len(cached)
        return self._end(cached, cause, now_us, now_us)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _end(self, blocks: Blocks, cause: str, due_us: int, now_us: int, *, told: bool = False) -> list[int]:
        """End the custody of unreferenced blocks and, as unreachable, of their cached descendants (X5).

        Returns the indexed ones among them, which the engine must forget; with `told`, it knows of `blocks` itself.
        """
        forget: list[int] = [] if told else blocks[self.indexed[blocks]].tolist()
        self._end_flat(blocks, cause, due_us, now_us)
        wave = self._orphans(blocks)
        while len(wave):
            forget += wave.tolist()
            dues = np.minimum(
                self.hold_until_us[wave], now_us
            )  # until now it could be reached, while it was held
            for due in np.unique(dues).tolist():
                self._end_flat(wave[dues == due], "unreachable", due, now_us)
            wave = self._orphans(wave)
        return forget

    def _orphans(self, ended: Blocks) -> Blocks:
        """CACHED blocks that continue one of those that ended."""
        left = ended[self.children[ended] > 0]
        if not len(left):
            return NO_BLOCKS
        cached = np.flatnonzero(self.state == CACHED)
        cached = cached[np.isin(self.parent[cached], left)]
        orphans: Blocks = cached[self.parent_generation[cached] == self.generation[self.parent[cached]]]
        return orphans

    def _leave_parents(self, blocks: Blocks) -> None:
        """What ends is nobody's child any more."""
        with_parent = blocks[self.parent[blocks] >= 0]
        if len(with_parent):
            parents = self.parent[with_parent]
            same = self.parent_generation[with_parent] == self.generation[parents]
            np.subtract.at(self.children, parents[same], 1)
            self.parent[with_parent] = _NO_BLOCK

    def _prune_domains(self) -> None:
        live = set(np.unique(self.tag[(self.state != CLEAN) & (self.state != DIRTY)]).tolist())
        live.update(custody.domain.tag for custody in self.queue.custodies() if custody.domain is not None)
        self.domains = {tag: domain for tag, domain in self.domains.items() if tag in live}
        self._domains_max = max(_DOMAINS_MIN, 2 * len(self.domains))

    def _end_flat(self, blocks: Blocks, cause: str, due_us: int, now_us: int) -> None:
        self._leave_parents(blocks)
        self.state[blocks] = FENCED
        self.indexed[blocks] = False
        self.holds[blocks] = 0
        self.hold_until_us[blocks] = 0
        tags = self.tag[blocks]
        fence = self.fences.last if len(self.fences) else 0
        first = int(tags[0])
        if len(tags) == 1 or not bool((tags != first).any()):
            groups: list[tuple[Domain, Blocks]] = [(self.domains[first], blocks)]
        else:
            groups = [(self.domains[tag], blocks[tags == tag]) for tag in dict.fromkeys(tags.tolist())]
        for domain, run in groups:
            domain.owner.charge(-len(run))
            custody = Custody(run, self.generation[run], domain.owner, domain, cause, due_us, now_us, fence)
            self.queue.add(custody)

    # -- steps --------------------------------------------------------------------------------------------------------

    def order(self, now_us: int) -> ScrubOrder | None:
        """The scrubs that the coming step must do first: everything that ended and whose fences have retired (X2)."""
        for custody in self.queue.reclaim(self.fences, now_us):
            current = self.generation[custody.blocks] == custody.generations
            still = custody.blocks[current & (self.state[custody.blocks] == FENCED)]
            self.state[still] = DIRTY
        return self.queue.order()

    def scrubbed(self, number: int, shard: int, results: Sequence[ScrubResult]) -> Blocks:
        """One shard's answer to an order. Blocks become CLEAN with the last shard's; returns those that failed."""
        done, failed = self.queue.answer(number, shard, results)
        for custody in done:
            same = (self.generation[custody.blocks] == custody.generations) & (
                self.state[custody.blocks] == DIRTY
            )
            self.state[custody.blocks[same]] = CLEAN
        if len(failed):
            unused = failed[(self.state[failed] != ACTIVE) & (self.state[failed] != CACHED)]
            self.state[unused] = QUARANTINED
        return failed

    def take_scrubbed(self) -> list[Scrubbed]:
        """Evidence of the answered launches since the last call."""
        return self.queue.take_scrubbed()

    # -- limits -------------------------------------------------------------------------------------------------------

    def set_limits(self, changed: Mapping[Domain, Limits], now_us: int) -> None:
        """New limits for live domains; a ceiling or deadline only ever moves earlier (allocator.limits, N1–N3)."""
        shorter: dict[int, int] = {}
        for domain, limits in changed.items():
            shorter[domain.tag] = max(0, domain.idle_us - limits[0])
            domain.idle_us, domain.absolute_us, domain.scrub_within_us, domain.verify_share = limits
            if domain.absolute_us < NEVER_US:
                mine = np.flatnonzero(self.tag == domain.tag)
                self.ceiling_us[mine] = np.minimum(
                    self.ceiling_us[mine], self.born_us[mine] + domain.absolute_us
                )
        self._lower_descendants()
        for hold in [hold for account in self.accounts.values() for hold in account.residencies.values()]:
            assert isinstance(hold, ForeignResidency)
            valid = hold.held[self.generation[hold.held] == hold.held_generations]
            if not len(valid):
                continue
            earlier = max((shorter.get(tag, 0) for tag in set(self.tag[valid].tolist())), default=0)
            deadline = min(hold.deadline_us - earlier, int(self.ceiling_us[valid].min()))
            if deadline < hold.deadline_us:
                wheel = hold.account.partition.wheel
                wheel.remove(hold)
                hold.deadline_us = max(deadline, now_us)
                wheel.add(hold)
        self.recount_holds()

    def _lower_descendants(self) -> None:
        """No ceiling above its parent's (L8): in waves, as many as the longest chain is deep at most."""
        while True:
            live = np.flatnonzero((self.state == CACHED) | (self.state == ACTIVE))
            live = live[self.parent[live] >= 0]
            parents = self.parent[live]
            same = self.parent_generation[live] == self.generation[parents]
            live, parents = live[same], parents[same]
            above = self.ceiling_us[live] > self.ceiling_us[parents]
            if not above.any():
                return
            self.ceiling_us[live[above]] = self.ceiling_us[parents[above]]

    def recount_holds(self) -> None:
        """Find every block's latest hold deadline again, after holds lapsed or moved out of their turn."""
        self.hold_until_us[:] = 0
        for account in self.accounts.values():
            for hold in account.residencies.values():
                assert isinstance(hold, ForeignResidency)
                valid = hold.held[self.generation[hold.held] == hold.held_generations]
                self.hold_until_us[valid] = np.maximum(self.hold_until_us[valid], hold.deadline_us)

    def counts(self) -> dict[str, int]:
        """Blocks by state, without the reserved ones."""
        numbers = np.bincount(self.state, minlength=len(BlockState)).tolist()
        numbers[CLEAN] -= len(self.reserved)
        return {state.name.lower(): numbers[state] for state in BlockState}


_FREE = bytes([CLEAN, DIRTY, FENCED])
_HELD = bytes([ACTIVE, CACHED])
