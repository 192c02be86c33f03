"""Custody of one engine's blocks under continuous batching: reports the engine's actions to the Governor.

1. The engine's block tables hold only what the Governor handed out; the engine's own pool is sealed.
2. A request is admitted with its whole prompt. Each further block is given before the step that writes into it. Its
   tokens are reported when it is full and computed. In between, a decoding request costs nothing.
3. Everything here happens in a `turn`: one thread at a time, and on the engine's compute stream. So a scrub or a copy
   runs after the last read that was launched, and before the first write that follows.
4. Steps that stay in flight (async batching) are fenced; a fence retires when its step's results have been read. Their
   tokens are still being computed when their blocks are given: such blocks are never published.
5. A request that does not fit even into an empty engine is refused at once, because waiting would not help.
6. The model's parameters are checked once a step, before its first admission: their places and the counts of writes to
   them. If these changed, all later admissions have keys of their own (`weights_changed`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.governance.admission_outcome import Admission, AdmissionRefused, Deferred
from kvcustody.governance.decisions.access_plan import Plan
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.identity.content_digest import unique_epoch
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.integrations.transformers.batching.block_memory import EngineBlocks
from kvcustody.integrations.transformers.batching.kv_events import BatchingBlockEvents
from kvcustody.integrations.transformers.batching.request_claims import (
    RequestClaim,
    RequestClaims,
    RequestRecord,
)
from kvcustody.integrations.transformers.batching.thread_turn import Turn
from kvcustody.logger import get_logger

RETRY_US, RETRY_STEPS = (
    20_000,
    8,
)  # a deferred request asks again after a release, this long or this many steps
TRASH_EVERY_US = 500_000
IN_FLIGHT_STEPS = 2  # async batching: the step being prepared is the second one after the last that was read
_log = get_logger(__name__)


class BatchCustody:
    """The Governor's side of one engine cache."""

    def __init__(
        self,
        governor: Governor,
        model: ModelIdentity,
        blocks: EngineBlocks,
        claims: RequestClaims,
        *,
        is_sharing: bool,
        is_async: bool,
        parameters: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        """Prepare the custody. `parameters`: the running model's, in their current state."""
        self.governor = governor
        self.blocks = blocks
        self.turn = Turn(blocks.memories)
        self.page = governor.block_tokens
        self.records: dict[str, RequestRecord] = {}
        self.is_async = is_async
        self.events: BatchingBlockEvents | None = None
        self._model = model
        self._parameters = parameters
        self._parameters_seen = _writes(parameters())
        self._looked_at = -1  # the last step that did
        self._claims = claims
        self._claimed: dict[str, RequestClaim] = {}
        self._asked_us: dict[str, int] = {}
        self._is_sharing = is_sharing
        self._deferred: dict[str, tuple[int, int, int]] = {}  # releases and steps seen, and when to ask again
        self._releases = 0
        self._steps = 0
        self._fences: deque[int] = deque()
        self._trash_us = 0

    # -- entering -----------------------------------------------------------------------------------------------------

    def take_claim(self, request_id: str, waited_us: int = 0) -> None:
        """Bind a request that joins the queue, `waited_us` after its arrival, to its claim's owner."""
        if request_id not in self._claimed:
            self._asked_us[request_id] = self.governor.clock.now_us() - waited_us
            claim = self._claims.take(request_id)
            if self._claims.is_nobodys(claim):
                self.governor.attempts.note("missing")
            self._claimed[request_id] = claim if self._is_sharing else claim.private()

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended for good."""
        self._claimed.pop(request_id, None)
        self._asked_us.pop(request_id, None)
        self._deferred.pop(request_id, None)

    def admit(
        self, request_id: str, tokens: Sequence[int], max_new_tokens: int | None
    ) -> Admission | AdmissionRefused | Deferred | None:
        """Admit a request with its whole prompt; return None while a deferred request has no reason to try again."""
        waits = self._deferred.get(request_id)
        now_us = self.governor.clock.now_us()
        if waits is not None and self._must_still_wait(waits, now_us):
            return None
        if self._looked_at != self._steps:
            self._look_at_weights()
        claim = self._claimed[request_id]
        outcome = self.governor.admit(
            claim.principal,
            self._model,
            tokens,
            request_id=request_id,
            route=claim.route,
            hints=claim.hints,
            extras=claim.extras,
            trace=claim.trace,
            asked_us=self._asked_us.get(request_id),
            is_resumed=request_id not in self._asked_us,
        )
        if not isinstance(outcome, Admission):
            if isinstance(outcome, Deferred):
                self._deferred[request_id] = (self._releases, self._steps + RETRY_STEPS, now_us + RETRY_US)
            return self._refuse_if_too_big(claim, outcome, len(tokens), max_new_tokens)
        self._deferred.pop(request_id, None)
        plan = self.governor.running[outcome.request_id].residency.facts
        assert isinstance(plan, Plan)
        needed, most = self._needed(len(tokens), max_new_tokens), plan.account.cap_blocks
        if needed > most:
            self.governor.release(outcome.request_id, "refused")
            return self.governor.too_large(request_id, plan.tenant, needed, most)
        self._record(request_id, outcome, claim, plan, len(tokens))
        return outcome

    def _look_at_weights(self) -> None:
        self._looked_at = self._steps
        writes = _writes(self._parameters())
        if writes != self._parameters_seen:
            self._parameters_seen = writes
            self.weights_changed()

    def weights_changed(self) -> None:
        """Make everything computed before unreachable for later requests."""
        self._model = replace(self._model, weights_epoch=unique_epoch())
        _log.warning("weights changed", **self._model.named())

    def _must_still_wait(self, waits: tuple[int, int, int], now_us: int) -> bool:
        releases, steps, until_us = waits
        return releases == self._releases and self._steps < steps and now_us < until_us

    def _record(
        self, request_id: str, admitted: Admission, claim: RequestClaim, plan: Plan[BlockManager], tokens: int
    ) -> None:
        rows = admitted.blocks + self.blocks.pool_first[plan.manager.number]
        tables: list[list[int]] = [(rows + part.first).tolist() for part in self.blocks.parts]
        for part, table in zip(self.blocks.parts, tables, strict=True):
            part.allocator.block_table[request_id] = table
        self.records[request_id] = RequestRecord(admitted, claim, plan, tokens, tables, self.page * len(rows))

    def _needed(self, tokens: int, max_new_tokens: int | None) -> int:
        return -(-(tokens + (max_new_tokens or 1) - 1) // self.page)

    def _refuse_if_too_big(
        self,
        claim: RequestClaim,
        outcome: AdmissionRefused | Deferred,
        tokens: int,
        max_new_tokens: int | None,
    ) -> AdmissionRefused | Deferred:
        """Turn a deferral into a refusal where the request could not run even alone."""
        if isinstance(outcome, AdmissionRefused):
            return outcome
        needed = self._needed(tokens, max_new_tokens)
        tenant = self.governor.tenant_name(claim.principal)
        for manager in self.governor.managers:
            account = manager.accounts.get(tenant)
            if account is not None and needed > account.cap_blocks:
                return self.governor.too_large(outcome.request_id, tenant, needed, account.cap_blocks)
        return outcome

    def is_crowded(self, request_id: str, margin: float) -> bool:
        """Return whether a request of a tenant beyond its guarantee should wait so that running ones can continue."""
        tenant = self.governor.tenant_name(self._claimed[request_id].principal)
        for manager in self.governor.managers:
            account = manager.accounts.get(tenant)
            if account is None:
                continue
            partition = account.partition
            active = sum(one.active_blocks for one in partition.accounts)
            return account.active_blocks >= account.guaranteed_blocks and active > (1 - margin) * partition.size
        return False

    # -- running ------------------------------------------------------------------------------------------------------

    def extend(self, states: Iterable[Any], decoding: object) -> None:
        """Add a block for each `decoding` request without room for its next token, all of a step together.

        Whoever gets none has no room, and so cannot be scheduled.
        """
        records = self.records
        wanting: list[tuple[RequestRecord, int]] = []
        for state in states:
            if state._status == decoding:
                record = records[state.request_id]
                if record.room_tokens <= state.position_offset:
                    wanting.append((record, state.tokens_to_process[0]))
        if not wanting:
            return
        for pool in {record.manager.number for record, _ in wanting}:
            self._extend([one for one in wanting if one[0].manager.number == pool], pool)

    def _extend(self, wanting: list[tuple[RequestRecord, int]], pool: int) -> None:
        """Add one more block for each record, all in one pool."""
        governor = self.governor
        for record, _ in wanting:
            if record.reported_tokens < record.room_tokens:  # only where tokens are not known in time (rule 4)
                governor.fill(record.handle, None)
                record.reported_tokens = record.room_tokens
        slots = np.array([record.slot for record, _ in wanting], dtype=np.int64)
        ids = None if self.is_async else np.array([token for _, token in wanting], dtype=np.int32)
        without = set(governor.extend_slots(slots, ids, pool))
        for record, _ in wanting:
            if record.handle not in without:
                row = int(governor.blocks(record.handle)[-1]) + self.blocks.pool_first[pool]
                for table, part in zip(record.tables, self.blocks.parts, strict=True):
                    table.append(row + part.first)
                record.reported_tokens += 1
                record.room_tokens += self.page

    def filled(self, request_id: str, generated: Sequence[int]) -> None:
        """Report a decoding request's completed last block; `generated`: all its tokens after the prompt."""
        record = self.records.get(request_id)
        if record is not None and not self.is_async and record.reported_tokens < record.room_tokens:
            tokens = generated[record.reported_tokens - record.prompt : record.room_tokens - record.prompt]
            self.governor.fill(record.handle, tokens)
            record.reported_tokens = record.room_tokens

    def computed(self, request_id: str, tokens: int) -> None:
        """Report that the prompt's first `tokens` tokens have their K/V."""
        record = self.records.get(request_id)
        if record is not None:
            self.governor.commit((record.handle,), (min(tokens, record.prompt),))
            if tokens >= record.prompt:
                self._asked_us.pop(request_id, None)  # its first token has come

    def inherit(self, parent_id: str, child_ids: Iterable[str]) -> None:
        """Let children run on their parent's behalf, whether they fork now or are queued."""
        child_ids = tuple(child_ids)
        self._claims.keep_open(parent_id, child_ids)
        claim, rewrites = self.records[parent_id].claim, self.blocks.are_rewritten
        for child_id in child_ids:
            self._claimed[child_id] = claim.private() if rewrites else claim

    def fork(
        self, parent_id: str, child_id: str, tokens: Sequence[int], computed: int
    ) -> list[tuple[list[int], list[int]]] | None:
        """Admit a child that inherited from its parent, with K/V for `computed` tokens.

        Returns for each allocator the parent's blocks whose content the engine must copy, and into which of the
        child's; None where there is no room now, or the parent reads what may not be read anew: a copy would be read
        as well. What the policy lets the parent reuse is shared, the rest is the child's own.
        """
        parent = self.records[parent_id].handle
        if parent not in self.governor.running or not self.governor.may_fork(parent):
            return None
        if not isinstance(self.admit(child_id, tokens, None), Admission):
            return None
        child = self.records[child_id]
        copied = slice(child.hit_tokens // self.page, -(-computed // self.page))
        return [
            (source[copied][: part.ring], own[copied][: part.ring])
            for part, source, own in zip(self.blocks.parts, self.records[parent_id].tables, child.tables, strict=True)
        ]

    # -- leaving ------------------------------------------------------------------------------------------------------

    def release(self, request_id: str, cause: str, *, asked_us: int | None = None) -> None:
        """Release a request's blocks; computed ones stay CACHED as far as its policy permits.

        `asked_us`: when its client cancelled it, in boot time.
        """
        record = self.records.pop(request_id, None)
        if record is None:
            return
        for part in self.blocks.parts:
            part.allocator.block_table.pop(request_id, None)
        self._releases += 1
        sequence = self.governor.running.get(record.handle)
        if sequence is None:  # erased or overdue: the Governor has released it already
            return
        residency = sequence.residency
        self.governor.release(record.handle, cause, asked_us=asked_us)
        if record.claim.is_private and residency.is_held:  # nobody could find it: kept for nothing
            now_us = self.governor.clock.now_us()
            record.manager.tree.lapse(residency, "not-retained", now_us)
            record.manager.tree.flush(now_us)

    def release_all(self, cause: str) -> None:
        """Release every request, while no step is in flight."""
        self.retire(0)
        for request_id in list(self.records):
            self.release(request_id, cause)

    # -- steps --------------------------------------------------------------------------------------------------------

    def fence(self, request_ids: Sequence[str]) -> None:
        """Open a fence over a step with these requests, which still runs when the next one is prepared."""
        handles = [self.records[request_id].handle for request_id in request_ids]
        self._fences.append(self.governor.fence(handles))

    def retire(self, in_flight: int) -> None:
        """Retire all fences except the newest `in_flight`, whose results have not been read."""
        while len(self._fences) > in_flight:
            self.governor.retire(self._fences.popleft())

    def tick(self) -> list[str]:
        """Run expiry, scrub, commands and evidence; return requests that the Governor has ended."""
        self._steps += 1
        stream = self.turn.stream
        if self._fences and (stream is None or stream.query()):
            self.retire(0)
        self.governor.step()
        now_us = self.governor.clock.now_us()
        if now_us >= self._trash_us:
            self.blocks.clear_trash()
            self._trash_us = now_us + TRASH_EVERY_US
        self.publish_events()
        running = self.governor.running
        if len(running) == len(self.records):
            return []
        return [request_id for request_id, record in self.records.items() if record.handle not in running]

    def publish_events(self) -> None:
        """Publish block events since the last call, where a publisher is set."""
        if self.events is not None:
            self.events.publish_pending()

    def free_blocks(self) -> int:
        """Return how many blocks no running request uses."""
        return self.blocks.blocks - sum(
            account.active_blocks for manager in self.governor.managers for account in manager.accounts.values()
        )


def _writes(parameters: Iterable[torch.Tensor]) -> int:
    """Return the parameters' addresses and counts of in-place writes, as one number."""
    return hash(tuple((one.data_ptr(), 0 if one.is_inference() else one._version) for one in parameters))
