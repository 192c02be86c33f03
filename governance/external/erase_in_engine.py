"""What an erasure does in an engine that allocates by itself.

Its queue may hold requests that have no block yet: they end with the running ones, or, where those may finish, begin
after the erasure and see nothing of what was before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.allocator.pool.accounting import Domain
from kvcustody.allocator.pool.block_state import ACTIVE, CACHED, QUARANTINED, Blocks
from kvcustody.governance.decisions.access_plan import Plan, label_of
from kvcustody.governance.erasure.erasure_run import (
    ErasureEffect,
    PoolUnits,
    Reread,
    UnitStates,
    unique_units,
)
from kvcustody.governance.erasure.selector import Selector, matches_label, matches_plan, may_hold
from kvcustody.governance.external.engine_control import EngineControl
from kvcustody.governance.external.port_view import PortView


class PortErasure:
    """An engine port as erasures see it; requests are residencies here."""

    def __init__(self, port: PortView, engine: EngineControl) -> None:
        self._port = port
        self._engine = engine

    def take_effect(self, selector: Selector, before_us: int, *, finish: bool) -> ErasureEffect:
        """End what the selector covers and began before; running requests end now, or are marked with `finish`."""
        port, pool, now_us = self._port, self._port.pool, self._port.clock.now_us()
        covered = _Covered(port, selector, before_us)
        before = _live(pool)
        for domain in covered.domains:
            domain.is_open = False  # nothing attaches from here on, whatever the engine does next
        aborted = 0
        finishing = [residency for residency in covered.running if finish and residency.is_opened]
        for residency in covered.running:
            residency.publishes = False  # and it leaves no hold
        if not finish and covered.running:
            aborted = len(covered.running)
            self._engine.abort([residency.request_id for residency in covered.running], "erased")
        forget: list[int] = []
        for hold in covered.holds:
            if hold.is_held:
                forget += pool.lapse(hold, "erased", now_us, before_us)
        if covered.holds:
            pool.recount_holds()
        if covered.domains:
            tags = [domain.tag for domain in covered.domains]
            forget += pool.end_cached(np.flatnonzero(np.isin(pool.tag, tags)), "erased", now_us, before_us)
        forget += _unpublish(pool, finishing)
        if forget:
            self._engine.evict(forget)
        port.reload_plans()
        port.forget_keys(selector.tenant)
        return ErasureEffect(
            aborted, tuple(finishing), len(covered.holds), before - _live(pool), (covered.units,)
        )

    def unit_states(self, units: Sequence[PoolUnits]) -> UnitStates:
        """Where these units are now: what no shard has answered for yet waits, whoever has the block since."""
        pool = self._port.pool
        waiting = quarantined = 0
        held: list[PoolUnits] = []
        used: list[PoolUnits] = []
        on_their_way = [custody.generations for custody in pool.queue.custodies()]
        pending = np.concatenate(on_their_way) if on_their_way else np.empty(0, dtype=np.int64)
        for part in units:
            waiting += int(np.count_nonzero(np.isin(part.generations, pending)))
            same = pool.generation[part.blocks] == part.generations
            state = pool.state[part.blocks]
            quarantined += int(np.count_nonzero(same & (state == QUARANTINED)))
            for into, wanted in ((held, CACHED), (used, ACTIVE)):
                chosen = same & (state == wanted)
                if chosen.any():
                    into.append(PoolUnits(part.pool, part.blocks[chosen], part.generations[chosen]))
        return UnitStates(waiting, quarantined, tuple(held), tuple(used))

    def still_running(self, requests: Sequence[object]) -> list[object]:
        """Those of the residencies that have not ended."""
        return [one for one in requests if isinstance(one, ExternalResidency) and one.is_running]

    def end(self, requests: Sequence[object]) -> None:
        """End these residencies' requests as erased."""
        ids = [one.request_id for one in requests if isinstance(one, ExternalResidency)]
        self._engine.abort(ids, "erased")

    def reread(self, units: Sequence[PoolUnits]) -> Reread | None:
        """The memory is the engine's workers': what was read back there is in the receipts."""
        return None


class _Covered:
    """What the pool has of a selector, found before anything is changed."""

    def __init__(self, port: PortView, selector: Selector, before_us: int) -> None:
        pool = port.pool
        self.domains: list[Domain] = [
            domain for domain in pool.domains.values() if matches_label(selector, label_of(domain))
        ]
        known = {domain.tag for domain in self.domains}
        tags = list(known)
        self.running: list[ExternalResidency] = []
        for residency in port.running.values():
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
