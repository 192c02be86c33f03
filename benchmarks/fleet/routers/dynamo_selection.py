"""Dynamo's `SelectionService` without etcd or NATS: what a namespace in `cache_salt` finds in its index.

Runs in Dynamo's own environment (`benchmarks/routers_env.sh dynamo`), which `probe_routers.py` does. Workers are ZMQ
publishers that tell blocks in vLLM's form. Prints one JSON object.

    .venv-dynamo/bin/python benchmarks/fleet/routers/dynamo_selection.py --workers 8 --chains 400
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from importlib.metadata import version
from typing import Any

import zmq
from dynamo.llm import SelectionService

from kvcustody.lab.fleet.dynamo_selection import BLOCK_TOKENS, MODEL, EventSource, overlap

BLOCKS, ASKED = 64, 100


async def probe(workers: int, chains: int) -> dict[str, Any]:
    """Publish chains under namespaces, then ask for each under its own, another, none, and in an unknown field."""
    context, service = zmq.Context(), SelectionService(indexer_threads=1)
    sources = [EventSource(context, number) for number in range(1, workers + 1)]
    for source in sources:
        await service.upsert_worker(source.record)
    await asyncio.sleep(2)
    chance, stored = random.Random(3), []
    for number in range(chains):
        tokens = [chance.randrange(50_000) for _ in range(BLOCK_TOKENS * BLOCKS)]
        namespace = f"namespace-{number % 128}"
        stored.append((tokens, namespace))
        hashes = range(number * BLOCKS + 1, (number + 1) * BLOCKS + 1)
        sources[number % workers].store(hashes, tokens, namespace)
    await asyncio.sleep(4)
    asked = stored[:ASKED]
    counts = {"own": 0, "foreign": 0, "none": 0, "unknown_field": 0}
    for tokens, namespace in asked:
        request = {"model_name": MODEL, "token_ids": tokens}
        for name, more in (
            ("own", {"cache_salt": namespace}),
            ("foreign", {"cache_salt": "another"}),
            ("none", {}),
            ("unknown_field", {"tenant_id": namespace}),
        ):
            counts[name] += overlap(await service.overlap_scores(request | more)) > 0
    taken = []
    for tokens, namespace in asked * 5:
        began = time.perf_counter()
        await service.select({"model_name": MODEL, "token_ids": tokens, "cache_salt": namespace})
        taken.append((time.perf_counter() - began) * 1e6)
    service.shutdown()
    return {
        "version": version("ai-dynamo-runtime"),
        "workers": workers,
        "asked": len(asked),
        "overlaps": counts,
        "select_us_p50": round(statistics.median(taken)),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--chains", type=int, default=400)
    given = parser.parse_args()
    print(json.dumps(asyncio.run(probe(given.workers, given.chains))))
