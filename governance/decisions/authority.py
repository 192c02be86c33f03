"""Decisions in one process: plans, keys, leases and commands under the active policy revision.

`custody.Custody` changes the limits and grants, over whichever pool.

- Every reuse is decided at the request's own instant under the active revision.
- A widening act is durable before it takes effect; a narrowing one takes effect first.
- One thread owns the state; commands from elsewhere wait in a queue that `step` drains and acknowledges.
- Every deadline is compared with one time, which no step of a clock sets back (`DeadlineClock`); each step looks at it.
- What is revoked stays revoked, under every later revision. If the control plane is not heard within the lease, only
  the own scope is reused; under an expired revision, nothing is. No step of a clock reopens either.
- If the newest erasures are not heard within the custody lease, nothing is reused at all. A request shares nothing with
  any other if its door knows other erasures than this process (`edge.worker_epochs`).
- `restricted` tells whose processing a case restricts (GDPR 18). This applies whatever the policy and monitoring orders
  are.
- The policy is enforced for every request. It is not enforced for those whom an order exempts, if this process allows
  that (`may_monitor`) and the policy's profile is `shared`. An order that enforces takes effect at once; one that
  exempts is recorded first.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, Self, TypeVar
from weakref import WeakValueDictionary

from kvcustody.allocator.pool.accounting import Account, Domain
from kvcustody.allocator.pool.block_state import NEVER_US
from kvcustody.audit.kinds import (
    GOVERNOR,
    Event,
    KeyEvent,
)
from kvcustody.clock import MICROSECONDS
from kvcustody.deadline_clock import DeadlineClock
from kvcustody.errors import CapacityError, LedgerUnavailable
from kvcustody.governance.admission_outcome import AdmissionRefused, Deferred
from kvcustody.governance.decisions.access_plan import (
    AnyPlan,
    Plan,
    PlanCache,
    PlanKey,
    PoolT_co,
    plan_key,
)
from kvcustody.governance.decisions.authorize import OwnData, authorize, decision_event
from kvcustody.governance.decisions.first_use_log import FirstUseLog
from kvcustody.governance.decisions.reuse_decision import Moment, ReuseDecider
from kvcustody.governance.decisions.shadow_policy import ShadowPolicy
from kvcustody.governance.decisions.staged_table import quotas_of
from kvcustody.governance.decisions.tenant_names import TenantNames
from kvcustody.governance.edge.custody_lease import EPOCHS, CustodyLease
from kvcustody.governance.edge.erase_epochs import KnownEpochs
from kvcustody.governance.edge.worker_epochs import OTHER_EPOCH, WorkerEpochs
from kvcustody.governance.identity.domain_spec import DomainSpec, KeyOwner
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.keys.keyring import KeyFact, Keyring
from kvcustody.governance.ledger_protocol import Ledger
from kvcustody.governance.monitoring.enforcement import (
    ENFORCED,
    Requester,
)
from kvcustody.governance.observability.attempts import Attempts
from kvcustody.governance.observability.serving_measures import ServingMeasures
from kvcustody.governance.observability.tenant_counters import TenantCounters
from kvcustody.governance.request import Hints
from kvcustody.governance.restriction.restricted_subjects import NOBODY_RESTRICTED
from kvcustody.ids import TenantId
from kvcustody.logger import get_logger
from kvcustody.policies.document.model import Action
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.model import Decision
from kvcustody.policies.workbench.lint.without_effect import needs_store

T = TypeVar("T")
_OVER = "its time is over"
_AUTHORIZED_MAX = 100_000
_ASK_AGAIN_US = 5_000_000
NO_ROOM = "there is no room for another tenant at the moment; try again later"
_log = get_logger(__name__)
MISPLACED = "policy allows other workers to serve this request, but not this one"
_MISPLACED = "misplaced"
TOO_LARGE = "too-large"  # the reason of a refusal, in figures


class Authority(Generic[PoolT_co]):
    """Decides who may do what under the active revision. Not thread-safe, except `call`."""

    def __init__(
        self,
        table: DecisionTable,
        keyring: Keyring,
        ledger: Ledger,
        account: Callable[[str], tuple[Account, PoolT_co]],
        *,
        block_tokens: int,
        clock: DeadlineClock,
        expires_utc_us: int | None = None,
    ) -> None:
        """`account`: an admitted tenant's, and the pool that it is charged in; raises `CapacityError` without room."""
        self._clock = clock
        self._account = account
        self._ledger = ledger
        self._keyring = keyring
        self.block_tokens = block_tokens
        self.event_figures: Callable[[], dict[str, float]] = dict  # of the adapter's KV events
        self._domains: WeakValueDictionary[tuple[DomainSpec, int], Domain] = WeakValueDictionary()
        self._commands: deque[Callable[[], None]] = deque()
        self.on_command = _stays_asleep
        self._outbox: list[Event] = []
        self._unrecorded: dict[KeyOwner, list[KeyFact]] = {}
        self._first_uses = FirstUseLog(ledger, self._clock)
        self.attempts = Attempts("engine", self._clock)
        self._export_again_us = 0  # until then no permit of an export can be recorded
        self._authorized: dict[tuple[Action, str, int], Decision] = {}  # what is on record under this revision
        self.tenant_counters: dict[str, TenantCounters] = {}
        self._departed = TenantCounters()
        self.measures = ServingMeasures(block_tokens)
        self._has_store = True
        self._epoch = 0  # moves with all that decides: what was looked up before is looked up anew
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
        self.placement_group: str | None = None  # of this worker; None: it is of no fleet, and serves whatever comes
        self.custody = CustodyLease()
        self.epochs = WorkerEpochs()
        self._lease_until_us, self._expires_us = NEVER_US, self._boot_time(expires_utc_us)
        self._book = self._new_book(table)
        self._reuse = self._new_reuse(table)
        self._watched = self._new_reuse(table, monitored=True)  # what is recorded of requests that are monitored

    @property
    def tables(self) -> tuple[DecisionTable, DecisionTable | None]:
        """The active revision, and a pending one that is not yet on record: narrowing applies from both."""
        return self.table, self._reuse.coming

    @property
    def keyring(self) -> Keyring:
        """The keyring of all epochs, shared with whatever names copies."""
        return self._keyring

    def lease_seconds(self) -> dict[str, float]:
        """Seconds for which reuse across scopes, and any reuse, may go on without renewal; negative: it is over."""
        now_us = self._clock.now_us()
        ends = {"policy": self._lease_until_us, "custody": self.custody.until_us}
        return {name: (until_us - now_us) / MICROSECONDS for name, until_us in ends.items() if until_us < NEVER_US}

    # -- plans --------------------------------------------------------------------------------------------------------

    def _plan(self, key: PlanKey, request_id: Hashable, moment: Moment) -> Plan[PoolT_co] | AdmissionRefused | Deferred:
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
        """Whether door and worker know the same erasures, for a request that came through a door."""
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
        """Return the name of a principal's tenant in policy, accounts and ledger."""
        with suppress(LedgerUnavailable):
            self._names.met(principal)  # the first of a ledger decides whose its bare ids are
        return self._names.called(principal.issuer, principal.tenant)

    def _counters(self, tenant: str) -> TenantCounters:
        counters = self.tenant_counters.get(tenant)
        if counters is None:
            counters = self.tenant_counters[tenant] = TenantCounters()
        return counters

    def too_large(self, request_id: Hashable, tenant: str, needed: int, most: int) -> AdmissionRefused:
        """Refuse and count a request that could not run here even alone; an engine would run out of memory."""
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
        self._epoch += 1

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
        """Return the plan that a principal's request would get now; None where it would not be admitted."""
        key = plan_key(principal, model, route, hints)
        plan = self._plan(key, None, self._moment())
        return plan if isinstance(plan, Plan) else None

    def reads_own(self, plan: AnyPlan) -> bool:
        """Whether a request under this plan may reuse its own scope now, where no other is searched."""
        return self._reuse.reads_own(plan, self._counters(plan.tenant), self._moment())[0]

    def may_export(self, tenant: str, classification: str) -> bool:
        """Whether events about a tenant's blocks may be published; the decision is on record before the first one.

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
        """Decide an act other than a request's own reuse, and record it (`decisions.authorize`, rule 2).

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

    # -- standing -----------------------------------------------------------------------------------------------------

    def set_store(self, *, is_there: bool) -> None:
        """Note whether a remote store is available; a later revision that needs one is reported without it."""
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

    def _decide_by(self, table: DecisionTable, coming: DecisionTable | None = None) -> None:
        """From here on every reuse is decided by `table`, and by `coming` too where it is not on record yet."""
        self._outbox += self._take_counts(self._clock.now_us())
        self._authorized.clear()
        self._reuse = self._new_reuse(table, coming)
        self._watched = self._new_reuse(table, coming, monitored=True)
        self._forget_lookups()

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

    def _take_counts(self, now_us: int) -> list[Event]:
        return self._reuse.take_counts(now_us) + self._watched.take_counts(now_us)

    def renew_lease(self, until_us: int) -> None:
        """Allow grants and segments until `until_us` in boot time: the control plane was heard."""
        self._lease_until_us = until_us
        self._reuse.lease_until_us = self._watched.lease_until_us = until_us

    def renew_custody(self, source: str, until_us: int) -> None:
        """Allow reuse of held blocks until `until_us` in boot time: a source of erasures was heard.

        Told after the erasures that it named: they take effect first.
        """
        self.custody.renew(source, until_us)

    def take_epochs(self, known: KnownEpochs, until_us: int) -> None:
        """Act by these erase epochs until `until_us` in boot time; an older snapshot changes nothing.

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
        """Evaluate `candidate` beside the active revision from now on (None: stop); its decisions are only recorded."""
        self._shadow = None if candidate is None else ShadowPolicy(candidate)
        self._decide_by(self.table)
        return self._shadow

    def end_keys_in_service(self) -> None:
        """Have the key service destroy the keys of destroyed epochs, on record; never on the owning thread."""
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

    def settle(self, timeout_seconds: float = 5.0) -> None:
        """Wait until pending first uses are durable (tests and orderly shutdown)."""
        self._first_uses.settle(timeout_seconds)

    @property
    def clock(self) -> DeadlineClock:
        """The clock that decides deadlines."""
        return self._clock


def _stays_asleep() -> None:
    """The owning thread steps by itself often enough."""
