"""A request's plan: what it may read and write, from identity and policy.

A plan is made once per (principal, model, route, hint, salt) and policy revision, and kept in a bounded cache; what
may change with time is decided again at every request.

- A plan holds primed states only of domains that the policy opens to this reader: own, segments, grants.
- Every reuse is decided at the request's own instant; a plan's cached part never answers for a grant or a segment.
- A tenant that invents principals, salts or epochs evicts its own plans, nobody else's.
- Under a revision, a grant or segment serves a reader only after its first use is durable in the ledger (class A).
- The own domain of a request through a door is that of the erase epochs in its token (`edge.worker_epochs`).
- A plan that has left the book holds no primed state, whoever still refers to it (docs/concepts/keys.md).
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar, Unpack
from weakref import WeakValueDictionary

from kvcustody.allocator.pool.accounting import Account, Domain, DomainFacts, OwnerData
from kvcustody.allocator.pool.residency import Residency
from kvcustody.allocator.prefix.block_priority import BlockPriority
from kvcustody.allocator.prefix.key_chain import HashState
from kvcustody.allocator.prefix.longest_prefix import Chain, ReadPlan
from kvcustody.governance.decisions.authorize import authorize
from kvcustody.governance.decisions.eviction_order import block_priorities
from kvcustody.governance.decisions.segment_matcher import Candidate, SegmentMatcher
from kvcustody.governance.decisions.tenant_names import TenantNames
from kvcustody.governance.edge.erase_epochs import Epochs
from kvcustody.governance.edge.worker_epochs import WorkerEpochs, epoch_salt
from kvcustody.governance.identity.domain_spec import (
    DomainSpec,
    KeyOwner,
    ScopeKind,
    own_domain,
    tenant_owner,
)
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.keys.keyring import KeyFact, Keyring
from kvcustody.governance.request import Hints
from kvcustody.governance.restriction.restricted_subjects import NOBODY_RESTRICTED, RestrictedSubjects
from kvcustody.ids import TenantId
from kvcustody.policies.document.model import Action, Grant, OnOutage, Scope, SegmentRule, Via
from kvcustody.policies.document.token_priorities import KindRange
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.model import AccessRequest, Decision
from kvcustody.policies.table.obligations import Obligations

GRANTS_READ_MAX = 4
PLANS_PER_TENANT_MAX = 4096

_SCOPES = {Scope.SESSION: ScopeKind.SESSION, Scope.SUBJECT: ScopeKind.SUBJECT, Scope.TENANT: ScopeKind.TENANT}
_REACH = {ScopeKind.SESSION: 0, ScopeKind.SUBJECT: 1, ScopeKind.TENANT: 2}  # all others: whoever is named
LEVELS = {ScopeKind.SESSION: Scope.SESSION, ScopeKind.SUBJECT: Scope.SUBJECT, ScopeKind.TENANT: Scope.TENANT}


class DomainPool(Protocol):
    """The maker of plans' domains, which are interned by it: a `BlockManager` or an `ExternalPool`."""

    def domain(self, owner: Account, **facts: Unpack[DomainFacts]) -> Domain:
        """A new domain charged to `owner`."""


PoolT_co = TypeVar("PoolT_co", bound=DomainPool, covariant=True)


@dataclass(frozen=True, slots=True)
class DomainLabel(OwnerData):
    """The governance's label of an allocator domain: names for the ledger, never keys."""

    tenant: str
    classification: str
    level: int
    scope: str
    subject: str | None
    session: str | None
    spec: DomainSpec | None
    grant_or_segment: str = ""
    is_monitored: bool = False  # its keys are the engine's own, not the policy's


def owed_by(table: DecisionTable, tenant: str, level: int) -> Obligations:
    """A tenant's obligations for a domain; without permission to publish or retain, blocks are never CACHED.

    The same for every reader, so that a domain's limits do not depend on who came first.
    """
    owed = table.obligations(tenant, level)
    for action in (Action.PUBLISH, Action.RETAIN):
        if not authorize(table, action, tenant, level).permitted:
            return owed._replace(idle_us=0, absolute_us=0)
    return owed


class AdmissionFacts(NamedTuple):
    """The requester of a plan's residencies, equal in every leaf that opens one."""

    tenant: str
    subject: str | None
    session: str | None
    asserted: bool  # subject or session are the tenant's word
    classification: str
    model: str


def label_of(domain: Domain) -> DomainLabel:
    """Return the governance's label of a domain."""
    assert isinstance(domain.label, DomainLabel)
    return domain.label


def is_withheld(label: DomainLabel, restricted: RestrictedSubjects) -> bool:
    """Whether a restriction withholds a domain's blocks."""
    return restricted.withholds(label.tenant, label.spec, is_monitored=label.is_monitored)


class OpenedDomain(NamedTuple):
    """A grant or segment that the policy lists for the reader; each use is decided again."""

    id: str
    owner: str
    reuse: AccessRequest
    chain: Chain


def is_revoked(source: str, revoked: Collection[str]) -> bool:
    """Whether a grant or segment is revoked, by its own id or its sharing group's."""
    return source in revoked or source.partition("~")[0] in revoked


class Plan(OwnerData, Generic[PoolT_co]):
    """One reader's permissions under one revision."""

    __slots__ = (
        "account",
        "active_us",
        "admitted",
        "classification",
        "contents",
        "decoy",
        "epoch_tags",
        "facts",
        "grants",
        "hits_need_ledger",
        "key",
        "level",
        "manager",
        "matcher",
        "own",
        "own_plan",
        "own_reuse",
        "owner_scope",
        "principal",
        "priorities",
        "segments",
        "session",
        "subject_key",
        "tenant",
        "valid_until_utc_us",
        "waits_for_ledger",
    )

    def __init__(
        self,
        principal: Principal,
        tenant: TenantId,
        account: Account,
        manager: PoolT_co,
        level: int,
        name: str,
    ) -> None:
        self.principal = principal
        self.tenant: str = tenant
        self.account = account
        self.manager = manager  # the pool that makes its domains
        self.level = level
        self.classification = name
        self.key: PlanKey
        self.facts: AdmissionFacts
        self.own: Chain
        self.own_plan: ReadPlan
        self.own_reuse: AccessRequest
        self.owner_scope = Scope.SUBJECT
        self.grants: tuple[OpenedDomain, ...] = ()
        self.segments: dict[str, OpenedDomain] = {}
        self.matcher: SegmentMatcher | None = None
        self.epoch_tags: frozenset[bytes] = frozenset()  # of the scopes whose raise ends it
        self.active_us = 0
        self.admitted: Decision  # the same at every instant under one revision
        self.decoy: HashState | None = None  # of a key that keys nothing, for denied grants
        self.subject_key = (tenant, principal.subject, principal.session)
        self.session: Hashable | None = self.subject_key if principal.session is not None else None
        self.valid_until_utc_us = 1 << 62
        self.priorities: tuple[BlockPriority, ...] = ()  # of the blocks that its requests write
        self.contents: dict[Domain, SegmentRule] = {}  # segments that are of a kind of content
        self.waits_for_ledger = False  # no new custody while events are spilled (`lifecycle: deny`)
        self.hits_need_ledger = False  # nor any reuse (`own_hits: deny`)

    @property
    def has_keys(self) -> bool:
        """Whether the plan has keys to look anything up."""
        return self.own.state is not None or self.matcher is not None

    def forget_keys(self) -> None:
        """Drop every primed key state. What a residency keeps of a plan names its holder but derives no key."""
        self.own = Chain(self.own.domain, None)
        self.own_plan = ReadPlan(self.own)
        self.grants = ()
        self.segments = {}
        self.matcher = None


AnyPlan = Plan[DomainPool]
"""A plan as decisions and evidence use it, whatever pool its domains are in."""


def plan_of(residency: Residency) -> AnyPlan:
    """Return the plan of an identified requester's residency."""
    assert isinstance(residency.facts, Plan)
    return residency.facts


MODEL_DIGITS = 16  # of a ModelIdentity's digest, in leaves


PlanKey = tuple[Principal, bytes, str | None, str | None, str | None, Epochs | None]
"""What decides a plan, all that a request says of itself: principal, digest of the model, route, classification, salt,
and the epochs of a door's token.

A plain tuple: one is made for every request, and a named one costs several times as much to make.
"""


def plan_key(principal: Principal, model: ModelIdentity, route: str | None, hints: Hints) -> PlanKey:
    """Return the facts that decide a request's plan."""
    return (principal, model.digest, route or principal.route, hints.classification, hints.salt, hints.epochs)


class PlanCache(Generic[PoolT_co]):
    """Plans under one policy revision. Domains outlive it: they are interned weakly by their spec."""

    def __init__(
        self,
        table: DecisionTable,
        keyring: Keyring,
        account_of: Callable[[str], tuple[Account, PoolT_co]],
        domains: WeakValueDictionary[tuple[DomainSpec, int], Domain],
        block_tokens: int,
        record_keys: Callable[[KeyOwner, tuple[KeyFact, ...]], None],
        names: TenantNames,
        revoked: Collection[str] = (),
        restricted: RestrictedSubjects = NOBODY_RESTRICTED,
        epochs: WorkerEpochs | None = None,
    ) -> None:
        self.table = table
        self._epochs = epochs or WorkerEpochs()
        self._revoked = revoked
        self._restricted = restricted
        self._record_keys = record_keys
        self._key_changes = keyring.changes
        self._keyring = keyring
        self._names = names
        self._account_of = account_of
        self._domains = domains
        self._block_tokens = block_tokens
        self._plans: dict[str, OrderedDict[PlanKey, Plan[PoolT_co]]] = {}
        self._by_key: dict[PlanKey, Plan[PoolT_co]] = {}

    def priorities(
        self, plan: AnyPlan, segment: Chain | None, kinds: tuple[KindRange, ...]
    ) -> tuple[BlockPriority, ...]:
        """Return the eviction priorities of one request's blocks, by its `segment` and its kinds of content."""
        eviction = self.table.policy.eviction
        if not eviction.kinds or not (kinds or plan.contents):
            return plan.priorities
        rule = None if segment is None else plan.contents.get(segment.domain)
        return block_priorities(eviction, self._block_tokens, rule, kinds)

    def known(self, key: PlanKey, now_utc_us: int) -> Plan[PoolT_co] | None:
        """Return the reader's cached plan if it is still valid; never waits."""
        if self._key_changes != self._keyring.changes:
            self.drop()  # a rotation or destruction: every plan holds primed states
        plan = self._by_key.get(key)
        return plan if plan is not None and now_utc_us < plan.valid_until_utc_us else None

    def plan(self, key: PlanKey, now_utc_us: int) -> Plan[PoolT_co] | None:
        """Return the reader's plan, or None where the policy admits no such tenant. Waits for the ledger where it is
        new.
        """
        plan = self.known(key, now_utc_us)
        if plan is not None:
            return plan
        plan = self._make(key, now_utc_us)
        if plan is not None:
            self._keep(key, plan)
        return plan

    def drop(self) -> None:
        """Forget every plan and its primed key states, as a key rotation or destruction demands."""
        for plan in self._by_key.values():
            plan.forget_keys()
        self._plans.clear()
        self._by_key.clear()
        self._key_changes = self._keyring.changes

    def forget_tenant(self, tenant: str) -> None:
        """Forget the plans of a tenant that has left."""
        for key, plan in self._plans.pop(tenant, {}).items():
            plan.forget_keys()
            del self._by_key[key]

    def forget_closed(self) -> None:
        """Forget plans with a closed domain, as after an erasure: the next request gets a new one."""
        for key, plan in list(self._by_key.items()):
            chains = (plan.own, *(opened.chain for opened in (*plan.grants, *plan.segments.values())))
            if not all(chain.domain.is_open for chain in chains):
                self._forget(key, plan)

    def forget_raised(self, raised: frozenset[bytes] | None) -> None:
        """Forget the plans with a scope of one of these tags; None: of any."""
        for key, plan in list(self._by_key.items()):
            if key[5] is not None and (raised is None or not plan.epoch_tags.isdisjoint(raised)):
                self._forget(key, plan)

    def _forget(self, key: PlanKey, plan: Plan[PoolT_co]) -> None:
        plan.forget_keys()
        del self._by_key[key]
        self._plans[plan.tenant].pop(key, None)

    def _keep(self, key: PlanKey, plan: Plan[PoolT_co]) -> None:
        own = self._plans.setdefault(plan.tenant, OrderedDict())
        known = own.get(key)
        if known is not None:
            known.forget_keys()
        own[key] = plan
        self._by_key[key] = plan
        if len(own) > PLANS_PER_TENANT_MAX:
            oldest, passed = own.popitem(last=False)
            passed.forget_keys()
            self._by_key.pop(oldest, None)

    def _make(self, key: PlanKey, now_utc_us: int) -> Plan[PoolT_co] | None:
        principal, model, route, hint, _, epochs = key
        table, tenant = self.table, self._names.met(principal)
        entry = None if tenant is None else table.tenant(tenant)
        if tenant is None or entry is None:
            return None
        level = table.classify(tenant, route, principal.classification, hint)
        account, manager = self._account_of(tenant)
        plan = Plan(principal, tenant, account, manager, level, table.policy.classifications[level])
        owed = table.obligations(tenant, level)
        plan.key = key
        if epochs is not None:
            plan.epoch_tags = self._epochs.tags(principal)
        plan.facts = AdmissionFacts(
            tenant,
            principal.subject,
            principal.session,
            principal.subject_asserted or principal.session_asserted,
            plan.classification,
            model.hex()[:MODEL_DIGITS],
        )
        plan.active_us = owed.active_max_us
        plan.waits_for_ledger = owed.on_outage_lifecycle is OnOutage.DENY
        plan.hits_need_ledger = owed.on_outage_own_hits is OnOutage.DENY
        owner = tenant_owner(principal.issuer, principal.tenant)
        self._record_keys(owner, self._keyring.ensure([owner]))  # class A: durable before the epoch keys anything
        self._key_changes = self._keyring.changes
        self._own(plan, owner, key, owed, entry.scope)
        change = table.next_change_us(now_utc_us)
        if change is not None:
            plan.valid_until_utc_us = change
        plan.priorities = block_priorities(table.policy.eviction, self._block_tokens)
        plan.admitted = authorize(table, Action.ADMIT, tenant, level)
        if plan.own.state is not None:
            self._open_grants(plan, model, now_utc_us)
        self._open_segments(plan, model, now_utc_us)
        return plan

    def _own(self, plan: AnyPlan, owner: KeyOwner, key: PlanKey, owed: Obligations, scope: Scope) -> None:
        principal, model, route, _, salt, epochs = key
        if epochs is not None:
            salt = epoch_salt(salt, epochs, is_tenant_wide=scope is Scope.TENANT)
        epoch = self._keyring.current(owner)
        assert epoch is not None, "ensured above"
        salt = self._restricted.salt(plan.tenant, _SCOPES[scope], salt)
        spec = own_domain(
            principal,
            scope=_SCOPES[scope],
            classification=plan.classification,
            model=model,
            key_epoch=epoch,
            labels=self.table.labels(plan.tenant, route),
            salt=salt,
            tenant_name=plan.tenant,
        )
        if spec is None:  # no subject and no session: nothing is reused across requests
            domain = self._domain(None, plan.account, plan.manager, plan, owed._replace(idle_us=0, absolute_us=0))
            plan.own = Chain(domain, None)
        else:
            plan.owner_scope = LEVELS[spec.scope]
            owed = owed_by(self.table, plan.tenant, plan.level)
            domain = self._domain(spec, plan.account, plan.manager, plan, owed)
            state = self._keyring.domains.state(spec) if owed.cacheable else None
            plan.own = Chain(domain, state)
        plan.own_plan = ReadPlan(plan.own)
        plan.own_reuse = AccessRequest(Action.REUSE, plan.tenant, plan.tenant, plan.level, plan.owner_scope, Via.OWN)

    def _domain(
        self,
        spec: DomainSpec | None,
        owner: Account,
        manager: DomainPool,
        plan: AnyPlan,
        owed: Obligations,
        *,
        tenant: str = "",
        classification: str = "",
        source: str = "",
        is_segment: bool = False,
    ) -> Domain:
        if spec is not None:
            known = self._domains.get((spec, id(manager)))
            if known is not None and known.is_open:
                return known
        label = DomainLabel(
            tenant or plan.tenant,
            classification or plan.classification,
            plan.level,
            spec.scope.value if spec is not None else "request",
            spec.subject if spec is not None else None,
            spec.session if spec is not None else None,
            spec,
            source,
        )
        domain: Domain = manager.domain(
            owner,
            label=label,
            idle_us=owed.idle_us,
            absolute_us=owed.absolute_us,
            scrub_within_us=owed.scrub_within_us,
            verify_share=owed.verify_share,
            integrity_share=owed.integrity_share,
            is_segment=is_segment,
            reach=_REACH.get(spec.scope, 3) if spec is not None else 0,
        )
        domain.is_withheld = is_withheld(label, self._restricted)
        if spec is not None:
            self._domains[(spec, id(manager))] = domain
        return domain

    # -- across a boundary --------------------------------------------------------------------------------------------

    def _open_grants(self, plan: AnyPlan, model: bytes, now_utc_us: int) -> None:
        """At most four, in order of id; only the owner's tenant-level domain of the reader's own classification.

        And of labels that the grant crosses, where they are not the reader's.
        """
        opened: list[OpenedDomain] = []
        route = plan.key[2]
        for grant in self.table.grants_for(plan.tenant, plan.level, now_utc_us):
            if len(opened) == GRANTS_READ_MAX:
                break
            if is_revoked(grant.id, self._revoked) or not self.table.opens(grant, plan.tenant, route):
                continue
            entry = self._grant(plan, grant, model)
            if entry is not None:
                opened.append(entry)
        plan.grants = tuple(opened)
        if opened:
            plan.decoy = hashlib.blake2b(key=os.urandom(32), digest_size=32)

    def _grant(self, plan: AnyPlan, grant: Grant, model: bytes) -> OpenedDomain | None:
        owner = self._names.owner(grant.owner)
        epoch = self._keyring.current(owner)
        account, manager = self._account_of(grant.owner)
        if epoch is None or manager is not plan.manager:
            return None
        salt: str | None = None
        if plan.key[5] is not None:  # what the owner's own requests through a door have
            salt = epoch_salt(None, self._epochs.of(owner.issuer, owner.name), is_tenant_wide=True)
            plan.epoch_tags |= self._epochs.tags_of_tenant(owner.issuer, owner.name)
        spec = DomainSpec(
            scope=ScopeKind.TENANT,
            issuer=owner.issuer,
            tenant=owner.name,
            tenant_name=grant.owner,
            classification=plan.classification,
            labels=self.table.labels(grant.owner, None),
            model=model,
            key_epoch=epoch,
            salt=self._restricted.salt(grant.owner, ScopeKind.TENANT, salt),
        )
        owed = owed_by(self.table, grant.owner, plan.level)
        if not owed.cacheable:
            return None
        domain = self._domain(spec, account, manager, plan, owed, tenant=grant.owner)
        chain = Chain(domain, self._keyring.domains.state(spec))
        reuse = AccessRequest(Action.REUSE, plan.tenant, grant.owner, plan.level, Scope.TENANT, Via.GRANT, grant.id)
        return OpenedDomain(grant.id, grant.owner, reuse, chain)

    def _open_segments(self, plan: AnyPlan, model: bytes, now_utc_us: int) -> None:
        candidates: list[Candidate] = []
        for rule in self.table.segments_for(plan.tenant, now_utc_us):
            if is_revoked(rule.id, self._revoked) or not self.table.opens(rule, plan.tenant, plan.key[2]):
                continue
            entry = self._segment(plan, rule, model)
            if entry is not None:
                plan.segments[rule.id] = entry
                if rule.content is not None:
                    plan.contents[entry.chain.domain] = rule
                owner = self._names.owner(rule.owner)
                candidates.append(Candidate(rule.id, owner, rule.digest.removeprefix("hmac:"), rule.tokens))
        if candidates:
            plan.matcher = SegmentMatcher(self._keyring, candidates, model=model, block_tokens=self._block_tokens)

    def _segment(self, plan: AnyPlan, rule: SegmentRule, model: bytes) -> OpenedDomain | None:
        owner = self._names.owner(rule.owner)
        epoch = self._keyring.current(owner)
        account, manager = self._account_of(rule.owner)
        if epoch is None or manager is not plan.manager or rule.level > plan.level:
            return None
        name = self.table.policy.classifications[rule.level]
        spec = DomainSpec(
            scope=ScopeKind.SEGMENT,
            issuer=owner.issuer,
            tenant=owner.name,
            tenant_name=rule.owner,
            segment=rule.id,
            classification=name,
            labels=self.table.labels(rule.owner, None),
            model=model,
            key_epoch=epoch,
        )
        owed = owed_by(self.table, rule.owner, rule.level)
        if not owed.cacheable:
            return None
        domain = self._domain(
            spec,
            account,
            manager,
            plan,
            owed,
            tenant=rule.owner,
            classification=name,
            source=rule.id,
            is_segment=True,
        )
        chain = Chain(domain, self._keyring.domains.state(spec))
        reuse = AccessRequest(Action.REUSE, plan.tenant, rule.owner, rule.level, rule.scope, Via.SEGMENT, rule.id)
        return OpenedDomain(rule.id, rule.owner, reuse, chain)
