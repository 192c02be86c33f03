"""A toy engine on our own block manager, through the Governor: the kit's second kind of adapter.

1. Blocks come from `Governor.admit` and `extend_many`, zeroed before they are handed out (clean-first).
2. Every device step runs under a fence, so that nothing it writes late can land in a block that was zeroed meanwhile.
"""

from __future__ import annotations

from functools import partial

from kvcustody.allocator.pool.block_state import NEVER_US
from kvcustody.allocator.pool.options import PoolOptions
from kvcustody.governance.admission_outcome import Admission, Deferred
from kvcustody.governance.edge.erase_epochs import KnownEpochs
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.governor.pools import Pools
from kvcustody.integrations.events.block_event import BlockEvent
from kvcustody.testkit.conformance.deployment import keyring, table, toy_model
from kvcustody.testkit.conformance.engine_protocol import ABORTED, RUNNING, Capabilities, Setup
from kvcustody.testkit.conformance.engines.toy_device import Call, Work
from kvcustody.testkit.conformance.engines.toy_engine import BLOCK_TOKENS, ToyEngine, ToyRequest

TIMER_US = 250_000  # an idle engine's own tick
_MODEL = toy_model(BLOCK_TOKENS)
_LACKS = {
    "tier": "our block manager has no external tier yet",
    "events": "our block manager publishes no block events yet",
}


class NativeEngine(ToyEngine):
    """The toy scheduler on a Governor's pool."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, setup.blocks)
        options = PoolOptions(block_tokens=BLOCK_TOKENS, evict_ahead=1, scrub_batch=4)
        self.governor = Governor(
            Pools(lambda _: self.device.memory, setup.blocks, options),
            table(setup.policy),
            keyring(setup.clock),
            self.ledger_port,
            clock=setup.clock,
        )
        self._handles: dict[ToyRequest, object] = {}
        self._capabilities = Capabilities(
            "native toy on the Governor", BLOCK_TOKENS, setup.blocks, setup.shards, lacks=_LACKS
        )

    @property
    def capabilities(self) -> Capabilities:
        """See `EngineUnderTest`."""
        return self._capabilities

    # -- requests ------------------------------------------------------------------------------------------------------

    def start(self, request: ToyRequest) -> bool:
        """Admit the request, which attaches and allocates in one call."""
        if request.principal is None:
            self.refuse(request, "no valid identity")
            return False
        answer = self.governor.admit(
            request.principal,
            _MODEL,
            request.tokens,
            request_id=(request.number, request.epoch),
            hints=request.hints,
            lookahead_tokens=request.ask.max_tokens - len(request.output),
            is_resumed=bool(request.output),
        )
        if not isinstance(answer, Admission):
            if not isinstance(answer, Deferred):
                self.refuse(request, answer.reason)
            return False
        self._handles[request] = answer.request_id
        request.table = answer.blocks.tolist()
        request.sent = request.landed = request.cached_tokens = answer.hit_tokens
        for block in request.table[answer.hit_tokens // BLOCK_TOKENS :]:
            self.device.handed_out(block, request.number)
        return True

    def grow(self, request: ToyRequest) -> bool:
        """Make room for one more accepted token; the tail of a fork is copied where it was shared."""
        handle = self._handles[request]
        if self.governor.extend_many([handle], [request.tokens[-1]]):
            return False
        before = len(request.table)
        request.table = self.governor.blocks(handle).tolist()
        for block in request.table[before:]:
            self.device.handed_out(block, request.number)
        return True

    def computed(self, request: ToyRequest) -> None:
        """Make the whole blocks among them reusable from now on."""
        self.governor.commit([self._handles[request]], [request.landed])

    def give_back(self, request: ToyRequest, cause: str) -> None:
        """Release the request; release is idempotent in the Governor."""
        handle = self._handles.pop(request, None)
        if handle is not None:
            self.governor.release(handle, cause)

    def fork(self, request: object) -> object:
        """Return a second request on the same blocks."""
        parent = self.requests[request]
        while self.device.stream:
            self.device.retire()
        child = self.requests[self.queue(parent.ask, parent.principal, parent.hints, like=parent)]
        if parent.state != RUNNING:
            return child.number
        answer = self.governor.fork(self._handles[parent], (child.number, 0))
        if not isinstance(answer, Admission):
            return child.number  # it waits, and is admitted by itself
        self.waiting.remove(child)
        self.running.append(child)
        child.state, self._handles[child] = RUNNING, answer.request_id
        child.table, child.cached_tokens = answer.blocks.tolist(), len(child.ask.tokens)
        child.sent, child.landed = parent.sent, parent.landed
        return child.number

    # -- steps ---------------------------------------------------------------------------------------------------------

    def dispatch(self, work: list[Work]) -> None:
        """Take the Governor's step, then one device step under a fence over everything that runs."""
        self._tick()
        if work:
            fence = self.fence()
            self.device.submit([*work, Call(partial(self.governor.retire, fence))])
        self.retire_due(submitted=bool(work))

    def fence(self) -> int:
        """Open a fence over the blocks of everything that runs, which the coming step may touch."""
        return self.governor.fence([self._handles[one] for one in self.running])

    def _tick(self) -> None:
        over = set(self.governor.step())
        for request, handle in list(self._handles.items()):
            if handle in over:
                self.end(request, ABORTED, "active-max")

    def idle(self, microseconds: int) -> None:
        """Run only the timer."""
        while microseconds > 0:
            stride = min(TIMER_US, microseconds)
            self.clock.advance(stride)
            microseconds -= stride
            self._tick()

    # -- administration ------------------------------------------------------------------------------------------------

    def activate(self, policy: str) -> None:
        """Activate a new policy revision."""
        self.revision += 1
        self.governor.activate(table(policy, self.revision), actor="conformance")

    def erase(self, selector: Selector) -> None:
        """Erase in the Governor; the engine drops the requests that the Governor aborted."""
        self.governor.erase(selector)
        live = set(self.governor.running)
        for request, handle in list(self._handles.items()):
            if handle not in live:
                self.end(request, ABORTED, "erased")

    def take_epochs(self, known: KnownEpochs) -> None:
        """Take erase epochs as a worker that learns of them."""
        self.governor.take_epochs(known, NEVER_US)

    def scan(self) -> list[str]:
        """Return the findings of the Governor's orphan scan."""
        return [str(finding) for finding in self.governor.scan()]

    def check(self) -> list[str]:
        """Return the violated invariants, recomputed."""
        return self.governor.check()

    def close(self) -> None:
        """Retire everything in flight, and end everything."""
        for request in [*self.waiting, *self.running]:
            self.end(request, ABORTED, "shutdown")
        while self.device.stream:
            self.device.retire()
        self.governor.close()

    # -- evidence ------------------------------------------------------------------------------------------------------

    def free_blocks(self) -> tuple[int, ...]:
        """Return the clean ring."""
        blocks: list[int] = []
        for partition in self.governor.managers[0].pool.partitions:
            places = range(partition.clean_head, partition.clean_head + partition.clean_count)
            blocks += [int(partition.clean_ring[at % partition.size]) for at in places]
        return tuple(blocks)

    def indexed(self) -> frozenset[bytes]:
        """Return nothing: an engine without events is not asked."""
        return frozenset()

    def events(self) -> list[BlockEvent]:
        """Return nothing: there are no events yet."""
        return []
