"""The engine port's part for monitored requests: those that run whatever the policy says, and are recorded.

An order of monitoring says which tenants are monitored (`Authority.enforcement`). Their requests read and publish under
the engine's own keys (`Monitor`); a forecast says what enforcement would have given them (`PortForecast`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.allocator.pool.accounting import Account, Domain
from kvcustody.allocator.pool.block_state import Blocks
from kvcustody.allocator.prefix.longest_prefix import Prompt, ReadPlan
from kvcustody.governance.custody.custody import Custody
from kvcustody.governance.decisions.access_plan import Plan, PlanKey, label_of
from kvcustody.governance.decisions.reuse_decision import Moment
from kvcustody.governance.decisions.staged_table import quotas_of
from kvcustody.governance.external.accounts import PortAccounts
from kvcustody.governance.external.block_keys import KeyChain
from kvcustody.governance.external.residency_events import NO_IDENTITY
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.monitoring.enforcement import MONITORED
from kvcustody.governance.monitoring.forecast_cache import QuotaBlocks
from kvcustody.governance.monitoring.monitor import NO_TENANT, MonitoredRequest
from kvcustody.governance.monitoring.port_forecast import PortForecast
from kvcustody.policies.document.model import Action
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.tenants import ANONYMOUS


class MonitoredPort(Custody[ExternalPool]):
    """Custody of an engine's blocks, with what monitored requests need: the base of `EnginePort`."""

    pool: ExternalPool
    _accounts: PortAccounts
    _forecast: PortForecast
    _flush_deferred: Callable[[], None]
    _common: tuple[DecisionTable | None, int] = (None, 0)

    def _monitored_plan(self, key: PlanKey, request_id: Hashable, moment: Moment) -> Plan[ExternalPool] | None:
        """The plan of a request that is let in whatever the policy says; None for a tenant that it does not name."""
        plan = self._plan(key, request_id, moment)
        if not isinstance(plan, Plan):
            return None
        if not plan.admitted.permitted:
            rule = plan.admitted.reasons[0]
            counters = self._counters(plan.tenant)
            counters.count(counters.would_deny, rule)
            self._watched.denied(Action.ADMIT, plan.tenant, rule)
        return plan

    def _monitored_request(
        self,
        plan: Plan[ExternalPool] | None,
        account: Account,
        domain: Domain,
        principal: Principal | None,
        model: ModelIdentity,
        salt: str | None,
    ) -> MonitoredRequest:
        """A monitored request at its arrival, under the engine's own keys."""
        refused = "" if principal is None else NO_TENANT
        if plan is not None:
            refused = "" if plan.admitted.permitted else plan.admitted.reasons[0]
        chain = self._monitor.chain(domain, self.pool, model.digest, salt)
        return MonitoredRequest(chain, None, model.digest, salt, reader=account.name, refusal=refused)

    def _judge(self, residency: ExternalResidency, chain: KeyChain, now_us: int) -> MonitoredRequest | None:
        """Record what the policy would let a monitored request read.

        Returns:
            None for a request that is not monitored, or not any more.
        """
        monitored = residency.monitored
        if not isinstance(monitored, MonitoredRequest):
            return None
        self._flush_deferred()  # what has begun or was computed by now may be found
        plan = residency.facts
        moment = Moment(now_us, now_us + self._clock.offset_us, residency.trace)
        if chain.epoch != self._epoch or (isinstance(plan, Plan) and moment.utc_us >= plan.valid_until_utc_us):
            if not self._stands_again(residency, chain, monitored):
                return None
            plan = residency.facts
        read: ReadPlan | None = None
        reasons: tuple[str, ...] = (monitored.refusal,) if monitored.refusal else NO_IDENTITY
        if isinstance(plan, Plan):
            counters = self._counters(plan.tenant)
            read, reasons = self._watched.read_plan(plan, chain.prompt, counters, moment)
            if monitored.refusal:
                read, reasons = None, (monitored.refusal,)
        self._forecast.judge(monitored, read, reasons, now_us)
        residency.reasons = (MONITORED, *reasons)
        return monitored

    def _stands_again(self, residency: ExternalResidency, chain: KeyChain, monitored: MonitoredRequest) -> bool:
        """Whether a waiting request is still monitored, after orders, policy or keys have changed."""
        chain.forget()
        chain.epoch = self._epoch
        old = residency.facts
        plan = self._plan(old.key, residency.request_id, self._moment()) if isinstance(old, Plan) else None
        if isinstance(plan, Plan):
            residency.facts = plan
        known = residency.facts if isinstance(residency.facts, Plan) else None
        own = known.own.domain if known is not None else self._accounts.anonymous_domain(self.table)
        principal = known.principal if known is not None else None
        if self._is_monitored(principal, residency.request_id):
            monitored.chain = self._monitor.chain(own, self.pool, monitored.model, monitored.salt)
            residency.domain = monitored.chain.domain
            return True
        residency.monitored, residency.domain = None, own
        residency.expected = 0
        if known is None or monitored.refusal or known.own.state is None:  # it runs, reads nothing, leaves nothing
            residency.keys, residency.publishes = None, False
        return False

    def _attachable_monitored(self, blocks: Blocks, now_us: int) -> int:
        """How many leading blocks a monitored request may attach: those of monitored requests alone.

        Args:
            blocks: indices, int64.
        """
        tags = self.pool.tag[blocks]
        domains = {tag: self.pool.domains.get(tag) for tag in set(tags.tolist())}
        readable = [
            tag
            for tag, domain in domains.items()
            if domain is not None and domain.is_open and not domain.is_withheld and label_of(domain).is_monitored
        ]
        return self.pool.attachable(blocks, np.where(np.isin(tags, readable), tags, -1), now_us)

    def _count_monitored(self, residency: ExternalResidency, monitored: MonitoredRequest) -> None:
        """Record the request as soon as it is known what it would have matched."""
        domains = [self.pool.domains[tag] for tag in self.pool.tag[residency.attached].tolist()]
        record = self._recording(residency, monitored, domains, residency.prompt_tokens, residency.began_us)
        self._forecast.when_known(monitored, record)
        self.measures.began(0, 0, residency.began_us - residency.asked_us)

    def _quota_of(self, tenant: str) -> QuotaBlocks:
        """What the policy gives a tenant, whether it is enforced or not."""
        entry, size = quotas_of(self.table).tenant(tenant), self.pool.partition.size
        return (
            QuotaBlocks(0, size)
            if entry is None or tenant == ANONYMOUS
            else QuotaBlocks(int(entry.guaranteed * size), int(entry.cap * size))
        )

    def _common_blocks(self) -> int:
        """What no guarantee of the policy has claimed, whether it is enforced or not."""
        table = quotas_of(self.table)
        if self._common[0] is not table:
            size = self.pool.partition.size
            claimed = sum(int(tenant.guaranteed * size) for tenant in table.policy.tenants)
            self._common = (table, size - claimed)
        return self._common[1]


def monitored_again(residency: ExternalResidency, prompt: Prompt, chain: KeyChain) -> MonitoredRequest | None:
    """The record of a resumed request, which is judged anew; None where it is not monitored."""
    before = residency.monitored
    if not isinstance(before, MonitoredRequest):
        return None
    governed = before.governed
    if governed is not None:
        governed = KeyChain(prompt, single_group=chain.single_group, epoch=-1, kinds=chain.kinds)
    again = MonitoredRequest(
        before.chain, governed, before.model, before.salt, reader=before.reader, refusal=before.refusal
    )
    again.reserved_blocks = before.reserved_blocks
    return again
