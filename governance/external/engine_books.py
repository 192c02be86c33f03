"""The books of a pool that an engine allocates by itself: its columns, its residencies, and the engine that obeys.

Its queue may hold requests that have no block yet. In an erasure they end with the running ones, or, where those may
finish, begin after it and see nothing of what was before.

In a scan the engine's books, the pool's and the residencies' are counted apart and compared:

- References and holds are counted from the residencies, block by block where generations agree, and compared with what
  the pool keeps; what the pool keeps is compared with what the engine says.
- What the engine alone can put right is ordered from it (`evict`, `abort`, `withhold`); its books are never written
  here.
- A chain has no nodes here, so a hold may outlive its blocks: it lapses at its deadline, and is no orphan.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.external.evicted_blocks import EvictedBlocks
from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.external.repair import drop_ended, set_holds, set_refs, stale_generations
from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.allocator.pool.accounting import Domain
from kvcustody.allocator.pool.block_state import ACTIVE, CACHED, QUARANTINED, Blocks
from kvcustody.allocator.pool.integrity import MismatchedBlocks
from kvcustody.audit.evidence.coverage.conservation import PoolCounts
from kvcustody.audit.kinds import Event
from kvcustody.governance.custody.books import CopyTiers, Covers, PoolFigures
from kvcustody.governance.custody_events import integrity_mismatch
from kvcustody.governance.decisions.access_plan import DomainLabel, Plan, label_of
from kvcustody.governance.decisions.staged_table import quotas_of
from kvcustody.governance.erasure.erasure_run import PoolUnits, UnitStates, unique_units, unit_states
from kvcustody.governance.erasure.selector import Selector, matches_label, matches_plan, may_hold
from kvcustody.governance.external.accounts import PortAccounts
from kvcustody.governance.external.engine_control import EngineControl
from kvcustody.governance.external.residency_events import ends, receipts, unreported
from kvcustody.governance.observability.stats import PoolStats, charged_blocks
from kvcustody.governance.observability.thrash import advised_blocks
from kvcustody.governance.orphans.finding import (
    FAILED_VERIFICATION,
    NONE,
    FindingBuilder,
    Repair,
    RepairableFinding,
)
from kvcustody.governance.orphans.scan_protocol import Held, PoolFindings
from kvcustody.policies.table.decision_table import DecisionTable

Int64s = NDArray[np.int64]
Mask = NDArray[np.bool_]
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

    copies: CopyTiers = field(default_factory=CopyTiers)
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
        self.tiers = EngineTiers()
        self.tokens_of: Callable[[Hashable], int] | None = None  # of a running request, if the adapter knows
        self.are_hits_leading = True  # False: hit blocks are of several layer groups
        self.known_difference = 0  # between the engine's count of hand-outs and ours, named by a scan before
        self.contained: set[int] = set()  # what the engine references by itself, and was told to withhold
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

    def withdraw(self, changed: Blocks, now_us: int) -> list[Hashable]:
        """Take what workers found changed out of reach, with all that was computed from it; which requests read any.

        Those go on, for nobody can take back what they have read; they publish nothing more and leave no hold, so the
        blocks end with the last of them.
        """
        pool, sums = self.pool, self.pool.sums
        assert sums is not None, "answered without an order"
        running = [(request_id, residency, residency.blocks()) for request_id, residency in self.running.items()]
        for tag in np.unique(pool.tag[changed]).tolist():
            blocks = changed[pool.tag[changed] == tag]
            requests = sum(bool(np.isin(held, blocks).any()) for _, _, held in running)
            mismatch = MismatchedBlocks(pool.domains[tag], blocks, pool.generation[blocks], requests, now_us)
            sums.found.append(mismatch)
        sums.strike(changed)
        reach = pool.continuations(changed)
        readers: list[Hashable] = []
        for request_id, residency, held in running:
            if np.isin(held, reach).any():
                residency.publishes = False
                readers.append(request_id)
        self.evict(pool.withdraw(reach, "integrity", now_us))
        withheld = sums.withheld(changed)
        if withheld:
            self.engine.withhold(withheld)
        return readers

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

    def __init__(self, books: EngineBooks, selector: Selector, before_us: int, now_us: int, *, finish: bool) -> None:
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


class EngineScan:
    """`refs` and `holds` are counted by block, as the residencies explain them."""

    def __init__(self, books: EngineBooks, now_us: int) -> None:
        self._books = books
        pool, engine = books.pool, books.engine
        self._engine = engine
        self._view = engine.view()
        self._refs, self._holds_counted = count_references(books), count_holds(books)
        self._now_us = now_us
        self._found = FindingBuilder(pool.number, now_us)
        self._usable = np.ones(pool.blocks, dtype=np.bool_)
        self._usable[pool.reserved] = False
        self._custody: Mask = ((pool.state == ACTIVE) | (pool.state == CACHED)) & self._usable
        self._lost = [
            residency
            for request_id, residency in books.running.items()
            if residency.is_opened and request_id not in self._view.requests
        ]

    def findings(self) -> list[RepairableFinding]:
        """Every finding of this pool with its repair, in an order in which they can be repaired one by one."""
        return [
            *self._ended_under_requests(),
            *self._references(),
            *self._lost_finishes(),
            *self._engine_references(),
            *self._holds(),
            *self._index(),
            *self._contained(),
            *self._difference(),
        ]

    # -- requests -----------------------------------------------------------------------------------------------------

    def _lost_finishes(self) -> list[RepairableFinding]:
        def lost(residency: ExternalResidency) -> RepairableFinding:
            def release() -> tuple[str, str]:
                self._books.release(residency, "orphan")
                return "released", "recovered"

            cause = "a residency whose request is gone"
            return self._request("lost finish", residency, cause, release)

        return [lost(residency) for residency in self._lost]

    def _ended_under_requests(self) -> list[RepairableFinding]:
        def broken(residency: ExternalResidency) -> RepairableFinding:
            def abort() -> tuple[str, str]:
                drop_ended(self._books.pool, residency)
                self._engine.abort([residency.request_id], "orphan")
                return "aborted", "recovered"

            cause = "custody of its blocks ended while it held them"
            return self._request("sequence without reference", residency, cause, abort)

        pool, running = self._books.pool, self._books.running.values()
        return [broken(residency) for residency in running if len(stale_generations(pool, residency))]

    def _request(self, orphan: str, residency: ExternalResidency, cause: str, repair: Repair) -> RepairableFinding:
        return self._found(
            orphan,
            residency.tenant,
            cause,
            residency.blocks(),
            repair,
            since_us=residency.began_us,
            residency=residency.id,
        )

    # -- references and holds -----------------------------------------------------------------------------------------

    def _references(self) -> list[RepairableFinding]:
        """What the pool keeps against what the residencies explain."""
        pool = self._books.pool

        def repair(blocks: Blocks) -> Repair:
            def count() -> tuple[str, str]:
                self._evict(set_refs(pool, blocks, self._refs[blocks], self._now_us))
                return "references counted anew", "recovered"

            return count

        more = "more references are recorded than running requests hold"
        fewer = "fewer references are recorded than running requests hold"
        return [
            *self._each_owner("reference without sequence", more, self._custody & (pool.refs > self._refs), repair),
            *self._each_owner("sequence without reference", fewer, self._custody & (pool.refs < self._refs), repair),
        ]

    def _engine_references(self) -> list[RepairableFinding]:
        """What the engine references against what live requests have."""
        expected = self._refs.copy()
        for residency in self._lost:
            np.subtract.at(expected, residency.blocks(), 1)

        def withhold(blocks: Blocks) -> Repair:
            def contain() -> tuple[str, str]:
                self._engine.evict(blocks.tolist())
                self._engine.withhold(blocks.tolist())
                self._books.contained.update(blocks.tolist())
                return "withheld from the engine", "contained"

            return contain

        def abort(blocks: Blocks) -> Repair:
            def end() -> tuple[str, str]:
                users = [
                    residency.request_id
                    for residency in list(self._books.running.values())
                    if np.isin(residency.blocks(), blocks).any()
                ]
                self._engine.abort(users, "orphan")
                return "aborted", "recovered"

            return end

        more = "the engine references blocks that no request was given"
        fewer = "requests have blocks that the engine does not reference"
        refs, usable = self._view.refs, self._usable
        withheld = self._books.pool.state == QUARANTINED
        withheld[list(self._books.contained)] = True
        return [
            *self._each_owner("reference without sequence", more, (refs > expected) & usable & ~withheld, withhold),
            *self._each_owner("sequence without reference", fewer, (refs < expected) & usable, abort),
        ]

    def _holds(self) -> list[RepairableFinding]:
        pool, counted = self._books.pool, self._holds_counted

        def repair(blocks: Blocks) -> Repair:
            def count() -> tuple[str, str]:
                still = blocks[(pool.state[blocks] == ACTIVE) | (pool.state[blocks] == CACHED)]
                self._evict(set_holds(pool, still, counted[still], self._now_us))
                return "holds counted anew", "recovered"

            return count

        unheld = (pool.state == CACHED) & (counted == 0)
        more = self._custody & ((pool.holds > counted) | unheld)
        fewer = self._custody & (pool.holds < counted)
        return [
            *self._each_owner("hold without residency", "no residency explains its holds", more, repair),
            *self._each_owner("residency without block", "a hold is not kept with its block", fewer, repair),
        ]

    # -- index --------------------------------------------------------------------------------------------------------

    def _index(self) -> list[RepairableFinding]:
        pool, view = self._books.pool, self._view

        def end(blocks: Blocks) -> Repair:
            def remove() -> tuple[str, str]:
                self._evict(pool.end_cached(blocks, "orphan", self._now_us))
                return "ended", "recovered"

            return remove

        def forget(blocks: Blocks) -> Repair:
            def evict() -> tuple[str, str]:
                self._engine.evict(blocks.tolist())
                return "taken out of the engine's index", "recovered"

            return evict

        unreachable = (pool.state == CACHED) & ~view.indexed & self._usable
        nobodys = view.indexed & ~self._custody & self._usable
        missing = "CACHED blocks missing from the engine's index"
        stray = "the engine's index has blocks without custody"
        return [
            *self._each_owner("unreachable chain", missing, unreachable, end),
            *self._each_owner("unreachable chain", stray, nobodys, forget),
        ]

    # -- what waits ---------------------------------------------------------------------------------------------------

    def _contained(self) -> list[RepairableFinding]:
        pool, findings = self._books.pool, []
        failed = np.flatnonzero((pool.state == QUARANTINED) & self._usable)
        if len(failed):
            done = "withheld until teardown", "contained"
            cause = "blocks did not verify after a scrub"
            findings.append(self._found(FAILED_VERIFICATION, "", cause, failed, lambda: done))
        stuck = pool.fences.stuck_before(pool.fence_bound_us, self._now_us) if len(pool.fences) else 0
        if stuck:
            waits = "scrubs wait until it retires", "contained"
            cause, tenant = "a device step did not finish within its limit", ""
            waiting = [custody for custody in pool.queue.custodies() if 0 < custody.fence < stuck]
            blocks = np.concatenate([custody.blocks for custody in waiting]) if waiting else NONE
            since_us = min((custody.ended_us for custody in waiting), default=0)
            findings.append(self._found("stuck fence", tenant, cause, blocks, lambda: waits, since_us=since_us))
        return findings

    def _difference(self) -> list[RepairableFinding]:
        """Hand-outs that one side counted and the other did not, beyond those that are known."""
        books, allocated = self._books, self._view.allocated
        ours = books.pool.next_generation - 1
        if allocated - ours == books.known_difference:
            return []

        def note() -> tuple[str, str]:
            books.known_difference = allocated - ours
            return "named in the record", "on record"

        cause = f"the engine handed out {allocated} blocks, {ours} came into custody"
        return [self._found("reference without sequence", "", cause, NONE, note)]

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _evict(self, forget: list[int]) -> None:
        if forget:
            self._engine.evict(forget)

    def _each_owner(
        self, orphan: str, cause: str, mask: Mask, repair: Callable[[Blocks], Repair]
    ) -> list[RepairableFinding]:
        """One finding for each owner of the blocks in `mask`."""
        blocks = np.flatnonzero(mask)
        if not len(blocks):
            return []
        pool, findings = self._books.pool, []
        owners = {tag: self._owner(tag) for tag in np.unique(pool.tag[blocks]).tolist()}
        for owner in dict.fromkeys(owners.values()):
            tags = [tag for tag, name in owners.items() if name == owner]
            mine = blocks[np.isin(pool.tag[blocks], tags)]
            since_us = int(pool.born_us[mine].min())
            findings.append(self._found(orphan, owner, cause, mine, repair(mine), since_us=since_us))
        return findings

    def _owner(self, tag: int) -> str:
        domain = self._books.pool.domains.get(tag)
        label = domain.label if domain is not None else None
        return label.tenant if isinstance(label, DomainLabel) else ""


class EngineCensus:
    """`Census` of one engine's pool."""

    def __init__(self, books: EngineBooks) -> None:
        self._books = books

    def findings(self, now_us: int) -> PoolFindings:
        """As `Census`."""
        pool = self._books.pool
        findings = EngineScan(self._books, now_us).findings()
        return PoolFindings(findings, len(pool.hold_table) + len(self._books.running), pool.blocks)

    def problems(self) -> list[str]:
        """As `Census`."""
        return _problems(self._books)

    def counts(self) -> PoolCounts:
        """As `Census`, where every order has been answered too."""
        pool, opened = self._books.pool, self._opened()
        states, queue = pool.counts(), pool.queue
        return PoolCounts(
            allocated_total=pool.next_generation - 1,
            unreported=sum(map(unreported, opened)),
            live_blocks=states["active"] + states["cached"] + queue.fenced_blocks(),
            fenced=0,
            dirty=queue.pending_blocks(),
            quarantined=states["quarantined"],
            scrubbed=tuple(blocks + queue.repeats for blocks in queue.device_blocks),
            open_residencies=len(opened),
        )

    def _opened(self) -> list[ExternalResidency]:
        return [residency for residency in self._books.running.values() if residency.is_opened]

    def held(self) -> Held:
        """As `Census`."""
        pool, opened = self._books.pool, self._opened()
        here = pool.generation[(pool.state == ACTIVE) | (pool.state == CACHED)]
        waiting = [generations for _, generations in pool.queue.fenced()]
        live = np.sort(np.concatenate([here, *waiting]))
        ids = frozenset(residency.id for residency in opened)
        return Held(ids, {pool.number: live}, sum(map(unreported, opened)))

    def domains(self) -> Iterable[Domain]:
        """As `Census`."""
        return self._books.pool.domains.values()

    def generations(self, pool: int) -> NDArray[np.int64]:
        """As `Census`."""
        return self._books.pool.generation


def count_references(books: EngineBooks) -> NDArray[np.int64]:
    """By block, how many running residencies refer to it as it is now."""
    pool = books.pool
    counted = np.zeros(pool.blocks, dtype=np.int64)
    for residency in books.running.values():
        blocks = residency.blocks()
        np.add.at(counted, blocks[pool.generation[blocks] == residency.generations()], 1)
    return counted


def count_holds(books: EngineBooks) -> NDArray[np.int64]:
    """By block, how many ended residencies hold it as it is now."""
    pool = books.pool
    held = [
        hold.held[pool.generation[hold.held] == hold.held_generations]
        for account in pool.accounts.values()
        for hold in pool.hold_table.of(account)
    ]
    every = np.concatenate(held) if held else np.empty(0, dtype=np.int64)
    return np.bincount(every, minlength=pool.blocks).astype(np.int64)


def _problems(books: EngineBooks) -> list[str]:
    """Recompute references, holds and charges from the residencies; every difference is a problem."""
    pool = books.pool
    problems: list[str] = []
    refs = np.zeros(pool.blocks, dtype=np.int64)
    for residency in books.running.values():
        np.add.at(refs, residency.blocks(), 1)
    if (refs != pool.refs).any():
        at = np.flatnonzero(refs != pool.refs)
        problems.append(
            f"references of blocks {at[:8].tolist()}: counted {refs[at[:8]].tolist()}, "
            f"kept {pool.refs[at[:8]].tolist()}"
        )
    holds = count_holds(books)
    live = (pool.state == ACTIVE) | (pool.state == CACHED)
    if (holds[live] != pool.holds[live]).any():
        problems.append("holds kept per block differ from those of the residencies")
    if ((pool.state == ACTIVE) != (pool.refs > 0)).any():
        problems.append("a block is ACTIVE without a reference, or referenced and not ACTIVE (L1)")
    if ((pool.state == CACHED) & ~pool.indexed).any():
        problems.append("a CACHED block is not indexed")
    if (pool.indexed & ~live).any():
        problems.append("an indexed block is in nobody's custody")
    for account in pool.accounts.values():
        tags = [tag for tag, domain in pool.domains.items() if domain.owner is account]
        used = int(np.count_nonzero(live & np.isin(pool.tag, tags)))
        if used != account.used_blocks:
            problems.append(f"tenant `{account.name}` is charged {account.used_blocks} blocks and has {used}")
    if pool.ranking is not None:
        above = pool.ranking.out_of_order(np.flatnonzero(pool.state == CACHED))
        if len(above):
            problems.append(f"blocks {above[:8].tolist()} would leave after what they continue (L7)")
    total = sum(pool.counts().values())
    if total != pool.partition.size:
        problems.append(f"{total} blocks in all states, {pool.partition.size} in the pool (L1)")
    if int(np.count_nonzero(pool.state == CACHED)) and not len(pool.hold_table):
        problems.append("blocks are CACHED and no hold will lapse")
    return problems
