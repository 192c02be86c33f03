"""The engine's scheduler, governed: admission by policy and quota, and preemption that stays inside a tenant.

1. A request that must wait waits alone: nobody behind it is held up, nobody is preempted for it.
2. A tenant that is out of room gives up its own newest request. Another tenant's is touched only where every running
   request of every tenant is out of room.
3. A request that cannot be served fails alone, with a reason; the loop never dies of it.
4. The engine's loop wakes ten times a second when idle, and every time expiry, scrub and commands are carried out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, ClassVar

from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import FIFOScheduler, PrefillFirstScheduler

from kvcustody.allocator.pool.accounting import Account
from kvcustody.clock import MICROSECONDS
from kvcustody.errors import CapacityError, ConfigError, CustodyError, HandleError, IdentityError
from kvcustody.governance.admission_outcome import Admission, AdmissionRefused
from kvcustody.integrations.transformers.batching.custody import (
    IN_FLIGHT_STEPS,
    BatchCustody,
)
from kvcustody.integrations.transformers.batching.request_claims import CANCEL_MARK

BASES = {"fifo": FIFOScheduler, "prefill_first": PrefillFirstScheduler}


class GovernedScheduler:
    """A mixin for the engine's schedulers (`scheduler_for`). `install` takes the new cache into custody."""

    install: ClassVar[Callable[[Any], BatchCustody]]
    deliver_failure: ClassVar[Callable[[RequestState, Exception], None]]
    end_id: ClassVar[Callable[[str], None]]  # of a request or cancellation that has no result

    cache: Any
    safety_margin: float
    active_requests: dict[str, RequestState]
    waiting_requests: dict[str, RequestState]
    waiting_requests_order: deque[str]
    starved_requests: list[tuple[RequestState, int]]
    _requests_to_cancel: set[str]

    def __init__(self, cache: Any, safety_margin: float | None, max_requests_per_batch: int) -> None:
        self.custody = type(self).install(cache)
        self._cancelled_us: dict[str, int] = {}
        super().__init__(cache, safety_margin, max_requests_per_batch)  # type: ignore[call-arg]

    # -- queue --------------------------------------------------------------------------------------------------------

    def add_waiting_request(self, state: RequestState) -> None:
        """Queue a request under its claim.

        Raises:
            HandleError: its id is in use.
        """
        request_id = state.request_id
        with self.custody.turn:
            if request_id in self.active_requests or request_id in self.waiting_requests:
                raise HandleError(f"request id `{request_id}` is in use", request_id=request_id)
            waited_us = int((perf_counter() - state.created_time) * MICROSECONDS)
            self.custody.take_claim(request_id, max(0, waited_us))
            super().add_waiting_request(state)  # type: ignore[misc]

    def finish_request(self, request_id: str) -> None:
        """Finish a request that has its last token, or has failed."""
        with self.custody.turn:
            self._end(request_id, "finished")

    def set_request_cancellation(self, request_id: str) -> None:
        """Note a client's cancellation, on its thread."""
        self._cancelled_us.setdefault(request_id, self.custody.governor.clock.now_us())
        super().set_request_cancellation(request_id)  # type: ignore[misc]

    def clear_cancelled_requests(self) -> list[RequestState]:
        """Process cancellations, then due work and other threads' calls, once per turn of the engine's loop (rule
        4).
        """
        with self.custody.turn:
            asked_for = list(self._requests_to_cancel)
            for request_id in asked_for:
                asked_us = self._cancelled_us.pop(request_id, None)
                self.custody.release(request_id, "aborted", asked_us=asked_us)
                self.custody.forget(request_id)
            cancelled: list[RequestState] = super().clear_cancelled_requests()  # type: ignore[misc]
            without_result = [state.request_id for state in cancelled]
            for name in (*without_result, *(CANCEL_MARK + request_id for request_id in asked_for)):
                type(self).end_id(name)
            for request_id in self.custody.tick():
                self._fail(request_id, HandleError(f"request `{request_id}` was ended by policy or erasure"))
            return cancelled

    def _end(self, request_id: str, cause: str) -> None:
        self.custody.release(request_id, cause)
        self.custody.forget(request_id)
        self.active_requests.pop(request_id, None)

    def _fail(self, request_id: str, error: CustodyError) -> None:
        """End one request with an error that its client sees (rule 3)."""
        state = self.active_requests.get(request_id) or self.waiting_requests.pop(request_id, None)
        if request_id in self.waiting_requests_order:
            self.waiting_requests_order.remove(request_id)
        self._end(request_id, "failed")
        if state is not None:
            type(self).deliver_failure(state, error)

    # -- a batch ------------------------------------------------------------------------------------------------------

    def schedule_batch(self, token_budget: int, cache_budget: int) -> tuple[list[Any], bool, int, int]:
        """Return the next batch. An empty one means that all requests wait; the engine then neither offloads nor
        dies.
        """
        custody, cache = self.custody, self.cache
        with custody.turn:
            custody.retire(IN_FLIGHT_STEPS - 1)
            cache.is_scheduling = True
            try:
                batch, fast, queries, reads = self._schedule(token_budget, cache_budget)
                while self._relieve_pressure(batch):
                    batch, fast, queries, reads = self._schedule(token_budget, cache_budget)
            finally:
                cache.is_scheduling = False
            custody.publish_events()  # what this step evicts is known before it is computed
            self.starved_requests = []  # else the engine offloads by rules of its own, and blocks new requests
            if custody.is_async and batch:
                custody.fence([future.state.request_id for future in batch])
            return batch, fast, queries, reads

    def _schedule(self, token_budget: int, cache_budget: int) -> tuple[list[Any], bool, int, int]:
        self.custody.extend(self.active_requests.values(), RequestStatus.DECODING)
        batch, fast, queries, reads = super().schedule_batch(token_budget, cache_budget)  # type: ignore[misc]
        return batch or [], fast, queries, reads

    def _infer_request_tokens(self, state: RequestState, request_ids_to_remove_from_waiting: set[str]) -> list[int]:
        """Return the tokens that the request processes next; a pending one is admitted first, if possible."""
        if state.status == RequestStatus.PENDING:
            self._admit(state, request_ids_to_remove_from_waiting)
        tokens: list[int] = (
            state.tokens_to_process if state.status == RequestStatus.DECODING else state.remaining_prefill_tokens
        )
        return tokens

    def _admit(self, state: RequestState, started: set[str]) -> None:
        request_id, custody = state.request_id, self.custody
        if self.active_requests and custody.is_crowded(request_id, self.safety_margin):
            return
        try:
            outcome = custody.admit(request_id, state.initial_tokens, state.max_new_tokens)
        except (
            IdentityError,
            ConfigError,
        ) as error:  # a malformed hint, token ids outside int32: its own fault
            outcome = AdmissionRefused(request_id, error.message)
        if isinstance(outcome, AdmissionRefused):
            started.add(request_id)
            kind = CapacityError if outcome.is_too_large else IdentityError
            self._fail(request_id, kind(f"request `{request_id}`: {outcome.reason}"))
        elif isinstance(outcome, Admission):
            started.add(request_id)
            self.waiting_requests.pop(request_id, None)
            self.active_requests[request_id] = state
            state.status = RequestStatus.PREFILLING
            state.remaining_prefill_tokens = state.remaining_prefill_tokens[outcome.hit_tokens :]
            state.position_offset += outcome.hit_tokens

    def _try_to_meet_safety_margin(self) -> bool:
        """Let the margin hold back only admissions of tenants beyond their guarantee: see `_admit`."""
        return True

    # -- out of room --------------------------------------------------------------------------------------------------

    def _relieve_pressure(self, batch: list[Any]) -> bool:
        """Preempt or fail requests that block only themselves (rule 2); return whether scheduling again may find
        work.
        """
        starved = [state for state, _ in self.starved_requests]
        if not starved:
            return False
        records = self.custody.records
        waiting: dict[Account, list[RequestState]] = {}
        for state in starved:
            waiting.setdefault(records[state.request_id].account, []).append(state)
        running: dict[Account, int] = {}
        for request_id in self.active_requests:
            account = records[request_id].account
            running[account] = running.get(account, 0) + 1
        acted = False
        for account, states in waiting.items():
            if len(states) < running[account]:
                continue  # its others run on, and will give room
            if len(states) > 1:
                acted = self._preempt(states[-1])
            elif account.active_blocks >= account.cap_blocks:
                acted = self._fail_outgrown(states[0])
        if not acted and not batch and len(starved) == len(self.active_requests):
            acted = self._preempt(starved[-1]) if len(starved) > 1 else self._fail_outgrown(starved[0])
        return acted and not batch

    def _preempt(self, state: RequestState) -> bool:
        """Preempt a request; it is queued in front, with its generated tokens as part of its prompt."""
        request_id = state.request_id
        self.custody.release(request_id, "preempted")
        self.active_requests.pop(request_id)
        resumed = state.create_equivalent_initial_request()
        state._status = RequestStatus.FINISHED  # a step in flight must not touch it any more
        self.waiting_requests[request_id] = resumed
        self.waiting_requests_order.appendleft(request_id)
        return True

    def _fail_outgrown(self, state: RequestState) -> bool:
        self._fail(
            state.request_id,
            CapacityError(f"request `{state.request_id}` has outgrown the blocks that its tenant may have"),
        )
        return True


def scheduler_for(
    kind: str,
    install: Callable[[Any], BatchCustody],
    deliver_failure: Callable[[RequestState, Exception], None],
    end_id: Callable[[str], None],
) -> type[GovernedScheduler]:
    """Return a scheduler class for the engine's registry.

    Raises:
        ConfigError: the kind is not the engine's own.
    """
    base = BASES.get(kind)
    if base is None:
        raise ConfigError(f"scheduler `{kind}` is not governed; use one of {', '.join(BASES)}", kind=kind)
    calls: dict[str, Callable[..., Any]] = {
        "install": install,
        "deliver_failure": deliver_failure,
        "end_id": end_id,
    }
    members: dict[str, Any] = {name: staticmethod(call) for name, call in calls.items()}
    return type(f"Governed{base.__name__}", (GovernedScheduler, base), members)
