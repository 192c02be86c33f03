"""What erasures, scans and checks use of an engine port: its pool, its requests, and the ways to end one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.audit.evidence.coverage.conservation import PoolCounts
from kvcustody.clock import Clock
from kvcustody.governance.erasure.erasure_run import ErasureRunner


class PortView(Protocol):
    """`EnginePort` is the real one."""

    pool: ExternalPool
    erasures: ErasureRunner

    @property
    def clock(self) -> Clock:
        """The clock that decides deadlines."""

    @property
    def running(self) -> Mapping[object, ExternalResidency]:
        """Requests between arrival and release, by the engine's own id."""

    def release(self, residency: ExternalResidency, cause: str = ...) -> bool:
        """End a request; False where it had ended already."""

    def reload_plans(self) -> None:
        """After domains were closed: requests that wait get a new plan."""

    def forget_keys(self, tenant: str | None) -> None:
        """Something of `tenant` (None: of whoever) was erased: no key of what it had is kept."""

    def counts(self) -> PoolCounts:
        """The pool's own counters, after everything that happened went to the ledger."""
