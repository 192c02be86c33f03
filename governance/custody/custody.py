"""The custody of one process: acts that change its limits, and acts that end, compare and account for it.

`Governor` adds requests over our own pools; `EnginePort` adds those of an engine that allocates its own blocks. `Books`
hides how either pool carries out an act.

- A widening act is durable before it takes effect; a narrowing one takes effect first.
- What is revoked stays revoked, under every later revision.
- The policy is enforced for every request. It is not enforced for those whom an order exempts, if this process allows
  that (`may_monitor`) and the policy's profile is `shared`. An order that enforces takes effect at once; one that
  exempts is recorded first.
- An erasure, a restriction and a scan reach every pool and tier of the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from kvcustody.allocator.pool.accounting import Account, Domain
from kvcustody.allocator.pool.block_state import NEVER_US
from kvcustody.allocator.pool.residency import Residency
from kvcustody.audit.evidence.coverage.conservation import PoolCounts
from kvcustody.audit.evidence.query.key_orders import CLOCKS_DIFFER_US, DESTROY
from kvcustody.audit.kinds import (
    GOVERNOR,
    EnforcementChanged,
    Event,
    GrantsRevoked,
    KeysDropped,
    PolicyActivated,
    PolicyStaged,
    ProcessingRestricted,
)
from kvcustody.deadline_clock import DeadlineClock
from kvcustody.errors import ConfigError, LedgerUnavailable
from kvcustody.governance.custody.books import Books, Covers
from kvcustody.governance.decisions.access_plan import PoolT_co, is_withheld, label_of
from kvcustody.governance.decisions.apply_narrowing import apply_limits
from kvcustody.governance.decisions.authority import Authority
from kvcustody.governance.decisions.policy_on_record import documents_on_record, revoked_on_record
from kvcustody.governance.decisions.staged_table import StagedTable
from kvcustody.governance.erasure.erasure_run import ErasureEffect, ErasureResult, ErasureRunner
from kvcustody.governance.erasure.selector import Selector, matches_label
from kvcustody.governance.identity.domain_spec import KeyOwner
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
    refusal,
)
from kvcustody.governance.monitoring.monitor import Monitor, MonitoredRequest
from kvcustody.governance.monitoring.monitored_event import changed_tenants, monitored_event
from kvcustody.governance.observability.stats import Counted, Stats
from kvcustody.governance.observability.thrash import ThrashWatch
from kvcustody.governance.orphans.finding import Finding
from kvcustody.governance.orphans.scan_protocol import LedgerJoin
from kvcustody.governance.orphans.scans import OrphanScans, Scanned
from kvcustody.governance.restriction.restricted_subjects import RestrictedSubjects
from kvcustody.logger import get_logger
from kvcustody.policies.document.model import Profile
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.tenants import ANONYMOUS

_OVER = "its time is over"
_log = get_logger(__name__)


class PolicyForecast(Protocol):
    """A forecast of what enforcing the policy would do to monitored requests."""

    def forget(self, covers: Covers, now_us: int) -> None:
        """Forget what ends in these domains."""

    def close(self) -> None:
        """Record the outcome, as far as it is known, of requests that still wait."""


class Custody(Authority[PoolT_co]):
    """Custody of every block of one process's pools. Not thread-safe, except `call`."""

    def __init__(
        self,
        books: Books,
        forecast: PolicyForecast,
        table: DecisionTable,
        keyring: Keyring,
        ledger: Ledger,
        account: Callable[[str], tuple[Account, PoolT_co]],
        *,
        block_tokens: int,
        clock: DeadlineClock,
        expires_utc_us: int | None = None,
    ) -> None:
        super().__init__(
            table,
            keyring,
            ledger,
            account,
            block_tokens=block_tokens,
            clock=clock,
            expires_utc_us=expires_utc_us,
        )
        self._books, self._forecast = books, forecast
        self._began_utc = clock.utc_us()
        self._dropped: dict[str, int] = {}  # by tenant: the last order to destroy that was followed
        self._monitor = Monitor()
        self._thrash = ThrashWatch()
        self.counted: Counted | None = None  # the newest counters, for any thread; None: nobody asked yet
        self.erasures = ErasureRunner(
            self._end_selected, clock, self._emit, lambda: self.table.policy.erasure, ledger.submit
        )
        self._orphans = OrphanScans(books.census, self.erasures.tiers, clock, self._emit)

    # -- activate -----------------------------------------------------------------------------------------------------

    def activate(self, table: DecisionTable, *, actor: str, expires_utc_us: int | None = None) -> None:
        """Make `table` the active revision. It narrows at once, and widens when the revision is on record.

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
        self._books.copies.narrow()
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
        self._books.limit(table)
        self._share_ledger(table)
        self._bind(table, now_us)
        self._books.copies.narrow()
        self._look_for_store(table)

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
            return PolicyStaged(now_us, table.revision, policy.name, table.digest, table.stage, actor, previous)
        return PolicyActivated(now_us, table.revision, policy.name, policy.profile.value, table.digest, actor, previous)

    def _bind(self, table: DecisionTable, now_us: int, *, only_narrow: bool = False) -> None:
        self._outbox += apply_limits(
            self._books.pools,
            list(self._domains.items()),
            table,
            now_us,
            only_narrow=only_narrow,
            revoked=self.revoked,
            epoch_of=self._keyring.current,
        )

    # -- revoke and restrict ------------------------------------------------------------------------------------------

    def revoke(self, ids: Iterable[str], *, actor: str) -> None:
        """Withdraw grants, segments or sharing groups permanently: no request reuses through them from now on.

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

    def restrict(self, ordered: RestrictedSubjects) -> None:
        """Stop using exactly these subjects' blocks from now on; no change where that is so already.

        It holds at once, for what waits too, and is recorded after. What runs goes on, and what it leaves is withheld.
        """
        before = self.restricted
        if ordered.orders == before.orders:
            return
        self.restricted = ordered
        self._book.drop()
        self._book = self._new_book(self.table)
        self._decide_by(self.table, self._reuse.coming)
        for domain in {*self._domains.values(), *self._books.census().domains()}:
            domain.is_withheld = is_withheld(label_of(domain), ordered)
        now_us = self._clock.now_us()
        for one in sorted(ordered.orders ^ before.orders):
            is_new = one in ordered.orders
            self._outbox.append(
                ProcessingRestricted(now_us, one.case_id, one.tenant, one.subject, "restricted" if is_new else "lifted")
            )
            _log.warning("processing restricted" if is_new else "restriction lifted", case=one.case_id)

    # -- enforce ------------------------------------------------------------------------------------------------------

    def order_enforcement(self, ordered: Enforcement) -> None:
        """Follow an order, or enforce where orders are not followed here; no change where that is so already.

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
        _log.warning("enforcement changed", mode=target.mode, order=ordered.order, actor=ordered.actor, refused=refused)

    def _enforce(self, target: Enforcement, until_us: int, refused: str) -> None:
        before, self.enforcement = self.enforcement, target
        self.enforcement_refused, self._enforcement_until_us = (
            refused,
            until_us if target.monitors else NEVER_US,
        )
        self._books.limit(self.table)
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

    def _end_monitored(self, before: Enforcement) -> None:
        """What is cached under the engine's own keys ends, of whoever's standing is another than it was `before`."""
        tenants = changed_tenants(self._monitor.tenants(), before, self.enforcement)
        if not tenants:
            return
        now_us = self._clock.now_us()
        self._monitor.close(tenants)
        self._forecast.forget(lambda domain: label_of(domain).tenant in tenants, now_us)
        self._books.close(lambda domain: label_of(domain).is_monitored and label_of(domain).tenant in tenants, now_us)

    # -- keys ---------------------------------------------------------------------------------------------------------

    def reload_keys(self) -> None:
        """Forget every primed key state after a rotation or destruction; the sweeps end old blocks."""
        self._book.drop()
        self._forget_lookups()
        self._bind(self.table, self._clock.now_us())
        self._books.copies.narrow()

    def follow_keys(self, orders: Iterable[OrderedKeys]) -> int:
        """Rotate and destroy keys as ordered, on record before the owner's next request. Returns the number of
        epochs.
        """
        changes, orders = self._keyring.changes, tuple(orders)
        done = apply_key_orders(self._keyring, orders, self._names.named)
        if done or self._keyring.changes != changes:
            self.reload_keys()
        self._record_key_facts(done)
        for order in orders:
            self._record_dropped(order, done)
        return sum(map(len, done.values()))

    def _record_dropped(self, order: OrderedKeys, done: Mapping[KeyOwner, list[KeyFact]]) -> None:
        """That an order to destroy is followed here, once: what was unwrapped is wiped, whoever removed the wrap.

        A process that began after the order never had anything of it.
        """
        last_us = self._dropped.get(order.tenant, self._began_utc - CLOCKS_DIFFER_US)
        if order.action != DESTROY or last_us >= order.before_us:
            return
        facts = [fact for owner, each in done.items() if self._names.named(owner) == order.tenant for fact in each]
        ended = sum(fact.kind == "destroyed" for fact in facts)
        self._ledger.submit_durable(KeysDropped(self._clock.now_us(), order.before_us, ended))
        self._dropped[order.tenant] = order.before_us

    # -- erase --------------------------------------------------------------------------------------------------------

    def erase(self, selector: Selector, **order: Any) -> ErasureResult:
        """End all custody of a selector now, with running requests treated as the policy says; `step` completes it.

        `order`: what `ErasureRunner.begin` takes besides. Raises `ConfigError` for a malformed selector and what a
        case restricts.
        """
        if not order.get("on_record"):  # one on record was checked there
            self.restricted.check_erasable(selector.tenant, selector.subject, selector.session)
        result = self.erasures.begin(selector, **order)
        _log.info("erased", erasure=result.erasure, blocks=result.ended_blocks, remaining=result.remaining_blocks)
        self._drain(self._clock.now_us())
        self.on_command()
        return result

    def _end_selected(self, selector: Selector, before_us: int, finish: bool) -> ErasureEffect:
        now_us = self._clock.now_us()
        effect = self._books.erase(selector, before_us, now_us, finish=finish)
        self._book.forget_closed()
        self._forget_lookups()
        self._forecast.forget(lambda domain: matches_label(selector, label_of(domain)), now_us)
        return effect

    # -- scan and check -----------------------------------------------------------------------------------------------

    def scan(self) -> list[Finding]:
        """Find every disagreement of pools, requests, holds, queues, tiers and an engine's own books."""
        return self._orphans.scan()

    def scan_and_recover(self, ledger: LedgerJoin | None = None, *, mode: str = "full") -> Scanned:
        """Scan, repair every finding, and record both. With `ledger`, the scan covers the ledger too.

        An engine is told what it must forget, abort or withhold; its own books stay its own.
        """
        self._drain(self._clock.now_us())  # what happened is on its way before anybody compares
        scanned = self._orphans.scan_and_recover(ledger, mode)
        self._drain(self._clock.now_us())
        self.on_command()
        return scanned

    def check(self) -> list[str]:
        """Recompute every invariant from scratch; returns an empty list when all hold."""
        return self._books.census().problems()

    def counts(self) -> PoolCounts:
        """Return the pools' own counters for conservation, after every event has gone to the ledger."""
        self._drain(self._clock.now_us())
        return self._books.census().counts()._replace(tiers=self._books.copies.counts())

    # -- account for --------------------------------------------------------------------------------------------------

    def count(self) -> None:
        """Read the counters now for `counted`, on the owning thread, and keep them from then on."""
        self.counted = Counted(self.stats(), time.monotonic())

    def stats(self) -> Stats:
        """A snapshot of counters; consistent between steps."""
        books = self._books
        figures = books.figures(self._clock.now_us())
        for named in (figures.charged, figures.tenant_tokens):
            named.pop(ANONYMOUS, None)
        return Stats(
            dict(self.tenant_counters),
            figures.pools,
            figures.running,
            self._orphans.drift_blocks,
            figures.charged,
            dict(self.attempts.totals),
            self._departed,
            are_hits_leading=figures.are_hits_leading,
            monitors=self.enforcement.monitors,
            serving=self.measures.figures(),
            tiers=books.copies.figures(),
            thrashing=dict(self._thrash.look(self.tenant_counters, figures.room)),
            room=figures.room,
            tenant_tokens=figures.tenant_tokens,
            leases=self.lease_seconds(),
            events=self.event_figures(),
        )

    def _recording(
        self,
        residency: Residency,
        monitored: MonitoredRequest,
        attached: Sequence[Domain],
        prompt_tokens: int,
        at_us: int,
    ) -> Callable[[], None]:
        """What puts a monitored request on record, to be called once it is known what it would have found."""
        revision, order = self.table.revision, self.enforcement.order
        counters = self._counters(residency.account.name)

        def record() -> None:
            event = monitored_event(
                residency,
                monitored,
                attached,
                prompt_tokens=prompt_tokens,
                block_tokens=self.block_tokens,
                revision=revision,
                order=order,
                at_us=at_us,
                counters=counters,
            )
            self._outbox.append(event)

        return record

    def _forget_tenant(self, tenant: str) -> None:
        super()._forget_tenant(tenant)
        self._books.copies.forget_tenant(tenant)

    def _emit(self, events: Sequence[Event]) -> None:
        self._outbox += events

    # -- drain and close ----------------------------------------------------------------------------------------------

    def _drain(self, now_us: int) -> None:
        """Hand everything that happened to the ledger's queue, releases before the ends that they explain."""
        outbox, self._outbox = self._outbox, []
        outbox += self._take_counts(now_us)
        if self.attempts.due_us <= now_us:
            outbox += self.attempts.events()
        outbox += self._books.take_events(now_us)
        if outbox:
            self._ledger.submit(outbox)

    def close(self) -> None:
        """Release every request, end all custody and hand over the evidence."""
        now_us = self._clock.now_us()
        self._books.teardown(now_us)
        self._forecast.close()
        if self.erasures.pending:
            self.erasures.poll(now=True)
        self._outbox += self.attempts.events()
        self._drain(now_us)
        self._first_uses.close()


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
