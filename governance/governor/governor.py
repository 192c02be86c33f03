"""The Governor: the one facade an engine calls. It wraps the block manager in identity, policy, keys and evidence.

    outcome = governor.admit(principal, model, tokens)      # Admission, AdmissionRefused or Deferred
    governor.commit([outcome.request_id], [computed])       # whole blocks among these tokens may be reused
    governor.extend_many(ids, tokens)                       # one more token each; returns who got no room
    governor.release(outcome.request_id)
    governor.step()                                         # once an engine step: expiry, scrubs, evidence

- No tenant, no admission. A denied reuse is a miss, never a refusal, and looks like one to the requester.
- Every reuse is decided at the request's own instant under the active revision, and attach checks the domain again.
- One thread owns the state; `call` is the way in from others.
- An admission that raises leaves nothing: no residency, reference, block or event. What it returns is a copy.
- No SQL on this path: events are tuples handed to the ledger's queue. Scrubbing and revocation never wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.pool.accounting import Account, Domain
from kvcustody.allocator.pool.block_state import CLEAN, DIRTY, NEVER_US, Blocks
from kvcustody.allocator.prefix.hash_index import IndexChange
from kvcustody.allocator.prefix.longest_prefix import Chain, PrefixMatch, Prompt, ReadPlan
from kvcustody.allocator.prefix.sequence import RunningSequence
from kvcustody.audit.evidence.coverage.conservation import PoolCounts
from kvcustody.clock import Clock
from kvcustody.deadline_clock import DeadlineClock
from kvcustody.errors import HandleError
from kvcustody.governance.admission_outcome import Admission, AdmissionOutcome, AdmissionRefused, Deferred
from kvcustody.governance.custody.custody import Custody
from kvcustody.governance.custody_events import (
    FoundHere,
    residency_released,
    route_found,
)
from kvcustody.governance.decisions.access_plan import (
    AdmissionFacts,
    DomainLabel,
    Plan,
    PlanKey,
    plan_key,
    plan_of,
)
from kvcustody.governance.decisions.reuse_decision import Moment, via_reasons
from kvcustody.governance.decisions.staged_table import quotas_of
from kvcustody.governance.edge.route_receipt import RouteReceipt
from kvcustody.governance.governor.forecast_pools import ForecastPools, PoolRun
from kvcustody.governance.governor.offloading import Offloading
from kvcustody.governance.governor.pool_books import PoolBooks
from kvcustody.governance.governor.pools import Pools
from kvcustody.governance.governor.sequence_events import (
    opening_events,
    path_domains,
    sequence_joined,
    sequence_opened,
    written,
)
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.identity.w3c_trace import check_trace
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.ledger_protocol import Ledger
from kvcustody.governance.monitoring.enforcement import MONITORED
from kvcustody.governance.monitoring.monitor import NO_TENANT, MonitoredRequest
from kvcustody.governance.observability.first_asked import NO_EARLIER, EarlierRun, FirstAsked
from kvcustody.governance.observability.prefill_cost import RecomputeCost
from kvcustody.governance.observability.tenant_counters import TenantCounters
from kvcustody.governance.request import (
    NO_HINTS,
    Hints,
    Tokens,
    check_latency,
    read_count,
    read_counts,
    read_kinds,
    read_prompt,
    read_token_array,
)
from kvcustody.governance.tiers.run_transfers import RunTransfers
from kvcustody.governance.tiers.tier import SealedTier
from kvcustody.governance.tiers.tier_rules import TierRules
from kvcustody.ids import TenantId
from kvcustody.logger import get_logger
from kvcustody.policies.document.model import Action, Effect
from kvcustody.policies.document.token_priorities import KindRange
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.table.model import Decision
from kvcustody.tenants import ANONYMOUS

_log = get_logger(__name__)


RESUMED = EarlierRun(NEVER_US, has_first_token=True)  # all that it finds is its own work


class Governor(Custody[BlockManager]):
    """Custody of every block of one engine process. Not thread-safe, except `call`."""

    _books: PoolBooks
    _forecast: ForecastPools

    def __init__(
        self,
        pools: Pools,
        table: DecisionTable,
        keyring: Keyring,
        ledger: Ledger,
        *,
        clock: Clock | None = None,
        expires_utc_us: int | None = None,
        tiers: Callable[[TierRules], Sequence[SealedTier]] | None = None,
        recompute: RecomputeCost | None = None,
        moves_always: bool = False,
    ) -> None:
        """`tiers` opens what evicted blocks go to, under the rules of whichever revision is active.

        `moves_always`: copies move wherever policy permits, whatever it takes.

        `recompute` says what computing tokens again takes, in place of what its own prefills were measured at.
        """
        clock = DeadlineClock.of(clock)
        self._pools = pools
        self._keep_last = pools.options.keep_last_token
        forecast = ForecastPools(pools, clock)
        books = PoolBooks(pools, forecast, self.release, self.finish)
        self._live = books.running
        self._asked = FirstAsked()
        self._nobodys: Domain | None = None
        super().__init__(
            books,
            forecast,
            table,
            keyring,
            ledger,
            self._account_of,
            block_tokens=pools.options.block_tokens,
            clock=clock,
            expires_utc_us=expires_utc_us,
        )
        pools.is_unlimited = self._is_unlimited
        self.offload: Offloading | None = None
        if tiers is not None:
            rules = TierRules(
                lambda: (self.table, self._reuse.coming),
                self.authorize,
                lambda: self.restricted,
                lambda: self.custody.is_over(self._clock.now_us()),
            )
            opened = tiers(rules)
            cost = recompute or self.measures.cost
            transfers = RunTransfers(opened, cost, self._clock, self.block_tokens, always=moves_always)
            self.offload = Offloading(transfers, self._clock, self.block_tokens)
            self.erasures.tiers += opened
            books.copies, pools.watch = transfers, self.offload.watch
        pools.boot(quotas_of(table))
        books.limit(table)
        self._drain(self._clock.now_us())

    # -- admission ----------------------------------------------------------------------------------------------------

    def admit(
        self,
        principal: Principal,
        model: ModelIdentity,
        tokens: Tokens,
        *,
        request_id: Hashable = None,
        route: str | None = None,
        hints: Hints = NO_HINTS,
        extras: Mapping[int, bytes] | None = None,
        lookahead_tokens: int = 0,
        can_preempt: bool = False,
        trace: str = "",
        asked_us: int | None = None,
        is_resumed: bool = False,
        takes_partial: bool = False,
    ) -> AdmissionOutcome:
        """Decide, look up, attach and allocate for one request.

        `tokens`: prompt token ids, a list of ints or an int32 array. `extras`: framed extra content by the block in
        which it ends (`identity.extra_content.frame`). `trace`: the W3C trace id that the request came with, only for
        its leaves. `asked_us`: when the request came, in boot time, if it waited before this call. `is_resumed`: it had
        its first token before, under another id; for the same id the Governor knows that itself. `takes_partial`: the
        content that it left when it was preempted by swap comes with the tokens of its last block, which is not full.
        Raises `IdentityError` for a malformed identity, hint or trace. Raises `ConfigError` for token ids that are not
        integers of 31 bits, a negative count, and extra content that is not framed.
        """
        if type(lookahead_tokens) is not int or lookahead_tokens < 0:
            lookahead_tokens = read_count("lookahead_tokens", lookahead_tokens)
        prompt = read_prompt(tokens, self.block_tokens, extras, keep_last=self._keep_last)
        kinds = read_kinds(hints.kinds) if hints.kinds else ()
        latency, receipt = check_latency(hints.latency), None if is_resumed else hints.receipt
        key = plan_key(principal, model, route, hints)
        moment = self._moment(check_trace(trace) if trace else trace)
        plan, moment = self._standing(key, request_id, moment)
        if not isinstance(plan, Plan):
            return self._without_plan(principal, request_id, plan)
        counters = self._counters(plan.tenant)
        numbered = request_id is None  # one counter for all tenants would tell each of the others' requests
        counters.numbered += numbered
        request_id = ("request", counters.numbered) if numbered else request_id
        handle = (plan.tenant, request_id)
        ledger = self._ledger
        is_monitored = self._is_monitored(principal, request_id)
        admits = prompt.tokens and (is_monitored or plan.admitted.permitted) and ledger.admitting
        if (
            not admits
            or plan.tenant in self._shares.over
            or handle in self._live
            or (plan.waits_for_ledger and not is_monitored and not ledger.recording)
        ):
            return self._kept_out(plan, handle, prompt, counters)
        manager, now_us = plan.manager, moment.now_us
        begun: RunningSequence | str = ""
        try:  # all that can fail, before the first book says that the request runs
            monitored = self._judge(plan, prompt, counters, moment) if is_monitored else None
            read, reasons = (
                self._reuse.read_plan(plan, prompt, counters, moment)
                if monitored is None
                else (ReadPlan(monitored.chain), (MONITORED, *monitored.reasons))
            )
            match, now_us = self._match(plan, read, prompt, now_us, is_monitored=is_monitored)
            begun = manager.allocate(
                handle,
                match,
                prompt,
                manager.residency(plan.account, read.own.domain, plan.subject_key, plan, now_us, trace),
                now_us,
                active_us=NEVER_US if is_monitored else plan.active_us,
                lookahead_tokens=lookahead_tokens,
                can_preempt=can_preempt,
            )
            if isinstance(begun, str):
                since_us = now_us if asked_us is None else asked_us
                most = plan.account.cap_blocks if can_preempt else plan.account.request_blocks
                return self._without_room(plan, handle, begun, match, prompt.tokens + lookahead_tokens, most, since_us)
            earlier = RESUMED if is_resumed else self._asked.earlier_run(handle)
            begun.earlier_blocks, begun.monitored = min(begun.hit_blocks, earlier.blocks), monitored
            begun.priorities = () if is_monitored else self._book.priorities(plan, read.segment, kinds)
            if begun.hit_blocks and monitored is None and (plan.grants or plan.segments):
                reasons += tuple(id_ for one in begun.foreign_blocks() for id_ in via_reasons(plan, one))
            opening = opening_events(plan, begun, manager, reasons, self.table.revision, now_us)
            answer = _admission(begun, self.block_tokens)
        except Exception:
            if isinstance(begun, RunningSequence):
                manager.withdraw(begun, now_us)
            counters.numbered -= numbered
            raise
        self._live[handle] = begun
        begun.asked_us = self._asked.take(handle, now_us if asked_us is None else asked_us)
        begun.prompt_tokens = 0 if earlier.has_first_token else prompt.tokens
        self._outbox += opening
        if monitored is not None:
            self._begin_monitored(begun, monitored, prompt.tokens, kinds, now_us, extra=(lookahead_tokens, can_preempt))
            return self._arrived(plan, begun, receipt, answer, prompt.tokens, now_us)
        if self.offload is not None and self._restore(manager, begun, prompt, latency, takes_partial=takes_partial):
            answer = _admission(begun, self.block_tokens)
        self._measure(
            begun, plan, match, prompt, counters, now_us, says_kinds=bool(kinds), is_new=earlier is NO_EARLIER
        )
        return self._arrived(plan, begun, receipt, answer, prompt.tokens, now_us)

    def _arrived(
        self,
        plan: Plan[BlockManager],
        begun: RunningSequence,
        receipt: RouteReceipt | None,
        answer: Admission,
        prompt_tokens: int,
        now_us: int,
    ) -> Admission:
        """The answer, once this worker's half of the route receipt is written."""
        if receipt is None or plan.facts.tenant == ANONYMOUS:
            return answer
        counts = plan.manager.pool.counts
        found_here = FoundHere(
            prompt_tokens,
            answer.hit_tokens - answer.earlier_tokens,
            len(self._live) - 1,
            counts[CLEAN] + counts[DIRTY],
            any(domain.owner is not begun.account for domain in begun.foreign_blocks()),
            self.knows_epochs(plan),
        )
        self._outbox += route_found(receipt, plan.facts, found_here, now_us, begun.residency.trace)
        return answer

    # -- monitored ----------------------------------------------------------------------------------------------------

    def _standing(
        self, key: PlanKey, request_id: Hashable, moment: Moment
    ) -> tuple[Plan[BlockManager] | AdmissionRefused | Deferred, Moment]:
        """The requester's plan; where it is monitored, and the policy knows no such tenant, that of nobody known.

        And the moment from which everything else is decided: a new plan may have waited for the ledger.
        """
        known = self._book.known(key, moment.utc_us)
        if known is not None and self._is_placed(key, known):
            return known, moment
        plan = self._plan(key, request_id, moment)
        if isinstance(plan, AdmissionRefused) and self._is_monitored(key[0], request_id):
            plan = self._plan_of_nobody(key)
        return plan, self._moment(moment.trace)

    def _plan_of_nobody(self, key: PlanKey) -> Plan[BlockManager]:
        """What it leaves is charged to nobody's account, and is nobody's in the ledger."""
        names = self.table.policy.classifications
        manager, top = self._pools.managers[0], len(names) - 1
        account = manager.account(ANONYMOUS)
        plan = Plan(key[0], TenantId(ANONYMOUS), account, manager, top, names[top])
        plan.key, plan.facts = key, AdmissionFacts(ANONYMOUS, None, None, False, names[top], "")
        if self._nobodys is None or not self._nobodys.is_open:
            label = DomainLabel(ANONYMOUS, names[top], top, "request", None, None, None)
            self._nobodys = manager.domain(account, label=label, idle_us=0, absolute_us=0, verify_share=1.0)
        plan.own = Chain(self._nobodys, None)
        plan.own_plan = ReadPlan(plan.own)
        plan.admitted = Decision(Effect.DENY, (NO_TENANT,), self.table.revision)
        plan.subject_key = (TenantId(ANONYMOUS), None, None)
        return plan

    def _judge(
        self,
        plan: Plan[BlockManager],
        prompt: Prompt,
        counters: TenantCounters,
        moment: Moment,
    ) -> MonitoredRequest:
        """What the policy would let a request read that it is not enforced for, and under which keys it goes."""
        _, model, _, _, salt, _ = plan.key
        chain = self._monitor.chain(plan.own.domain, plan.manager, model, salt)
        rule = "" if plan.admitted.permitted else plan.admitted.reasons[0]
        request = MonitoredRequest(chain, None, model, salt, reader=plan.account.name, refusal=rule)
        if rule:
            counters.count(counters.would_deny, rule)
            self._watched.denied(Action.ADMIT, plan.tenant, rule)
            request.reasons = (rule,)
            return request
        request.read, request.reasons = self._watched.read_plan(plan, prompt, counters, moment)
        self._forecast.open(quotas_of(self.table))
        self._forecast.judge(request, plan, request.read, prompt, moment.now_us)
        return request

    def _begin_monitored(
        self,
        begun: RunningSequence,
        request: MonitoredRequest,
        prompt_tokens: int,
        kinds: tuple[KindRange, ...],
        now_us: int,
        *,
        extra: tuple[int, bool],
    ) -> None:
        """It is put on record as soon as it is known what it would have found."""
        record = self._recording(begun.residency, request, path_domains(begun), prompt_tokens, now_us)
        self.measures.began(0, 0, now_us - begun.asked_us)
        run = request.run
        if not isinstance(run, PoolRun):
            record()
            return
        run.lookahead_tokens, run.can_preempt = extra
        run.priorities = self._book.priorities(run.plan, run.policy_read.segment, kinds)
        self._forecast.begin(run, record, now_us)

    def _restore(
        self,
        manager: BlockManager,
        begun: RunningSequence,
        prompt: Prompt,
        latency: str,
        *,
        takes_partial: bool,
    ) -> int:
        """Fill blocks behind the hit from tiers. Where the device fails the request ends, as one that never was."""
        assert self.offload is not None
        try:
            come = self.offload.restore(manager, begun, prompt.limit, latency)
            return come + (self.offload.restore_tail(manager, begun, prompt, latency) if takes_partial else 0)
        except Exception:
            self.release(begun.id, "failed")
            raise

    def _holds_still(self, plan: Plan[BlockManager], found: PrefixMatch, now_us: int, *, is_monitored: bool) -> bool:
        """Whether what was decided and found before a wait may be attached after it."""
        leaf = found.leaf
        if leaf is None:
            return True
        until_us = self.custody.until_us if is_monitored else self._reuse.nothing_from_us
        if not is_monitored and (plan.grants or plan.segments):
            valid_us = plan.valid_until_utc_us - self._clock.offset_us
            until_us = min(until_us, self._reuse.lease_until_us, valid_us)
        return now_us < until_us and plan.manager.tree.attachable(leaf, leaf.domain, now_us)

    def _match(
        self, plan: Plan[BlockManager], read: ReadPlan, prompt: Prompt, now_us: int, *, is_monitored: bool
    ) -> tuple[PrefixMatch, int]:
        """What may be attached, and from when: blocks may have been compared on the device first."""
        began_ns, manager = perf_counter_ns(), plan.manager
        if is_monitored and self.custody.is_over(now_us):
            prompt = prompt._replace(limit=0)
        match = manager.match_prefix(read, prompt, now_us)
        if manager.pool.sums is not None:
            now_us = self._clock.now_us()
            if not self._holds_still(plan, match, now_us, is_monitored=is_monitored):
                match = manager.match_prefix(read, prompt._replace(limit=0), now_us)
        self.measures.look_up_ns += perf_counter_ns() - began_ns
        return match, now_us

    def _measure(
        self,
        begun: RunningSequence,
        plan: Plan[BlockManager],
        match: PrefixMatch,
        prompt: Prompt,
        counters: TenantCounters,
        now_us: int,
        *,
        says_kinds: bool,
        is_new: bool,
    ) -> None:
        has_keys, hits = plan.has_keys, begun.hit_blocks - begun.earlier_blocks
        if has_keys and not says_kinds and self.table.policy.eviction.kinds:
            counters.without_kinds += 1
        if is_new:
            counters.count_start(plan.session, prompt.tokens if has_keys else None, hits)
        else:
            counters.hit_blocks += hits
        if plan.grants or plan.segments:
            for domain, blocks in begun.foreign_blocks(first=begun.earlier_blocks).items():
                counters.granted_hit_blocks += blocks
                self._reuse.crossed(plan, domain, blocks, blocks * self.block_tokens)
        counters.stale_blocks += match.stale_blocks
        counters.verified_blocks += match.checked_blocks
        leaf, evicted = begun.leaf, plan.manager.tree.evicted_keys
        age_us = now_us - leaf.born_us if leaf is not None else 0
        self.measures.began(hits, age_us, now_us - begun.asked_us)
        if evicted.evicted:
            for span in begun.spans:
                again = evicted.computed_again(span.domain.owner.name, span.keys)
                if again:
                    counters.recomputed_blocks += again

    def _without_room(
        self,
        plan: Plan[BlockManager],
        handle: tuple[str, Hashable],
        reason: str,
        match: PrefixMatch,
        tokens: int,
        most: int,
        since_us: int,
    ) -> AdmissionRefused | Deferred:
        """It waits for room, where it could ever have it."""
        needed = -(-tokens // self.block_tokens)
        if match.via is not plan.own.domain:
            needed -= match.hit_blocks  # they are charged to whose they are, and so is what it writes for others
        account = plan.account
        needed -= sum(span.last - span.first for span in match.spans if span.domain.owner is not account)
        if needed > most:
            return self.too_large(handle[1], plan.tenant, needed, most)
        return self._deferred(self._counters(plan.tenant), handle, reason, since_us)

    def _deferred(self, counters: TenantCounters, handle: tuple[str, Hashable], reason: str, since_us: int) -> Deferred:
        """A request that waits is counted once for each reason, however often it is offered."""
        if self._asked.note(handle, since_us, reason):
            counters.count(counters.deferred, reason)
        return Deferred(handle[1], reason)

    def _without_plan(
        self, principal: Principal, request_id: Hashable, outcome: AdmissionRefused | Deferred
    ) -> AdmissionRefused | Deferred:
        """The tenant is not admitted, or its first key cannot be recorded now."""
        if isinstance(outcome, Deferred):
            tenant = self._names.called(principal.issuer, principal.tenant)
            counters = self._counters(tenant)
            if request_id is None:
                counters.count(counters.deferred, outcome.reason)
            else:
                self._deferred(counters, (tenant, request_id), outcome.reason, self._clock.now_us())
        return outcome

    def _kept_out(
        self, plan: Plan[BlockManager], handle: tuple[str, Hashable], prompt: Prompt, counters: TenantCounters
    ) -> AdmissionRefused | Deferred:
        """Why a request with a plan does not get in, whatever room there is."""
        request_id = handle[1]
        if handle in self._live:
            return AdmissionRefused(request_id, "this request id is in use")
        if not prompt.tokens:
            return AdmissionRefused(request_id, "prompt is empty")
        if not plan.admitted.permitted:
            rule = plan.admitted.reasons[0]
            counters.count(counters.refused, rule)
            self._reuse.denied(Action.ADMIT, plan.tenant, rule)
            return AdmissionRefused(request_id, f"policy: {rule}")
        self._deferred(counters, handle, "ledger", self._clock.now_us())
        return Deferred(request_id, "ledger")

    # -- running ------------------------------------------------------------------------------------------------------

    def commit(self, request_ids: Sequence[Hashable], computed_tokens: Sequence[int]) -> None:
        """Note that the first n tokens of each request have their K/V: whole blocks among them may be reused from now
        on.
        """
        now_us = self._clock.now_us()
        counts = read_counts("computed tokens", computed_tokens)
        for request_id, computed in zip(request_ids, counts, strict=True):
            sequence = self._get(request_id)
            manager = self._pools.managers[sequence.pool]
            manager.commit(sequence, computed, now_us)
            if sequence.monitored is not None:
                self._forecast.computed(sequence.monitored, computed, now_us)
            if 0 < sequence.prompt_tokens <= computed:
                self._has_first_token(sequence, now_us)
            if manager.pool.attached:
                self._record_joins(manager)

    def _has_first_token(self, sequence: RunningSequence, now_us: int) -> None:
        attached = (sequence.hit_blocks + sequence.restored_blocks) * self.block_tokens + sequence.tail_tokens
        began_us = sequence.residency.opened_us
        earlier = sequence.earlier_blocks * self.block_tokens
        computed, waited_us = sequence.prompt_tokens - attached, now_us - sequence.asked_us
        self.measures.first_token(computed, attached, waited_us, now_us - began_us, earlier=earlier)
        sequence.prompt_tokens = 0

    def slots(self, request_ids: Sequence[Hashable]) -> NDArray[np.int64]:
        """Decode slots of running requests, for `extend_slots`. They stay valid until release."""
        live = self._live
        return np.array([live[request_id].slot for request_id in request_ids], dtype=np.int64)

    def extend_many(self, request_ids: Sequence[Hashable], tokens: Tokens | None) -> tuple[Hashable, ...]:
        """Make room for one more accepted token in each request; returns the ids that got none (preempt or
        retry them).
        """
        by_pool: dict[int, list[int]] = {}
        for at, request_id in enumerate(request_ids):
            by_pool.setdefault(self._get(request_id).pool, []).append(at)
        ids = read_token_array(tokens, len(request_ids)) if tokens is not None else None
        stalled: list[Hashable] = []
        for pool, places in by_pool.items():
            slots = self.slots([request_ids[at] for at in places])
            stalled += self.extend_slots(slots, ids[places] if ids is not None else None, pool)
        return tuple(stalled)

    def extend_slots(self, slots: NDArray[np.int64], tokens: NDArray[np.int32] | None, pool: int = 0) -> list[Hashable]:
        """Extend by decode slot of one pool: the form of `extend_many` for engines that keep their batch as arrays."""
        if tokens is not None:
            tokens = read_token_array(tokens, len(slots))
        manager, now_us = self._pools.managers[pool], self._clock.now_us()
        stalled = [sequence.id for sequence in manager.extend_many(slots, tokens, now_us)]
        self.measures.stalled += len(stalled)
        if self._forecast.is_open:
            waits = set(stalled)
            given = [
                None if sequence is None or sequence.id in waits else sequence.monitored
                for sequence in map(manager.decode.sequences.__getitem__, slots.tolist())
            ]
            self._forecast.extend(given, tokens, now_us)
        return stalled

    def fill(self, request_id: Hashable, tokens: Tokens | None) -> None:
        """Note that the request's last block is full and computed: the form for engines that report whole blocks.

        `tokens`: ids of those accepted since admission or the last call of `fill` or `extend_slots`, or None where the
        engine withholds them. The next token needs `extend_slots`. Raises as `BlockManager.fill`.
        """
        sequence = self._get(request_id)
        manager = self._pools.managers[sequence.pool]
        ids = None if tokens is None else read_token_array(tokens)
        manager.fill(sequence, ids)
        if sequence.monitored is not None:
            self._forecast.fill(sequence.monitored, ids)

    def may_fork(self, request_id: Hashable) -> bool:
        """Whether a new request may read all blocks of this one: none was revoked, expired or erased."""
        sequence = self._get(request_id)
        residency = sequence.residency
        if not residency.may_hold:  # erased, and let finish
            return False
        epochs, principal = plan_of(residency).key[5], plan_of(residency).principal
        if self.custody.is_over(self._clock.now_us()):
            return False
        if epochs is not None and not self.epochs.agree(principal, epochs):
            return False
        if residency.domain.is_withheld or self.restricted.covers(
            plan_of(residency).tenant, plan_of(residency).principal.subject
        ):
            return False
        if sequence.monitored is not None:
            return True
        crossed: dict[Domain, int] = {}  # with the ceiling of what is read of each
        node = sequence.leaf
        while node is not None:
            if node.domain is not residency.domain:
                crossed[node.domain] = min(crossed.get(node.domain, NEVER_US), node.ceiling_us)
            node = node.parent
        if not crossed:
            return True
        plan = self._plan(plan_of(residency).key, request_id, self._moment(residency.trace))  # as it is now
        if not isinstance(plan, Plan):
            return False
        counters, moment = self._counters(plan.tenant), self._moment(residency.trace)
        return all(
            self._reuse.may_go_on(plan, domain, counters, moment) and moment.now_us < ceiling_us
            for domain, ceiling_us in crossed.items()
        )

    def fork(self, request_id: Hashable, child_id: Hashable) -> AdmissionOutcome:
        """Start a second request on the same blocks (parallel sampling, beams); the first divergent write copies.

        Refused where the parent reads what may not be read anew, deferred where the ledger takes no opening of this
        tenant's now: it runs on, and the child is admitted by itself.
        """
        parent = self._get(request_id)
        plan = plan_of(parent.residency)
        manager = self._pools.managers[parent.pool]
        key = (plan.tenant, child_id)
        if key in self._live:
            raise HandleError(f"request id `{child_id}` is in use", request_id=child_id)
        ledger = self._ledger
        if not ledger.admitting or plan.tenant in self._shares.over or (plan.waits_for_ledger and not ledger.recording):
            counters = self._counters(plan.tenant)
            counters.count(counters.deferred, "ledger")
            return Deferred(child_id, "ledger")
        if not self.may_fork(request_id):
            return AdmissionRefused(
                child_id, "fork: policy no longer permits all reads of the parent; admit the child as a new request"
            )
        own = plan.own.domain if parent.monitored is None else parent.domain
        now_us = self._clock.now_us()
        child = manager.fork(
            parent,
            key,
            manager.residency(plan.account, own, plan.subject_key, plan, now_us, parent.residency.trace),
            now_us,
        )
        if isinstance(parent.monitored, MonitoredRequest):
            child.monitored = self._forecast.fork(parent.monitored, now_us)
        if manager.pool.attached:
            self._record_joins(manager)
        self._live[key] = child
        why = ("fork",) if parent.monitored is None else (MONITORED, "fork")
        self._outbox.append(sequence_opened(plan, child, manager, why, self.table.revision, now_us))
        there = int(manager.decode.computed[child.slot])  # its last block may not be full, or computed
        return _admission(child, self.block_tokens)._replace(hit_tokens=there, earlier_tokens=there)

    def blocks(self, request_id: Hashable) -> NDArray[np.int64]:
        """Return the present block table of a running request, as a read-only copy."""
        return _block_table(self._get(request_id))

    # -- release ------------------------------------------------------------------------------------------------------

    def release(self, request_id: Hashable, cause: str = "finished", *, asked_us: int | None = None) -> bool:
        """End a request, whatever its state; False where it had ended already.

        `asked_us`: when its client cancelled it, in boot time, where that was before now.
        """
        sequence = self._live.pop(request_id, None)
        if sequence is None:
            self._asked.forget(request_id)
            return False
        if cause == "preempted":
            computed = int(self._pools.managers[sequence.pool].decode.computed[sequence.slot])
            blocks = max(sequence.hit_blocks, computed // self.block_tokens)
            self._asked.note_preempted(request_id, EarlierRun(blocks, not sequence.prompt_tokens))
        self.finish(sequence, cause)
        if cause == "aborted":
            now_us = self._clock.now_us()
            self.measures.cancelled(now_us - (now_us if asked_us is None else asked_us))
        self._count_when_idle()
        return True

    def finish(self, sequence: RunningSequence, cause: str, handle: Hashable = None) -> None:
        """End a sequence in every book, and record it: for `release`, and for a scan that found a lost one."""
        if handle is not None:
            self._live.pop(handle, None)
        now_us = self._clock.now_us()
        manager = self._pools.managers[sequence.pool]
        runs = written(sequence, manager)
        if sequence.monitored is not None:
            self._forecast.end(sequence.monitored, cause, now_us)
        manager.release(sequence, now_us, cause)
        if manager.pool.attached:
            self._record_joins(manager)
        self._outbox.append(residency_released(sequence.residency, runs, cause, now_us))

    def _record_joins(self, manager: BlockManager) -> None:
        """A request's joins go after its opening and before its release: what it held then has a reader on record."""
        joins, manager.pool.attached = manager.pool.attached, []
        self._outbox += [sequence_joined(join, manager.number) for join in joins]

    def abort(self, request_id: Hashable) -> bool:
        """Release a request whose client cancelled or disconnected."""
        return self.release(request_id, "aborted")

    def preempt(self, request_id: Hashable, *, swap: bool = False) -> bool:
        """Give up a request's blocks: computed ones stay CACHED under their hold, and its next admission may find them.

        `swap`: with tiers, all blocks go to one now, including the last block that is not full. An admission of all its
        tokens that `takes_partial` brings them back.
        """
        sequence = self._live.get(request_id)
        if not swap or sequence is None or self.offload is None:
            return self.release(request_id, "preempted")
        manager = self._pools.managers[sequence.pool]
        manager.commit(sequence, int(manager.decode.computed[sequence.slot]), self._clock.now_us())
        leaf = sequence.leaf
        self.offload.keep_tail(manager, sequence)
        self.release(request_id, "preempted")
        self.offload.keep_path(manager, leaf)
        return True

    def fence(self, request_ids: Sequence[Hashable]) -> int:
        """Note a device step in flight over these requests' blocks; returns its id for `retire`."""
        pools = {self._get(request_id).pool for request_id in request_ids}
        opened = self._pools.open_fence(pools, self._clock.now_us())
        for request_id in request_ids:
            sequence = self._get(request_id)
            sequence.fence = opened.by_pool[sequence.pool]
        if self._forecast.is_open:
            watched = (self._live[request_id].monitored for request_id in request_ids)
            self._forecast.fence(opened.number, watched, self._clock.now_us())
        return opened.number

    def retire(self, fence: int) -> None:
        """Note that the device step of `fence` has retired; a second call changes nothing."""
        self._pools.retire_fence(fence)
        self._forecast.retire(fence)

    # -- time, commands, evidence -------------------------------------------------------------------------------------

    def step(self) -> tuple[Hashable, ...]:
        """Advance custody once per engine step, and on a timer while idle: commands, expiry, scrub, evidence.

        Returns the requests that were ACTIVE longer than their policy allows and have been released.
        """
        self._clock.look()
        now_us = self._clock.now_us()
        self._run_commands()
        self._end_monitoring_in_time()
        over: list[RunningSequence] = []
        for manager in self._pools.managers:
            over += manager.step(now_us)
        self._forecast.step(now_us)
        for sequence in over:
            self.release(sequence.id, "active-max")
        self._outbox += self._books.take_overdue(now_us)
        self._orphans.step()
        if self.offload is not None:
            self.offload.transfers.step(now_us)
        if self.erasures.pending:
            self.erasures.poll()
        self._drain(now_us)
        self._count_when_idle()
        return tuple(sequence.id for sequence in over) if over else ()

    # -- administration -----------------------------------------------------------------------------------------------

    def _account_of(self, tenant: str) -> tuple[Account, BlockManager]:
        return self._pools.account(tenant, quotas_of(self.table), self._leaves)

    def _leaves(self, tenant: str) -> bool:
        """Whether an unlisted tenant makes room for another: it runs nothing, and holds nothing.

        In `shared` one that never came back gives up its cache as well: a storm of names takes room from itself.
        """
        found = self._pools.seat(tenant)
        if found is not None:
            account, manager = found
            running = (sequence.residency.account for sequence in self._live.values())
            if account.active_blocks or any(one is account for one in running):
                return False
            if self._pools.is_shared and self._came_once(tenant):
                now_us = self._clock.now_us()
                for hold in list(manager.hold_table.of(account)):
                    manager.tree.lapse(hold, "quota", now_us)
                manager.tree.flush(now_us)
            if not self._pools.leave(tenant):
                return False
        self._forget_tenant(tenant)
        return True

    def _forget_tenant(self, tenant: str) -> None:
        super()._forget_tenant(tenant)
        self._forecast.forget_tenant(tenant, self._clock.now_us())

    def index_changes(self) -> list[IndexChange]:
        """Return what was published and what ended in the index of any pool since the last call, in order.

        Recorded from the first call on, which returns nothing; whoever calls once must go on calling.
        """
        return self._pools.index_changes()

    def scan_online(self) -> None:
        """Scan a slice of one pool in every step from now on; findings are recorded for a full scan to repair."""
        self._orphans.scan_online(self._books.slices())

    def _count_when_idle(self) -> None:
        """Nobody may step an engine that has nothing to do: its counters are taken when it comes to that."""
        if self.counted is not None and not self._live:
            self.count()

    def counts(self) -> PoolCounts:
        """Return counts as `Custody.counts` does, after waiting for scrubs in flight, to compare the device's count
        with the record.
        """
        for manager in self._pools.managers:
            manager.pool.synchronize()
        if not self._live:
            self._forecast.settle(self._clock.now_us())
        return super().counts()

    @property
    def managers(self) -> list[BlockManager]:
        """The block managers, one per pool."""
        return self._pools.managers

    @property
    def running(self) -> Mapping[Hashable, RunningSequence]:
        """Requests between admission and release."""
        return self._live

    def _get(self, request_id: Hashable) -> RunningSequence:
        live = self._live.get(request_id)
        if live is None:
            raise HandleError(f"request `{request_id}` is not running here", request_id=request_id)
        return live


def _admission(begun: RunningSequence, block_tokens: int) -> Admission:
    there = (begun.hit_blocks + begun.restored_blocks) * block_tokens + begun.tail_tokens
    earlier = begun.earlier_blocks * block_tokens
    return Admission(begun.id, there, _block_table(begun), begun.slot, earlier)


def _block_table(sequence: RunningSequence) -> Blocks:
    """A copy for the engine: nothing that is done to it reaches the block table."""
    shown = sequence.table[: sequence.block_count].copy()
    shown.setflags(write=False)
    return shown
