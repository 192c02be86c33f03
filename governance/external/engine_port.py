"""The engine port: what the adapter of an engine with its own allocator reports, and what it gets back.

The engine keeps its allocator and its index. It reports which blocks it handed out, attached, published and released,
by index; the port answers with keys, decisions and orders to evict, abort or withhold (`EngineControl`):

    residency = port.admit(principal, model, tokens, request_id=...)    # who it is, and what it may ever read
    keys = port.look_up(residency, find)                                # its block keys, and how many it may read now
    port.may_start(residency), port.attachable(residency, blocks)       # its quota; domain and deadline, once more
    port.attached / handed_out / published / returned / release         # what the engine did
    order = port.step()                                                 # scrubs to do before any other write

Where its workers can sum blocks (`can_sum`), a policy may ask for `integrity`, and there is more:

    port.may_read(residency, blocks)                                    # None: it must wait for `compared`
    sums = port.sum_order()                                             # to sum and compare, before any other write
    port.settle_sums()                                                  # the step has left, and all of it is told
    port.compared(sums.number, shard, differing)                        # what a worker answered

docs/build/engine-port.md has a complete example.

- A request without a valid identity reads nothing, publishes nothing and holds nothing; its blocks are in custody.
- Keys of the request's own, granted and segment domains are made only here. A request whose reuse is denied has keys
  that no other request can compute.
- Due blocks have ended before any look-up answers, and attach is checked again, block by block.
- Every block that is not zero is in the scrub order of the step that first writes to it.
- An adapter may make costly reports late, if it declares that (`defer_calls`). The port then asks for them before it
  decides or ends anything.
- Reporting something twice changes nothing; reporting something impossible raises `IsolationError`.
- A residency is recorded before its end, and before anything that it gives back while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.external.block_sums import SumOrder
from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.allocator.external.scrub_queue import ScrubOrder
from kvcustody.allocator.pool.accounting import Account
from kvcustody.allocator.pool.block_state import NEVER_US, Blocks
from kvcustody.allocator.pool.memory_protocol import ScrubResult
from kvcustody.allocator.prefix.eviction_policy import EvictionPolicy
from kvcustody.allocator.prefix.longest_prefix import Prompt, ReadPlan
from kvcustody.audit.evidence.coverage.conservation import PoolCounts
from kvcustody.audit.kinds import Event
from kvcustody.clock import Clock
from kvcustody.deadline_clock import DeadlineClock
from kvcustody.errors import ConfigError
from kvcustody.governance.admission_outcome import AdmissionRefused, Deferred
from kvcustody.governance.custody_events import (
    FoundHere,
    residency_released,
    route_found,
)
from kvcustody.governance.decisions.access_plan import Plan, PlanKey, plan_key
from kvcustody.governance.decisions.eviction_order import eviction_orders
from kvcustody.governance.decisions.reuse_decision import Moment
from kvcustody.governance.decisions.staged_table import quotas_of
from kvcustody.governance.edge.route_receipt import RouteReceipt
from kvcustody.governance.external.accounts import PortAccounts
from kvcustody.governance.external.active_deadlines import ActiveDeadlines
from kvcustody.governance.external.block_keys import NO_KEYS, Find, KeyChain, RequestKeys, look_up
from kvcustody.governance.external.engine_books import EngineBooks
from kvcustody.governance.external.engine_control import EngineControl
from kvcustody.governance.external.monitored_port import monitored_again
from kvcustody.governance.external.namespace_keys import NO_PATH, NamespaceTree, TreePath, look_up_tree
from kvcustody.governance.external.residency_events import (
    assigned,
    opened,
    written,
)
from kvcustody.governance.external.tiered_port import TieredPort
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.identity.w3c_trace import check_trace
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.ledger_protocol import Ledger
from kvcustody.governance.monitoring.forecast_cache import ForecastCache
from kvcustody.governance.monitoring.monitor import MonitoredRequest
from kvcustody.governance.monitoring.port_forecast import PortForecast
from kvcustody.governance.observability.stats import Stats
from kvcustody.governance.orphans.finding import Finding
from kvcustody.governance.orphans.scan_protocol import LedgerJoin
from kvcustody.governance.orphans.scans import Scanned
from kvcustody.governance.request import NO_HINTS, Hints, Tokens, read_count, read_kinds, read_prompt
from kvcustody.logger import get_logger
from kvcustody.policies.document.model import Action, Profile
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.tenants import ANONYMOUS

_log = get_logger(__name__)
SWEEP_BATCH = 128
_newest = np.maximum.reduce
BlockIds = Sequence[int] | Blocks


class EnginePort(TieredPort):
    """Custody of every block of one engine that allocates by itself. Not thread-safe, except `call`."""

    def __init__(
        self,
        pool: ExternalPool,
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
        eviction: Callable[[], EvictionPolicy] | None = None,
        can_sum: bool = False,
    ) -> None:
        """`eviction`: what orders one account's victims; None: the policy document says it.

        `can_sum`: the engine's workers do what `sum_order` says, and its requests can wait for the answer.
        """
        if table.policy.profile is Profile.DEDICATED and len(table.policy.tenants) > 1:
            raise ConfigError(
                f"policy `{table.policy.name}` is `dedicated` and names {len(table.policy.tenants)} tenants: "
                "run one engine for each, with a policy of its own"
            )
        self._can_sum = can_sum
        self._refuse_integrity(table)
        self.pool = pool
        pool.rank_by(eviction or eviction_orders(table.policy.eviction))
        self._engine = engine
        self._keep_last = keep_last
        self._accounts = PortAccounts(pool, residencies_max)
        books = EngineBooks(pool, engine, self._accounts, block_tokens, self.release)
        self._running = books.running
        self.evicted_blocks = books.evicted_blocks
        self._starting: list[ExternalResidency] = []
        self._active = ActiveDeadlines()
        self._flush_deferred: Callable[[], None] = books.flush
        self._defers_hand_outs_alone = self._indexes_at_once = False
        super().__init__(
            books,
            PortForecast(ForecastCache(pool.partition.size, self._quota_of), self._common_blocks),
            table,
            keyring,
            ledger,
            self._account_of,
            block_tokens=block_tokens,
            clock=DeadlineClock.of(clock),
            expires_utc_us=expires_utc_us,
        )
        self._accounts.is_unlimited = self._is_unlimited
        books.limit(table)
        self.on_command = engine.wake

    def activate(self, table: DecisionTable, *, actor: str, expires_utc_us: int | None = None) -> None:
        """As `Custody.activate`. Raises `ConfigError` for what an engine's own blocks cannot be held to."""
        self._refuse_integrity(table)
        super().activate(table, actor=actor, expires_utc_us=expires_utc_us)

    def defer_calls(
        self, flush: Callable[[], None], *, hand_outs_alone: bool = False, indexes_at_once: bool = False
    ) -> None:
        """Let the adapter make its calls later, in order; `flush` causes it to make all of them now.

        `indexes_at_once`: the blocks that a step computes are in the engine's index when the step is scheduled.

        `hand_outs_alone`: it reports only hand-outs late, and each before anything else about its block. Then nothing
        that ends or is scrubbed meanwhile is among them. So two things need not wait for them: a step in which nothing
        else is due, and a report on other blocks.
        """
        self._flush_deferred = self._books.flush = flush
        self._defers_hand_outs_alone, self._indexes_at_once = hand_outs_alone, indexes_at_once

    # -- admission ----------------------------------------------------------------------------------------------------

    def admit(
        self,
        principal: Principal | None,
        model: ModelIdentity,
        tokens: Tokens,
        *,
        request_id: Hashable,
        route: str | None = None,
        hints: Hints = NO_HINTS,
        extras: Mapping[int, bytes] | None = None,
        max_tokens: int = 0,
        groups: int = 1,
        keyed: bool = True,
        trace: str = "",
        asked_us: int | None = None,
    ) -> ExternalResidency | AdmissionRefused:
        """Admit a request that has arrived: its identity, and what it may ever read. `request_id` must be the engine's
        own.

        `principal` None: no valid identity. `tokens`: prompt token ids; `extras`: framed extra content by the block in
        which it ends; `max_tokens`: the most that will be generated; `groups`: layer groups, each with blocks of its
        own; `keyed` False: the prompt has content that no key covers, so nothing of it is reused; `trace`: the W3C
        trace id that it came with, only for its leaves; `asked_us`: when it came, in boot time, if that was before now.
        Raises `ConfigError` for token ids that are not integers of 31 bits, an invalid count, and extra content that is
        not framed. Raises `IdentityError` for a malformed hint or trace.
        """
        max_tokens, groups = read_count("max_tokens", max_tokens), read_count("groups", groups, 1)
        kinds = read_kinds(hints.kinds) if hints.kinds else ()
        prompt = read_prompt(tokens, self.block_tokens, extras, keep_last=self._keep_last) if keyed else None
        if request_id in self._running:
            self._flush_deferred()
            if request_id in self._running:
                return AdmissionRefused(request_id, "this request id is in use")
        moment = self._moment(check_trace(trace) if trace else trace)
        is_monitored = self._is_monitored(principal, request_id)
        plan: Plan[ExternalPool] | AdmissionRefused | None = None
        if principal is not None:
            find_plan = self._monitored_plan if is_monitored else self._admitted_plan
            plan = find_plan(plan_key(principal, model, route, hints), request_id, moment)
        if isinstance(plan, AdmissionRefused):
            return plan
        account = plan.account if plan is not None else self._accounts.anonymous()
        domain = plan.own.domain if plan is not None else self._accounts.anonymous_domain(self.table)
        monitored: MonitoredRequest | None = None
        if is_monitored:
            monitored = self._monitored_request(plan, account, domain, principal, model, hints.salt)
            domain = monitored.chain.domain
        subject = plan.subject_key if plan is not None else None
        residency = self.pool.residency(account, domain, subject, plan, request_id, moment.now_us)
        residency.trace = moment.trace
        residency.priorities = plan.priorities if plan is not None else ()
        residency.prompt_tokens = len(tokens)
        residency.receipt, residency.queue = hints.receipt, len(self._running)
        if asked_us is not None:
            residency.asked_us = min(asked_us, moment.now_us)
        blocks = -(-(len(tokens) + max_tokens) // self.block_tokens) * groups
        if blocks > account.request_blocks:
            return self.too_large(request_id, account.name, blocks, account.request_blocks)
        residency.reserved_blocks = blocks
        if monitored is not None:
            monitored.reserved_blocks = blocks
        residency.monitored = monitored
        is_keyed = prompt is not None and plan is not None and plan.own.state is not None
        if prompt is not None and (is_keyed or monitored is not None):
            residency.keys = KeyChain(prompt, single_group=groups == 1, epoch=self._epoch, kinds=kinds)
            if monitored is not None and is_keyed:
                monitored.governed = KeyChain(prompt, single_group=groups == 1, epoch=self._epoch, kinds=kinds)
        else:
            residency.publishes = False
        if groups > 1:
            self._books.are_hits_leading = False
        self._running[request_id] = residency
        return residency

    def _admitted_plan(
        self, key: PlanKey, request_id: Hashable, moment: Moment
    ) -> Plan[ExternalPool] | AdmissionRefused:
        plan = self._plan(key, request_id, moment)
        if isinstance(plan, Deferred):
            return AdmissionRefused(request_id, "the ledger cannot record the tenant's first key; try again")
        if isinstance(plan, AdmissionRefused):
            return plan
        if not plan.admitted.permitted:
            self._reuse.denied(Action.ADMIT, plan.tenant, plan.admitted.reasons[0])
            return self._forbidden(plan, request_id, plan.admitted)
        refused = self._refused_copies(plan, request_id, moment) if self.tiers.copies_leave else None
        return plan if refused is None else refused

    # -- look-up ------------------------------------------------------------------------------------------------------

    def look_up(self, residency: ExternalResidency, find: Find, *, lazily: bool = False) -> RequestKeys:
        """The keys of the request's whole blocks, and how many leading ones it may read now.

        `find` gives the block that the engine's index has under a key, or -1; it is asked only where several domains
        may be read. `lazily`: the engine asks for the keys by iterating once, and calls `complete` before it uses
        them otherwise, where they are `LazyKeys`.
        """
        now_us = self._clock.now_us()
        self._sweep(now_us)
        chain = residency.keys
        if not isinstance(chain, KeyChain):
            return NO_KEYS
        monitored = self._judge(residency, chain, now_us)
        if monitored is not None:
            own = ReadPlan(monitored.chain)
            keys = look_up(residency, chain, own, self.pool, find, now_us, lazily=lazily)
            residency.expected = np.empty(0, dtype=np.int32)  # whoever wrote them: found by the blocks themselves
            residency.publishes = keys.publishable
            return keys
        if residency.keys is None:
            return NO_KEYS
        read = self._read(residency, chain, now_us)
        keys = look_up(residency, chain, read, self.pool, find, self._clock.now_us(), lazily=lazily)
        residency.publishes = keys.publishable
        return keys

    def look_up_tree(self, residency: ExternalResidency, tree: NamespaceTree) -> TreePath:
        """`look_up` and `attachable` at once, for an engine whose index is a tree of token ids under namespaces.

        The engine attaches what it finds before it asks for anything else, and publishes along the path alone.
        """
        now_us = self._clock.now_us()
        self._sweep(now_us)
        chain = residency.keys
        if not isinstance(chain, KeyChain):
            return NO_PATH
        monitored = self._judge(residency, chain, now_us)
        if residency.keys is None:
            return NO_PATH
        read = self._read(residency, chain, now_us) if monitored is None else ReadPlan(monitored.chain)
        path = look_up_tree(residency, chain.prompt, read, self.pool, tree, now_us, single_group=chain.single_group)
        residency.publishes = path.publishable
        fine = self.attachable(residency, path.blocks)
        return path if fine == len(path.blocks) else path._replace(blocks=path.blocks[:fine])

    def _read(self, residency: ExternalResidency, chain: KeyChain, now_us: int) -> ReadPlan:
        """What the request may read now, by what the policy says at this instant."""
        plan = residency.facts
        assert isinstance(plan, Plan)
        moment = Moment(now_us, now_us + self._clock.offset_us, residency.trace)
        if chain.epoch != self._epoch or moment.utc_us >= plan.valid_until_utc_us:
            self._renew_plan(residency, chain)
            plan = residency.facts
            assert isinstance(plan, Plan)
            moment = self._moment(residency.trace)  # a new plan may have waited for the ledger
        counters = self._counters(plan.tenant)
        read, reasons = self._reuse.read_plan(plan, chain.prompt, counters, moment)
        residency.reasons = reasons
        residency.priorities = self._book.priorities(plan, read.segment, chain.kinds)
        chain.until_utc_us = plan.valid_until_utc_us
        return read

    def _renew_plan(self, residency: ExternalResidency, chain: KeyChain) -> None:
        """A revision, a key rotation or an end came between arrival and now: the request's standing is found anew."""
        old = residency.facts
        assert isinstance(old, Plan)
        key = old.key
        plan = self._plan(key, residency.request_id, self._moment())
        if isinstance(plan, Plan):
            residency.facts = plan
            if not residency.is_opened:
                residency.domain = plan.own.domain
        chain.forget()
        chain.epoch = self._epoch

    def extend_keys(self, residency: ExternalResidency, tokens: Sequence[int]) -> list[bytes]:
        """The keys of blocks that `tokens`, accepted after those known, complete."""
        chain, monitored = residency.keys, residency.monitored
        if isinstance(monitored, MonitoredRequest):
            self._forecast.extend(monitored, tokens, self._clock.now_us())
        return chain.extend(tokens) if isinstance(chain, KeyChain) else []

    def may_start(self, residency: ExternalResidency) -> str | None:
        """None where the request may be scheduled now, else why it alone must wait: `over-quota` or `ledger`.

        A request that may start has its whole length reserved until its release; its tenant's own cache makes room.
        """
        if residency.is_reserved:
            return None
        account, plan = residency.account, residency.facts
        waits = isinstance(plan, Plan) and plan.waits_for_ledger and residency.monitored is None
        ledger = self._ledger
        is_over = residency.tenant in self._shares.over
        if is_over or not ledger.admitting or (waits and not ledger.recording):
            return self._defer(residency, "ledger")
        need = residency.reserved_blocks
        if residency.monitored is None and not self._accounts.fits(account, need):
            self._flush_deferred()  # a release may wait to be told
            if not self._accounts.fits(account, need):
                return self._defer(residency, "over-quota")
        account.charge_active(need)
        residency.is_reserved = True
        if account.cap_blocks < self.pool.partition.size:
            self._make_room(account, need)
        return None

    def _make_room(self, account: Account, need: int) -> None:
        """A tenant's own cache makes room under its cap."""
        self._flush_deferred()
        over = account.used_blocks + need - account.cap_blocks
        if over > 0:
            now_us = self._clock.now_us()
            victims = np.array(self.pool.victims(over, now_us, account), dtype=np.int64)
            self.evicted_blocks.made_room(victims)
            self._books.evict(self.pool.evict(victims, "quota", now_us))

    def _defer(self, residency: ExternalResidency, reason: str) -> str:
        """A request that waits is counted once for each reason, however often its engine asks."""
        if reason not in residency.deferred_for:
            residency.deferred_for += (reason,)
            counters = self._counters(residency.tenant)
            counters.count(counters.deferred, reason)
        return reason

    def attachable(self, residency: ExternalResidency, blocks: BlockIds, positions: Sequence[int] | None = None) -> int:
        """How many leading blocks may be attached now: domain, deadline and ceiling are compared again.

        An adapter that tells late has told every release that may have taken blocks out by now (`keeps_until`).
        `positions`: the key of `look_up` that each block was found by, where that is not its place in `blocks`.
        """
        if not len(blocks) or not residency.domain.is_open or residency.domain.is_withheld:
            return 0
        chain = residency.keys
        if isinstance(chain, KeyChain) and chain.epoch != self._epoch:
            return 0  # decided under what no longer holds: looked up again, or computed
        indices = np.array(blocks, dtype=np.int64)
        expected, now_us = residency.expected, self._clock.now_us()
        if self.custody.is_over(now_us):
            return 0
        if residency.monitored is not None:
            return self._attachable_monitored(indices, now_us)
        if now_us >= self._reuse.expires_us:
            return 0
        if isinstance(expected, np.ndarray):
            edge_us = chain.until_utc_us if isinstance(chain, KeyChain) else 0
            if now_us >= self._reuse.lease_until_us or now_us + self._clock.offset_us >= edge_us:
                expected = residency.domain.tag  # what a grant or segment opened then may be over by now
            else:
                expected = expected[np.array(positions)] if positions is not None else expected[: len(indices)]
                if len(expected) < len(indices):  # behind the prompt, where everything is its own
                    own = np.full(len(indices) - len(expected), residency.domain.tag, dtype=np.int32)
                    expected = np.concatenate((expected, own))
        fine = self.pool.attachable(indices, expected, now_us)
        residency.stale_blocks = len(blocks) - fine
        return fine

    def may_read(self, residency: ExternalResidency, blocks: Sequence[int]) -> NDArray[np.bool_] | None:
        """By block: whether it may be attached as far as its checksum says, by what the policy has compared.

        None: some are being compared. The request waits, and looks up again when `compared` was told of an order that
        leaves with the next step. What has come into its reach meanwhile is not read this time.
        """
        indices = np.array(blocks, dtype=np.int64)
        asked, now_us = residency.comparison, self._clock.now_us()
        if asked is None or (asked.is_answered and asked.until_us <= now_us):
            asked = residency.comparison = self.pool.compare(indices, residency.domain, now_us)
            if asked is None:
                return np.ones(len(indices), dtype=np.bool_)
        if not asked.is_answered:
            return None
        return asked.may_read(indices)

    def first_token(self, residency: ExternalResidency, attached_tokens: int, *, at_us: int | None = None) -> None:
        """The request's first token is there; its prompt had `attached_tokens` leading ones in the cache.

        Told once, or again without effect; `at_us` as below.
        """
        prompt = residency.prompt_tokens
        if not prompt or not residency.is_opened:
            return
        residency.prompt_tokens = 0
        now_us = self._clock.now_us() if at_us is None else at_us
        if isinstance(residency.monitored, MonitoredRequest):
            self._forecast.computed(residency.monitored, None, now_us)
        self.measures.first_token(
            max(0, prompt - attached_tokens),
            attached_tokens,
            now_us - residency.asked_us,
            now_us - max(residency.began_us, residency.computes_us),  # what a tier took is no prefill
            earlier=min(attached_tokens, residency.earlier_blocks * self.block_tokens),
        )

    def count_tokens(self, tokens_of: Callable[[Hashable], int]) -> None:
        """The adapter knows how many tokens a running request has: snapshots ask for it by request id."""
        self._books.tokens_of = tokens_of

    # -- what the engine did ------------------------------------------------------------------------------------------

    def attached(self, residency: ExternalResidency, blocks: BlockIds, *, at_us: int | None = None) -> None:
        """The engine took references on these cached or running blocks for the request.

        `at_us`, here and below: when it did, on the boot-time clock, where that is not now.
        """
        if len(blocks):
            now_us = self._clock.now_us() if at_us is None else at_us
            which = np.array(blocks, dtype=np.int64)
            self.pool.attach(residency, which, now_us)
            if isinstance(residency.monitored, MonitoredRequest):
                self._forecast.given(residency.monitored, len(which))
            if residency.comparison is not None:
                residency.compared_blocks = residency.comparison.compared(which)
                residency.comparison = None
            self._begin(residency, now_us)

    def handed_out(self, residency: ExternalResidency, blocks: BlockIds, *, at_us: int | None = None) -> None:
        """The engine gave these blocks to the request; what they held is scrubbed before the coming step."""
        if not len(blocks):
            return
        indices: Blocks = np.array(blocks, dtype=np.int64)
        now_us = self._clock.now_us() if at_us is None else at_us
        boundary = residency.segment_blocks
        if boundary:
            self._hand_out_by_domain(residency, indices, boundary, now_us)
        else:
            self.pool.hand_out(residency, indices, residency.domain, now_us)
        if isinstance(residency.monitored, MonitoredRequest):
            self._forecast.given(residency.monitored, len(indices))
        self._begin(residency, now_us)

    def handed_out_each(self, residencies: Sequence[ExternalResidency], blocks: Sequence[int]) -> None:
        """`handed_out` of one block each, to requests that have begun: the growth of a decode step."""
        if blocks:
            self.pool.hand_out_each(residencies, np.array(blocks, dtype=np.int64), self._clock.now_us())
            for residency in residencies:
                if isinstance(residency.monitored, MonitoredRequest):
                    self._forecast.given(residency.monitored, 1)

    def _hand_out_by_domain(self, residency: ExternalResidency, blocks: Blocks, boundary: int, now_us: int) -> None:
        """Blocks of a declared segment belong to its domain, and are charged to its owner."""
        segment = residency.segment_domain
        assert segment is not None
        have = len(residency.attached) + sum(len(run) for run, _ in residency.handed)
        inside = max(0, min(boundary - have, len(blocks)))
        if inside:
            self.pool.hand_out(residency, blocks[:inside], segment, now_us)
        if inside < len(blocks):
            self.pool.hand_out(residency, blocks[inside:], residency.domain, now_us)

    def _begin(self, residency: ExternalResidency, now_us: int) -> None:
        if not residency.is_opened:
            residency.is_opened = True
            residency.began_us = now_us
            if residency.active_since_us < 0:
                residency.active_since_us = now_us
            self._starting.append(residency)
            plan, monitored = residency.facts, residency.monitored
            if isinstance(monitored, MonitoredRequest):
                self._forecast.begin(monitored)
                if self._indexes_at_once:
                    self._forecast.computed(monitored, None, now_us)
            elif isinstance(plan, Plan) and plan.active_us < NEVER_US:
                self._active.push(residency.active_since_us + plan.active_us, residency)

    def published(
        self,
        residency: ExternalResidency,
        blocks: BlockIds,
        before: int = -1,
        *,
        chained: bool = True,
        depths: Sequence[int] | None = None,
        keys: Sequence[bytes] = (),
    ) -> None:
        """These blocks are in the engine's index under the request's keys; the first continues block `before`.

        `chained` False: blocks of a layer group whose children are reachable without them (a sliding window).
        `depths`: their places in the prompt, in the port's blocks, where they are not one after `before`. `keys`:
        the key of each, which tells what is computed again after an eviction; without them, that is not counted.
        """
        if not len(blocks):
            return
        if not self.may_publish(residency):
            # not in the owner's domain, and in nobody's without a decision
            self._engine.evict([int(block) for block in blocks])
            return
        which = np.array(blocks, dtype=np.int64)
        self.pool.publish(which, before, chained=chained, depths=depths)
        if isinstance(residency.monitored, MonitoredRequest):
            self._forecast.computed(residency.monitored, _place(residency, int(blocks[-1])), self._clock.now_us())
        if keys:
            again = self.evicted_blocks.published(which, keys)
            if again:
                self._counters(residency.tenant).recomputed_blocks += again

    def may_publish(self, residency: ExternalResidency) -> bool:
        """Whether what the request computes may enter the index now; an erasure or a lost grant ends that."""
        return residency.publishes and residency.granted_blocks <= len(residency.attached)

    def published_each(self, blocks: Sequence[int], before: Sequence[int], keys: Sequence[bytes] = ()) -> None:
        """`published` of one block each, all of requests that publish: what a decode step filled."""
        if blocks:
            self.pool.publish_each(blocks, before)
            if keys:
                self.evicted_blocks.note(blocks, keys)

    def unpublished(self, blocks: BlockIds, cause: str = "evicted") -> None:
        """The engine forgot these blocks' keys by itself; the unreferenced ones end."""
        if len(blocks):
            if not self._defers_hand_outs_alone:
                self._flush_deferred()
            which = np.array(blocks, dtype=np.int64)
            if cause == "evicted":
                self.evicted_blocks.made_room(which)
            self._books.evict(self.pool.unpublish(which, cause, self._clock.now_us()))

    def returned(self, residency: ExternalResidency, blocks: BlockIds) -> None:
        """A running request gave these blocks back, as a sliding window does."""
        if len(blocks):
            self._record_starting()
            which = np.array(blocks, dtype=np.int64)
            self._books.evict(self.pool.release_blocks(residency, which, self._clock.now_us()))

    def release(
        self,
        residency: ExternalResidency,
        cause: str = "finished",
        *,
        at_us: int | None = None,
        fence: int | None = None,
    ) -> bool:
        """The request ended, or was preempted; False where it had ended already.

        `fence`: the newest one that was open when it ended, 0 for none, where that is not now.
        """
        if self._running.get(residency.request_id) is not residency:  # or a resumed one has its place
            return False
        del self._running[residency.request_id]
        account = residency.account
        if isinstance(residency.monitored, MonitoredRequest):
            self._forecast.end(residency.monitored, cause, self._clock.now_us())
            if not self._running:
                self._forecast.settle(self._clock.now_us())
        if residency.is_reserved:
            account.charge_active(-residency.reserved_blocks)
            residency.is_reserved = False
        if not residency.is_opened:
            residency.is_running = False
            return True
        self._record_starting()
        now_us = self._clock.now_us() if at_us is None else at_us
        runs = written(residency, self.pool)
        if cause == "aborted":
            self.measures.cancelled(self._clock.now_us() - now_us)
        forget = self.pool.release(residency, cause, now_us, fence)
        self._outbox += (
            residency_released(residency, runs, cause, now_us),
            *assigned(residency, self.pool),
        )
        forget += self.pool.enforce_residency_cap(account, now_us)
        self._books.evict(forget)
        return True

    def keeps_until(self, residency: ExternalResidency, at_us: int, *, others: int = 0) -> int:
        """Until when its release at that instant, after `others` of its tenant, leaves all its blocks in the index.

        On the boot-time clock; 0 where it may take some out.
        """
        domain, account = residency.domain, residency.account
        if (
            residency.publishes
            and not residency.is_mixed
            and domain.cacheable
            and domain.is_open
            and len(self.pool.hold_table.of(account)) + others < account.residency_cap
        ):
            return min(at_us + domain.idle_us, residency.ceiling_us, residency.began_us + domain.absolute_us)
        return 0

    def resume(self, residency: ExternalResidency, tokens: Tokens) -> ExternalResidency | AdmissionRefused:
        """A preempted, released request waits to run again: its successor, with every token it has by now.

        The identity was verified at arrival; policy, keys and quota are those of the moment of its look-up. How long it
        may run counts from its first block on: who is preempted again and again is not kept for ever.
        """
        if residency.request_id in self._running:
            return AdmissionRefused(residency.request_id, "this request id is in use")
        chain = residency.keys
        prompt: Prompt | None = None
        if isinstance(chain, KeyChain):
            prompt = read_prompt(tokens, self.block_tokens, chain.prompt.extras, keep_last=self._keep_last)
        again = self.pool.residency(
            residency.account,
            residency.domain,
            residency.principal,
            residency.facts,
            residency.request_id,
            self._clock.now_us(),
        )
        again.reserved_blocks = residency.reserved_blocks
        again.active_since_us = residency.active_since_us
        again.asked_us, again.prompt_tokens = residency.asked_us, residency.prompt_tokens
        again.trace = residency.trace
        again.receipt, again.queue = residency.receipt, residency.queue
        again.is_resumed = residency.is_opened or residency.is_resumed
        again.earlier = np.union1d(residency.generations(), residency.earlier)
        again.priorities = residency.priorities
        if prompt is not None and isinstance(chain, KeyChain):
            again.keys = KeyChain(prompt, single_group=chain.single_group, epoch=-1, kinds=chain.kinds)
            again.monitored = monitored_again(residency, prompt, chain)
        else:
            again.publishes = False
        self._running[again.request_id] = again
        return again

    # -- steps --------------------------------------------------------------------------------------------------------

    def scrubs_now(self) -> ScrubOrder | None:
        """Between steps, where nothing runs on the device: the scrubs that are due, before a tier fills blocks."""
        return self.pool.order(self._clock.now_us())

    def step(self) -> ScrubOrder | None:
        """Once per engine step, after scheduling, and on a timer while idle: commands, expiry, evidence.

        Returns the scrubs that this step must do before any other write.
        """
        if self._step_needs_all():
            self._flush_deferred()
        if self._commands:
            self._run_commands()
        self._clock.look()
        self._end_monitoring_in_time()
        now_us = self._clock.now_us()
        self._forecast.start_waiting(now_us)
        self._sweep(now_us)
        over = self._active.pop_expired(now_us)
        if over:
            self._engine.abort(over, "active-max")
        if self.erasures.pending:
            self.erasures.poll()
        order = self.pool.order(now_us)
        self._drain(now_us)
        return order

    def _step_needs_all(self) -> bool:
        """Whether what a step does may touch blocks that were handed out and not told yet."""
        return bool(
            not self._defers_hand_outs_alone
            or self._commands
            or self.erasures.looks_at_blocks
            or self.enforcement.monitors
        )

    def sum_order(self) -> SumOrder | None:
        """Once per engine step, with `step`: what its workers sum and compare before any other write."""
        sums = self.pool.sums
        return None if sums is None else sums.order()

    def settle_sums(self) -> None:
        """Every publication so far is of a step that has left, so the next order may sum it."""
        if self.pool.sums is not None:
            self.pool.sums.settle()

    def compared(self, number: int, shard: int, differing: Sequence[int]) -> list[Hashable]:
        """A worker's answer to a sum order that compares: the blocks that are not what was summed.

        What had changed is withdrawn, with all that was computed from it. Returns the running requests that read any of
        that: they go on, and the adapter publishes nothing more of theirs.
        """
        sums = self.pool.sums
        assert sums is not None, "answered without an order"
        self._flush_deferred()
        now_us = self._clock.now_us()
        changed = sums.answer(number, shard, np.array(differing, dtype=np.int64), now_us)
        if not len(changed):
            return []
        _log.error("blocks changed since they were published", blocks=changed.tolist()[:16], count=len(changed))
        return self._books.withdraw(changed, now_us)

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
        if any(map(_has_failed, results)):
            self._flush_deferred()  # whoever has a block that did not become zero is ended
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
        pool = self.pool
        if self._commands or self._outbox or pool.queue.has_work:
            return True
        if pool.sums is not None and pool.sums.has_work:
            return True
        if now_us is None:
            now_us = self._clock.now_us()
        if pool.hold_table.is_due(now_us) or self._active.is_due(now_us) or self.attempts.due_us <= now_us:
            return True
        if self.enforcement.monitors and self._enforcement_until_us <= now_us:
            return True
        due_us = self.erasures.next_due_us()
        return due_us is not None and due_us <= now_us

    def next_due_us(self) -> int | None:
        """When something is due next, on the boot-time clock: for a timer. None where nothing is."""
        soonest = self._enforcement_until_us if self.enforcement.monitors else None
        for due_us in (
            self.pool.hold_table.next_due_us(),
            self._active.next_due_us(),
            self.erasures.next_due_us(),
            self.attempts.next_due_us(),
        ):
            if due_us is not None and (soonest is None or due_us < soonest):
                soonest = due_us
        return soonest

    # -- administration -----------------------------------------------------------------------------------------------

    def _account_of(self, tenant: str) -> tuple[Account, ExternalPool]:
        return self._accounts.account(tenant, quotas_of(self.table), self._leaves), self.pool

    def _leaves(self, tenant: str) -> bool:
        """Whether an unlisted tenant makes room for another; as `Governor._leaves`."""
        account = self._accounts.seat(tenant)
        if account is not None:
            self._flush_deferred()  # a release may wait to be told
            if account.active_blocks or any(one.account is account for one in self._running.values()):
                return False
            is_shared = self.table.policy.profile is Profile.SHARED
            if is_shared and self._came_once(tenant):
                account.residency_cap = 0
                self._books.evict(self.pool.enforce_residency_cap(account, self._clock.now_us()))
            if not self._accounts.leave(tenant, charged=is_shared):
                return False
        self.evicted_blocks.keys.forget(tenant)
        self._forget_tenant(tenant)
        return True

    def _refuse_integrity(self, table: DecisionTable) -> None:
        """The blocks lie in the engine's own workers: where those sum nothing, no policy that relies on it is run."""
        if table.policy.checks_integrity and not self._can_sum:
            raise ConfigError(
                f"policy `{table.policy.name}`: `integrity` compares what is reused with checksums, which is not done "
                "beside this engine; set `verify: none` everywhere, or remove the section"
            )

    def scan_and_recover(self, ledger: LedgerJoin | None = None, *, mode: str = "full") -> Scanned:
        """As `Custody.scan_and_recover`, with all that the adapter has to report."""
        self._flush_deferred()
        return super().scan_and_recover(ledger, mode=mode)

    def record_elsewhere(self, findings: Sequence[Finding], started_us: int) -> None:
        """The engine's workers compared their tiers for a full scan, and found and repaired these; put it on record."""
        self._orphans.record_elsewhere(findings, started_us)

    def victims(self, count: int) -> list[int]:
        """CACHED blocks that our policy ends first to make room, their custody ended: hand these out first.

        Empty where the least recently used goes first and no tenant has a guarantee: then the engine's own order is as
        good (`orders_victims`). None of them is one that the engine holds (`pool.is_held`).
        """
        self._flush_deferred()
        now_us = self._clock.now_us()
        victims, is_held = self.pool.victims(count, now_us), self.pool.is_held
        if is_held is not None:
            unused = [block for block in victims if not is_held(block)]
            taken = len(victims) - len(unused)
            if taken:
                again = self.pool.victims(count + taken, now_us)
                unused = [block for block in again if not is_held(block)][:count]
            victims = unused
        if not victims:
            return []
        which = np.array(victims, dtype=np.int64)
        self.evicted_blocks.made_room(which)
        return self.pool.evict(which, "evicted", now_us)

    @property
    def orders_victims(self) -> bool:
        """Whether `victims` says anything that the engine's own order, the least recently used first, does not."""
        partition = self.pool.partition
        return self.pool.ranking is not None or partition.common_blocks != partition.size

    def stats(self) -> Stats:
        """As `Custody.stats`, with all that the adapter has to report."""
        self._flush_deferred()
        self._record_starting()  # whoever has blocks is counted
        return super().stats()

    def counts(self) -> PoolCounts:
        """As `Custody.counts`, with all that the adapter has to report."""
        self._flush_deferred()
        if not any(residency.is_opened for residency in self._running.values()):
            self._forecast.settle(self._clock.now_us())
        return super().counts()

    @property
    def running(self) -> Mapping[Hashable, ExternalResidency]:
        """Requests between arrival and release."""
        return self._running

    # -- expiry --------------------------------------------------------------------------------------------------------

    def _sweep(self, now_us: int) -> None:
        if self.pool.is_due(now_us):
            self._flush_deferred()
            self._books.evict(self.pool.sweep(now_us, SWEEP_BATCH))

    # -- evidence -----------------------------------------------------------------------------------------------------

    def _record_starting(self) -> None:
        if not self._starting:
            return
        starting, self._starting = self._starting, []
        revision = self.table.revision
        for residency in starting:
            self._outbox += (opened(residency, self.pool, revision), *assigned(residency, self.pool))
            if isinstance(residency.receipt, RouteReceipt):
                self._outbox += self._arrived(residency, residency.receipt)
                residency.receipt = None
            if isinstance(residency.monitored, MonitoredRequest):
                self._count_monitored(residency, residency.monitored)
            else:
                self._count(residency)

    def _arrived(self, residency: ExternalResidency, receipt: RouteReceipt) -> list[Event]:
        """Its half of a route receipt, once."""
        plan = residency.facts
        if not isinstance(plan, Plan) or plan.facts.tenant == ANONYMOUS:
            return []
        attached, states = residency.attached, self.pool.counts()
        others = set(self.pool.tag[attached].tolist()) - {residency.domain.tag}
        hits = min(len(attached) * self.block_tokens, residency.prompt_tokens)
        found_here = FoundHere(
            residency.prompt_tokens,
            hits,
            residency.queue,
            states["clean"] + states["dirty"],
            any(self.pool.domains[tag].owner is not residency.account for tag in others),
            self.knows_epochs(plan),
        )
        return route_found(receipt, plan.facts, found_here, residency.began_us, residency.trace)

    def _count(self, residency: ExternalResidency) -> None:
        counters, plan, chain = self._counters(residency.tenant), residency.facts, residency.keys
        attached, earlier = residency.attached, residency.earlier_blocks
        if residency.is_resumed:
            counters.hit_blocks += len(attached) - earlier
        else:
            counters.count_start(
                plan.session if isinstance(plan, Plan) else None,
                chain.prompt.tokens if isinstance(chain, KeyChain) else None,
                len(attached),
            )
        counters.stale_blocks += residency.stale_blocks
        counters.verified_blocks += residency.compared_blocks
        if isinstance(chain, KeyChain) and not chain.kinds and self.table.policy.eviction.kinds:
            counters.without_kinds += 1
        hits = len(attached)
        born_us = int(_newest(self.pool.born_us.take(attached))) if hits else residency.began_us
        self.measures.began(hits - earlier, residency.began_us - born_us, residency.began_us - residency.asked_us)
        if len(residency.attached) and isinstance(plan, Plan) and (plan.grants or plan.segments):
            new = ~np.isin(residency.attached_generations, residency.earlier)
            counters.granted_hit_blocks += self._count_crossed(plan, residency, self.pool.tag[attached[new]])

    def _drain(self, now_us: int) -> None:
        self._record_starting()
        super()._drain(now_us)


def _place(residency: ExternalResidency, block: int) -> int:
    """How many of a residency's blocks end with this one."""
    found = np.flatnonzero(residency.blocks() == block)
    return int(found[-1]) + 1 if len(found) else 0


def _has_failed(result: ScrubResult) -> bool:
    return len(result.failed) > 0
