"""The decision behind every reuse: own scope, segments and grants, each at the request's own instant.

- A reuse that is not permitted is a miss: the domain is not searched, and the denial is counted, not told.
- A grant or segment of another tenant serves a reader only after its first use is durable (class A).
- A denied grant costs what an absent block costs: a chain is hashed and looked up whose key keys nothing.
- While a new revision is being recorded, a reuse needs the permission of both (a narrowing act takes effect first).
- What was revoked is denied whatever the table says. Once the policy's lease has run out so is all but the own scope,
  and once the revision itself has expired everything is: it permits nothing any more.
- A worker that has not confirmed the newest erasures within its custody lease reuses nothing (`edge.custody_lease`).
- Whose processing is restricted (GDPR 18) reuses nothing, by whatever path.
- A fork reads anew what its parent attached across tenants: it is decided as that reuse is, at its own instant.
- Of requests that are monitored each decision is the same, and counted as what would have been denied: nobody's denial,
  and no first use of anything.
- Where the policy says `own_hits: deny`, nothing is reused while the ledger has what happens only later.
- Each reuse across tenants is in the reader's log, in its residency's leaf. The first is in both logs, and both
  count all of them (class C).
"""

from __future__ import annotations

from typing import NamedTuple

from kvcustody.allocator.pool.accounting import Domain
from kvcustody.allocator.pool.block_state import NEVER_US
from kvcustody.allocator.prefix.longest_prefix import Chain, Prompt, ReadPlan
from kvcustody.audit.kinds import Event, HitCounted
from kvcustody.governance.decisions.access_plan import AnyPlan, OpenedDomain, is_revoked, label_of
from kvcustody.governance.decisions.first_use_log import FirstUseLog
from kvcustody.governance.decisions.shadow_policy import ShadowPolicy
from kvcustody.governance.edge.custody_lease import CUSTODY_LEASE, CustodyLease
from kvcustody.governance.observability.tenant_counters import TenantCounters
from kvcustody.governance.restriction.restricted_subjects import (
    BESIDE_RESTRICTED,
    NOBODY_RESTRICTED,
    RESTRICTED,
    RestrictedSubjects,
)
from kvcustody.policies.document.model import Action, Scope
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.model import AccessRequest, Decision

LAPSED, EXPIRED, UNRECORDED = "policy-lease", "policy-expired", "ledger-outage"
UNCERTAIN, CLOSED = "clock-in-doubt", "no-longer-opened"


class Moment(NamedTuple):
    """The time of a decision, on both clocks, and the request's trace (empty: none)."""

    now_us: int
    utc_us: int
    trace: str = ""


class _Tally(NamedTuple):
    """Requests of one kind, and what they reused."""

    requests: int
    blocks: int
    tokens: int

    @property
    def reused(self) -> tuple[int, int]:
        """Blocks and tokens."""
        return self.blocks, self.tokens


_NOTHING = _Tally(0, 0, 0)


class ReuseDecider:
    """Decides what a request may read, under one revision."""

    def __init__(
        self,
        table: DecisionTable,
        first_uses: FirstUseLog,
        coming: DecisionTable | None = None,
        *,
        revoked: frozenset[str] = frozenset(),
        lease_until_us: int = NEVER_US,
        expires_us: int = NEVER_US,
        shadow: ShadowPolicy | None = None,
        monitored: bool = False,
        restricted: RestrictedSubjects = NOBODY_RESTRICTED,
        custody: CustodyLease | None = None,
    ) -> None:
        """`monitored`: of requests that its decisions are not enforced for."""
        self.custody = custody or CustodyLease()
        self._restricted = restricted
        self._shadow = shadow
        self._monitored = monitored
        self.lease_until_us = lease_until_us  # boot time from which nothing but the own scope is reused
        self.expires_us = expires_us  # boot time from which nothing is
        self._table = table
        self.coming = coming
        self._revoked = revoked
        self._first_uses = first_uses
        self._counted: dict[tuple[str, str, str, str, str], _Tally] = {}

    def read_plan(
        self, plan: AnyPlan, prompt: Prompt, counters: TenantCounters, moment: Moment
    ) -> tuple[ReadPlan, tuple[str, ...]]:
        """Return what may be searched now, and the rules that permit the own scope."""
        permitted, reasons = self.reads_own(plan, counters, moment)
        if not permitted:
            return ReadPlan(Chain(plan.own.domain, None)), reasons
        if plan.grants or plan.matcher is not None:
            return self._widened(plan, prompt, counters, moment), reasons
        return plan.own_plan, reasons

    def reads_own(self, plan: AnyPlan, counters: TenantCounters, moment: Moment) -> tuple[bool, tuple[str, ...]]:
        """Whether the own scope may be searched now, and the rules that decide it."""
        over = self._is_over(plan, plan.tenant, counters, moment)
        if over:
            return False, (over,)
        restricted = self._restricted
        if restricted and restricted.covers(plan.tenant, plan.principal.subject):
            self._deny(counters, plan, RESTRICTED, plan.tenant)
            return False, (RESTRICTED,)
        if plan.hits_need_ledger and not self._first_uses.recording:
            self._deny(counters, plan, UNRECORDED, plan.tenant)
            return False, (UNRECORDED,)
        own = self._decide(plan.own_reuse, plan.classification, moment)
        if not own.permitted:
            self._deny(counters, plan, own.reasons[0], plan.tenant)
        elif restricted and plan.owner_scope is Scope.TENANT and restricted.has_tenant(plan.tenant):
            return True, (*own.reasons, BESIDE_RESTRICTED)
        return own.permitted, own.reasons

    def _is_over(self, plan: AnyPlan, owner: str, counters: TenantCounters, moment: Moment) -> str:
        """Why nothing at all may be reused now, counted; empty where something may."""
        if moment.now_us >= self.expires_us:
            rule = EXPIRED
        elif self.custody.is_over(moment.now_us):
            rule = CUSTODY_LEASE
        else:
            return ""
        self._deny(counters, plan, rule, owner)
        return rule

    @property
    def nothing_from_us(self) -> int:
        """The boot time from which nothing is reused."""
        return min(self.expires_us, self.custody.until_us)

    def _widened(self, plan: AnyPlan, prompt: Prompt, counters: TenantCounters, moment: Moment) -> ReadPlan:
        segment: Chain | None = None
        blocks = 0
        matched = plan.matcher.match(prompt.data) if plan.matcher is not None else None
        if matched is not None:
            entry = plan.segments[matched.id]
            if self.may(plan, entry, counters, moment):
                segment, blocks = entry.chain, matched.blocks
        grants = tuple(
            entry.chain if self.may(plan, entry, counters, moment) else Chain(entry.chain.domain, plan.decoy)
            for entry in plan.grants
        )
        return ReadPlan(plan.own, segment, blocks, grants)

    def may(self, plan: AnyPlan, entry: OpenedDomain, counters: TenantCounters, moment: Moment) -> bool:
        """Whether the plan's reader may search this grant's or segment's domain now."""
        if not entry.chain.domain.is_open:
            return False
        if moment.now_us >= self.lease_until_us:
            self._deny(counters, plan, LAPSED, entry.owner)
            return False
        if self._revoked and is_revoked(entry.id, self._revoked):
            self._deny(counters, plan, f"revoked:{entry.id}", entry.owner)
            return False
        name = self._table.policy.classifications[entry.reuse.level]
        decision = self._decide(entry.reuse, name, moment)
        if not decision.permitted:
            self._deny(counters, plan, decision.reasons[0], entry.owner)
            return False
        if entry.owner == plan.tenant or self._monitored:
            return True
        if self._first_uses.may(entry.reuse, name, decision, moment.trace):
            return True
        if self._first_uses.in_doubt:
            self._deny(counters, plan, UNCERTAIN, entry.owner)
        return False

    def may_go_on(self, plan: AnyPlan, domain: Domain, counters: TenantCounters, moment: Moment) -> bool:
        """Whether the plan's reader may attach again, as a fork does, what it attached of another's domain before."""
        if self._is_over(plan, label_of(domain).tenant, counters, moment):
            return False
        if self._restricted and self._restricted.covers(plan.tenant, plan.principal.subject):
            self._deny(counters, plan, RESTRICTED, label_of(domain).tenant)
            return False
        opened = [entry for entry in (*plan.grants, *plan.segments.values()) if entry.chain.domain is domain]
        if not opened:
            self._deny(counters, plan, CLOSED, label_of(domain).tenant)
        return any(self.may(plan, entry, counters, moment) for entry in opened)

    def _decide(self, request: AccessRequest, classification: str, moment: Moment) -> Decision:
        """By the active revision, and by the coming one too while that is being recorded."""
        decision = self._table.decide(request, moment.utc_us)
        if decision.permitted and self.coming is not None:
            decision = self.coming.decide(request, moment.utc_us)
        if self._shadow is not None:
            self._shadow.compare(decision, request, classification, moment.utc_us)
        return decision

    def _deny(self, counters: TenantCounters, plan: AnyPlan, rule: str, owner: str) -> None:
        if self._monitored:
            counters.count(counters.would_deny, rule)
            self._count(plan.tenant, owner, "would-deny", rule)
            return
        counters.count(counters.denials, rule)
        self._count(plan.tenant, owner, "deny", rule)

    def crossed(self, plan: AnyPlan, domain: Domain, blocks: int, tokens: int) -> None:
        """Count blocks that the plan's reader attached from this domain; another owner's log gets the count too."""
        for entry in (*plan.grants, *plan.segments.values()):
            if entry.chain.domain is domain and entry.owner != plan.tenant:
                self._count(plan.tenant, entry.owner, "permit", entry.id, blocks=blocks, tokens=tokens)

    def denied(self, action: Action, tenant: str, rule: str) -> None:
        """Count a denied act of a tenant's own, like a denied reuse."""
        effect = "would-deny" if self._monitored else "deny"
        self._count(tenant, tenant, effect, rule, action.name.lower())

    def _count(
        self,
        reader: str,
        owner: str,
        effect: str,
        rule: str,
        action: str = "reuse",
        *,
        blocks: int = 0,
        tokens: int = 0,
    ) -> None:
        key = (reader, owner, effect, rule, action)
        before = self._counted.get(key, _NOTHING)
        self._counted[key] = _Tally(before.requests + 1, before.blocks + blocks, before.tokens + tokens)

    def take_counts(self, now_us: int) -> list[Event]:
        """Return denials and crossings since the last call as counts (class C); an event for each would cost
        too much.
        """
        if not self._counted:
            return []
        revision = self._table.revision
        counted: list[Event] = [
            HitCounted(now_us, tenant, owner, action, effect, rule, revision, *tally.reused, tally.requests)
            for (tenant, owner, effect, rule, action), tally in self._counted.items()
        ]
        self._counted.clear()
        return counted


def via_reasons(plan: AnyPlan, domain: Domain) -> tuple[str, ...]:
    """Return the grant or segment through which the plan reaches `domain`."""
    opened = (*plan.grants, *plan.segments.values())
    return tuple(entry.id for entry in opened if entry.chain.domain is domain)
