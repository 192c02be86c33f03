"""Dynamo's indexer fed from the fleet's stream in NATS, as any consumer of it would be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("nats", reason="nats-py is not installed (pip install 'kvcustody[nats]')")

from kvcustody.governance.edge.erase_epochs import EpochScope, KnownEpochs
from kvcustody.integrations.events.block_event import BlockEvent
from kvcustody.integrations.events.dynamo_wire import DynamoWire
from kvcustody.integrations.events.incoming import Hash, Removed, StoredBlocks, read
from kvcustody.integrations.jetstream.keeper_process import StreamKeeper
from kvcustody.integrations.jetstream.publisher import StreamLimits, StreamPublisher, ToldStream
from kvcustody.integrations.jetstream.reader import StreamReader
from standins.engines.dynamo.router_world import (
    ACME,
    ALICE,
    BLOCK,
    BLOCKS,
    GLOBEX,
    ISSUER,
    Indexer,
    RawPublisher,
    indexer,
    namespaces,
    prompt,
    some_removed,
    some_stored,
)
from standins.integrations.jetstream.nats_server import ABSENT, BINARY, NatsServer
from standins.integrations.jetstream.told_world import epochs

pytestmark = pytest.mark.skipif(BINARY is None, reason=ABSENT)
WHOLE, SECONDS = BLOCK * BLOCKS, 30.0
NAMES = namespaces()


class IndexerFeed:
    """A `BlockIndex` that passes what one worker told on to Dynamo's indexer, batch by batch."""

    def __init__(self, engine: RawPublisher) -> None:
        self._engine = engine
        self._held: dict[str, set[Hash]] = {}
        self.forgotten = 0

    def apply(self, worker: str, tenant: str, payload: bytes) -> None:
        held = self._held.setdefault(tenant, set())
        for event in read(payload).events:
            if isinstance(event, StoredBlocks):
                held.update(event.hashes)
            elif isinstance(event, Removed):
                held.difference_update(event.hashes)
        self._engine.forward(payload)

    def forget(self, worker: str, tenant: str) -> None:
        self.forgotten += 1
        if held := self._held.pop(tenant, None):
            self._engine.send({"type": "BlockRemoved", "block_hashes": [*held], "medium": "GPU"})


def encode(events: Sequence[BlockEvent], at: float) -> bytes:
    return DynamoWire(tokens_published=True).payload_of(events, at, 0, "inc", tokens_published=True)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[tuple[Indexer, RawPublisher]]:
    engine = RawPublisher()
    with indexer(engine.endpoint, tmp_path / "log") as made:
        yield made, engine
    engine.close()


def found(index: Indexer, number: int, known: KnownEpochs) -> tuple[int, int, int, int]:
    """What acme's, its subject's, globex's and a nameless request are told of one prompt."""
    owners = (ACME.owner, ALICE.owner, GLOBEX.owner)
    names = [None if owner is None else NAMES.of(*owner, known=known) for owner in owners]
    acme, alice, globex, nobody = (index.tokens_found(prompt(number), name) for name in (*names, None))
    return acme, alice, globex, nobody


def test_it_knows_what_workers_told_and_nobody_elses(index: tuple[Indexer, RawPublisher], tmp_path: Path) -> None:
    dynamo, engine = index
    server = NatsServer(tmp_path)
    feed = IndexerFeed(engine)

    async def until(holds: Callable[[], object]) -> None:
        end = time.monotonic() + SECONDS
        while not await asyncio.to_thread(holds):
            assert time.monotonic() < end, "it did not come to be"
            await asyncio.sleep(0.05)

    async def run() -> None:
        keeper, known = StreamKeeper(server.keeper()), epochs()
        keeper.take(known)
        reader = StreamReader(server.reader("dynamo", "all"), feed)
        limits = StreamLimits(part_blocks=3, beat_seconds=0.1)
        publisher = StreamPublisher(
            server.worker("gpu-1"), ToldStream("gpu-1", NAMES, encode, limits=limits), limits=limits
        )
        tasks = [asyncio.ensure_future(one) for one in (keeper.run(), reader.run())]
        try:
            await until(lambda: keeper.stats.rounds and publisher.stats().is_connected)
            publisher.take_epochs(known)
            publisher.publish([some_stored(1, ACME), some_stored(2, ALICE), some_stored(2, GLOBEX)])
            await until(lambda: found(dynamo, 1, known) == (WHOLE, 0, 0, 0))
            await until(lambda: found(dynamo, 2, known) == (0, WHOLE, WHOLE, 0))
            raised = epochs(EpochScope(ISSUER, "acme", "alice"))
            publisher.take_epochs(raised)  # an erasure: her name ends
            await until(lambda: found(dynamo, 2, known) == (0, 0, WHOLE, 0))
            assert found(dynamo, 1, raised) == (WHOLE, 0, 0, 0)
            server.kill()  # and with it the stream
            publisher.publish([some_removed(1, ACME), some_stored(3, ACME)])
            await asyncio.to_thread(server.start)
            await until(lambda: found(dynamo, 3, raised) == (WHOLE, 0, 0, 0))
            await until(lambda: found(dynamo, 1, raised) == (0, 0, 0, 0))
            assert feed.forgotten, "what was missed came with a snapshot"
        finally:
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(publisher.close)

    try:
        asyncio.run(run())
    finally:
        server.close()
