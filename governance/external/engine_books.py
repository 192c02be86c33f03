"""The books of a pool that an engine allocates by itself: its columns, its residencies, and the engine that obeys.

Its queue may hold requests that have no block yet. In an erasure they end with the running ones, or, where those may
finish, begin after it and see nothing of what was before.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.external.evicted_blocks import EvictedBlocks
from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.allocator.pool.accounting import Domain
from kvcustody.allocator.pool.block_state import ACTIVE, CACHED, Blocks
from kvcustody.audit.kinds import Event
from kvcustody.governance.custody.books import CopyTiers, Covers, NoTiers, PoolFigures
from kvcustody.governance.custody_events import integrity_mismatch
from kvcustody.governance.decisions.access_plan import Plan, label_of
from kvcustody.governance.decisions.staged_table import quotas_of
from kvcustody.governance.erasure.erasure_run import PoolUnits, UnitStates, unique_units, unit_states
from kvcustody.governance.erasure.selector import Selector, matches_label, matches_plan, may_hold
from kvcustody.governance.external.accounts import PortAccounts
from kvcustody.governance.external.census import EngineCensus, KnownToScans
from kvcustody.governance.external.engine_control import EngineControl
from kvcustody.governance.external.residency_events import ends, receipts
from kvcustody.governance.observability.stats import PoolStats, charged_blocks
from kvcustody.governance.observability.thrash import advised_blocks
from kvcustody.policies.table.decision_table import DecisionTable

_NO_EVICTIONS = ("erased", "orphan")  # nobody needed the room


def _nothing() -> None:
    """The adapter has told all."""


def _no() -> bool:
    return False


@dataclass(slots=True)
class EngineTiers:
    """What keeps copies beside an engine.

    `copies`: the tiers of its adapter. `copies_leave`: something beside it keeps copies of all that it computes;
    `are_copies_sealed`: whether nothing of those rests in clear.
    """

    copies: CopyTiers
    copies_leave: bool = False
    are_copies_sealed: Callable[[], bool] = _no


class EngineBooks:
    """`Books` of one engine's pool.

    `release` ends a residency, for a cause. `flush` makes an adapter that reports late report all that it has.
    """

    def __init__(
        self,
        pool: ExternalPool,
        engine: EngineControl,
        accounts: PortAccounts,
        block_tokens: int,
        release: Callable[[ExternalResidency, str], bool],
    ) -> None:
        self.pool = pool
        self.engine = engine
        self.accounts = accounts
        self.release = release
        self.flush: Callable[[], None] = _nothing
        self.running: dict[Hashable, ExternalResidency] = {}
        self.evicted_blocks = EvictedBlocks(pool)
        self.tiers = EngineTiers(NoTiers())
        self.tokens_of: Callable[[Hashable], int] | None = (
            None  # of a running request, where the adapter knows
        )
        self.are_hits_leading = True  # False: hit blocks are of several layer groups
        self.known = KnownToScans()
        self._block_tokens = block_tokens
        self._launch = 0

    @property
    def copies(self) -> CopyTiers:
        """As `Books`."""
        return self.tiers.copies

    @property
    def pools(self) -> tuple[ExternalPool]:
        """As `Books`."""
        return (self.pool,)

    def limit(self, table: DecisionTable) -> None:
        """As `Books`."""
        self.accounts.limit(quotas_of(table))
        if table.policy.checks_integrity:
            self.pool.keep_sums()

    def evict(self, forget: Sequence[int]) -> None:
        """The engine forgets these blocks' keys now."""
        if forget:
            self.evicted_blocks.drop(forget)
            self.engine.evict(forget)

    def close(self, covers: Covers, now_us: int) -> None:
        """As `Books`."""
        self.flush()
        pool = self.pool
        closed = [domain for domain in pool.domains.values() if covers(domain)]
        for domain in closed:
            domain.is_open = False
        for residency in self.running.values():
            if residency.is_opened and covers(residency.domain):
                residency.publishes = False
        forget: list[int] = []
        for account in pool.accounts.values():
            for hold in list(pool.hold_table.of(account)):
                if covers(hold.domain):
                    forget += pool.lapse(hold, "unreachable", now_us)
        mine = np.flatnonzero(np.isin(pool.tag, [domain.tag for domain in closed]))
        self.evict(forget + pool.end_cached(mine, "unreachable", now_us))

    def erase(self, selector: Selector, before_us: int, now_us: int, *, finish: bool) -> EngineErasure:
        """As `Books`."""
        self.flush()
        return EngineErasure(self, selector, before_us, now_us, finish=finish)

    def census(self) -> EngineCensus:
        """As `Books`."""
        self.flush()
        return EngineCensus(self)

    def take_events(self, now_us: int) -> list[Event]:
        """As `Books`."""
        pool, events = self.pool, list[Event]()
        if pool.sums is not None and pool.sums.found:
            changed, pool.sums.found = pool.sums.found, []
            events += [integrity_mismatch(mismatch, pool.number) for mismatch in changed]
        events += ends(pool, now_us)
        events += self.copies.leaves()
        launches = pool.take_scrubbed()
        if launches:
            self._launch += len(launches)
            events += receipts(launches, self._launch - len(launches), pool, now_us)
        return events

    def figures(self, now_us: int) -> PoolFigures:
        """As `Books`."""
        running = [residency for residency in self.running.values() if residency.is_opened]
        tokens: dict[str, int] = {}
        if self.tokens_of is not None:
            for residency in running:
                count = self.tokens_of(residency.request_id)
                tokens[residency.tenant] = tokens.get(residency.tenant, 0) + count
        return PoolFigures(
            (self._pool_stats(running, None if self.tokens_of is None else sum(tokens.values()), now_us),),
            len(running),
            charged_blocks(self.pool.accounts.values()),
            self.accounts.room_of(),
            tokens,
            self.are_hits_leading,
        )

    def _pool_stats(self, running: Sequence[ExternalResidency], tokens: int | None, now_us: int) -> PoolStats:
        """The snapshot of the pool; the prefix index is the engine's. `tokens`: of running requests, where it tells."""
        pool = self.pool
        due_us = pool.hold_table.next_due_us()
        age_us = now_us - pool.born_us[pool.state == CACHED]
        slots = sum(len(residency.blocks()) for residency in running) * self._block_tokens
        return PoolStats(
            pool.partition.size,
            pool.counts(),
            pool.next_generation - 1,
            tuple(pool.queue.device_blocks),
            None,
            len(pool.hold_table),
            {cause: blocks for cause, blocks in pool.evicted.items() if cause not in _NO_EVICTIONS},
            pool.expired_residencies,
            pool.hold_table.overdue(now_us),
            0 if due_us is None else max(0, now_us - due_us),
            tokens,
            None if tokens is None else slots,
            pool.unclean_hand_outs,
            advised_blocks(pool.partition.size, self.evicted_blocks.keys.distances),
            cached_age_us=(int(age_us.mean()), int(age_us.max())) if len(age_us) else None,
            checked_blocks=pool.sums.checked_blocks if pool.sums is not None else 0,
            mismatched_blocks=pool.sums.mismatched_blocks if pool.sums is not None else 0,
        )

    def teardown(self, now_us: int) -> None:
        """As `Books`; the engine then does the last scrub order."""
        self.flush()
        for residency in list(self.running.values()):
            self.release(residency, "shutdown")
        forget: list[int] = []
        for account in self.pool.accounts.values():
            for hold in list(self.pool.hold_table.of(account)):
                forget += self.pool.lapse(hold, "teardown", now_us)
        self.evict(forget)


class EngineErasure:
    """`ErasureEffect` in an engine's pool: what it covers is ended when it is made. Requests are residencies."""

    def __init__(
        self, books: EngineBooks, selector: Selector, before_us: int, now_us: int, *, finish: bool
    ) -> None:
        self._books = books
        pool, covered = books.pool, _Covered(books, selector, before_us)
        live_before = _live(pool)
        for domain in covered.domains:
            domain.is_open = False  # nothing attaches from here on, whatever the engine does next
        self.finishing = [residency for residency in covered.running if finish and residency.is_opened]
        for residency in covered.running:
            residency.publishes = False  # and it leaves no hold
        self.aborted = 0 if finish else len(covered.running)
        if self.aborted:
            books.engine.abort([residency.request_id for residency in covered.running], "erased")
        forget: list[int] = []
        for hold in covered.holds:
            if hold.is_held:
                forget += pool.lapse(hold, "erased", now_us, before_us)
        if covered.holds:
            pool.recount_holds()
        if covered.domains:
            tags = [domain.tag for domain in covered.domains]
            forget += pool.end_cached(np.flatnonzero(np.isin(pool.tag, tags)), "erased", now_us, before_us)
        forget += _unpublish(pool, self.finishing)
        if forget:
            books.engine.evict(forget)
        books.evicted_blocks.forget(selector.tenant)
        self.lapsed, self.ended_blocks = len(covered.holds), live_before - _live(pool)
        self.units = [covered.units]

    def running(self) -> int:
        """As `ErasureEffect`."""
        return sum(residency.is_running for residency in self.finishing)

    def end(self) -> None:
        """As `ErasureEffect`."""
        ids = [residency.request_id for residency in self.finishing if residency.is_running]
        self._books.engine.abort(ids, "erased")

    def states(self) -> UnitStates:
        """As `ErasureEffect`: what no shard has answered for yet waits, whoever has the block since."""
        pool = self._books.pool
        on_their_way = [custody.generations for custody in pool.queue.custodies()]
        pending = np.concatenate(on_their_way) if on_their_way else np.empty(0, dtype=np.int64)

        def waiting(part: PoolUnits, same: NDArray[np.bool_], state: NDArray[np.uint8]) -> int:
            return int(np.count_nonzero(np.isin(part.generations, pending)))

        return unit_states(self.units, lambda _: pool, waiting)

    def reread(self) -> None:
        """As `ErasureEffect`: the memory is the engine's workers', and what they read back is in the receipts."""


class _Covered:
    """What the pool has of a selector, found before anything is changed."""

    def __init__(self, books: EngineBooks, selector: Selector, before_us: int) -> None:
        pool = books.pool
        self.domains: list[Domain] = [
            domain for domain in pool.domains.values() if matches_label(selector, label_of(domain))
        ]
        known = {domain.tag for domain in self.domains}
        tags = list(known)
        self.running: list[ExternalResidency] = []
        for residency in books.running.values():
            if residency.opened_us > before_us:
                continue
            reads = bool(tags) and bool(np.isin(pool.tag[residency.attached], tags).any())
            if reads or _matches(selector, residency):
                self.running.append(residency)
        self.holds = [
            hold
            for account in pool.accounts.values()
            if selector.tenant is None or account.name == selector.tenant
            for hold in list(pool.hold_table.of(account))
            if hold.opened_us <= before_us and _matches(selector, hold)
        ]
        parts: list[Blocks] = [residency.blocks() for residency in self.running]
        parts += [hold.held[pool.generation[hold.held] == hold.held_generations] for hold in self.holds]
        live = (pool.state == ACTIVE) | (pool.state == CACHED)
        parts.append(np.flatnonzero(live & np.isin(pool.tag, tags)))
        present = unique_units(pool.number, parts, pool.generation)
        self.units = self._with_ended(pool, selector, present)
        for residency in self.running:  # domains that have no block yet
            if matches_label(selector, label_of(residency.domain)) and residency.domain.tag not in known:
                known.add(residency.domain.tag)
                self.domains.append(residency.domain)

    @staticmethod
    def _with_ended(pool: ExternalPool, selector: Selector, present: PoolUnits) -> PoolUnits:
        """And what ended before and has no receipt yet; its block may be somebody else's by now."""
        blocks, generations = [present.blocks], [present.generations]
        for custody in pool.queue.custodies():
            if custody.domain is not None and may_hold(selector, label_of(custody.domain)):
                blocks.append(custody.blocks)
                generations.append(custody.generations)
        every, first = np.unique(np.concatenate(generations), return_index=True)
        return PoolUnits(pool.number, np.concatenate(blocks)[first], every)


def _unpublish(pool: ExternalPool, finishing: Sequence[ExternalResidency]) -> list[int]:
    """What only these requests use leaves the index; returns what the engine must forget."""
    if not finishing:
        return []
    uses = np.zeros(pool.blocks, dtype=np.int64)
    for residency in finishing:
        np.add.at(uses, residency.blocks(), 1)
    alone = np.flatnonzero((uses > 0) & (pool.refs == uses) & (pool.holds <= 0) & pool.indexed)
    pool.indexed[alone] = False
    return [int(block) for block in alone]


def _live(pool: ExternalPool) -> int:
    live: NDArray[np.bool_] = (pool.state == ACTIVE) | (pool.state == CACHED)
    return int(np.count_nonzero(live))


def _matches(selector: Selector, residency: ExternalResidency) -> bool:
    return isinstance(residency.facts, Plan) and matches_plan(selector, residency.facts)
