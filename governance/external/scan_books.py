"""The books of an engine port, as a scan reads them: the engine's own, the pool's and the residencies', counted apart.

P1  References and holds are counted from the residencies, block by block where generations agree, and compared with
    what the pool keeps; what the pool keeps is compared with what the engine says.
P2  What the engine alone can put right is asked of it (`evict`, `abort`, `withhold`); its books are never written here.
P3  A chain has no nodes here, so a hold may outlive its blocks: it lapses at its deadline, and is no orphan.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.external.residency import ForeignResidency
from kvcustody.allocator.pool.block_state import ACTIVE, CACHED
from kvcustody.governance.erasure.tier_protocol import CopyStore
from kvcustody.governance.external.engine_control import EngineControl
from kvcustody.governance.external.port_view import PortView
from kvcustody.governance.external.scan_findings import PortTroubles
from kvcustody.governance.orphans.finding import Trouble
from kvcustody.governance.orphans.scan_protocol import Held
from kvcustody.governance.orphans.slices import Slices


class EngineBooks:
    """One port's pool against its requests and its engine."""

    def __init__(self, port: PortView, engine: EngineControl) -> None:
        self._port = port
        self._engine = engine
        self._known_difference = 0  # between the engine's count of hand-outs and ours, named by a scan before
        self._contained: set[int] = set()  # what the engine references by itself, and was told to withhold

    def troubles(self, now_us: int) -> tuple[list[Trouble], int]:
        """Findings of the pool, and how many holds and requests were compared."""
        port = self._port
        found = PortTroubles(
            port, self._engine, count_references(port), count_holds(port), now_us, self._contained
        )
        made = [*found.troubles(), *found.difference(self._known_difference, self._know)]
        holds = sum(len(account.residencies) for account in port.pool.accounts.values())
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
    """By block, how many running residencies refer to it as it is now (P1)."""
    pool = port.pool
    counted = np.zeros(pool.blocks, dtype=np.int64)
    for residency in port.running.values():
        blocks = residency.blocks()
        np.add.at(counted, blocks[pool.generation[blocks] == residency.generations()], 1)
    return counted


def count_holds(port: PortView) -> NDArray[np.int64]:
    """By block, how many ended residencies hold it as it is now (P1)."""
    pool = port.pool
    held: list[NDArray[np.int64]] = []
    for account in pool.accounts.values():
        for hold in account.residencies.values():
            assert isinstance(hold, ForeignResidency)
            held.append(hold.held[pool.generation[hold.held] == hold.held_generations])
    every = np.concatenate(held) if held else np.empty(0, dtype=np.int64)
    return np.bincount(every, minlength=pool.blocks).astype(np.int64)
