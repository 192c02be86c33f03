"""What custody asks of a pool: `Books` limits and ends what is held, and their `Census` reads it.

Block managers of our own (`governor.pool_books`) and an engine's pool (`external.engine_books`) fulfil it. What only
one of the two has, as a tree, a fork or the engine's own books, stays behind these methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvcustody.allocator.pool.accounting import Domain
from kvcustody.audit.evidence.coverage.conservation import TierCounts
from kvcustody.audit.kinds import Event
from kvcustody.governance.decisions.apply_narrowing import LimitedPool
from kvcustody.governance.erasure.erasure_run import ErasureEffect
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.observability.stats import PoolStats
from kvcustody.governance.orphans.scan_protocol import Census
from kvcustody.policies.table.decision_table import DecisionTable

Covers = Callable[[Domain], bool]


class CopyTiers:
    """The tiers off the device that hold copies of a pool's blocks: none, where a subclass does not say more."""

    def counts(self) -> tuple[TierCounts, ...]:
        """Their own counters, for conservation."""
        return ()

    def figures(self) -> dict[str, float]:
        """What they did and hold, by the keys of `metrics.MEASURES`."""
        return {}

    def leaves(self) -> list[Event]:
        """What became of copies since the last call, where it is not told otherwise."""
        return []

    def narrow(self) -> None:
        """Policy or keys have changed: end the copies that no tier may keep any more, now or with the next step."""

    def forget_tenant(self, tenant: str) -> None:
        """An unlisted tenant has left: end its copies."""

    def close(self) -> None:
        """End what does not outlive the process, and let the stores go."""


class PoolFigures(NamedTuple):
    """Counters of the pools of one process. Blocks are by tenant; `charged` has who has no identity too."""

    pools: tuple[PoolStats, ...]
    running: int
    charged: dict[str, int]
    room: Mapping[str, int]
    tenant_tokens: dict[str, int]
    are_hits_leading: bool = True


class Books(Protocol):
    """The books of one process's pools. Called on the owning thread."""

    @property
    def copies(self) -> CopyTiers:
        """Its tiers."""

    @property
    def pools(self) -> Sequence[LimitedPool]:
        """The pools whose domains a revision binds."""

    def limit(self, table: DecisionTable) -> None:
        """Apply a revision's quotas, and what it asks of memory."""

    def close(self, covers: Covers, now_us: int) -> None:
        """End what nobody uses of these domains; requests that run in them go on and leave nothing."""

    def erase(self, selector: Selector, before_us: int, now_us: int, *, finish: bool) -> ErasureEffect:
        """End what the selector covers and began before; running requests end now, or are marked with `finish`."""

    def census(self) -> Census:
        """A reading of the books, for scan, check and conservation: it may cost as much as the pool has blocks."""

    def take_events(self, now_us: int) -> list[Event]:
        """What happened in pools and tiers since the last call, releases before the ends that they explain."""

    def figures(self, now_us: int) -> PoolFigures:
        """The counters, for metrics."""

    def teardown(self, now_us: int) -> None:
        """End every request and all custody."""
