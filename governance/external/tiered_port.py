"""The engine port's part for tiers: whose blocks may be copied beside the engine, and whose copies may come back.

port.may_offload(residency)                          # asked before the first copy, and on record by then
port.may_restore(residency, domain)                  # as for attaching, by the request's last look-up
port.restored(residency, blocks, born_us, ceiling_us)  # a tier filled blocks that the request was handed
port.record_copies(leaves)                           # what became of copies
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.allocator.pool.accounting import Domain
from kvcustody.audit.kinds import Event
from kvcustody.errors import LedgerUnavailable
from kvcustody.governance.admission_outcome import AdmissionRefused
from kvcustody.governance.decisions.access_plan import Plan, owed_by
from kvcustody.governance.decisions.reuse_decision import Moment
from kvcustody.governance.external.block_keys import KeyChain
from kvcustody.governance.external.engine_books import EngineBooks, EngineTiers
from kvcustody.governance.external.monitored_port import MonitoredPort
from kvcustody.governance.restriction.restricted_subjects import RESTRICTED
from kvcustody.policies.document.model import Action, Effect
from kvcustody.policies.table.model import Decision

COPIES_IN_CLEAR = "copies-in-clear"  # the rule that denies what would rest beside the engine unsealed


class TieredPort(MonitoredPort):
    """What tiers beside the engine ask: the base of `EnginePort`."""

    _books: EngineBooks

    @property
    def tiers(self) -> EngineTiers:
        """What keeps copies beside the engine: its adapter says so before the first request."""
        return self._books.tiers

    def may_offload(self, residency: ExternalResidency) -> bool:
        """Whether copies of the request's blocks may leave the device: asked before the first, and on record by then.

        An engine that cannot ask for each request says so once (`EngineTiers`): who may not offload is refused.
        """
        plan = residency.facts
        if not isinstance(plan, Plan) or residency.monitored is not None:
            return False  # a copy is kept under the policy's keys, or not at all
        if residency.domain.is_withheld or self.restricted.covers(plan.tenant, plan.principal.subject):
            return False
        try:
            return self.authorize(Action.OFFLOAD, plan, residency.trace).permitted
        except LedgerUnavailable:
            return False

    def may_restore(self, residency: ExternalResidency, domain: Domain) -> bool:
        """Whether a tier may fill blocks of this domain for the request, by its last look-up: as for attaching them.

        Its own, or that of the segment which it begins with. What a grant opens stays in the pool; its own behind that
        may be filled while the grant stands.
        """
        chain, now_us = residency.keys, self._clock.now_us()
        if not isinstance(chain, KeyChain) or chain.epoch != self._epoch:
            return False
        if now_us >= self._reuse.nothing_from_us:
            return False
        if not domain.may_be_copied or (domain is residency.domain and not residency.granted_blocks):
            return domain.may_be_copied
        return (
            domain in (residency.domain, residency.segment_domain)
            and now_us < self._reuse.lease_until_us
            and now_us + self._clock.offset_us < chain.until_utc_us
        )

    def restored(self, residency: ExternalResidency, blocks: Sequence[int], born_us: int, ceiling_us: int) -> None:
        """A tier filled these blocks, which the request was handed: they are as old as the copies, and end with them.

        Told before they are published.
        """
        if not blocks:
            return
        self._flush_deferred()
        which, plan = np.array(blocks, dtype=np.int64), residency.facts
        self.pool.restored(residency, which, born_us, ceiling_us)
        residency.computes_us = self._clock.now_us()
        if residency.segment_blocks and isinstance(plan, Plan):
            self._count_crossed(plan, residency, self.pool.tag[which])

    def record_copies(self, leaves: Sequence[Event]) -> None:
        """What became of copies off the device, for the ledger; it leaves with the next step."""
        self._outbox += leaves

    def _refused_copies(
        self, plan: Plan[ExternalPool], request_id: Hashable, moment: Moment
    ) -> AdmissionRefused | None:
        """Whatever a request computes would be copied, and nothing asks for each: why it may not run; None: it may."""
        denied, owed = "", owed_by(self.table, plan.tenant, plan.level)
        if self.restricted.covers(plan.tenant, plan.principal.subject):
            denied = RESTRICTED
        elif owed.tiers and owed.encrypt and not self.tiers.are_copies_sealed():
            denied = COPIES_IN_CLEAR
        if denied:
            self._reuse.denied(Action.OFFLOAD, plan.tenant, denied)
            return self._forbidden(plan, request_id, Decision(Effect.DENY, (denied,), self.table.revision))
        try:
            decision = self.authorize(Action.OFFLOAD, plan, moment.trace)
        except LedgerUnavailable:
            return AdmissionRefused(request_id, "the ledger cannot record the transfer of copies; try again")
        return None if decision.permitted else self._forbidden(plan, request_id, decision)

    def _forbidden(self, plan: Plan[ExternalPool], request_id: Hashable, decision: Decision) -> AdmissionRefused:
        counters = self._counters(plan.tenant)
        counters.count(counters.refused, decision.reasons[0])
        return AdmissionRefused(request_id, f"policy: {decision.reasons[0]}")

    def _count_crossed(self, plan: Plan[ExternalPool], residency: ExternalResidency, tags: NDArray[np.int32]) -> int:
        """Blocks with these tags were reused; how many of them are of another domain than the request's own."""
        found, counts = np.unique(tags[tags != residency.domain.tag], return_counts=True)
        for tag, blocks in zip(found.tolist(), counts.tolist(), strict=True):
            self._reuse.crossed(plan, self.pool.domains[tag], blocks, blocks * self.block_tokens)
        return int(counts.sum())
