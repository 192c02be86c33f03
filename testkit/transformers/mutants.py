"""Historic bugs in the continuous batching adapter: its own code, the block manager and governance below it.

`kvcustody conformance --engine kvcustody.testkit.transformers.conformance:engine \
    --mutants kvcustody.testkit.transformers.mutants`
"""

from __future__ import annotations

from typing import Any

from kvcustody.allocator.prefix.node import KEY_BYTES, Node
from kvcustody.allocator.prefix.tree import PrefixTree
from kvcustody.governance.admission_outcome import Admission
from kvcustody.integrations.events.block_event import BlockEvent, EventScope
from kvcustody.integrations.transformers.batching import kv_events as block_events
from kvcustody.integrations.transformers.batching.custody import BatchCustody
from kvcustody.integrations.transformers.batching.governed_batching import GovernedBatching
from kvcustody.integrations.transformers.batching.kv_events import BatchingBlockEvents
from kvcustody.integrations.transformers.batching.request_claims import RequestClaim, RequestClaims
from kvcustody.integrations.transformers.batching.scheduler import GovernedScheduler
from kvcustody.testkit.conformance.mutants import native as mutants_of_native
from kvcustody.testkit.conformance.mutants.runner import Mutant, constant, patch

# Of governance, the block manager, its memory and the kit's ledger: the same patches as in the native engine.
_BELOW = (
    "scope dropped at admission",
    "unscoped keys",
    "grant cached past its revocation",
    "scope dropped at look-up",
    "double free in one list",
    "generation not bumped",
    "never scrubbed",
    "scrub skips the tail",
    "verify skipped",
    "failed block handed out",
    "late sweep serves the expired",
    "ceiling moved by attach",
    "running block past its ceiling attached",
    "erase misses cached",
    "erase misses running",
    "end not recorded",
    "receipt not recorded",
)
_NOBODY = EventScope("*", "request", "", 0, 0)


def _last_claim(original: Any) -> Any:
    """Take an unclaimed request for the last claimed one."""

    def take(self: RequestClaims, request_id: str) -> RequestClaim:
        claim: RequestClaim = original(self, request_id)
        known: RequestClaim = self.__dict__.setdefault("last", claim)
        if not claim.is_private:
            known = self.__dict__["last"] = claim
        return known

    return take


def _resumed_as_nobody(original: Any) -> Any:
    def preempt(self: GovernedScheduler, state: Any) -> bool:
        answer = bool(original(self, state))
        self.custody.forget(state.request_id)
        self.custody.take_claim(state.request_id)
        return answer

    return preempt


def _published_at_admission(original: Any) -> Any:
    def admit(self: BatchCustody, request_id: str, tokens: Any, limit: Any) -> Any:
        answer = original(self, request_id, tokens, limit)
        if isinstance(answer, Admission):
            self.computed(request_id, len(tokens))
        return answer

    return admit


def _waits_in_line(original: Any) -> Any:
    """Make the first request that cannot start block all requests behind it."""

    def admit(self: GovernedScheduler, state: Any, started: set[str]) -> None:
        ahead = [name for name in self.waiting_requests_order if name not in started]
        if ahead and ahead[0] == state.request_id:
            original(self, state, started)

    return admit


def _preempts_anybody(original: Any) -> Any:
    """Make a request that cannot start take the blocks of another tenant's running request."""

    def schedule(self: GovernedScheduler, *budgets: int) -> Any:
        records, claimed = self.custody.records, self.custody._claimed
        for hungry in [name for name in self.waiting_requests_order if name in self.custody._deferred][:1]:
            for name, state in list(self.active_requests.items()):
                if records[name].claim.principal.tenant != claimed[hungry].principal.tenant:
                    self._preempt(state)
                    break
        return original(self, *budgets)

    return schedule


def _renews(original: Any) -> Any:
    """Make every release of a path move the deadlines of all holds on it."""

    def release(self: PrefixTree, leaf: Node | None, hold: Any, now_us: int, *rest: Any) -> None:
        original(self, leaf, hold, now_us, *rest)
        while leaf is not None:
            leaf.deadline_us = now_us + leaf.domain.idle_us
            renewed = leaf.hold_here
            if renewed is not None and renewed is not hold:
                self.hold_table.remove(renewed)
                renewed.deadline_us, renewed.is_held = leaf.deadline_us, True
                self.hold_table.add(renewed)
            leaf = leaf.parent

    return release


def _stored(**change: Any) -> Any:
    """Make every stored event with these fields, derived from it."""

    def make(original: Any) -> Any:
        def stored(self: BatchingBlockEvents, scope: EventScope, told: Any) -> BlockEvent:
            event: BlockEvent = original(self, scope, told)
            return event._replace(**{name: field(event) for name, field in change.items()})

        return stored

    return make


def _tokens(event: BlockEvent) -> tuple[int, ...]:
    return (7,) * (len(event.keys) // KEY_BYTES * event.block_tokens)


def _removed_by_nobody(original: Any) -> Any:
    return lambda scope, keys, **more: original(_NOBODY, keys, **more)


def _silent(original: Any) -> Any:
    def collect(self: PrefixTree, *args: Any) -> None:
        kept, self.changes = self.changes, None
        original(self, *args)
        self.changes = kept

    return collect


MUTANTS: tuple[Mutant, ...] = (
    *(mutant for mutant in mutants_of_native.MUTANTS if mutant.fault in _BELOW),
    Mutant("no identity falls to a tenant", patch(RequestClaims, "take", _last_claim)),
    Mutant("scope dropped after preemption", patch(GovernedScheduler, "_preempt", _resumed_as_nobody)),
    Mutant("hold renewed by foreign reader", patch(PrefixTree, "release", _renews)),
    Mutant("uncomputed block published", patch(BatchCustody, "admit", _published_at_admission)),
    Mutant("TTL does not fire while idle", constant(GovernedBatching, "tick", None)),
    Mutant("quota stalls others", patch(GovernedScheduler, "_admit", _waits_in_line)),
    Mutant("quota preempts others", patch(GovernedScheduler, "_schedule", _preempts_anybody)),
    Mutant("scope dropped at event", patch(BatchingBlockEvents, "_stored", _stored(scope=lambda event: _NOBODY))),
    Mutant("unscoped removal", patch(block_events, "removed", _removed_by_nobody)),
    Mutant("removal not told", patch(PrefixTree, "_gather_end", _silent)),
    Mutant("tokens in events", patch(BatchingBlockEvents, "_stored", _stored(tokens=_tokens))),
)

_NO_TOKENS = "identity travels by request id; there is no token to forge, replay or outlive"
_NO_TIER = "the engine's host memory tier is refused (batching/test_refusals.py)"
_NO_FLIGHT = "no step is in flight on the CPU; the fences are driven without a device in batching/test_capacity.py"
NOT_APPLICABLE: dict[str, str] = {
    "forged identity accepted": _NO_TOKENS,
    "erase epochs ignored": _NO_TOKENS,
    "expired identity accepted": _NO_TOKENS,
    "replayed identity accepted": _NO_TOKENS,
    "scope dropped at store": _NO_TIER,
    "scope dropped at prefetch": _NO_TIER,
    "async store of a re-used block": _NO_TIER,
    "tier outlives the deadline": _NO_TIER,
    "erase misses the tier": _NO_TIER,
    "scope dropped at fork": "the kit cannot ask for a fork while decoding; see batching/test_capacity.py",
    "free while in flight": _NO_FLIGHT,
    "late answer of a preempted request": _NO_FLIGHT,
    "release not idempotent": "the adapter's records and the Governor both forget a request at its first release",
    "order to forget ignored": "the index is the block manager's own; there is nobody to order",
    "scrub after hand-out": "clean-first: only blocks that are CLEAN are in the ring that is handed out",
    "scrub of the first shard only": "tensor parallelism is refused (batching/test_refusals.py)",
}
