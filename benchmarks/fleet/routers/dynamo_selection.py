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
import struct
import time
from importlib.metadata import version
from typing import Any

import msgspec
import zmq
from dynamo.llm import SelectionService

BLOCK, BLOCKS, ASKED = 16, 64, 100


def overlap(answer: dict[str, Any]) -> int:
    """The most blocks that any worker is said to have."""
    scored = answer.get("scores") or answer.get("workers") or []
    found = [
        item.get("overlap_blocks", item.get("device_blocks", 0)) for item in scored if isinstance(item, dict)
    ]
    return max([0, *(value or 0 for value in found)])


async def probe(workers: int, chains: int) -> dict[str, Any]:
    """Publish chains under namespaces, then ask for each under its own, another, none, and in an unknown field."""
    context, publishers = zmq.Context(), []
    service = SelectionService(indexer_threads=1)
    for place in range(workers):
        publisher = context.socket(zmq.PUB)
        publisher.set_hwm(0)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        publishers.append(publisher)
        worker = {
            "worker_id": place + 1,
            "model_name": "toy",
            "block_size": BLOCK,
            "endpoint": f"http://127.0.0.1:{20_000 + place}",
            "kv_events_endpoint": f"tcp://127.0.0.1:{port}",
            "data_parallel_start_rank": 0,
            "data_parallel_size": 1,
            "total_kv_blocks": 100_000,
            "max_num_batched_tokens": 8192,
        }
        await service.upsert_worker(worker)
    await asyncio.sleep(2)
    chance, told = random.Random(3), []
    for number in range(chains):
        place = number % workers
        tokens = [chance.randrange(50_000) for _ in range(BLOCK * BLOCKS)]
        namespace = f"namespace-{number % 128}"
        told.append((tokens, namespace))
        event = {
            "type": "BlockStored",
            "block_hashes": [number * BLOCKS + block + 1 for block in range(BLOCKS)],
            "parent_block_hash": None,
            "token_ids": tokens,
            "block_size": BLOCK,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "cache_salt": namespace,
        }
        batch = msgspec.msgpack.encode([time.time(), [event], 0])
        publishers[place].send_multipart([b"", struct.pack(">Q", number // workers), batch])
    await asyncio.sleep(4)
    asked = told[:ASKED]
    counts = {"own": 0, "foreign": 0, "none": 0, "unknown_field": 0}
    for tokens, namespace in asked:
        question = {"model_name": "toy", "token_ids": tokens}
        for name, more in (
            ("own", {"cache_salt": namespace}),
            ("foreign", {"cache_salt": "another"}),
            ("none", {}),
            ("unknown_field", {"tenant_id": namespace}),
        ):
            counts[name] += overlap(await service.overlap_scores(question | more)) > 0
    taken = []
    for tokens, namespace in asked * 5:
        began = time.perf_counter()
        await service.select({"model_name": "toy", "token_ids": tokens, "cache_salt": namespace})
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--chains", type=int, default=400)
    given = parser.parse_args()
    print(json.dumps(asyncio.run(probe(given.workers, given.chains))))
