"""The scan of an engine's pool: the engine's books, the pool's and the residencies', counted apart and compared.

`EngineScanSource` is what `OrphanScans` asks; `PortScan` finds what disagrees and gives the repair of each.

- References and holds are counted from the residencies, block by block where generations agree, and compared with what
  the pool keeps; what the pool keeps is compared with what the engine says.
- What the engine alone can put right is ordered from it (`evict`, `abort`, `withhold`); its books are never written
  here.
- A chain has no nodes here, so a hold may outlive its blocks: it lapses at its deadline, and is no orphan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.external.repair import drop_ended, set_holds, set_refs, stale_generations
from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.allocator.pool.block_state import ACTIVE, CACHED, QUARANTINED, Blocks
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.erasure.tier_protocol import CopyStore
from kvcustody.governance.external.engine_control import EngineControl
from kvcustody.governance.external.port_view import PortView
from kvcustody.governance.orphans.finding import (
    FAILED_VERIFICATION,
    NONE,
    FindingBuilder,
    Repair,
    RepairableFinding,
)
from kvcustody.governance.orphans.scan_protocol import Held
from kvcustody.governance.orphans.slices import Slices

Int64s = NDArray[np.int64]
Mask = NDArray[np.bool_]


class PortScan:
    """`refs`, `holds`: by block, as the residencies explain them. `contained`: blocks withheld by a scan, kept up."""

    def __init__(
        self,
        port: PortView,
        engine: EngineControl,
        refs: Int64s,
        holds: Int64s,
        now_us: int,
        contained: set[int],
    ) -> None:
        self._port = port
        self._engine = engine
        self._view = engine.view()
        self._refs = refs
        self._holds_counted = holds
        self._now_us = now_us
        self._contained_before = contained
        self._found = FindingBuilder(port.pool.number, now_us)
        self._usable = np.ones(port.pool.blocks, dtype=np.bool_)
        self._usable[port.pool.reserved] = False
        pool = port.pool
        self._custody: Mask = ((pool.state == ACTIVE) | (pool.state == CACHED)) & self._usable
        self._lost = [
            residency
            for request_id, residency in port.running.items()
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
        ]

    # -- requests -----------------------------------------------------------------------------------------------------

    def _lost_finishes(self) -> list[RepairableFinding]:
        def lost(residency: ExternalResidency) -> RepairableFinding:
            def release() -> tuple[str, str]:
                self._port.release(residency, "orphan")
                return "released", "recovered"

            cause = "a residency whose request is gone"
            return self._request("lost finish", residency, cause, release)

        return [lost(residency) for residency in self._lost]

    def _ended_under_requests(self) -> list[RepairableFinding]:
        def broken(residency: ExternalResidency) -> RepairableFinding:
            def abort() -> tuple[str, str]:
                drop_ended(self._port.pool, residency)
                self._engine.abort([residency.request_id], "orphan")
                return "aborted", "recovered"

            cause = "custody of its blocks has ended under it"
            return self._request("sequence without reference", residency, cause, abort)

        pool, running = self._port.pool, self._port.running.values()
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
        pool = self._port.pool

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
                    for residency in list(self._port.running.values())
                    if np.isin(residency.blocks(), blocks).any()
                ]
                self._engine.abort(users, "orphan")
                return "aborted", "recovered"

            return end

        more = "the engine references blocks that no request was handed or attached"
        fewer = "requests have blocks that the engine does not reference"
        refs, usable = self._view.refs, self._usable
        withheld = self._port.pool.state == QUARANTINED
        withheld[list(self._contained_before)] = True
        return [
            *self._each_owner(
                "reference without sequence", more, (refs > expected) & usable & ~withheld, withhold
            ),
            *self._each_owner("sequence without reference", fewer, (refs < expected) & usable, abort),
        ]

    def _holds(self) -> list[RepairableFinding]:
        pool, counted = self._port.pool, self._holds_counted

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
        pool, view = self._port.pool, self._view

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
        pool, made = self._port.pool, []
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

    def difference(self, known: int, know: Callable[[int], None]) -> list[RepairableFinding]:
        """Hand-outs that one side counted and the other did not, beyond those that are `known`."""
        allocated, ours = self._view.allocated, self._port.pool.next_generation - 1
        if allocated - ours == known:
            return []

        def note() -> tuple[str, str]:
            know(allocated - ours)
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
        pool, made = self._port.pool, []
        owners = {tag: self._owner(tag) for tag in np.unique(pool.tag[blocks]).tolist()}
        for owner in dict.fromkeys(owners.values()):
            tags = [tag for tag, name in owners.items() if name == owner]
            mine = blocks[np.isin(pool.tag[blocks], tags)]
            since_us = int(pool.born_us[mine].min())
            made.append(self._found(orphan, owner, cause, mine, repair(mine), since_us=since_us))
        return made

    def _owner(self, tag: int) -> str:
        domain = self._port.pool.domains.get(tag)
        label = domain.label if domain is not None else None
        return label.tenant if isinstance(label, DomainLabel) else ""


class EngineScanSource:
    """One port's pool against its requests and its engine."""

    def __init__(self, port: PortView, engine: EngineControl) -> None:
        self._port = port
        self._engine = engine
        self._known_difference = 0  # between the engine's count of hand-outs and ours, named by a scan before
        self._contained: set[int] = set()  # what the engine references by itself, and was told to withhold

    def findings(self, now_us: int) -> tuple[list[RepairableFinding], int]:
        """Findings of the pool, and how many holds and requests were compared."""
        port = self._port
        found = PortScan(
            port, self._engine, count_references(port), count_holds(port), now_us, self._contained
        )
        made = [*found.findings(), *found.difference(self._known_difference, self._know)]
        holds = len(port.pool.hold_table)
        return made, holds + len(port.running)

    def _know(self, difference: int) -> None:
        self._known_difference = difference

    def tiers(self) -> Sequence[CopyStore]:
        """Its tiers off the device."""
        return self._port.erasures.tiers

    def held(self) -> Held:
        """Open residencies, and custody whose end is not on record."""
        port, pool = self._port, self._port.pool
        unlisted = port.counts().unreported
        here = pool.generation[(pool.state == ACTIVE) | (pool.state == CACHED)]
        waiting = [generations for _, generations in pool.queue.fenced()]
        live = np.sort(np.concatenate([here, *waiting]))
        opened = (residency for residency in port.running.values() if residency.is_opened)
        return Held(frozenset(residency.id for residency in opened), {pool.number: live}, unlisted)

    def generations(self, pool: int) -> NDArray[np.int64]:
        """By block, its generation now."""
        return self._port.pool.generation

    def slices(self) -> list[Slices]:
        """None: the engine's own books are shown whole or not at all, which costs more than a step may."""
        return []


def count_references(port: PortView) -> NDArray[np.int64]:
    """By block, how many running residencies refer to it as it is now."""
    pool = port.pool
    counted = np.zeros(pool.blocks, dtype=np.int64)
    for residency in port.running.values():
        blocks = residency.blocks()
        np.add.at(counted, blocks[pool.generation[blocks] == residency.generations()], 1)
    return counted


def count_holds(port: PortView) -> NDArray[np.int64]:
    """By block, how many ended residencies hold it as it is now."""
    pool = port.pool
    held = [
        hold.held[pool.generation[hold.held] == hold.held_generations]
        for account in pool.accounts.values()
        for hold in pool.hold_table.of(account)
    ]
    every = np.concatenate(held) if held else np.empty(0, dtype=np.int64)
    return np.bincount(every, minlength=pool.blocks).astype(np.int64)
