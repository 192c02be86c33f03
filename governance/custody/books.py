"""What custody needs from a pool: `Books` limit and end custody, and their `Census` reads it.

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
    """Tiers off the device that hold copies of a pool's blocks. The base class has none."""

    def counts(self) -> tuple[TierCounts, ...]:
        """Return the tiers' own counters, for conservation."""
        return ()

    def figures(self) -> dict[str, float]:
        """Return the tiers' activity and contents, by the keys of `metrics.MEASURES`."""
        return {}

    def leaves(self) -> list[Event]:
        """Return the events of copies since the last call that no other call reports."""
        return []

    def narrow(self) -> None:
        """End copies that the changed policy or keys no longer permit, now or with the next step."""

    def forget_tenant(self, tenant: str) -> None:
        """End the copies of an unlisted tenant that has left."""

    def close(self) -> None:
        """End copies that must not outlive the process, and close the stores."""


class PoolFigures(NamedTuple):
    """Counters of the pools of one process, by tenant; `charged` also covers anonymous requests."""

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
        """The tiers of the pool."""

    @property
    def pools(self) -> Sequence[LimitedPool]:
        """The pools whose domains a revision limits."""

    def limit(self, table: DecisionTable) -> None:
        """Apply a revision's quotas and memory limits."""

    def close(self, covers: Covers, now_us: int) -> None:
        """End unused custody of these domains; running requests in them go on and leave nothing."""

    def erase(self, selector: Selector, before_us: int, now_us: int, *, finish: bool) -> ErasureEffect:
        """End the custody that the selector covers and that began before; running requests end now, or are marked with
        `finish`.
        """

    def census(self) -> Census:
        """Read the books for scan, check and conservation; the cost may grow with the pool's blocks."""

    def take_events(self, now_us: int) -> list[Event]:
        """Return the events of pools and tiers since the last call, releases before the ends that they explain."""

    def figures(self, now_us: int) -> PoolFigures:
        """Return the counters, for metrics."""

    def teardown(self, now_us: int) -> None:
        """End every request and all custody."""
