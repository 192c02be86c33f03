"""The block manager: admission, publication, decoding, forks, release and expiry over one pool.

    manager = BlockManager(memory, blocks=1024)
    manager.boot()                                             # zero every block
    acme = manager.account("acme", guaranteed=100, cap=500)
    domain = manager.domain(acme, idle_us=60_000_000)          # what may be reused together
    match = manager.match_prefix(plan, prompt, now_us)         # the longest prefix that may be reused
    residency = manager.residency(acme, domain, principal, facts, now_us)
    sequence = manager.allocate(request_id, match, prompt, residency, now_us)
    manager.commit(sequence, computed_tokens, now_us)          # publish whole computed blocks
    manager.extend_many(slots, tokens, now_us)                 # room for one more token each
    manager.release(sequence, now_us, "finished")              # hold what policy allows, end the rest
    manager.step(now_us)                                       # expire, scrub, refill the clean reserve

Numbers in, events out: it knows no policy, SQL or HTTP. One thread owns it. Times are boot-time microseconds and are
always passed in.

- Attach happens before allocation, so making room can never take the path that is about to be used.
- Release is idempotent: a sequence leaves its slot once, whatever order finish, abort and preemption come in (L4).
- A request that cannot be served changes nothing for anybody else.
- An admission that fails on its way leaves nothing: what it attached and was handed goes back as it was (`withdraw`).
- New limits move a ceiling or a deadline only earlier (L8); wider ones hold for what is written or released later.
- From then on attach compares the new times, so nothing that they end is served, swept or not.
- A hold whose time has passed lapses with the next sweeps, due now: what was lawful until now is not late. So no
  ceiling moves before now, and no hold ends later than it would have.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.manager.integrity import sum_published, withdraw_changed
from kvcustody.allocator.manager.reclaim import POOL_FULL, Reclaimer
from kvcustody.allocator.pool.accounting import (
    Account,
    Domain,
    DomainFacts,
    DomainLimits,
    OwnerData,
    PoolPartition,
)
from kvcustody.allocator.pool.block_state import ACTIVE, CACHED, EMPTY, NEVER_US, Blocks
from kvcustody.allocator.pool.hold_table import HoldList
from kvcustody.allocator.pool.memory_protocol import Memory
from kvcustody.allocator.pool.options import DEFAULT_OPTIONS, PoolOptions, cut, reserve_of
from kvcustody.allocator.pool.pool import Pool
from kvcustody.allocator.prefix.copy_on_write import Forks
from kvcustody.allocator.prefix.decode_table import DecodeTable
from kvcustody.allocator.prefix.eviction_policy import EvictionPolicy, Lru
from kvcustody.allocator.prefix.key_chain import keys_of
from kvcustody.allocator.prefix.longest_prefix import PrefixMatch, Prompt, ReadPlan, find_longest_prefix
from kvcustody.allocator.prefix.node import Node, PathResidency
from kvcustody.allocator.prefix.publish import Publication
from kvcustody.allocator.prefix.sequence import RunningSequence
from kvcustody.allocator.prefix.tree import PrefixTree
from kvcustody.errors import CapacityError, HandleError

RESIDENCY_BITS = 40  # of a residency's number; above it stands its pool's, and both are below 2^53
POOLS_MAX = 1 << 53 - RESIDENCY_BITS


class BlockManager:
    """The blocks of one pool, from hand-out to CLEAN: the pool, its prefix tree, its accounts and its running
    sequences.
    """

    def __init__(
        self,
        memory: Memory,
        blocks: int,
        options: PoolOptions = DEFAULT_OPTIONS,
        *,
        policy: Callable[[], EvictionPolicy] = Lru,
        partitions: dict[str, int] | None = None,
        number: int = 0,
    ) -> None:
        if blocks < 1:
            raise CapacityError(f"a pool needs at least one block, got `{blocks}`", blocks=blocks)
        self.options = options
        self.number = number  # which pool of its process this is
        self.block_bytes = 4 * options.block_tokens
        self._partitions = cut(blocks, options, partitions)
        self.pool = Pool(memory, blocks, list(self._partitions.values()))
        self.tree = PrefixTree(self.pool, policy)
        self.hold_table = self.tree.hold_table
        self.reclaimer = Reclaimer(self.pool, self.tree, options)
        self.decode = DecodeTable(options.block_tokens)
        self.publication = Publication(self.pool, self.tree)
        self.forks = Forks(self.pool, self.tree, self.decode)
        self.accounts: dict[str, Account] = {}
        self._next_domain = 1
        self.expired_residencies = 0
        self.behind = False  # the newest sweep lapsed as many holds as it may, so more may be due
        self._next_residency = (number << RESIDENCY_BITS) + 1  # no two pools of a process number one alike
        self._forked = 0  # sequences on a shared tail
        self._handed: list[tuple[Account, Blocks]] = []  # what the newest `allocate` was handed, in order

    def boot(self) -> int:
        """Zero every block before the first hand-out. Returns the number of blocks that became CLEAN."""
        cleaned = sum(self.pool.scrub(partition, partition.size) for partition in self.pool.partitions)
        return cleaned + self.pool.synchronize()

    def account(
        self,
        name: str,
        *,
        guaranteed: int = 0,
        cap: int | None = None,
        borrow: bool = True,
        residencies: int = 1 << 30,
    ) -> Account:
        """Return the account `name` with these limits, created on first use in its own partition or the common one."""
        account = self.accounts.get(name)
        if account is None:
            partition = self._partitions.get(name, self._partitions.get(""))
            if partition is None:
                raise CapacityError(f"tenant `{name}` has no partition in this pool", tenant=name)
            account = self.accounts[name] = Account(name, partition)
            self.tree.add_account(account)
            partition.accounts.append(account)
        account.limit(guaranteed=guaranteed, cap=cap, borrow=borrow, residencies=residencies)
        return account

    def forget_account(self, name: str) -> None:
        """Forget a tenant that holds nothing and is charged for nothing; its partition becomes free."""
        account = self.accounts[name]
        assert not account.used_blocks, f"tenant `{name}` is charged for {account.used_blocks} blocks"
        account.limit(guaranteed=0, cap=0, borrow=False, residencies=0)
        self.tree.forget_account(account)
        account.partition.accounts.remove(account)
        del self.accounts[name]

    def give_partition(self, before: str, name: str) -> None:
        """Give the partition of `before`, which has left, to `name`."""
        assert before not in self.accounts
        self._partitions[name] = self._partitions.pop(before)

    def clean_blocks(self, name: str) -> int:
        """Return how many blocks of an account's partition can be handed out now."""
        return self._partitions[name].clean_count

    def domain(self, owner: Account, **facts: Unpack[DomainFacts]) -> Domain:
        """Return a new domain charged to `owner`. It lives as long as a reader's plan or its own blocks refer to it."""
        domain = Domain(self._next_domain, owner, windows=self.options.windows, **facts)
        self._next_domain += 1
        return domain

    def residency(
        self,
        account: Account,
        domain: Domain,
        principal: Hashable,
        facts: OwnerData | None,
        now_us: int,
        trace: str = "",
    ) -> PathResidency:
        """Return a new residency that does not hold anything yet."""
        id_ = self._next_residency
        self._next_residency = id_ + 1
        return PathResidency(id_, account, domain, principal, facts, now_us, trace)

    def partition_blocks(self, name: str) -> int:
        """Return the size of the partition that belongs, or belonged, to `name`."""
        return self._partitions[name].size

    def has_partition(self, name: str) -> bool:
        """Return whether `name` has a partition of its own."""
        return name in self._partitions

    def add_partition(self, name: str, size: int) -> PoolPartition:
        """Return a partition for `name` made of blocks outside all partitions; it is zeroed before use."""
        first = sum(partition.size for partition in self.pool.partitions)
        if first + size > self.pool.blocks:
            raise CapacityError(
                f"tenant `{name}`: a partition of {size} blocks does not fit, {self.pool.blocks - first} are left",
                tenant=name,
                blocks=size,
            )
        partition = self._partitions[name] = PoolPartition(
            first, size, *reserve_of(size, self.pool.blocks, self.options)
        )
        self.pool.add_partition(partition)
        self.pool.scrub(partition, size)
        self.pool.synchronize()
        return partition

    def live_blocks(self) -> int:
        """Return the number of blocks in ACTIVE or CACHED custody."""
        return self.pool.counts[ACTIVE] + self.pool.counts[CACHED]

    # -- admission ---------------------------------------------------------------------------------------------

    def match_prefix(self, plan: ReadPlan, prompt: Prompt, now_us: int) -> PrefixMatch:
        """Return the longest prefix that `plan` lets this prompt reuse.

        Changes nothing, but where blocks are compared with their checksums: what has changed since it was published is
        withdrawn, and the match is made without it.
        """
        match = find_longest_prefix(self.tree, plan, prompt, now_us)
        sums, tree = self.pool.sums, self.tree
        if sums is not None:
            before = sums.checked_blocks
            while withdraw_changed(sums, tree, self.decode, match, plan.own.domain, now_us):
                match, before = find_longest_prefix(tree, plan, prompt, now_us), sums.checked_blocks
            match.checked_blocks = min(match.hit_blocks, sums.checked_blocks - before)
        return match

    def allocate(
        self,
        id_: Hashable,
        match: PrefixMatch,
        prompt: Prompt,
        residency: PathResidency,
        now_us: int,
        *,
        active_us: int = NEVER_US,
        lookahead_tokens: int = 0,
        can_preempt: bool = False,
    ) -> RunningSequence | str:
        """Attach the matched blocks and allocate the rest; return the reason if there is no room."""
        tree = self.tree
        total = -(-(prompt.tokens + lookahead_tokens) // self.options.block_tokens)
        partition = residency.account.partition
        over = partition.over_blocks
        sequence = RunningSequence(id_, residency, self.number)
        leaf = match.leaf
        parts: list[Blocks] = []
        self._handed = []
        if leaf is not None:
            if match.position < leaf.length:
                leaf = tree.split(leaf, match.position)
            parts = tree.attach(leaf, now_us)
        sequence.leaf = leaf
        try:
            if over < partition.over_blocks > partition.common_blocks and not can_preempt:
                refused: str | None = (
                    POOL_FULL  # reviving this much cache would eat into a guarantee (rule 3 of `accounting`)
                )
            else:
                refused = self._allocate_spans(sequence, match, parts, total, now_us, can_preempt)
            if refused is not None:
                if leaf is not None:
                    tree.release(leaf, None, now_us, "deferred")
                return refused
            sequence.hit_blocks = sequence.published = match.hit_blocks
            if now_us + active_us < NEVER_US:
                sequence.active_until_us = now_us + active_us
            else:
                sequence.active_until_us = NEVER_US
            self._key(sequence, match, prompt)
            self.decode.add(sequence, prompt.tokens, prompt.data[prompt.whole * self.block_bytes :])
        except Exception:  # whatever ends the process needs no undoing
            self.withdraw(sequence, now_us)
            raise
        return sequence

    def withdraw(self, sequence: RunningSequence, now_us: int) -> None:
        """Undo the newest `allocate` before anybody learned its answer: no slot, block, reference or charge remains."""
        if sequence.slot >= 0:
            self.decode.remove(sequence)
        handed, self._handed = self._handed, []
        for account, blocks in reversed(handed):
            account.charge_active(-len(blocks))
            self.pool.take_back(account.partition, blocks, account)
        leaf, sequence.leaf = sequence.leaf, None
        if leaf is not None:
            self.tree.release(leaf, None, now_us, "deferred")

    def _allocate_spans(
        self,
        sequence: RunningSequence,
        match: PrefixMatch,
        parts: list[Blocks],
        total: int,
        now_us: int,
        can_preempt: bool,
    ) -> str | None:
        """Hand out what each span needs, to the account that owns the span."""
        spans = match.spans
        if len(spans) == 1:
            wanted = [(spans[0].domain.owner, total - match.hit_blocks)] if total > match.hit_blocks else []
        else:
            wanted = [
                (span.domain.owner, min(span.last, total) - span.first)
                for span in spans
                if min(span.last, total) > span.first
            ]
        groups = 1 + len(self.options.windows)
        if len(wanted) == 1:
            refused = self.reclaimer.ensure(wanted[0][0], wanted[0][1] * groups, now_us, can_preempt)
        else:
            refused = self.reclaimer.ensure_all(wanted, groups, now_us, can_preempt)
        if refused is not None:
            return refused
        parts.reverse()
        sequence.first_generation = self.pool.next_generation
        for account, count in wanted:
            parts.append(self._hand_to_request(account, count))
        sequence.table = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else EMPTY
        sequence.block_count = sequence.admitted_blocks = len(sequence.table)
        if self.options.windows:
            self.publication.open_windows(sequence, wanted, match.hit_blocks, self._hand_to_request)
        sequence.recorded_until = self.pool.next_generation
        sequence.spans = match.spans
        return None

    def _key(self, sequence: RunningSequence, match: PrefixMatch, prompt: Prompt) -> None:
        """Make the keys of the part that will be written; they are published when they are computed."""
        span = match.spans[-1]
        if span.state is None or not span.domain.cacheable:
            span.state = None
            return
        first, keys = span.first, b""
        if match.pending_key is not None:
            keys = match.pending_key
            first += 1
        span.keys = keys + keys_of(span.state, prompt.data, first, prompt.whole, prompt.block_bytes, prompt.extras)

    def _hand_out(self, account: Account, count: int) -> Blocks:
        blocks = self.pool.hand_out(account.partition, count, account)
        account.charge_active(count)
        return blocks

    def _hand_to_request(self, account: Account, count: int) -> Blocks:
        blocks = self.pool.hand_out(account.partition, count, account)
        account.charge_active(count)
        self._handed.append((account, blocks))
        return blocks

    # -- running sequences -------------------------------------------------------------------------------------

    def commit(self, sequence: RunningSequence, computed_tokens: int, now_us: int) -> None:
        """Record that the first `computed_tokens` tokens have their K/V, and publish the whole blocks among them
        (L10).
        """
        slot = sequence.slot
        if slot < 0:
            return
        if computed_tokens > int(self.decode.length[slot]):
            raise CapacityError(
                f"request `{sequence.id}`: `{computed_tokens}` tokens computed, "
                f"`{int(self.decode.length[slot])}` admitted"
            )
        self.decode.computed[slot] = computed_tokens
        self.publication.publish(sequence, computed_tokens // self.options.block_tokens, now_us)

    def publish_restored(
        self, sequence: RunningSequence, blocks: int, born_us: int, ceiling_us: int, now_us: int
    ) -> None:
        """Publish the sequence's first `blocks`, all whole; those not yet published were restored from a tier.

        What it computes from them lives no longer than they may (L8).
        """
        slot, tokens = sequence.slot, blocks * self.options.block_tokens
        self.decode.computed[slot] = max(tokens, int(self.decode.computed[slot]))
        sequence.ceiling_us = min(sequence.ceiling_us, ceiling_us)
        self.publication.publish(sequence, blocks, now_us, born_us)

    def extend_many(
        self, slots: NDArray[np.int64], tokens: NDArray[np.int32] | None, now_us: int
    ) -> list[RunningSequence]:
        """Make room for one more accepted token in each slot; all earlier ones are computed.

        `tokens`: their ids, int32 of the same shape, or None where the engine withholds them (then the blocks are
        never published). Returns the sequences that got no room; they are unchanged.
        """
        table, size = self.decode, self.options.block_tokens
        length = table.length[slots]
        if not length.all():
            raise HandleError(f"slots `{slots[length == 0].tolist()}` are not running")
        stalled = self._copy_on_write(slots, now_us) if self._forked else []
        stalled += self._grow(slots[length >= table.capacity[slots]], now_us)
        if stalled:
            keep = ~np.isin(slots, [sequence.slot for sequence in stalled])
            slots, length = slots[keep], length[keep]
            tokens = None if tokens is None else tokens[keep]
        table.computed[slots] = length
        table.length[slots] = length + 1
        at = length % size
        if tokens is not None:
            table.pending[slots, at] = tokens
        for slot in slots[at == size - 1].tolist():
            self._key_block(slot, tokens is not None)
        return stalled

    def fill(self, sequence: RunningSequence, tokens: NDArray[np.int32] | None) -> None:
        """Record that the last block of `sequence` is full and computed.

        `tokens`: the ids that fill it, int32, as many as it had room for; None where the engine withholds them (then
        neither this block nor what follows is ever published). Raises `HandleError` where it has ended, `CapacityError`
        where the tokens do not end with the block or would be written into a tail that others share.
        """
        table, slot, size = self.decode, sequence.slot, self.options.block_tokens
        if slot < 0:
            raise HandleError(f"request `{sequence.id}` is not running", request_id=sequence.id)
        length, capacity = int(table.length[slot]), int(table.capacity[slot])
        missing = capacity - length
        if (
            (tokens is not None and len(tokens) != missing)
            or missing >= size
            or (missing and sequence.shared_tail is not None)
        ):
            raise CapacityError(
                f"request `{sequence.id}`: `{missing}` tokens fill its last block, not `{tokens}`; a block of its own "
                "begins with `extend_many`"
            )
        table.length[slot] = table.computed[slot] = capacity
        if missing:
            if tokens is not None:
                table.pending[slot, size - missing :] = tokens
            self._key_block(slot, tokens is not None)

    def _key_block(self, slot: int, is_known: bool) -> None:
        """Make the key of the block that `pending` holds in full; without its tokens the chain ends here."""
        sequence = self.decode.sequences[slot]
        if sequence is not None and sequence.spans:
            span = sequence.spans[-1]
            if span.state is not None and is_known:
                span.state.update(self.decode.pending[slot].tobytes())
                span.keys += span.state.digest()
            else:
                span.state = None

    def fork(self, parent: RunningSequence, id_: Hashable, residency: PathResidency, now_us: int) -> RunningSequence:
        """Return a child on the same blocks; the first divergent write copies the partial tail."""
        if self.options.windows:
            raise CapacityError(f"request `{parent.id}`: a pool with sliding-window groups does not fork")
        computed = int(self.decode.computed[parent.slot])
        self.publication.publish(parent, computed // self.options.block_tokens, now_us)
        before = parent.shared_tail
        child = self.forks.fork(parent, id_, residency, now_us)
        if child.shared_tail is not None:
            self._forked += 1 if before is not None else 2
        return child

    def _copy_on_write(self, slots: NDArray[np.int64], now_us: int) -> list[RunningSequence]:
        """Copy-on-write for those of `slots` that are about to write into a shared tail."""
        stalled: list[RunningSequence] = []
        for slot in slots.tolist():
            sequence = self.decode.sequences[slot]
            if sequence is None or sequence.shared_tail is None:
                continue
            tail, account = sequence.shared_tail, sequence.domain.owner
            if tail.refs > 1:
                if self.reclaimer.ensure(account, tail.length, now_us) is not None:
                    stalled.append(sequence)
                    continue
                self.forks.unshare_tail(sequence, self._hand_out(account, tail.length), now_us)
            else:
                self.forks.unshare_tail(sequence, None, now_us)
            self._forked -= 1
        return stalled

    def _grow(self, slots: NDArray[np.int64], now_us: int) -> list[RunningSequence]:
        stalled: list[RunningSequence] = []
        table = self.decode
        by_account: dict[Account, list[RunningSequence]] = {}
        for slot in slots.tolist():
            sequence = table.sequences[slot]
            if sequence is not None:
                by_account.setdefault(sequence.domain.owner, []).append(sequence)
        groups = 1 + len(self.options.windows)
        for account, wanting in by_account.items():
            while wanting and self.reclaimer.ensure(account, len(wanting) * groups, now_us) is not None:
                stalled.append(wanting.pop())
            if not wanting:
                continue
            blocks = self._hand_out(account, len(wanting) * groups)
            for i, sequence in enumerate(wanting):
                sequence.append(blocks[i : i + 1])
                table.capacity[sequence.slot] += self.options.block_tokens
                if groups > 1:
                    self.publication.extend_windows(sequence, blocks[len(wanting) + i :: len(wanting)])
        return stalled

    # -- release ------------------------------------------------------------------------------------------------------

    def release(self, sequence: RunningSequence, now_us: int, cause: str) -> bool:
        """End a sequence; its residency holds what the policy allows. Return False if it had already ended."""
        slot = sequence.slot
        if slot < 0:
            return False
        computed = int(self.decode.computed[slot])
        if sequence.spans and sequence.spans[0].keys:
            self.publication.publish(sequence, computed // self.options.block_tokens, now_us)
        self.decode.remove(sequence)
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
        if hold is not None and self.hold_table.count(hold.account) > hold.account.residency_cap:
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
        lapsed, self.behind = 0, False
        for partition in self.pool.partitions:
            share = limit if partition.size == blocks else -(-limit * partition.size // blocks)
            swept = self._sweep(partition, share, now_us)
            if swept:
                lapsed += swept
                self.behind = self.behind or swept == share
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

    def step(self, now_us: int) -> list[RunningSequence]:
        """Expire, reclaim, scrub and refill the reserve; return sequences that have been ACTIVE longer than allowed."""
        self.sweep(now_us)
        for partition in self.pool.partitions:
            self.reclaimer.keep_reserve(partition, now_us)
        return self.decode.overrunning(now_us)

    def teardown(self, now_us: int) -> None:
        """End all custody and zero every block, once nothing is running any more."""
        for account in self.accounts.values():
            for residency in list(self.hold_table.of(account)):
                self.tree.lapse(residency, "shutdown", now_us)
        self.tree.flush(now_us)
        for fence in range(1, self.pool.fences.last + 1):
            self.pool.fences.retire(fence)
        for partition in self.pool.partitions:
            self.pool.reclaim(partition, now_us, self.options.fence_bound_us)
            self.pool.scrub(partition, partition.dirty_blocks)
        self.pool.synchronize()

    # -- limits ------------------------------------------------------------------------------------------------

    def set_limits(self, changed: Mapping[Domain, DomainLimits], now_us: int) -> dict[Account, HoldList[PathResidency]]:
        """Give domains new limits and apply them to their nodes and holds. Walks every node and hold once.

        Returns the accounts of which a hold now ends earlier, with all their holds.
        """
        shorter: dict[Domain, int] = {}
        for domain, limits in changed.items():
            shorter[domain] = max(0, domain.idle_us - limits.idle_us)
            domain.set_limits(limits)
        if any(limits.integrity_share for limits in changed.values()):
            sums = self.pool.keep_sums()
            if sums is not None:
                sum_published(sums, self.tree, changed)
        self._lower_ceilings(shorter, now_us)
        holds = [hold for account in self.accounts.values() for hold in self.hold_table.of(account)]
        narrowed: dict[Account, HoldList[PathResidency]] = {}
        for hold in holds:
            deadline = max(_deadline(hold, shorter), now_us)
            if deadline < hold.deadline_us:
                self.hold_table.shorten(hold, deadline)
                narrowed[hold.account] = self.hold_table.of(hold.account)
        for hold in holds:
            node = hold.leaf
            while node is not None:
                if hold.can_hold(node):
                    node.deadline_us = max(node.deadline_us, hold.deadline_us)
                node = node.parent
        return narrowed

    def _lower_ceilings(self, shorter: Mapping[Domain, int], now_us: int) -> None:
        """Top down, so that none is above its parent's. Deadlines are forgotten here and found again from the holds."""
        stack: list[Node] = list(self.tree.roots)
        while stack:
            node = stack.pop()
            node.deadline_us = 0
            if node.domain in shorter and node.domain.absolute_us < NEVER_US:
                node.ceiling_us = min(node.ceiling_us, max(node.born_us + node.domain.absolute_us, now_us))
            if node.parent is not None:
                node.ceiling_us = min(node.ceiling_us, node.parent.ceiling_us)
            child = node.first_child
            while child is not None:
                stack.append(child)
                child = child.next_sibling


def _deadline(hold: PathResidency, shorter: Mapping[Domain, int]) -> int:
    """Return the hold's deadline under the new limits, moved earlier by the largest reduction on its path."""
    assert hold.leaf is not None, "a held residency has a leaf"
    earlier = 0
    node: Node | None = hold.leaf
    while node is not None:
        earlier = max(earlier, shorter.get(node.domain, 0))
        node = node.parent
    return min(hold.deadline_us - earlier, hold.leaf.ceiling_us)
