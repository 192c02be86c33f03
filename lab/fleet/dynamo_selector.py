"""Dynamo's `SelectionService` over simulated workers: one JSON request per input line, one JSON answer per output line.

Runs in Dynamo's own environment, which `dynamo_router` does; nothing of kvcustody is imported.

    {"place": NAME, "blocks": [1, 2]}        the worker that it selects, and books the request for
    {"stored": WORKER, "name": NAME, "blocks": [1, 2], "keys": [3, 4], "known": 1}, {"removed": WORKER, "keys": [3]}
    {"prefilled": SELECTION}, {"ended": SELECTION}

Before it selects, it waits until the service has read what workers told: no select is of an older moment than its
question.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from typing import Any

_FORM = importlib.import_module("dynamo_selection")  # a script's neighbour
BLOCK, MODEL = _FORM.BLOCK_TOKENS, _FORM.MODEL
_READ_SECONDS = 30.0
_MARK, _MARKS = "kvcustody-mark", 1 << 60  # the name of marks, and above what their hashes are


def tokens_of(blocks: list[int]) -> list[int]:
    """Return a block's number as tokens: equal numbers give equal tokens."""
    return [block * BLOCK + place & 0x7FFFFFFF for block in blocks for place in range(BLOCK)]


class DynamoSelector:
    """The service, and one event publisher per worker."""

    def __init__(self, workers: int) -> None:
        context = importlib.import_module("zmq").Context()
        service = importlib.import_module("dynamo.llm").SelectionService
        self._service = service(indexer_threads=1)
        self._sources = [_FORM.EventSource(context, place + 1) for place in range(workers)]
        self._marks = [0] * workers  # of the last mark that each worker told of, behind what it told
        self._unread: set[int] = set()

    async def register(self, blocks_max: int) -> None:
        """Register the workers. Their queues have no bound, because no time passes while the service waits."""
        bounds = {"total_kv_blocks": blocks_max, "max_num_batched_tokens": 1 << 30}
        for source in self._sources:
            await self._service.upsert_worker(source.record | bounds)
        for place in range(len(self._sources)):  # a subscriber that is not there yet misses what is told
            until = time.monotonic() + _READ_SECONDS
            self._mark(place)
            while not await self._is_read(place):
                self._mark(place)
                await asyncio.sleep(0.05)
                if time.monotonic() > until:
                    raise SystemExit("the service reads no events")
            self._unread.clear()

    async def place(self, name: str, blocks: list[int]) -> dict[str, Any]:
        """Select a worker and book the request."""
        until = time.monotonic() + _READ_SECONDS
        while self._unread:
            worker = next(iter(self._unread))
            if await self._is_read(worker):
                self._unread.discard(worker)
            elif time.monotonic() > until:
                raise SystemExit("the service does not read what a worker told")
        asked = {"model_name": MODEL, "token_ids": tokens_of(blocks), "cache_salt": name}
        answer = await self._service.select_and_reserve(asked)
        return {"worker": answer["worker_id"] - 1, "selection": answer["selection_id"]}

    def stored(self, worker: int, name: str, blocks: list[int], keys: list[int], known: int = 0) -> None:
        """Publish that a worker has a prompt's blocks; it had the first `known` of them before. `keys` are their
        hashes.
        """
        self._store(worker, name, blocks[known:], keys[known:], keys[known - 1] if known else None)
        self._mark(worker)

    def removed(self, worker: int, keys: list[int]) -> None:
        """Publish that a worker no longer has these blocks."""
        self._sources[worker].remove(keys)

    def _store(self, worker: int, name: str, blocks: list[int], keys: list[int], parent: int | None) -> None:
        self._sources[worker].store(keys, tokens_of(blocks), name, parent)

    def _mark(self, worker: int) -> None:
        """Publish a marker block: once it is found, all earlier events have been read."""
        if self._marks[worker]:
            self.removed(worker, [_MARKS + self._marks[worker]])
        self._marks[worker] += 1
        self._store(worker, _MARK, [self._marks[worker]], [_MARKS + self._marks[worker]], None)
        self._unread.add(worker)

    async def _is_read(self, worker: int) -> bool:
        return await self._overlap(worker, _MARK, [self._marks[worker]]) > 0

    async def prefilled(self, selection: str) -> None:
        """Report that the request's first token was computed."""
        await self._service.prefill_complete(selection)

    async def ended(self, selection: str) -> None:
        """Report that the request ended."""
        await self._service.free_reservation(selection)

    async def _overlap(self, worker: int, name: str, blocks: list[int]) -> int:
        asked = {"model_name": MODEL, "token_ids": tokens_of(blocks), "cache_salt": name}
        answer = await self._service.overlap_scores(asked)
        for item in answer.get("scores") or answer.get("workers") or []:
            if item.get("worker_id") == worker + 1:
                return int(item.get("overlap_blocks", item.get("device_blocks", 0)) or 0)
        return 0


async def main(workers: int, blocks_max: int) -> None:
    """Answer requests until the input ends."""
    selector = DynamoSelector(workers)
    await selector.register(blocks_max)
    print(json.dumps({"workers": workers}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "place" in asked:
            print(json.dumps(await selector.place(asked["place"], asked["blocks"])), flush=True)
        elif "stored" in asked:
            selector.stored(asked["stored"], asked["name"], asked["blocks"], asked["keys"], asked["known"])
        elif "removed" in asked:
            selector.removed(asked["removed"], asked["keys"])
        elif "prefilled" in asked:
            await selector.prefilled(asked["prefilled"])
        else:
            await selector.ended(asked["ended"])


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
