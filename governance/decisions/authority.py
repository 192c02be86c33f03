"""What every facade of the governance shares: plans, decisions, keys, commands and the active policy revision.

`Governor` adds a pool that is ours, `EnginePort` a pool that an engine allocates by itself.

- Every reuse is decided at the request's own instant under the active revision.
- A widening act is durable before it takes effect; a narrowing one takes effect first.
- One thread owns the state; commands from elsewhere wait in a queue that `step` drains and acknowledges.
- Every deadline is compared with one time, which no step of a clock sets back (`DeadlineClock`); each step looks at it.
- What is revoked stays revoked, under every later revision. Without word from the control plane within the lease
  nothing but the own scope is reused; under a revision that has expired, nothing. No step of a clock reopens either.
- Without word of the newest erasures within the custody lease nothing is reused at all. A request through a door that
  knows other erasures than this process shares nothing with any other (`edge.worker_epochs`).
- Whose processing a case restricts (GDPR 18) is asked of `restricted`, whatever the policy and orders to monitor say.
- The policy is enforced for every request, unless an order says for whom not, this process allows that (`may_monitor`)
  and the policy's profile is `shared`. What an order enforces holds at once; what it opens is on record before.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, Self, TypeVar
from weakref import WeakValueDictionary

from kvcustody.allocator.pool.accounting import Account, Domain
from kvcustody.allocator.pool.block_state import NEVER_US
from kvcustody.audit.evidence.query.key_orders import CLOCKS_DIFFER_US, DESTROY
from kvcustody.audit.kinds import (
    GOVERNOR,
    EnforcementChanged,
    Event,
    GrantsRevoked,
    KeyEvent,
    KeysDropped,
    PolicyActivated,
    PolicyStaged,
    ProcessingRestricted,
)
from kvcustody.clock import MICROSECONDS, Clock, SystemClock
from kvcustody.deadline_clock import DeadlineClock
from kvcustody.errors import CapacityError, ConfigError, LedgerUnavailable
from kvcustody.governance.admission_outcome import AdmissionRefused, Deferred
from kvcustody.governance.decisions.access_plan import (
    AnyPlan,
    Plan,
    PlanCache,
    PlanKey,
    PoolT_co,
    is_withheld,
    label_of,
    plan_key,
)
from kvcustody.governance.decisions.apply_narrowing import LimitedPool, apply_limits
from kvcustody.governance.decisions.authorize import OwnData, authorize, decision_event
from kvcustody.governance.decisions.first_use_log import FirstUseLog
from kvcustody.governance.decisions.policy_on_record import documents_on_record, revoked_on_record
from kvcustody.governance.decisions.reuse_decision import Moment, ReuseDecider
from kvcustody.governance.decisions.shadow_policy import ShadowPolicy
from kvcustody.governance.decisions.staged_table import StagedTable, quotas_of
from kvcustody.governance.decisions.tenant_names import TenantNames
from kvcustody.governance.edge.custody_lease import EPOCHS, CustodyLease
from kvcustody.governance.edge.erase_epochs import KnownEpochs
from kvcustody.governance.edge.worker_epochs import OTHER_EPOCH, WorkerEpochs
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.identity.domain_spec import DomainSpec, KeyOwner
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.keys.apply_key_orders import OrderedKeys, apply_key_orders
from kvcustody.governance.keys.keyring import KeyFact, Keyring
from kvcustody.governance.ledger_protocol import Ledger
from kvcustody.governance.monitoring.enforcement import (
    CANARY,
    ENFORCE,
    ENFORCED,
    MILLIONTHS,
    MONITOR,
    Enforcement,
    Requester,
    refusal,
)
from kvcustody.governance.observability.attempts import Attempts
from kvcustody.governance.observability.serving_measures import ServingMeasures
from kvcustody.governance.observability.stats import Counted, Stats
from kvcustody.governance.observability.tenant_counters import TenantCounters
from kvcustody.governance.request import Hints
from kvcustody.governance.restriction.restricted_subjects import NOBODY_RESTRICTED, RestrictedSubjects
from kvcustody.ids import TenantId
from kvcustody.logger import get_logger
from kvcustody.policies.document.model import Action, Profile
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.model import Decision
from kvcustody.policies.workbench.lint.without_effect import needs_store

T = TypeVar("T")
_OVER = "its time is over"
_AUTHORIZED_MAX = 100_000
_ASK_AGAIN_US = 5_000_000
NO_ROOM = "there is no room for another tenant now; try again later"
_log = get_logger(__name__)
MISPLACED = "policy lets other workers serve this request, and not this one"
_MISPLACED = "misplaced"
TOO_LARGE = "too-large"  # the reason of a refusal, in figures


class Authority(ABC, Generic[PoolT_co]):
    """Who may do what, under the active revision. Not thread-safe, except `call`."""

    def __init__(
        self,
        table: DecisionTable,
        keyring: Keyring,
        ledger: Ledger,
        *,
        block_tokens: int,
        clock: Clock | None = None,
        expires_utc_us: int | None = None,
    ) -> None:
        clock = clock or SystemClock()
        self._clock = clock if isinstance(clock, DeadlineClock) else DeadlineClock(clock)
        self._ledger = ledger
        self._keyring = keyring
        self.block_tokens = block_tokens
        self.event_figures: Callable[[], dict[str, float]] = dict  # of the adapter's KV events
        self._domains: WeakValueDictionary[tuple[DomainSpec, int], Domain] = WeakValueDictionary()
        self._commands: deque[Callable[[], None]] = deque()
        self.on_command = _stays_asleep
        self._outbox: list[Event] = []
        self._unrecorded: dict[KeyOwner, list[KeyFact]] = {}
        self._began_utc = self._clock.utc_us()
        self._dropped: dict[
            str, int
        ] = {}  # by tenant: the last order to destroy that is on record as followed
        self._first_uses = FirstUseLog(ledger, self._clock)
        self.attempts = Attempts("engine", self._clock)
        self._export_again_us = 0  # until then no permit of an export can be recorded
        self._authorized: dict[
            tuple[Action, str, int], Decision
        ] = {}  # what is on record under this revision
        self.tenant_counters: dict[str, TenantCounters] = {}
        self._departed = TenantCounters()
        self.measures = ServingMeasures(block_tokens)
        self._has_store = True
        self.counted: Counted | None = None  # the newest counters, for any thread; None: nobody asked yet
        self._names = TenantNames(ledger, keyring, self._clock, table.policy.issuers)
        self._shares = ledger.shares
        self._share_ledger(table)
        self.table = table
        self.revoked = table.revoked
        self._shadow: ShadowPolicy | None = None
        self.restricted = NOBODY_RESTRICTED  # whose data is stored and not used
        self.may_monitor = False  # whether this process follows orders to monitor
        self.enforcement = ENFORCED  # whose requests the policy is enforced for
        self.ordered = ENFORCED  # the order that was heard last
        self.enforcement_refused = ""  # why that is not what is in effect
        self._enforcement_until_us = NEVER_US
        self.placement_group: str | None = (
            None  # of this worker; None: it is of no fleet, and serves whatever comes
        )
        self.custody = CustodyLease()
        self.epochs = WorkerEpochs()
        self._lease_until_us, self._expires_us = NEVER_US, self._boot_time(expires_utc_us)
        self._book = self._new_book(table)
        self._reuse = self._new_reuse(table)
        self._watched = self._new_reuse(
            table, monitored=True
        )  # what is recorded of requests that are monitored

    @property
    def tables(self) -> tuple[DecisionTable, DecisionTable | None]:
        """The active revision, and one that is not on record yet: what narrows applies from both."""
        return self.table, self._reuse.coming

    @property
    def keyring(self) -> Keyring:
        """Whose epochs keys come from: for what names copies by the same."""
        return self._keyring

    # -- what a facade over a pool provides ---------------------------------------------------------------------------

    @abstractmethod
    def _account(self, tenant: str) -> tuple[Account, PoolT_co]:
        """The account of an admitted tenant and the pool it is charged in; raises `CapacityError` without room."""

    @abstractmethod
    def _limited_pools(self) -> Iterable[LimitedPool]:
        """The pools whose domains a new revision binds."""

    @abstractmethod
    def _limit(self, table: DecisionTable) -> None:
        """Apply a revision's quotas."""

    @abstractmethod
    def stats(self) -> Stats:
        """A snapshot of counters; consistent between steps."""

    def lease_seconds(self) -> dict[str, float]:
        """How long what crosses scopes, and anything, may be reused without further word; below 0: it is over."""
        now_us = self._clock.now_us()
        ends = {"policy": self._lease_until_us, "custody": self.custody.until_us}
        return {
            name: (until_us - now_us) / MICROSECONDS for name, until_us in ends.items() if until_us < NEVER_US
        }

    def count(self) -> None:
        """Take the counters now, for `counted`; on the owning thread. From then on they are kept."""
        self.counted = Counted(self.stats(), time.monotonic())

    # -- plans --------------------------------------------------------------------------------------------------------

    def _plan(
        self, key: PlanKey, request_id: Hashable, moment: Moment
    ) -> Plan[PoolT_co] | AdmissionRefused | Deferred:
        try:
            plan = self._book.known(key, moment.utc_us) or self._new_plan(key, moment)
        except CapacityError as error:  # no room is left for a tenant that is admitted by default
            _log.debug("no room for a tenant", problem=error.message)
            return AdmissionRefused(request_id, NO_ROOM)  # whoever asks, however full it is, whoever is here
        except LedgerUnavailable:  # the first epoch of a tenant cannot be recorded
            return Deferred(request_id, "ledger")
        if plan is None:
            if not self._is_monitored(key[0], request_id):  # else it is not refused
                self.attempts.note("unknown-tenant", self._names.called(key[0].issuer, key[0].tenant))
            return AdmissionRefused(request_id, "tenant is not in the policy")
        if not self._is_placed(key, plan):
            if not self._is_monitored(key[0], request_id):
                self.attempts.note(_MISPLACED, plan.tenant)
                return AdmissionRefused(request_id, MISPLACED)
            counters = self._counters(plan.tenant)
            counters.count(counters.would_deny, _MISPLACED)
        return plan

    def _is_placed(self, key: PlanKey, plan: Plan[PoolT_co]) -> bool:
        """Whether policy lets this worker's group serve the request: the active revision, and one that is coming."""
        if self.placement_group is None:
            return True
        claim = key[0].classification
        return all(
            table.may_serve(self.placement_group, plan.tenant, key[2], claim, key[3])
            for table in self.tables
            if table is not None
        )

    def _new_plan(self, key: PlanKey, moment: Moment) -> Plan[PoolT_co] | None:
        """A plan of this request alone where door and worker know of other erasures: nobody else has its salt.

        Declared segments are the policy's text, and stay usable.
        """
        epochs = key[5]
        if epochs is None or self.epochs.agree(key[0], epochs):
            return self._book.plan(key, moment.utc_us)
        plan = self._book.plan((*key[:4], f"apart-{secrets.token_hex(16)}", None), moment.utc_us)
        if plan is not None:
            counters = self._counters(plan.tenant)
            counters.count(counters.denials, OTHER_EPOCH)
            self._reuse.denied(Action.REUSE, plan.tenant, OTHER_EPOCH)
        return plan

    def knows_epochs(self, plan: Plan[PoolT_co]) -> bool:
        """Whether door and worker still know of the same erasures, for a request that came through a door."""
        epochs = plan.key[5]
        return epochs is not None and self.epochs.agree(plan.principal, epochs)

    def _forget_tenant(self, tenant: str) -> None:
        """An unlisted tenant has left: nothing that is here names it any more."""
        self._book.forget_tenant(tenant)
        for domain in self._domains.values():
            if domain.owner.name == tenant:
                domain.is_open = False
        left = self.tenant_counters.pop(tenant, None)
        if left is not None:
            self._departed.add(left)

    def _came_once(self, tenant: str) -> bool:
        """Whether a tenant has not come back since its first request, as names that somebody invents do not."""
        counters = self.tenant_counters.get(tenant)
        return counters is None or counters.requests <= 1

    def tenant_name(self, principal: Principal) -> TenantId:
        """What a principal's tenant is called in policy, accounts and ledger."""
        with suppress(LedgerUnavailable):
            self._names.met(principal)  # the first of a ledger decides whose its bare ids are
        return self._names.called(principal.issuer, principal.tenant)

    def _counters(self, tenant: str) -> TenantCounters:
        counters = self.tenant_counters.get(tenant)
        if counters is None:
            counters = self.tenant_counters[tenant] = TenantCounters()
        return counters

    def too_large(self, request_id: Hashable, tenant: str, needed: int, most: int) -> AdmissionRefused:
        """The refusal, counted, of a request that could not run here even alone: what would be an OOM elsewhere."""
        counters = self._counters(tenant)
        counters.count(counters.refused, TOO_LARGE)
        return AdmissionRefused.too_large(request_id, needed, most)

    def _new_book(self, table: DecisionTable) -> PlanCache[PoolT_co]:
        return PlanCache(
            table,
            self._keyring,
            self._account,
            self._domains,
            self.block_tokens,
            self._record_keys,
            self._names,
            self.revoked,
            self.restricted,
            self.epochs,
        )

    def _new_reuse(
        self, table: DecisionTable, coming: DecisionTable | None = None, *, monitored: bool = False
    ) -> ReuseDecider:
        return ReuseDecider(
            table,
            self._first_uses,
            coming,
            revoked=self.revoked,
            lease_until_us=self._lease_until_us,
            expires_us=self._expires_us,
            shadow=None if monitored else self._shadow,
            monitored=monitored,
            restricted=self.restricted,
            custody=self.custody,
        )

    def _forget_lookups(self) -> None:
        """Decisions taken before this moment and not yet attached no longer count."""

    def _record_keys(self, owner: KeyOwner, made: tuple[KeyFact, ...]) -> None:
        """Record what was made for `owner`, now or when the ledger could not: until then it has no plan."""
        if made:
            self._unrecorded.setdefault(owner, []).extend(made)
        waiting = self._unrecorded.get(owner)
        while waiting:
            fact = waiting[0]
            tenant = self._names.named(owner) if owner.kind == "tenant" else None
            event = KeyEvent(
                self._clock.now_us(),
                tenant,
                fact.kind,
                fact.epoch,
                GOVERNOR,
                in_service=fact.in_service,
                ends_utc=fact.ends_utc,
            )
            self._ledger.submit_durable(event)
            del waiting[0]
        self._unrecorded.pop(owner, None)

    # -- commands -----------------------------------------------------------------------------------------------------

    def call(self, command: Callable[[Self], T]) -> Future[T]:
        """Run `command` on the owning thread at the next step; the future is its acknowledgement. Thread-safe.

        `on_command` is called then, on the caller's thread: it makes an engine that sleeps while nothing runs take a
        step, so that no order waits for somebody's next request.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(command(self))
            except Exception as error:
                future.set_exception(error)

        self._commands.append(run)
        self.on_command()
        return future

    def plan_of(
        self, principal: Principal, model: ModelIdentity, route: str | None, hints: Hints
    ) -> Plan[PoolT_co] | None:
        """A principal's plan as a request of it would have it now; None where it would not be admitted."""
        key = plan_key(principal, model, route, hints)
        plan = self._plan(key, None, self._moment())
        return plan if isinstance(plan, Plan) else None

    def reads_own(self, plan: AnyPlan) -> bool:
        """Whether a request under this plan may reuse its own scope now, where nothing else is searched for it."""
        return self._reuse.reads_own(plan, self._counters(plan.tenant), self._moment())[0]

    def may_export(self, tenant: str, classification: str) -> bool:
        """Whether events about a tenant's blocks may be published, by the active revision; on record before the first.

        On the owning thread. False too where a permit cannot be recorded: it is asked for again a while later.
        """
        levels = self.table.policy.classifications
        if classification not in levels or self._clock.now_us() < self._export_again_us:
            return False
        own = OwnData(tenant, levels.index(classification), classification)
        try:
            return self.authorize(Action.EXPORT, own).permitted
        except LedgerUnavailable:
            self._export_again_us = self._clock.now_us() + _ASK_AGAIN_US
            return False

    def authorize(self, action: Action, plan: AnyPlan | OwnData, trace: str = "") -> Decision:
        """Decide an act beside a request's own reuse, and have it on record (`decisions.authorize`, rule 2).

        Raises `LedgerUnavailable` where a permit cannot be recorded: the act must not happen then.
        """
        key = (action, plan.tenant, plan.level)
        known = self._authorized.get(key)
        if known is not None:
            return known
        decision = authorize(self.table, action, plan.tenant, plan.level)
        coming = self._reuse.coming
        if decision.permitted and coming is not None:
            decision = authorize(coming, action, plan.tenant, plan.level)
        if not decision.permitted:
            self._reuse.denied(action, plan.tenant, decision.reasons[0])
            return decision
        now_us, name = self._clock.now_us(), plan.classification
        self._ledger.submit_durable(decision_event(now_us, action, plan.tenant, name, decision, trace))
        if len(self._authorized) >= _AUTHORIZED_MAX:
            self._authorized.clear()  # on record a second time
        self._authorized[key] = decision
        return decision

    def _moment(self, trace: str = "") -> Moment:
        """Now, on both clocks; the date by the boot clock since the last look."""
        now_us = self._clock.now_us()
        return Moment(now_us, now_us + self._clock.offset_us, trace)

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    # -- administration -----------------------------------------------------------------------------------------------

    def activate(self, table: DecisionTable, *, actor: str, expires_utc_us: int | None = None) -> None:
        """Make `table` the active revision: what it narrows at once, what it widens once it is recorded.

        Revisions only rise; one that is staged may be staged further, or made whole. From `expires_utc_us` on, nothing
        is reused. Raises `LedgerUnavailable` where it cannot be recorded; the narrowing then stays.
        """
        self._check_newer(table)
        self._names.check(table.policy.issuers)
        now_us = self._clock.now_us()
        fresh = table.revoked - self.revoked
        self.revoked |= table.revoked
        self._outbox += revoked_on_record(fresh, table.revision, now_us, actor)
        expires_us = self._boot_time(expires_utc_us)
        self._expires_us = min(self._expires_us, expires_us)
        self._decide_by(self.table, coming=table)
        self._bind(table, now_us, only_narrow=True)
        self._narrow_tiers()
        self._ledger.submit_durable(self._activation(table, now_us, actor))
        self._outbox += documents_on_record(table, now_us)
        _log.info(
            "policy activated",
            revision=table.revision,
            policy=table.policy.name,
            policy_digest=table.digest,
            stage=table.stage if isinstance(table, StagedTable) else "",
        )
        self.table, self._expires_us = table, expires_us
        self._keep_enforcing(table)
        self._names.list(table.policy.issuers)
        self._book.drop()
        self._book = self._new_book(table)
        self._first_uses.forget()
        self._decide_by(table)
        self._limit(table)
        self._share_ledger(table)
        self._bind(table, now_us)
        self._narrow_tiers()
        self._look_for_store(table)

    def set_store(self, *, is_there: bool) -> None:
        """Whether copies can go to a remote store: where there is none, a later revision that needs one is reported."""
        self._has_store = is_there
        self._look_for_store(self.table)

    def _look_for_store(self, table: DecisionTable) -> None:
        """A revision is followed all the same, for what it narrows: what would need the store stays on the device."""
        lacking = [] if self._has_store else list(needs_store(table.policy))
        self.measures.absent_stores = len(lacking)
        for _, code, why in lacking:
            _log.error("no store for copies", revision=table.revision, code=code, why=why)

    def _share_ledger(self, table: DecisionTable) -> None:
        """Where tenants are kept apart, each waits for the ledger in a share of its own: that of the pool."""
        base = quotas_of(table)

        def share(tenant: str) -> float:
            entry = base.tenant(tenant)
            return 0.0 if entry is None else float(entry.guaranteed)

        self._shares.divide(share if base.policy.profile.isolating else None)

    def _check_newer(self, table: DecisionTable) -> None:
        active = self.table
        is_further = isinstance(active, StagedTable) and (table.revision, table.digest) == (
            active.revision,
            active.digest,
        )
        if table.revision <= active.revision and not is_further:
            raise ConfigError(
                f"policy revision `{table.revision}` is not newer than the active `{active.revision}`",
                revision=table.revision,
            )

    def _activation(self, table: DecisionTable, now_us: int, actor: str) -> Event:
        previous = self.table.base.revision if isinstance(self.table, StagedTable) else self.table.revision
        policy = table.policy
        if isinstance(table, StagedTable):
            return PolicyStaged(
                now_us, table.revision, policy.name, table.digest, table.stage, actor, previous
            )
        return PolicyActivated(
            now_us, table.revision, policy.name, policy.profile.value, table.digest, actor, previous
        )

    def _decide_by(self, table: DecisionTable, coming: DecisionTable | None = None) -> None:
        """From here on every reuse is decided by `table`, and by `coming` too where it is not on record yet."""
        self._outbox += self._take_counts(self._clock.now_us())
        self._authorized.clear()
        self._reuse = self._new_reuse(table, coming)
        self._watched = self._new_reuse(table, coming, monitored=True)
        self._forget_lookups()

    def _bind(self, table: DecisionTable, now_us: int, *, only_narrow: bool = False) -> None:
        self._outbox += apply_limits(
            self._limited_pools(),
            list(self._domains.items()),
            table,
            now_us,
            only_narrow=only_narrow,
            revoked=self.revoked,
            epoch_of=self._keyring.current,
        )

    def revoke(self, ids: Iterable[str], *, actor: str) -> None:
        """Take grants, segments or sharing groups back for good: nothing attaches through them from now on.

        A narrowing act: it holds at once and is recorded after, whatever state the ledger is in.
        """
        fresh = frozenset(ids) - self.revoked
        if not fresh:
            return
        now_us = self._clock.now_us()
        self.revoked |= fresh
        self._book.drop()
        self._book = self._new_book(self.table)
        self._decide_by(self.table)
        self._bind(self.table, now_us)
        self._outbox.append(GrantsRevoked(now_us, tuple(sorted(fresh)), self.table.revision, actor))
        _log.warning("revoked", ids=sorted(fresh), revision=self.table.revision)

    # -- restriction --------------------------------------------------------------------------------------------------

    def restrict(self, ordered: RestrictedSubjects) -> None:
        """Use nothing of these subjects from now on, and of all others as before; nothing where that is so already.

        It holds at once, for what waits too, and is recorded after. What runs goes on, and what it leaves is withheld.
        """
        before = self.restricted
        if ordered.orders == before.orders:
            return
        self.restricted = ordered
        self._book.drop()
        self._book = self._new_book(self.table)
        self._decide_by(self.table, self._reuse.coming)
        for domain in {*self._domains.values(), *self._domains_with_blocks()}:
            domain.is_withheld = is_withheld(label_of(domain), ordered)
        now_us = self._clock.now_us()
        for one in sorted(ordered.orders ^ before.orders):
            is_new = one in ordered.orders
            self._outbox.append(
                ProcessingRestricted(
                    now_us, one.case_id, one.tenant, one.subject, "restricted" if is_new else "lifted"
                )
            )
            _log.warning("processing restricted" if is_new else "restriction lifted", case=one.case_id)

    def _check_erasable(self, selector: Selector, order: Mapping[str, Any]) -> None:
        """Raise `ConfigError` where an erasure would end what is restricted; one on record was checked there."""
        if not order.get("on_record"):
            self.restricted.check_erasable(selector.tenant, selector.subject, selector.session)

    @abstractmethod
    def _domains_with_blocks(self) -> Iterable[Domain]:
        """Those that anything in the pools is of, the engine's own keys' among them."""

    # -- enforcement --------------------------------------------------------------------------------------------------

    def order_enforcement(self, ordered: Enforcement) -> None:
        """Follow an order, or enforce where it is not followed here; nothing happens where that is so already.

        What is enforced from now on is at once, and on record after; raises `LedgerUnavailable` where monitoring
        somebody anew cannot be recorded: nobody is monitored anew then.
        """
        self.ordered = ordered
        profile = self.table.policy.profile
        refused = ordered.unread or refusal(ordered, allowed=self.may_monitor, profile=profile)
        until_us = self._boot_time(ordered.until_utc_us) if ordered.monitors else NEVER_US
        if until_us <= self._clock.now_us():
            refused = refused or _OVER
        target = ENFORCED if refused or not ordered.monitors else ordered
        if (target, refused) == (self.enforcement, self.enforcement_refused):
            return
        if refused == _OVER and not self.enforcement.monitors and not self.enforcement_refused:
            return  # it was over before this process heard of it
        if _opens_nothing(self.enforcement, target):
            self._enforce(target, until_us, refused)
            self._outbox.append(self._enforcement_event(ordered, target, refused))
        else:
            self._ledger.submit_durable(self._enforcement_event(ordered, target, refused))
            self._enforce(target, until_us, refused)
        _log.warning(
            "enforcement changed", mode=target.mode, order=ordered.order, actor=ordered.actor, refused=refused
        )

    def _enforce(self, target: Enforcement, until_us: int, refused: str) -> None:
        before, self.enforcement = self.enforcement, target
        self.enforcement_refused, self._enforcement_until_us = (
            refused,
            until_us if target.monitors else NEVER_US,
        )
        self._limit(self.table)
        self._forget_lookups()
        self._end_monitored(before)

    def _enforcement_event(self, ordered: Enforcement, target: Enforcement, refused: str) -> Event:
        return EnforcementChanged(
            self._clock.now_us(),
            target.mode,
            tuple(sorted(target.stage.tenants)),
            int(target.stage.share * MILLIONTHS),
            target.until_utc_us // 1_000_000,
            self.table.revision,
            ordered.order,
            ordered.actor or GOVERNOR,
            refused,
        )

    def _keep_enforcing(self, table: DecisionTable) -> None:
        """A revision of another profile has come, or gone: what was ordered is followed where it may be."""
        if table.policy.profile is not Profile.SHARED or self.enforcement_refused:
            with suppress(LedgerUnavailable):
                self.order_enforcement(self.ordered)

    def _end_monitoring_in_time(self) -> None:
        """At each step: an order ends by itself."""
        if self._enforcement_until_us <= self._clock.now_us():
            self.order_enforcement(self.ordered)

    def _is_monitored(self, principal: Principal | None, request_id: Hashable) -> bool:
        """Whether a request that arrives now is."""
        enforcement = self.enforcement
        if not enforcement.monitors or self._clock.now_us() >= self._enforcement_until_us:
            return False
        if principal is None:
            return not enforcement.enforces(Requester(None), request_id)
        who = Requester(self.tenant_name(principal), principal.subject, principal.session)
        if who.tenant is not None and self.restricted.has_tenant(who.tenant):
            return False  # the engine's own keys know no subject
        return not enforcement.enforces(who, request_id)

    def _is_unlimited(self, tenant: str) -> bool:
        """Whether no quota binds a tenant: some of its requests are monitored, and it has one account."""
        return self.enforcement.monitors and self.enforcement.whole_tenant(tenant) is not True

    def _end_monitored(self, before: Enforcement) -> None:
        """What is cached under the engine's own keys ends, of whoever's standing is another than it was `before`."""

    def _take_counts(self, now_us: int) -> list[Event]:
        return self._reuse.take_counts(now_us) + self._watched.take_counts(now_us)

    def renew_lease(self, until_us: int) -> None:
        """The control plane was heard: grants and segments may be used until `until_us`, in boot time."""
        self._lease_until_us = until_us
        self._reuse.lease_until_us = self._watched.lease_until_us = until_us

    def renew_custody(self, source: str, until_us: int) -> None:
        """A source of erasures was heard: what is held may be reused until `until_us`, in boot time.

        Told after the erasures that it named: they take effect first.
        """
        self.custody.renew(source, until_us)

    def take_epochs(self, known: KnownEpochs, until_us: int) -> None:
        """Act by these erase epochs, heard of until `until_us` in boot time; an older snapshot changes nothing.

        What runs goes on, and leaves what nobody finds whose scope was raised. What waits is decided anew.
        """
        raised = self.epochs.take(known)
        if raised is None or raised:
            self._book.forget_raised(raised)
            self._forget_lookups()
        self.custody.renew(EPOCHS, until_us)

    def _boot_time(self, utc_us: int | None) -> int:
        """An instant of UTC as boot time, fixed here: a later step of the wall clock does not move it."""
        if utc_us is None:
            return NEVER_US
        return self._clock.now_us() + max(0, utc_us - self._clock.utc_us())

    def shadow(self, candidate: DecisionTable | None) -> ShadowPolicy | None:
        """Ask `candidate` beside the active revision from now on (None: no longer); it is obeyed in nothing."""
        self._shadow = None if candidate is None else ShadowPolicy(candidate)
        self._decide_by(self.table)
        return self._shadow

    def reload_keys(self) -> None:
        """After a rotation or destruction in the keyring: forget every primed state; old blocks end with the sweeps."""
        self._book.drop()
        self._forget_lookups()
        self._bind(self.table, self._clock.now_us())
        self._narrow_tiers()

    def _narrow_tiers(self) -> None:
        """Policy or keys have changed: what may be in no tier any more ends there."""

    def follow_keys(self, orders: Iterable[OrderedKeys]) -> int:
        """Rotate and destroy keys as ordered; on record at latest before the owner's next request. How many epochs."""
        changes, orders = self._keyring.changes, tuple(orders)
        done = apply_key_orders(self._keyring, orders, self._names.named)
        if done or self._keyring.changes != changes:
            self.reload_keys()
        self._record_key_facts(done)
        for order in orders:
            self._record_dropped(order, done)
        return sum(map(len, done.values()))

    def end_keys_in_service(self) -> None:
        """On any thread but the owning one: have the key service destroy the keys of destroyed epochs, on record."""
        for facts in (self._keyring.take_left_owed(), self._keyring.end_in_service()):
            by_owner: dict[KeyOwner, list[KeyFact]] = {}
            for fact in facts:
                by_owner.setdefault(fact.owner, []).append(fact)
            if by_owner:
                self._call_to_record(by_owner)

    def _call_to_record(self, facts: Mapping[KeyOwner, list[KeyFact]]) -> None:
        self.call(lambda authority: authority._record_key_facts(facts))

    def _record_key_facts(self, facts: Mapping[KeyOwner, list[KeyFact]]) -> None:
        for owner, of_owner in facts.items():
            with suppress(LedgerUnavailable):
                self._record_keys(owner, tuple(of_owner))

    def _record_dropped(self, order: OrderedKeys, done: Mapping[KeyOwner, list[KeyFact]]) -> None:
        """That an order to destroy is followed here, once: what was unwrapped is wiped, whoever removed the wrap.

        A process that began after the order never had anything of it.
        """
        last_us = self._dropped.get(order.tenant, self._began_utc - CLOCKS_DIFFER_US)
        if order.action != DESTROY or last_us >= order.before_us:
            return
        facts = [
            fact for owner, each in done.items() if self._names.named(owner) == order.tenant for fact in each
        ]
        ended = sum(fact.kind == "destroyed" for fact in facts)
        self._ledger.submit_durable(KeysDropped(self._clock.now_us(), order.before_us, ended))
        self._dropped[order.tenant] = order.before_us

    def forget_closed_plans(self) -> None:
        """After domains were closed: whoever asks for one next gets a fresh one."""
        self._book.forget_closed()

    def settle(self, timeout_seconds: float = 5.0) -> None:
        """Wait until pending first uses are durable (tests and orderly shutdown)."""
        self._first_uses.settle(timeout_seconds)

    @property
    def clock(self) -> DeadlineClock:
        """The clock that decides deadlines."""
        return self._clock


def _opens_nothing(before: Enforcement, target: Enforcement) -> bool:
    """Whether whoever is enforced for under `before` is so under `target`."""
    if not target.monitors or before.mode == MONITOR:
        return True
    if before.mode == ENFORCE or target.mode == MONITOR:
        return False
    assert before.mode == target.mode == CANARY
    first, second = before.stage, target.stage
    wider = first.tenants <= second.tenants and first.share <= second.share
    return wider and (before.seed == target.seed or not first.share)


def _stays_asleep() -> None:
    """The owning thread steps by itself often enough."""
