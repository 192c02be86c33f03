"""The engine port: what the adapter of an engine that allocates by itself tells the governance, and must obey.

The engine keeps its allocator and its index. It says which blocks it handed out, attached, published and released, by
index; the port answers with keys, decisions and orders. docs/engine-port.md has a complete example.

T1  A request without a valid identity reads nothing, publishes nothing and holds nothing; its blocks are in custody.
T2  Keys are made here, of the request's own, granted and segment domains, and nowhere else; a request whose reuse is
    denied has keys that no other request can compute.
T3  What is due has ended before any look-up answers, and attach is checked again, block by block.
T4  Every block that is not zero is in the scrub order of the step that first writes to it (foreign_blocks, X1).
T5  An adapter may tell late what costs time, if it says so (`tell_late`): the port then asks for it before it decides
    or ends anything.
T6  Telling the port something twice changes nothing (L4); telling it something impossible raises `IsolationError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import structlog

from kvcustody.allocator.external.pool import ForeignPool
from kvcustody.allocator.external.residency import ForeignResidency
from kvcustody.allocator.external.scrub_queue import ScrubOrder
from kvcustody.allocator.pool.account import Account
from kvcustody.allocator.pool.memory_protocol import ScrubResult
from kvcustody.audit.coverage.conservation import PoolCounts
from kvcustody.clock import Clock
from kvcustody.errors import ConfigError
from kvcustody.governance.decisions.apply_narrowing import Bound
from kvcustody.governance.decisions.staged_table import quotas_of
from kvcustody.governance.erasure.erasure_run import ErasureResult, ErasureRunner
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.external.accounts import ANONYMOUS, PortAccounts
from kvcustody.governance.external.active_deadlines import ActiveLimits
from kvcustody.governance.external.block_moves import PortMoves
from kvcustody.governance.external.check_invariants import check
from kvcustody.governance.external.engine_control import EngineControl
from kvcustody.governance.external.erase_in_engine import PortCustodian
from kvcustody.governance.external.scan_books import EngineBooks
from kvcustody.governance.external.stats import pool_counts, port_stats
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.ledger_protocol import Ledger
from kvcustody.governance.observability.stats import Stats, charged_blocks
from kvcustody.governance.orphans.finding import Finding
from kvcustody.governance.orphans.scan_protocol import LedgerJoin
from kvcustody.governance.orphans.scans import OrphanScans, Scanned
from kvcustody.policies.document.model import Profile
from kvcustody.policies.table.decision_table import DecisionTable

_log = structlog.get_logger(__name__)


class EnginePort(PortMoves):
    """Custody of every block of one engine that allocates by itself. Not thread-safe, except `call`."""

    def __init__(
        self,
        pool: ForeignPool,
        engine: EngineControl,
        table: DecisionTable,
        keyring: Keyring,
        ledger: Ledger,
        *,
        clock: Clock | None = None,
        expires_utc_us: int | None = None,
        block_tokens: int,
        keep_last: bool = True,
        residencies_max: int = 100_000,
    ) -> None:
        if table.policy.profile is Profile.DEDICATED and len(table.policy.tenants) > 1:
            raise ConfigError(
                f"policy `{table.policy.name}` is `dedicated` and names {len(table.policy.tenants)} tenants: "
                "run one engine for each, with a policy of its own"
            )
        self.pool = pool
        self._engine = engine
        self._keep_last = keep_last
        self._accounts = PortAccounts(pool, residencies_max)
        self._running: dict[object, ForeignResidency] = {}
        self._starting: list[ForeignResidency] = []
        self._launch = 0
        self._active = ActiveLimits()
        self._catch_up: Callable[[], None] = _nothing
        self._epoch = 0  # moves with every change of standing: keys made before are looked up anew
        super().__init__(
            table, keyring, ledger, block_tokens=block_tokens, clock=clock, expires_utc_us=expires_utc_us
        )
        self.erasures = ErasureRunner(
            PortCustodian(self, engine), self._clock, self._emit, lambda: self.table.policy.erasure
        )
        self._orphans = OrphanScans(EngineBooks(self, engine), self._clock, self._emit)
        self._accounts.limit(quotas_of(table))

    def tell_late(self, catch_up: Callable[[], None]) -> None:
        """The adapter notes facts and tells it later, in order; `catch_up` makes it tell everything now (T5)."""
        self._catch_up = catch_up

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self) -> ScrubOrder | None:
        """Once per engine step, after scheduling, and on a timer while idle: commands, expiry, evidence.

        Returns the scrubs that this step must do before any other write.
        """
        self._catch_up()
        if self._commands:
            self._run_commands()
        now_us = self._clock.now_us()
        self._sweep(now_us)
        over = self._active.take_over(now_us)
        if over:
            self._engine.abort(over, "active-max")
        if self.erasures.pending:
            self.erasures.poll()
        order = self.pool.order(now_us)
        self._drain(now_us)
        return order

    def fence(self, at_us: int | None = None) -> int:
        """A device step is in flight; what ends inside it is scrubbed after it. Returns its id for `retire`."""
        return self.pool.fences.open(self._clock.now_us() if at_us is None else at_us)

    def retire(self, fence: int) -> None:
        """The device step has retired; a second time changes nothing."""
        self.pool.fences.retire(fence)

    def scrubbed(
        self, number: int, shard: int, results: Sequence[ScrubResult], device_blocks: int | None = None
    ) -> None:
        """A worker's answer to a scrub order, one result a batch; `device_blocks` is the device's own count so far."""
        failed = self.pool.scrubbed(number, shard, results)
        if device_blocks is not None:
            self.pool.queue.device_blocks[shard] = device_blocks
        if len(failed):
            _log.error("blocks failed to verify", blocks=failed.tolist()[:16], count=len(failed))
            users = [
                residency.request_id
                for residency in self._running.values()
                if np.isin(residency.blocks(), failed).any()
            ]
            self._engine.withhold(failed.tolist())
            if users:
                self._engine.abort(users, "scrub failed")

    def has_work(self, now_us: int | None = None) -> bool:
        """Something is due now, so that an idle engine must step."""
        if self._commands or self._outbox or self.pool.queue.has_dirty or self.pool.queue.has_fenced:
            return True
        if self.erasures.is_due():
            return True
        due_us = self.next_due_us()
        return due_us is not None and due_us <= (self._clock.now_us() if now_us is None else now_us)

    def next_due_us(self) -> int | None:
        """When something is due next, on the boot-time clock: for a timer. None where nothing is."""
        lapse, active = self.pool.partition.wheel.next_due_us(), self._active.next_due_us()
        return active if lapse is None else lapse if active is None else min(lapse, active)

    # -- administration -----------------------------------------------------------------------------------------------

    def _account(self, tenant: str) -> tuple[Account, ForeignPool]:
        return self._accounts.account(tenant, quotas_of(self.table)), self.pool

    def _pools_bound(self) -> Iterable[Bound]:
        return [self._accounts.bound]

    def _limit(self, table: DecisionTable) -> None:
        self._accounts.limit(quotas_of(table))

    def _standing_changed(self) -> None:
        self._epoch += 1

    def erase(self, selector: Selector, **order: Any) -> ErasureResult:
        """End all custody of a selector now, by the policy's way with running requests; `step` completes it.

        `order`: what `ErasureRunner.begin` takes besides. Raises `ConfigError` for a malformed selector.
        """
        self._catch_up()
        result = self.erasures.begin(selector, **order)
        _log.info(
            "erased", erasure=result.erasure, blocks=result.ended_blocks, remaining=result.remaining_blocks
        )
        self._drain(self._clock.now_us())
        self._engine.wake()
        return result

    def reload_plans(self) -> None:
        """After domains were closed: requests that wait find their standing anew."""
        self.forget_closed_plans()
        self._epoch += 1

    def scan(self) -> list[Finding]:
        """Compare this side's books, requests, queues and tiers with each other and with the engine's books."""
        self._catch_up()
        return self._orphans.scan()

    def scan_and_recover(self, ledger: LedgerJoin | None = None, *, mode: str = "full") -> Scanned:
        """Scan, repair every finding, and put both on record. With `ledger`, that one is joined too.

        The engine is told what it must forget, abort or withhold; its own books stay its own.
        """
        self._catch_up()
        self._drain(self._clock.now_us())
        scanned = self._orphans.scan_and_recover(self.pool.blocks, ledger, mode)
        self._drain(self._clock.now_us())
        self._engine.wake()
        return scanned

    def check(self) -> list[str]:
        """Recompute the invariants from scratch; an empty list when all hold."""
        self._catch_up()
        return check(self)

    def victims(self, count: int) -> list[int]:
        """CACHED blocks that our policy ends first to make room, their custody ended: hand these out first.

        Empty where no tenant has a guarantee: then the engine's own order is as good.
        """
        self._catch_up()
        victims = self.pool.victims(count)
        if not victims:
            return []
        return self.pool.end_cached(np.array(victims, dtype=np.int64), "evicted", self._clock.now_us())

    def stats(self) -> Stats:
        """A snapshot of counters; consistent between steps."""
        self._catch_up()
        pools = (port_stats(self.pool, self._clock.now_us()),)
        charged = charged_blocks(self.pool.accounts.values())
        charged.pop(ANONYMOUS, None)
        return Stats(dict(self.tallies), pools, len(self._running), self._orphans.drift_blocks, charged)

    def counts(self) -> PoolCounts:
        """The pool's own counters for conservation, after everything that happened went to the ledger."""
        self._catch_up()
        self._drain(self._clock.now_us())
        return pool_counts(self.pool, self._running.values())

    @property
    def running(self) -> Mapping[object, ForeignResidency]:
        """Requests between arrival and release."""
        return self._running

    def close(self) -> None:
        """Release every request, end all custody and hand over the evidence; the engine then does the last order."""
        self._catch_up()
        for residency in list(self._running.values()):
            self.release(residency, "shutdown")
        now_us = self._clock.now_us()
        forget: list[int] = []
        for account in self.pool.accounts.values():
            for hold in list(account.residencies.values()):
                assert isinstance(hold, ForeignResidency)
                forget += self.pool.lapse(hold, "teardown", now_us)
        self._obey(forget)
        self._drain(now_us)
        self._first_uses.close()


def _nothing() -> None:
    """Everything has been told."""
