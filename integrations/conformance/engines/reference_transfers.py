"""The reference engine's traffic with its tier: stores and loads under way, their pins and their fences.

1. A store is of a block that is published, a load of blocks that the port lets the request read, and of nothing else.
2. From its start to its end a transfer has a fence, and its blocks are pinned: not zeroed, not handed out.
3. A load begins behind the scrub of the blocks that it fills.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.allocator.pool.accounting import Domain
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.integrations.conformance.engine_protocol import RUNNING, Setup, TierObject
from kvcustody.integrations.conformance.engines.reference_blocks import ReferenceBlocks
from kvcustody.integrations.conformance.engines.reference_tier import ReferenceTier, TierCopy
from kvcustody.integrations.conformance.engines.toy_device import Call, Work
from kvcustody.integrations.conformance.engines.toy_engine import BLOCK_TOKENS, ToyEngine, ToyRequest


class RequestTransfers:
    """What the engine keeps of one request beside its table: its residency, its keys, how much of it is indexed."""

    def __init__(self, residency: ExternalResidency) -> None:
        self.residency = residency
        self.keys: list[bytes] = []
        self.published = 0
        self.loading = 0  # blocks on their way from the tier


class TieredEngine(ToyEngine):
    """A toy engine with blocks of its own and a tier behind them; `port` is opened by its subclass."""

    port: EnginePort

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, setup.blocks)
        self.blocks = ReferenceBlocks(setup.blocks)
        self.far = ReferenceTier()
        self.standing: dict[ToyRequest, RequestTransfers] = {}
        self.loads: list[Work] = []  # begun in the coming step, behind its scrubs

    def store_name(self, request: ToyRequest, at: int, key: bytes) -> bytes:
        """What a block is called in the tier when it is stored: its key, which carries its scope."""
        return key

    def load_name(self, request: ToyRequest, at: int, key: bytes) -> bytes:
        """What is asked of the tier."""
        return key

    def store(self, request: ToyRequest, residency: ExternalResidency, at: int) -> None:
        """Begin to store a block that was just published."""
        block, key = request.table[at], self.standing[request].keys[at]
        name, domain = self.store_name(request, at, key), residency.domain
        until_us = self.clock.now_us() + min(domain.idle_us, domain.absolute_us)
        self.far.start(partial(self._stored, name, block, domain, until_us, self.begin_transfer([block])))

    def _stored(self, name: bytes, block: int, domain: Domain, until_us: int, fence: int) -> None:
        self.far.copies[name] = TierCopy(self.device.get(block), domain, until_us)
        self.end_transfer([block], fence)

    def load(self, request: ToyRequest, mine: RequestTransfers, readable: int) -> None:
        """Begin to load, into blocks that were just handed out, what the tier has of the leading readable ones."""
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
        mine = self.standing[request]
        mine.loading -= 1
        request.cached_tokens += BLOCK_TOKENS
        if not mine.loading:
            request.sent = request.landed = request.cached_tokens
            self.computed(request)

    def begin_transfer(self, blocks: Iterable[int]) -> int:
        """Device work outside the compute stream: its blocks stay where they are, and are not zeroed, until it ends."""
        self.blocks.pin(blocks)
        return self.port.fence()

    def end_transfer(self, blocks: Iterable[int], fence: int) -> None:
        """It has ended."""
        self.port.retire(fence)
        self.blocks.unpin(blocks)

    def is_loading(self, request: ToyRequest) -> bool:
        """Whether blocks of it are on their way from the tier."""
        return self.standing[request].loading > 0

    def hold_transfers(self, held: bool) -> None:
        """Hold the copy stream up, or let it go on."""
        self.far.is_held = held

    def tier(self) -> list[TierObject]:
        """Everything in the tier."""
        return [TierObject(name, copy.data) for name, copy in self.far.copies.items()]
