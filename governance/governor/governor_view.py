"""What erasures and scans use of a Governor: its pools, its requests, and the ways to end one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.pool.accounting import Domain
from kvcustody.allocator.prefix.sequence import RunningSequence
from kvcustody.audit.evidence.coverage.conservation import PoolCounts
from kvcustody.clock import Clock
from kvcustody.governance.erasure.erasure_run import ErasureRunner


class GovernorView(Protocol):
    """`Governor` is the real one."""

    erasures: ErasureRunner

    @property
    def clock(self) -> Clock:
        """The clock that decides deadlines."""

    @property
    def managers(self) -> list[BlockManager]:
        """The block managers, one per pool."""

    @property
    def running(self) -> Mapping[object, RunningSequence]:
        """Requests between admission and release, by handle."""

    def release(self, request_id: object, cause: str = ...) -> bool:
        """End a request; False where it had ended already."""

    def finish(self, sequence: RunningSequence, cause: str, *, handle: object = ...) -> None:
        """End a sequence, also one that no request refers to any more."""

    def forget_closed_plans(self) -> None:
        """After domains were closed: whoever asks for one next gets a fresh one."""

    def forget_forecast(self, covers: Callable[[Domain], bool]) -> None:
        """What enforcing would have had in these domains is not found again."""

    def counts(self) -> PoolCounts:
        """The pools' own counters, after everything that happened has been handed to the ledger."""
