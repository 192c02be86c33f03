"""Mutants for both toy engines: of the device, the door, the queue and the ledger behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcustody.allocator.pool.memory_protocol import NO_BLOCKS
from kvcustody.allocator.pool.tensor_memory import TensorMemory
from kvcustody.audit.kinds import CustodyEnded, Event, ReceiptRecorded
from kvcustody.governance.credentials.scope_token import VerifiedToken
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.request import NO_HINTS
from kvcustody.testkit.conformance.deployment import KeepingLedger
from kvcustody.testkit.conformance.engines.toy_engine import ToyEngine, ToyRequest
from kvcustody.testkit.conformance.mutants.runner import Mutant, patch


def partial_scrub(*, blocks: slice = slice(None), shards: int | None = None, share: float | None = None) -> Any:
    """Return a scrub that zeroes only a part of its blocks and reports all of them."""

    def make(original: Any) -> Any:
        def scrub(self: TensorMemory, shard: int, which: Any, verify_share: float) -> Any:
            if shards is not None and shard >= shards:
                return original(self, shard, NO_BLOCKS, 0.0)._replace(level="full", verified=len(which))
            asked = verify_share if share is None else share
            result = original(self, shard, which[blocks], asked)
            return result if share is not None else result._replace(verified=len(which))

        return scrub

    return make


def _last_known(original: Any) -> Any:
    """Take a request that cannot be verified for the last verified one."""

    def submit(self: ToyEngine, ask: Any) -> object:
        identity = ask.identity
        if isinstance(identity, Principal):
            self.__dict__["last"] = identity
        elif not isinstance(self.door.verify(identity), VerifiedToken):
            return self.queue(ask, self.__dict__.get("last"), NO_HINTS)
        return original(self, ask)

    return submit


def _without_epochs(original: Any) -> Any:
    """Lose the door's erase epochs on their way to governance."""

    def queue(self: ToyEngine, ask: Any, principal: Any, hints: Any, like: Any = None) -> object:
        return original(self, ask, principal, hints._replace(epochs=None), like)

    return queue


def _takes_late_answers(original: Any) -> Any:
    def said(self: ToyEngine, request: ToyRequest, epoch: int, token: int) -> None:
        original(self, request, request.epoch, token)

    return said


def stalls_the_queue(original: Any) -> Any:
    """Make the first request that cannot start block all requests behind it."""

    def start(self: ToyEngine, request: ToyRequest) -> bool:
        ahead = [one for one in self.waiting if one.number < request.number]
        return not ahead and bool(original(self, request))

    return start


def preempts_anybody(original: Any) -> Any:
    """Make a request that cannot start take the blocks of another tenant's running request."""

    def start(self: ToyEngine, request: ToyRequest) -> bool:
        if original(self, request):
            return True
        for other in self.running:
            if other.canary != request.canary:
                self.preempt(other.number)
                break
        return False

    return start


def publishes_at_start(original: Any) -> Any:
    """Index every whole block as soon as it is allocated."""

    def start(self: ToyEngine, request: ToyRequest) -> bool:
        if not original(self, request):
            return False
        landed, request.landed = request.landed, len(request.tokens)
        self.computed(request)
        request.landed = landed
        return True

    return start


def _loses(kind: type[Event]) -> Any:
    def make(original: Any) -> Any:
        def submit(self: KeepingLedger, events: Sequence[Event], /) -> int:
            lost = next((event for event in events if isinstance(event, kind)), None)
            return int(original(self, [event for event in events if event is not lost]))

        return submit

    return make


TOY = (
    Mutant("erase epochs ignored", patch(ToyEngine, "queue", _without_epochs)),
    Mutant("never scrubbed", patch(TensorMemory, "scrub", partial_scrub(blocks=slice(0)))),
    Mutant("scrub of the first shard only", patch(TensorMemory, "scrub", partial_scrub(shards=1))),
    Mutant("verify skipped", patch(TensorMemory, "scrub", partial_scrub(share=0.0))),
    Mutant("no identity falls to a tenant", patch(ToyEngine, "submit", _last_known)),
    Mutant("end not recorded", patch(KeepingLedger, "submit", _loses(CustodyEnded))),
    Mutant("receipt not recorded", patch(KeepingLedger, "submit", _loses(ReceiptRecorded))),
    Mutant("late answer of a preempted request", patch(ToyEngine, "_said", _takes_late_answers)),
)
