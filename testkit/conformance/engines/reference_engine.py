"""The reference engine: its own allocator, index and tier, governed through `EnginePort` like a third party's engine.

It is the example of docs/build/engine-port.md. Its duties towards governance, in the order of a request's life:

1. Arrival: `admit`. Each attempt to start: `may_start`, `look_up`, `attachable`, then `attached` and `handed_out`.
2. Whole blocks whose K/V is in memory are indexed under the port's keys, then `published`; nothing else is indexed.
3. Each device step: the scrub order first, under a `fence`. Each transfer has its own fence, and its blocks are pinned:
   they are neither zeroed nor handed out until it ends. Only a published block is stored. A load fills only blocks that
   the port lets the request read, after their scrub.
4. Any end: `release`, once or often. A preempted request's residency is succeeded by `resume`.

`ReferenceControl` has the orders that the port may give in return, and the engine's own books that the port may read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.allocator.external.scrub_queue import ScrubOrder
from kvcustody.allocator.pool.accounting import Domain
from kvcustody.allocator.pool.block_state import NEVER_US
from kvcustody.allocator.pool.memory_protocol import ScrubResult
from kvcustody.governance.admission_outcome import AdmissionRefused
from kvcustody.governance.edge.erase_epochs import KnownEpochs
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.external.engine_control import EngineView
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.governance.identity.principal import Principal
from kvcustody.integrations.events.block_event import BlockEvent, EventScope, removed, scope_of, stored
from kvcustody.testkit.conformance.deployment import keyring, table, toy_model
from kvcustody.testkit.conformance.engine_protocol import (
    ABORTED,
    OVER,
    RUNNING,
    Capabilities,
    Setup,
    TierObject,
)
from kvcustody.testkit.conformance.engines.reference_blocks import ReferenceBlocks
from kvcustody.testkit.conformance.engines.reference_tier import ReferenceTier, TierCopy
from kvcustody.testkit.conformance.engines.toy_device import Call, Say, ToyScrub, Work, Write
from kvcustody.testkit.conformance.engines.toy_engine import BLOCK_TOKENS, ToyEngine, ToyRequest

TIMER_US = 250_000  # an idle engine looks at the clock this often while it has something due
_MODEL = toy_model(BLOCK_TOKENS)


class ReferenceRequest:
    """The engine's facts about a request besides its table: its residency, its keys, and the indexed part."""

    def __init__(self, residency: ExternalResidency) -> None:
        self.residency = residency
        self.keys: list[bytes] = []
        self.published = 0
        self.loading = 0  # blocks on their way from the tier


class ReferenceEngine(ToyEngine):
    """The toy scheduler on its own allocator, with a tier behind it."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, setup.blocks)
        self.blocks = ReferenceBlocks(setup.blocks)
        self.far = ReferenceTier()
        self.admitted: dict[ToyRequest, ReferenceRequest] = {}
        self.loads: list[Work] = []  # begun in the coming step, behind its scrubs
        self.pool = ExternalPool(setup.blocks, shards=setup.shards, bytes_per_block=self.device.memory.bytes_per_block)
        self.port = EnginePort(
            self.pool,
            ReferenceControl(self),
            table(setup.policy),
            keyring(setup.clock),
            self.ledger_port,
            clock=setup.clock,
            block_tokens=BLOCK_TOKENS,
        )
        self.port.count_tokens(lambda number: len(self.requests[number].tokens))
        self._scopes: dict[int, EventScope] = {}
        self._events: list[BlockEvent] = []
        self._capabilities = Capabilities(
            "reference engine on the engine port", BLOCK_TOKENS, setup.blocks, setup.shards
        )

    @property
    def capabilities(self) -> Capabilities:
        """The reference engine's properties; it lacks nothing."""
        return self._capabilities

    # -- a request's life ----------------------------------------------------------------------------------------------

    def arrive(self, request: ToyRequest) -> None:
        """Admit the request, or continue a preempted request's residency."""
        known = self.admitted.get(request)
        answer: ExternalResidency | AdmissionRefused
        if known is not None:
            answer = self.port.resume(known.residency, request.tokens)
        else:
            answer = self.port.admit(
                request.principal,
                _MODEL,
                request.tokens,
                request_id=request.number,
                hints=request.hints,
                max_tokens=request.ask.max_tokens - len(request.output),
            )
        if isinstance(answer, AdmissionRefused):
            self.refuse(request, answer.reason)
        else:
            self.admitted[request] = ReferenceRequest(answer)

    def start(self, request: ToyRequest) -> bool:
        """Attach the reusable blocks, allocate the others, and start loading what the tier has."""
        mine = self.admitted[request]
        if self.port.may_start(mine.residency) is not None:
            return False
        looked = self.port.look_up(mine.residency, self.blocks.find)
        mine.keys = list(looked.keys)
        hit_blocks = self.find(mine.residency, looked.keys[: looked.readable])
        need = -(-len(request.tokens) // BLOCK_TOKENS) - len(hit_blocks)
        if self.blocks.room(hit_blocks) < need:
            return False
        self.blocks.share(hit_blocks)
        self.port.attached(mine.residency, hit_blocks)
        new = self.allocate(mine.residency, request, need)
        request.table = hit_blocks + new
        request.cached_tokens = request.sent = request.landed = BLOCK_TOKENS * len(hit_blocks)
        mine.published = len(hit_blocks)
        if self.setup.tier:
            self.load(request, mine, looked.readable)
        return True

    def find(self, residency: ExternalResidency, keys: Sequence[bytes]) -> list[int]:
        """Return the leading indexed blocks that the port lets this request attach now."""
        hit_blocks: list[int] = []
        for key in keys:
            block = self.blocks.find(key)
            if block < 0:
                break
            hit_blocks.append(block)
        return hit_blocks[: self.port.attachable(residency, hit_blocks)]

    def allocate(self, residency: ExternalResidency, request: ToyRequest, count: int) -> list[int]:
        """Allocate `count` blocks; the policy chooses what is evicted first, then our own order."""
        short = count - len(self.blocks.free)
        if short > 0:
            for block in self.port.victims(short):
                self.forget(block, "evicted")
        while len(self.blocks.free) < count:
            oldest = self.blocks.oldest()
            self.forget(oldest, "evicted")
            self.port.unpublished([oldest], "evicted")
        new = self.blocks.take(count)
        self.port.handed_out(residency, new)
        for block in new:
            self.device.handed_out(block, request.number)
        return new

    def grow(self, request: ToyRequest) -> bool:
        """Make room for an accepted token: the key of a block that it completes, and a block for the next token."""
        mine = self.admitted[request]
        mine.keys += self.port.extend_keys(mine.residency, request.tokens[-1:])
        if len(request.tokens) <= len(request.table) * BLOCK_TOKENS:
            return True
        if self.blocks.room() < 1:
            return False
        request.table += self.allocate(mine.residency, request, 1)
        return True

    def spoke(self, request: ToyRequest) -> None:
        """Report the first token, and where it had to wait."""
        self.port.first_token(self.admitted[request].residency, request.cached_tokens)

    def computed(self, request: ToyRequest) -> None:
        """Index the whole computed blocks, each behind its parent."""
        mine = self.admitted[request]
        while mine.published < min(request.landed // BLOCK_TOKENS, len(mine.keys)):
            at = mine.published
            before = -1 if at == 0 else self.blocks.find(mine.keys[at - 1])
            if at and before < 0:
                break  # its parent has ended: what follows could not be reached
            self.publish(request, mine, at, before)
            mine.published += 1

    def publish(self, request: ToyRequest, mine: ReferenceRequest, at: int, before: int) -> None:
        """Index one block, report it to the port and the routers, and start storing it."""
        residency, block, key = mine.residency, request.table[at], mine.keys[at]
        if not residency.publishes or not self.blocks.remember(key, block):
            return
        self.port.published(residency, [block], before, keys=[key])
        self._scopes[block] = scope_of(residency.domain, self.revision)
        self._events.append(
            stored(
                self._scopes[block],
                key,
                residency=residency.id,
                parent=mine.keys[at - 1] if at else b"",
                block_tokens=BLOCK_TOKENS,
            )
        )
        if self.setup.tier and self.port.may_offload(residency):
            self.store(request, residency, at)

    def forget(self, block: int, cause: str) -> None:
        """Remove a block from the index and tell the routers."""
        key = self.blocks.forget(block)
        if key is not None:
            self._events.append(removed(self._scopes.pop(block), key, cause=cause))

    def give_back(self, request: ToyRequest, cause: str) -> None:
        """Give up every block. The port goes first: it removes what it ends from the index before the blocks are
        free.
        """
        mine = self.admitted.get(request)
        if mine is None:
            return
        mine.loading = 0
        self.port.release(mine.residency, cause)
        blocks, request.table = request.table, []
        self.blocks.give_back(blocks)

    def fork(self, request: object) -> object:
        """Return a second request of the same principal: it attaches the first one's published blocks and computes the
        others.
        """
        parent = self.requests[request]
        return self.queue(parent.ask, self.identity_of_fork(parent), parent.hints, like=parent)

    def identity_of_fork(self, parent: ToyRequest) -> Principal | None:
        """Return the parent's principal."""
        return parent.principal

    # -- transfers -----------------------------------------------------------------------------------------------------

    def store_name(self, request: ToyRequest, at: int, key: bytes) -> bytes:
        """Return a block's name in the tier when it is stored: its key, which carries its scope."""
        return key

    def load_name(self, request: ToyRequest, at: int, key: bytes) -> bytes:
        """Return the name under which a block is looked up in the tier."""
        return key

    def store(self, request: ToyRequest, residency: ExternalResidency, at: int) -> None:
        """Start storing a block that was just published."""
        block, key = request.table[at], self.admitted[request].keys[at]
        name, domain = self.store_name(request, at, key), residency.domain
        until_us = self.clock.now_us() + min(domain.idle_us, domain.absolute_us)
        self.far.start(partial(self._stored, name, block, domain, until_us, self.begin_transfer([block])))

    def _stored(self, name: bytes, block: int, domain: Domain, until_us: int, fence: int) -> None:
        self.far.copies[name] = TierCopy(self.device.get(block), domain, until_us)
        self.end_transfer([block], fence)

    def load(self, request: ToyRequest, mine: ReferenceRequest, readable: int) -> None:
        """Start loading the leading readable blocks that the tier has, into newly allocated blocks."""
        now_us = self.clock.now_us()
        for at in range(mine.published, readable):
            name = self.load_name(request, at, mine.keys[at])
            if not self.far.has(name, now_us):
                break
            block = request.table[at]
            fence = self.begin_transfer([block])
            loaded = partial(self._loaded, request, request.epoch, block, self.far.copies[name].data, fence)
            self.loads.append(Call(partial(self.far.start, loaded)))
            mine.loading += 1

    def _loaded(self, request: ToyRequest, epoch: int, block: int, data: bytes, fence: int) -> None:
        self.device.put(block, data)
        self.end_transfer([block], fence)
        if request.state != RUNNING or request.epoch != epoch:
            return  # it went while the transfer was on its way
        mine = self.admitted[request]
        mine.loading -= 1
        request.cached_tokens += BLOCK_TOKENS
        if not mine.loading:
            request.sent = request.landed = request.cached_tokens
            self.computed(request)

    def begin_transfer(self, blocks: Iterable[int]) -> int:
        """Start device work outside the compute stream: its blocks are neither moved nor zeroed until it ends."""
        self.blocks.pin(blocks)
        return self.port.fence()

    def end_transfer(self, blocks: Iterable[int], fence: int) -> None:
        """End such device work."""
        self.port.retire(fence)
        self.blocks.unpin(blocks)

    def is_loading(self, request: ToyRequest) -> bool:
        """Return whether some of its blocks are being loaded from the tier."""
        return self.admitted[request].loading > 0

    def hold_transfers(self, held: bool) -> None:
        """Hold the copy stream, or release it."""
        self.far.is_held = held

    def tier(self) -> list[TierObject]:
        """Return everything in the tier."""
        return [TierObject(name, copy.data) for name, copy in self.far.copies.items()]

    # -- steps ---------------------------------------------------------------------------------------------------------

    def dispatch(self, work: list[Work]) -> None:
        """Take one device step under a fence: the port's scrubs, then loads, then the work."""
        self.far.run()
        order = self.port.step()
        step: list[Work] = [*self.first(order), *self.loads, *work]
        self.loads = []
        if step:
            fence = self.port.fence()
            touched = {block for one in work if isinstance(one, Write | Say) for block in one.table}
            self.blocks.pin(touched)
            self.device.submit([*step, Call(partial(self.end_transfer, touched, fence))])
        self.retire_due(submitted=bool(step))

    def first(self, order: ScrubOrder | None) -> list[Work]:
        """Return the scrubs that precede everything else in the step."""
        return [] if order is None else [ToyScrub(order.batches, partial(self._scrubbed, order.number))]

    def _scrubbed(self, number: int, results: list[list[ScrubResult]]) -> None:
        for shard, answers in enumerate(results):
            self.port.scrubbed(number, shard, answers, self.device.memory.scrubbed(shard))

    def idle(self, microseconds: int) -> None:
        """Run only the timer."""
        end_us = self.clock.now_us() + microseconds
        while (left := end_us - self.clock.now_us()) > 0:
            self.clock.advance(min(TIMER_US, left))
            self.tick()

    def tick(self) -> None:
        """Do what an idle engine does when its timer fires."""
        self.far.run()
        self.far.sweep(self.clock.now_us())
        if self.port.has_work():
            self.dispatch([])

    # -- administration ------------------------------------------------------------------------------------------------

    def activate(self, policy: str) -> None:
        """Activate a new policy revision."""
        self.revision += 1
        self.port.activate(table(policy, self.revision), actor="conformance")

    def erase(self, selector: Selector) -> None:
        """End custody in the port, and the tier's copies of closed domains with it."""
        self.port.erase(selector)
        self.far.sweep(self.clock.now_us())

    def take_epochs(self, known: KnownEpochs) -> None:
        """Take erase epochs as a worker that learns of them."""
        self.port.take_epochs(known, NEVER_US)

    def scan(self) -> list[str]:
        """Return the findings of the port's orphan scan."""
        return [str(finding) for finding in self.port.scan()]

    def check(self) -> list[str]:
        """Return the violated invariants of the port and of the engine."""
        return [*self.port.check(), *self.blocks.check()]

    def close(self) -> None:
        """End everything; the last order leaves every byte zero."""
        for request in list(self.requests.values()):
            self.end(request, ABORTED, "shutdown")
        self.hold_transfers(False)
        while self.device.stream:
            self.device.retire()
        self.far.run()
        self.port.close()
        self.dispatch([])
        self.port.step()

    # -- evidence ------------------------------------------------------------------------------------------------------

    def free_blocks(self) -> tuple[int, ...]:
        """Return the free list."""
        return tuple(self.blocks.free)

    def indexed(self) -> frozenset[bytes]:
        """Return the keys of the prefix index."""
        return frozenset(self.blocks.index)

    def events(self) -> list[BlockEvent]:
        """Return the block events since the last call."""
        taken, self._events = self._events, []
        return taken

    def drop_index(self) -> None:
        """Drop every index entry that is not in use."""
        blocks = list(self.blocks.unused)
        for block in blocks:
            self.forget(block, "reset")
        self.port.unpublished(blocks, "reset")


class ReferenceControl:
    """The orders that the port may give (`EngineControl`)."""

    def __init__(self, engine: ReferenceEngine) -> None:
        self._engine = engine

    def evict(self, blocks: Sequence[int]) -> None:
        """Evict these blocks; unreferenced ones are free from then on."""
        for block in blocks:
            self._engine.forget(block, "ended")

    def abort(self, request_ids: Sequence[object], cause: str) -> None:
        """Abort these requests."""
        for request_id in request_ids:
            self._engine.end(self._engine.requests[request_id], ABORTED, cause)

    def withhold(self, blocks: Sequence[int]) -> None:
        """Keep these blocks, which never become zero, out of the free list."""
        for block in blocks:
            self._engine.blocks.withhold(block)

    def wake(self) -> None:
        """Do nothing: the toy engine's timer runs often enough."""

    def view(self) -> EngineView:
        """Return the engine's own books."""
        blocks = self._engine.blocks
        indexed = np.zeros(blocks.count, dtype=np.bool_)
        indexed[list(blocks.key_of)] = True
        live = frozenset(one.number for one in self._engine.requests.values() if one.state not in OVER)
        return EngineView(blocks.refs.copy(), indexed, live, blocks.allocated)
