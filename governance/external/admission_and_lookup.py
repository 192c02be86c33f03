"""What a request may do in an engine of its own: arrive, start, read keys, attach blocks (engine_port, T1–T3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvcustody.allocator.external.residency import ForeignResidency
from kvcustody.allocator.pool.account import Account
from kvcustody.governance.admission_outcome import AdmissionRefused, Deferred
from kvcustody.governance.decisions.access_plan import Plan
from kvcustody.governance.decisions.reuse_decision import Moment
from kvcustody.governance.external.block_keys import NO_KEYS, Find, KeyChain, RequestKeys, look_up
from kvcustody.governance.external.port_state import PortBooks
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.identity.w3c_trace import check_trace
from kvcustody.governance.request import NO_HINTS, Hints, Tokens, read_prompt


class PortReading(PortBooks):
    """Admission, quota, look-up and the second decision at attach."""

    # -- admission ----------------------------------------------------------------------------------------------------

    def admit(
        self,
        principal: Principal | None,
        model: ModelIdentity,
        tokens: Tokens,
        *,
        request_id: object,
        route: str | None = None,
        hints: Hints = NO_HINTS,
        extras: Mapping[int, bytes] | None = None,
        max_tokens: int = 0,
        groups: int = 1,
        keyed: bool = True,
        trace: str = "",
    ) -> ForeignResidency | AdmissionRefused:
        """A request has arrived: who it is and what it may ever read. `request_id` must be the engine's own.

        `principal` None: no valid identity (T1). `tokens`: prompt token ids; `extras`: framed extra content by the
        block in which it ends; `max_tokens`: the most that will be generated; `groups`: layer groups, each with blocks
        of its own; `keyed` False: the prompt has content that no key covers, so nothing of it is reused; `trace`: the
        W3C trace id that it came with, for its leaves alone. Raises `ConfigError` for token ids outside int32 and
        `IdentityError` for a malformed hint or trace.
        """
        if request_id in self._running:
            self._catch_up()
            if request_id in self._running:
                return AdmissionRefused(request_id, "request id is in use")
        moment = Moment(self._clock.now_us(), self._clock.utc_us(), check_trace(trace) if trace else trace)
        plan = self._standing(principal, model, route, hints, request_id, moment)
        if isinstance(plan, AdmissionRefused):
            return plan
        account = plan.account if plan is not None else self._accounts.anonymous()
        domain = plan.own.domain if plan is not None else self._accounts.anonymous_domain(self.table)
        subject = plan.subject_key if plan is not None else None
        residency = self.pool.residency(account, domain, subject, plan, request_id, moment.now_us)
        residency.trace = moment.trace
        blocks = -(-(len(tokens) + max_tokens) // self.block_tokens) * groups
        most = self._accounts.limit_blocks(account)
        if blocks > most:
            return AdmissionRefused(
                request_id,
                f"the prompt and `max_tokens` need {blocks} blocks, the most that the tenant may have is {most}",
            )
        residency.reserved_blocks = blocks
        if plan is not None and keyed and plan.own.state is not None:
            prompt = read_prompt(tokens, self.block_tokens, extras, keep_last=self._keep_last)
            residency.keys = KeyChain(prompt, single_group=groups == 1, epoch=self._epoch)
        else:
            residency.publishes = False
        self._running[request_id] = residency
        return residency

    def _standing(
        self,
        principal: Principal | None,
        model: ModelIdentity,
        route: str | None,
        hints: Hints,
        request_id: object,
        moment: Moment,
    ) -> Plan | AdmissionRefused | None:
        if principal is None:
            return None
        key = (principal, model.digest, route or principal.route, hints.classification, hints.salt)
        plan = self._plan(key, request_id, moment)
        if isinstance(plan, Deferred):
            return AdmissionRefused(request_id, "the ledger cannot record the tenant's first key; try again")
        if isinstance(plan, AdmissionRefused):
            return plan
        if not plan.admitted.permitted:
            tally = self._tally(plan.tenant)
            tally.count(tally.refused, plan.admitted.reasons[0])
            return AdmissionRefused(request_id, f"policy: {plan.admitted.reasons[0]}")
        return plan

    # -- look-up ------------------------------------------------------------------------------------------------------

    def look_up(self, residency: ForeignResidency, find: Find, *, lazily: bool = False) -> RequestKeys:
        """The keys of the request's whole blocks, and how many leading ones it may read now (T2, T3).

        `find` gives the block that the engine's index has under a key, or -1; it is asked only where several domains
        may be read. `lazily`: the engine asks for the keys by iterating once, and calls `complete` before it uses
        them otherwise, where they are `LazyKeys`.
        """
        now_us = self._clock.now_us()
        self._sweep(now_us)
        chain = residency.keys
        if not isinstance(chain, KeyChain):
            return NO_KEYS
        plan = residency.facts
        assert isinstance(plan, Plan)
        if chain.epoch != self._epoch:
            self._plan_again(residency, chain)
            plan = residency.facts
            assert isinstance(plan, Plan)
        tally = self._tally(plan.tenant)
        moment = Moment(now_us, self._clock.utc_us(), residency.trace)
        read, reasons = self._reuse.read_plan(plan, chain.prompt, tally, moment)
        residency.reasons = reasons
        keys = look_up(residency, chain, read, self.pool, find, now_us, lazily=lazily)
        residency.publishes = keys.publishable
        return keys

    def _plan_again(self, residency: ForeignResidency, chain: KeyChain) -> None:
        """A revision or a key rotation came between arrival and now: the request's standing is found anew."""
        old = residency.facts
        assert isinstance(old, Plan)
        key = old.key
        plan = self._plan(key, residency.request_id, Moment(self._clock.now_us(), self._clock.utc_us()))
        if isinstance(plan, Plan):
            residency.facts = plan
            if not residency.is_opened:
                residency.domain = plan.own.domain
        chain.forget()
        chain.epoch = self._epoch

    def extend_keys(self, residency: ForeignResidency, tokens: Sequence[int]) -> list[bytes]:
        """The keys of blocks that `tokens`, accepted after those known, complete."""
        chain = residency.keys
        return chain.extend(tokens) if isinstance(chain, KeyChain) else []

    def may_start(self, residency: ForeignResidency) -> str | None:
        """None where the request may be scheduled now, else why it alone must wait: `over-quota` or `ledger`.

        A request that may start has its whole length reserved until its release; its tenant's own cache makes room.
        """
        if residency.is_reserved:
            return None
        account, plan = residency.account, residency.facts
        waits = isinstance(plan, Plan) and plan.waits_for_ledger
        if not self._ledger.admitting or (waits and not self._ledger.recording):
            return self._defer(residency, "ledger")
        need = residency.reserved_blocks
        if not self._accounts.fits(account, need):
            self._catch_up()  # a release may wait to be told
            if not self._accounts.fits(account, need):
                return self._defer(residency, "over-quota")
        account.charge_active(need)
        residency.is_reserved = True
        if account.cap_blocks < self.pool.partition.size:
            self._make_room(account, need)
        return None

    def _make_room(self, account: Account, need: int) -> None:
        """A tenant's own cache makes room under its cap."""
        self._catch_up()
        over = account.used_blocks + need - account.cap_blocks
        if over > 0:
            now_us = self._clock.now_us()
            victims = np.array(self.pool.victims(over, account), dtype=np.int64)
            self._obey(self.pool.end_cached(victims, "quota", now_us))

    def _defer(self, residency: ForeignResidency, reason: str) -> str:
        tally = self._tally(residency.tenant)
        tally.count(tally.deferred, reason)
        return reason

    def attachable(
        self, residency: ForeignResidency, blocks: Sequence[int], positions: Sequence[int] | None = None
    ) -> int:
        """How many leading blocks may be attached now: domain, deadline and ceiling are compared again (T3).

        An adapter that tells late has told every release that may have taken blocks out by now (`keeps_until`).
        `positions`: the key of `look_up` that each block was found by, where that is not its place in `blocks`.
        """
        if not blocks or not residency.domain.is_open:
            return 0
        chain = residency.keys
        if isinstance(chain, KeyChain) and chain.epoch != self._epoch:
            return 0  # decided under what no longer holds: looked up again, or computed
        which = np.array(blocks, dtype=np.int64)
        expected, now_us = residency.expected, self._clock.now_us()
        if now_us >= self._reuse.expires_us:
            return 0
        if isinstance(expected, np.ndarray):
            if now_us >= self._reuse.lease_until_us:
                expected = residency.domain.tag
            else:
                expected = expected[: len(which)] if positions is None else expected[np.array(positions)]
        return self.pool.attachable(which, expected, now_us)
