"""Two workers tell Dynamo's `SelectionService` one chain: what the second adds to it is found."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from kvcustody.integrations.events import publisher
from kvcustody.integrations.events.block_event import BlockEvent, removed, stored
from kvcustody.integrations.events.publisher import EventPublisher
from kvcustody.lab.fleet.dynamo_selection import BLOCK_TOKENS, MODEL, worker_record
from standins.engines.dynamo.router_world import ALICE, ISSUER, PATIENCE_SECONDS, namespaces

NAMES = namespaces()
ALICES = NAMES.of(ISSUER, "acme", "alice")
BLOCKS = 8
CHAIN, MARKS = 1, 1_000


def keys(worker: int, chain: int, blocks: int) -> list[bytes]:
    """As each worker's own keyring makes them."""
    return [bytes([worker]) + (chain * 100 + at).to_bytes(31, "big") for at in range(blocks)]


def tokens(chain: int, blocks: int = BLOCKS) -> list[int]:
    return [chain * BLOCKS + at for at in range(blocks) for _ in range(BLOCK_TOKENS)]


def blocks_stored(worker: int, chain: int, first: int, last: int) -> BlockEvent:
    """Blocks `first` to before `last` of a chain."""
    mine = keys(worker, chain, last)
    return stored(
        ALICE,
        b"".join(mine[first:]),
        residency=1,
        parent=mine[first - 1] if first else b"",
        block_tokens=BLOCK_TOKENS,
        tokens=tokens(chain, last)[first * BLOCK_TOKENS :],
    )


class Fleet:
    """Two workers with publishers of their own, and the service that reads them."""

    def __init__(self, service: Any, workers: list[EventPublisher]) -> None:
        self._service, self._workers = service, workers
        self._mark = MARKS

    async def register(self) -> None:
        for number, one in enumerate(self._workers, 1):
            await self._service.upsert_worker(worker_record(number, f"http://127.0.0.1:{number}", one.endpoint))
        for number in (1, 2):
            await self.is_read(number)

    async def tell(self, worker: int, *events: BlockEvent) -> None:
        """Tell, and wait until it is read."""
        self._workers[worker - 1].publish(list(events))
        await self.is_read(worker)

    async def is_read(self, worker: int) -> None:
        """Until a block told behind the others is found; told again, for an early one finds no subscriber."""
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            self._mark += 1
            self._workers[worker - 1].publish([blocks_stored(worker, self._mark, 0, 1)])
            for _ in range(20):
                if await self.overlap(worker, self._mark, 1):
                    return
                await asyncio.sleep(0.02)
            assert time.monotonic() < until, "the service reads no events"

    async def overlap(self, worker: int, chain: int = CHAIN, blocks: int = BLOCKS, name: str = ALICES) -> int:
        asked = {"model_name": MODEL, "token_ids": tokens(chain, blocks), "cache_salt": name}
        answer = await self._service.overlap_scores(asked)
        for each in answer.get("scores") or answer.get("workers") or []:
            if each.get("worker_id") == worker:
                return int(each.get("overlap_blocks", each.get("device_blocks", 0)) or 0)
        return 0


def worker() -> EventPublisher:
    return EventPublisher("tcp://127.0.0.1:0", form="dynamo", namespaces=NAMES, tokens_published=True)


def told_by_both() -> list[int]:
    """What the service finds at each worker: both told blocks 1 to 4, and the second 5 to 8 later."""
    from dynamo.llm import SelectionService

    async def asked(workers: list[EventPublisher]) -> list[int]:
        fleet = Fleet(SelectionService(indexer_threads=1), workers)
        await fleet.register()
        await fleet.tell(1, blocks_stored(1, CHAIN, 0, 4))
        await fleet.tell(2, blocks_stored(2, CHAIN, 0, 4))
        await fleet.tell(2, blocks_stored(2, CHAIN, 4, 8))
        found = [await fleet.overlap(1), await fleet.overlap(2)]
        assert await fleet.overlap(2, name=NAMES.of(ISSUER, "globex")) == 0
        await fleet.tell(1, removed(ALICE, b"".join(keys(1, CHAIN, 4)), cause="ended"))
        return [*found, await fleet.overlap(1), await fleet.overlap(2)]

    with worker() as first, worker() as second:
        return asyncio.run(asked([first, second]))


def test_what_a_second_worker_adds_to_a_chain_is_found() -> None:
    assert told_by_both() == [4, 8, 0, 8]


def test_hashes_of_each_workers_own_keys_lose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(publisher, "takes_fleet_hashes", lambda form: False)
    assert told_by_both()[1] < 8
