"""The part of a toy engine without governance: a door, a queue, chunked prefill, steps in flight.

`ReferenceEngine` (its own allocator, through the engine port) and `NativeEngine` (our block manager, through the
Governor) add where blocks come from. A toy engine is its own harness: it implements `EngineUnderTest`.

1. A request's identity is proved at the door by a signed token, spent there; what fails the door is nobody's.
2. A request that cannot start waits by itself: the queue goes on to the next one.
3. What a device step computed counts only when it has retired. A request that is over or preempted ignores the
   answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

from kvcustody.audit.kinds import Event
from kvcustody.governance.credentials.scope_token import ScopeTokens, VerifiedToken
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.keys.locked_buffer import KEY_BYTES, KeyBuffer
from kvcustody.governance.request import NO_HINTS, Hints
from kvcustody.testkit.conformance.deployment import KeepingLedger
from kvcustody.testkit.conformance.engine_protocol import (
    ABORTED,
    FINISHED,
    OVER,
    REFUSED,
    RUNNING,
    WAITING,
    Capabilities,
    FirstWrite,
    RequestOutcome,
    RequestSpec,
    Setup,
    TierObject,
)
from kvcustody.testkit.conformance.engines.toy_device import Call, Say, ToyDevice, Work, Write
from kvcustody.testkit.conformance.engines.toy_model import canary_of, prefix_states

BLOCK_TOKENS = 4
CHUNK_TOKENS = 10  # prefilled in one step of one request: not a multiple of a block
ANONYMOUS = "anonymous"


class ToyRequest:
    """One request in the engine's books. `sent`: tokens submitted for computation; `landed`: tokens computed."""

    def __init__(self, number: int, ask: RequestSpec, principal: Principal | None, hints: Hints) -> None:
        self.number = number
        self.ask = ask
        self.principal = principal
        self.hints = hints
        self.tokens = list(ask.tokens)
        self.output: list[int] = []
        self.states: list[int] = []
        self.canary = canary_of(ANONYMOUS if principal is None else principal.tenant)
        self.state = WAITING
        self.error = self.reason = ""
        self.cached_tokens = 0
        self.table: list[int] = []
        self.sent = self.landed = 0
        self.is_speaking = False
        self.epoch = 0  # rises at every preemption

    @property
    def is_over(self) -> bool:
        """Whether the request has finished, was aborted or was refused."""
        return self.state in OVER

    def restart(self) -> None:
        """Return to the queue: everything is computed or attached again."""
        self.epoch += 1
        self.table, self.sent, self.landed, self.is_speaking = [], 0, 0, False
        self.state = WAITING


class ToyEngine(ABC):
    """The scheduler. Subclasses provide blocks and call governance."""

    def __init__(self, setup: Setup, blocks: int) -> None:
        self.setup = setup
        self.clock = setup.clock
        self.device = ToyDevice(blocks, BLOCK_TOKENS, setup.shards, setup.clock)
        self.ledger_port = KeepingLedger()
        self.door = ScopeTokens(KeyBuffer.random(KEY_BYTES), setup.clock)
        self.requests: dict[object, ToyRequest] = {}
        self.waiting: list[ToyRequest] = []
        self.running: list[ToyRequest] = []
        self.revision = 1

    # -- what a subclass adds ------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """See `EngineUnderTest`."""

    @abstractmethod
    def start(self, request: ToyRequest) -> bool:
        """Attach and allocate for all the request's tokens: `table`, `sent`, `cached_tokens`. False: it waits."""

    @abstractmethod
    def grow(self, request: ToyRequest) -> bool:
        """Make room for the token that was just accepted. False: there is none, so preempt."""

    @abstractmethod
    def computed(self, request: ToyRequest) -> None:
        """Note that the K/V of the first `landed` tokens is in memory."""

    @abstractmethod
    def give_back(self, request: ToyRequest, cause: str) -> None:
        """Give up all blocks in any state; a second call does nothing."""

    @abstractmethod
    def dispatch(self, work: list[Work]) -> None:
        """Submit a device step of `work` after governance's scrubs, and retire the steps that are due."""

    # -- the door and the queue ----------------------------------------------------------------------------------------

    def mint(self, principal: Principal, valid_us: int) -> str:
        """Return a valid raw token for one request."""
        return self.door.issue(principal, ttl_seconds=-(-valid_us // 1_000_000))

    def submit(self, ask: RequestSpec) -> object:
        """Queue a request under the identity that it proves."""
        identity = ask.identity
        if isinstance(identity, Principal):
            identity = self.door.issue(identity, route=ask.route, client_salt=ask.salt, epochs=ask.epochs)
        verified = self.door.verify(identity)
        if isinstance(verified, VerifiedToken):
            return self.queue(ask, verified.principal, verified.hints)
        return self.queue(ask, None, NO_HINTS)

    def queue(
        self, ask: RequestSpec, principal: Principal | None, hints: Hints, like: ToyRequest | None = None
    ) -> object:
        """Append a request to the queue, or one that continues another (`like`); return its handle."""
        request = ToyRequest(len(self.requests) + 1, ask, principal, hints)
        if like is not None:
            request.tokens, request.output = list(like.tokens), list(like.output)
        self.requests[request.number] = request
        self.waiting.append(request)
        self.arrive(request)
        return request.number

    def arrive(self, request: ToyRequest) -> None:  # noqa: B027 (not every engine admits at arrival)
        """Admit the request on arrival, in engines that do so."""

    def outcome(self, request: object) -> RequestOutcome:
        """Return the current facts about a request."""
        one = self.requests[request]
        return RequestOutcome(one.state, one.cached_tokens, tuple(one.output), one.error, tuple(one.table), one.reason)

    def abort(self, request: object) -> None:
        """Cancel a request for its client."""
        self.end(self.requests[request], ABORTED, "aborted")

    def disconnect(self, request: object) -> None:
        """Drop a request's client."""
        self.end(self.requests[request], ABORTED, "disconnected")

    def end(self, request: ToyRequest, state: str, cause: str) -> None:
        """End a request in any state; do nothing where it has ended."""
        if request.is_over:
            return
        self._leave(request)
        request.state, request.reason = state, cause
        self.give_back(request, cause)
        request.table = []

    def refuse(self, request: ToyRequest, reason: str) -> None:
        """Refuse a request that can never be served."""
        self._leave(request)
        request.state, request.error, request.reason = REFUSED, "refused", reason

    def preempt(self, request: object) -> None:
        """Take a running request's blocks; it resumes on its own."""
        victim = self.requests[request]
        if victim.state != RUNNING:
            return
        self._leave(victim)
        self.give_back(victim, "preempted")
        victim.restart()
        self.waiting.insert(0, victim)
        self.arrive(victim)

    def _leave(self, request: ToyRequest) -> None:
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Start what can start, and compute one chunk or one token of everything that runs."""
        if not (self.waiting or self.running or self.device.stream):
            return False
        for request in list(self.waiting):
            if request.state == WAITING and self.start(request):
                self.waiting.remove(request)
                self.running.append(request)
                request.state = RUNNING
        self.dispatch(self._schedule())
        return True

    def _schedule(self) -> list[Work]:
        work: list[Work] = []
        for request in self.running:
            if self.is_loading(request) or request.is_speaking or request.sent == len(request.tokens):
                continue
            first, last = request.sent, min(request.sent + CHUNK_TOKENS, len(request.tokens))
            prefix_states(request.canary, request.tokens, request.states)
            table = tuple(request.table)
            work.append(Write(table, first, tuple(request.states[first:last])))
            work.append(Call(partial(self._landed, request, request.epoch, last)))
            if last == len(request.tokens):
                request.is_speaking = True
                work.append(Say(table, last, partial(self._said, request, request.epoch)))
            request.sent = last
        return work

    def is_loading(self, request: ToyRequest) -> bool:
        """Return whether a transfer into its blocks is running."""
        return False

    def _landed(self, request: ToyRequest, epoch: int, landed: int) -> None:
        if request.state == RUNNING and request.epoch == epoch:
            request.landed = landed
            self.computed(request)

    def spoke(self, request: ToyRequest) -> None:  # noqa: B027 (our own block manager sees it by itself)
        """Accept a token."""

    def _said(self, request: ToyRequest, epoch: int, token: int) -> None:
        if request.state != RUNNING or request.epoch != epoch:
            return
        self.spoke(request)
        request.is_speaking = False
        request.tokens.append(token)
        request.output.append(token)
        if len(request.output) >= request.ask.max_tokens:
            self.end(request, FINISHED, "finished")
        elif not self.grow(request):
            self.preempt(request.number)

    def retire_due(self, *, submitted: bool) -> None:
        """Run the device steps beyond `steps_in_flight`, or one step where nothing was submitted."""
        depth = self.setup.steps_in_flight if submitted and (self.waiting or self.running) else 0
        while len(self.device.stream) > depth:
            self.device.retire()
            if not submitted:
                break

    # -- evidence ------------------------------------------------------------------------------------------------------

    def watch(self, probe: Callable[[FirstWrite], None]) -> None:
        """Call `probe` before each first write."""
        self.device.probe = probe

    def read(self, blocks: Sequence[int]) -> list[bytes]:
        """Return all bytes of each block, every shard."""
        return [self.device.get(block) for block in blocks]

    def stick(self, block: int) -> None:
        """Make this block fail to become zero on the last shard."""
        self.device.memory.stuck.add((self.setup.shards - 1, block))

    def ledger(self) -> list[Event]:
        """Return every ledger event so far."""
        return list(self.ledger_port.events)

    # -- an engine without a tier --------------------------------------------------------------------------------------

    def hold_transfers(self, held: bool) -> None:  # noqa: B027 (not asked)
        """Do nothing: there is no tier."""

    def tier(self) -> list[TierObject]:
        """Return nothing: there is no tier."""
        return []

    def drop_index(self) -> None:  # noqa: B027 (not asked)
        """Do nothing: there is no tier."""
