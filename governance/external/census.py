"""A census of an engine's pool: the engine's books, the pool's and the residencies', counted apart and compared.

`EngineCensus` reads; `EngineScan` finds what disagrees and gives the repair of each.

- References and holds are counted from the residencies, block by block where generations agree, and compared with what
  the pool keeps; what the pool keeps is compared with what the engine says.
- What the engine alone can put right is ordered from it (`evict`, `abort`, `withhold`); its books are never written
  here.
- A chain has no nodes here, so a hold may outlive its blocks: it lapses at its deadline, and is no orphan.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.external.repair import drop_ended, set_holds, set_refs, stale_generations
from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.allocator.pool.accounting import Domain
from kvcustody.allocator.pool.block_state import ACTIVE, CACHED, QUARANTINED, Blocks
from kvcustody.audit.evidence.coverage.conservation import PoolCounts
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.external.engine_control import EngineControl
from kvcustody.governance.external.residency_events import unreported
from kvcustody.governance.orphans.finding import (
    FAILED_VERIFICATION,
    NONE,
    FindingBuilder,
    Repair,
    RepairableFinding,
)
from kvcustody.governance.orphans.scan_protocol import Held, PoolFindings

Int64s = NDArray[np.int64]
Mask = NDArray[np.bool_]


class ScannedBooks(Protocol):
    """`EngineBooks` is the real one."""

    pool: ExternalPool
    engine: EngineControl
    running: dict[Hashable, ExternalResidency]
    release: Callable[[ExternalResidency, str], bool]
    known: KnownToScans


class KnownToScans:
    """What scans of one engine have found and keep up.

    `difference`: between the engine's count of hand-outs and ours. `contained`: blocks that the engine references by
    itself, and was told to withhold.
    """

    def __init__(self) -> None:
        self.difference = 0
        self.contained: set[int] = set()


class EngineScan:
    """`refs` and `holds` are counted by block, as the residencies explain them."""

    def __init__(self, books: ScannedBooks, now_us: int) -> None:
        self._books = books
        pool, engine = books.pool, books.engine
        self._engine = engine
        self._view = engine.view()
        self._refs, self._holds_counted = count_references(books), count_holds(books)
        self._now_us = now_us
        self._contained_before = books.known.contained
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

            cause = "custody of its blocks has ended under it"
            return self._request("sequence without reference", residency, cause, abort)

        pool, running = self._books.pool, self._books.running.values()
        return [broken(residency) for residency in running if len(stale_generations(pool, residency))]

    def _request(
        self, orphan: str, residency: ExternalResidency, cause: str, repair: Repair
    ) -> RepairableFinding:
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

        more = "more references are kept than running requests have"
        fewer = "fewer references are kept than running requests have"
        return [
            *self._each_owner(
                "reference without sequence", more, self._custody & (pool.refs > self._refs), repair
            ),
            *self._each_owner(
                "sequence without reference", fewer, self._custody & (pool.refs < self._refs), repair
            ),
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
                self._contained_before.update(blocks.tolist())
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

        more = "the engine references blocks that no request was handed or attached"
        fewer = "requests have blocks that the engine does not reference"
        refs, usable = self._view.refs, self._usable
        withheld = self._books.pool.state == QUARANTINED
        withheld[list(self._contained_before)] = True
        return [
            *self._each_owner(
                "reference without sequence", more, (refs > expected) & usable & ~withheld, withhold
            ),
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
        missing = "CACHED blocks that the engine's index does not have"
        stray = "the engine's index has blocks that nobody has in custody"
        return [
            *self._each_owner("unreachable chain", missing, unreachable, end),
            *self._each_owner("unreachable chain", stray, nobodys, forget),
        ]

    # -- what waits ---------------------------------------------------------------------------------------------------

    def _contained(self) -> list[RepairableFinding]:
        pool, made = self._books.pool, []
        failed = np.flatnonzero((pool.state == QUARANTINED) & self._usable)
        if len(failed):
            done = "withheld until teardown", "contained"
            cause = "blocks did not verify after a scrub"
            made.append(self._found(FAILED_VERIFICATION, "", cause, failed, lambda: done))
        stuck = pool.fences.stuck_before(pool.fence_bound_us, self._now_us) if len(pool.fences) else 0
        if stuck:
            waits = "scrubs wait until it retires", "contained"
            cause, tenant = "a device step has not retired within its bound", ""
            waiting = [custody for custody in pool.queue.custodies() if 0 < custody.fence < stuck]
            blocks = np.concatenate([custody.blocks for custody in waiting]) if waiting else NONE
            since_us = min((custody.ended_us for custody in waiting), default=0)
            made.append(self._found("stuck fence", tenant, cause, blocks, lambda: waits, since_us=since_us))
        return made

    def _difference(self) -> list[RepairableFinding]:
        """Hand-outs that one side counted and the other did not, beyond those that are known."""
        known, allocated, ours = self._books.known, self._view.allocated, self._books.pool.next_generation - 1
        if allocated - ours == known.difference:
            return []

        def note() -> tuple[str, str]:
            known.difference = allocated - ours
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
        pool, made = self._books.pool, []
        owners = {tag: self._owner(tag) for tag in np.unique(pool.tag[blocks]).tolist()}
        for owner in dict.fromkeys(owners.values()):
            tags = [tag for tag, name in owners.items() if name == owner]
            mine = blocks[np.isin(pool.tag[blocks], tags)]
            since_us = int(pool.born_us[mine].min())
            made.append(self._found(orphan, owner, cause, mine, repair(mine), since_us=since_us))
        return made

    def _owner(self, tag: int) -> str:
        domain = self._books.pool.domains.get(tag)
        label = domain.label if domain is not None else None
        return label.tenant if isinstance(label, DomainLabel) else ""


class EngineCensus:
    """`Census` of one engine's pool."""

    def __init__(self, books: ScannedBooks) -> None:
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


def count_references(books: ScannedBooks) -> NDArray[np.int64]:
    """By block, how many running residencies refer to it as it is now."""
    pool = books.pool
    counted = np.zeros(pool.blocks, dtype=np.int64)
    for residency in books.running.values():
        blocks = residency.blocks()
        np.add.at(counted, blocks[pool.generation[blocks] == residency.generations()], 1)
    return counted


def count_holds(books: ScannedBooks) -> NDArray[np.int64]:
    """By block, how many ended residencies hold it as it is now."""
    pool = books.pool
    held = [
        hold.held[pool.generation[hold.held] == hold.held_generations]
        for account in pool.accounts.values()
        for hold in pool.hold_table.of(account)
    ]
    every = np.concatenate(held) if held else np.empty(0, dtype=np.int64)
    return np.bincount(every, minlength=pool.blocks).astype(np.int64)


def _problems(books: ScannedBooks) -> list[str]:
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
