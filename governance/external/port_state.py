"""What an engine port keeps of its engine, and how it reaches the ledger.

B1  A residency is on record before its end, and before anything that it gives back while it runs.
B2  Expiry and evidence meet every decision: what is due is asked from the adapter, ended, and only then decided on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcustody.allocator.external.pool import ForeignPool
from kvcustody.allocator.external.residency import ForeignResidency
from kvcustody.audit.events import Event
from kvcustody.governance.decisions.access_plan import Plan
from kvcustody.governance.decisions.authority import Authority
from kvcustody.governance.external import custody_events as port_evidence
from kvcustody.governance.external.accounts import PortAccounts
from kvcustody.governance.external.active_deadlines import ActiveLimits
from kvcustody.governance.external.block_keys import KeyChain
from kvcustody.governance.external.engine_control import EngineControl

SWEEP_BATCH = 128


class PortBooks(Authority):
    """Requests, accounts and evidence of one engine's pool; `EnginePort` fills the attributes."""

    pool: ForeignPool
    _engine: EngineControl
    _keep_last: bool
    _accounts: PortAccounts
    _running: dict[object, ForeignResidency]
    _starting: list[ForeignResidency]
    _launch: int
    _active: ActiveLimits
    _catch_up: Callable[[], None]
    _epoch: int

    def _sweep(self, now_us: int) -> None:
        if self.pool.is_due(now_us):
            self._catch_up()
            self._obey(self.pool.sweep(now_us, SWEEP_BATCH))

    def _obey(self, forget: Sequence[int]) -> None:
        if forget:
            self._engine.evict(forget)

    # -- evidence -----------------------------------------------------------------------------------------------------

    def _record_starting(self) -> None:
        if not self._starting:
            return
        starting, self._starting = self._starting, []
        revision = self.table.revision
        for residency in starting:
            self._outbox.append(port_evidence.opened(residency, self.pool, revision))
            self._count(residency)

    def _count(self, residency: ForeignResidency) -> None:
        tally = self._tally(residency.tenant)
        tally.requests += 1
        if isinstance(residency.keys, KeyChain):
            tally.prompt_tokens += residency.keys.prompt.tokens
        if len(residency.attached):
            tally.hit_requests += 1
            tally.hit_blocks += len(residency.attached)
            plan = residency.facts
            if isinstance(plan, Plan) and (plan.grants or plan.segments):
                for tag in set(self.pool.tag[residency.attached].tolist()) - {residency.domain.tag}:
                    self._reuse.crossed(plan, self.pool.domains[tag])

    def _drain(self, now_us: int) -> None:
        self._record_starting()
        outbox, self._outbox = self._outbox, []
        outbox += self._reuse.take_counts(now_us)
        outbox += port_evidence.ends(self.pool, now_us)
        launches = self.pool.take_scrubbed()
        if launches:
            self._launch += len(launches)
            outbox += port_evidence.receipts(launches, self._launch - len(launches), self.pool, now_us)
        if outbox:
            self._ledger.submit(outbox)

    def _emit(self, events: Sequence[Event]) -> None:
        self._outbox += events
