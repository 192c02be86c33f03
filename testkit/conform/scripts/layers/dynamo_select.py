"""Whom does Dynamo's SelectionService tell where a prompt's blocks are?

    python dynamo_select.py forged-salt        # needs: ai-dynamo-runtime, pyzmq and msgspec

It runs without etcd or NATS. Workers are publishers on loopback that tell blocks in vLLM's form, under a salt.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import struct
import sys
import time
from typing import Any

BLOCK, BLOCKS, CHAINS = 16, 16, 40
os.environ |= {"DYN_LOG": "error"}


def overlap(answer: dict[str, Any]) -> int:
    """The most blocks that any worker is said to have."""
    scored = answer.get("scores") or answer.get("workers") or []
    found = [
        each.get("overlap_blocks", each.get("device_blocks", 0)) for each in scored if isinstance(each, dict)
    ]
    return max([0, *(value or 0 for value in found)])


async def _asked(salts: dict[str, str | None]) -> dict[str, int]:
    """Of `CHAINS` prompts of one tenant, how many somebody with each salt is told of."""
    import msgspec
    import zmq
    from dynamo.llm import SelectionService

    context = zmq.Context()
    publisher = context.socket(zmq.PUB)
    publisher.set_hwm(0)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    service = SelectionService(indexer_threads=1)
    worker = {
        "worker_id": 1,
        "model_name": "toy",
        "block_size": BLOCK,
        "endpoint": "http://127.0.0.1:20000",
        "kv_events_endpoint": f"tcp://127.0.0.1:{port}",
        "data_parallel_start_rank": 0,
        "data_parallel_size": 1,
        "total_kv_blocks": 100_000,
        "max_num_batched_tokens": 8192,
    }
    await service.upsert_worker(worker)
    await asyncio.sleep(2)
    chance, prompts = random.Random(3), []  # noqa: S311 - prompts are no secrets
    for number in range(CHAINS):
        tokens = [chance.randrange(50_000) for _ in range(BLOCK * BLOCKS)]
        prompts.append(tokens)
        event = {
            "type": "BlockStored",
            "block_hashes": [number * BLOCKS + block + 1 for block in range(BLOCKS)],
            "parent_block_hash": None,
            "token_ids": tokens,
            "block_size": BLOCK,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "cache_salt": "salt-of-acme",
        }
        batch = msgspec.msgpack.encode([time.time(), [event], 0])
        publisher.send_multipart([b"", struct.pack(">Q", number), batch])
    await asyncio.sleep(3)
    told = {}
    for name, salt in salts.items():
        scope = {} if salt is None else {"cache_salt": salt}
        asked = [{"model_name": "toy", "token_ids": tokens, **scope} for tokens in prompts]
        told[name] = sum([overlap(await service.overlap_scores(each)) > 0 for each in asked])
    service.shutdown()
    context.destroy(linger=0)
    return told


def main(case: str) -> dict[str, Any]:
    """What was seen."""
    told = asyncio.run(_asked({"own": "salt-of-acme", "other": "another", "none": None}))
    assert told["own"] == CHAINS, f"void: its owner is told of {told['own']} of {CHAINS}"
    if case == "placement-oracle":
        said = f"of {CHAINS} prompts, who names no salt is told of {told['none']}, another salt of {told['other']}"
        return {"found": bool(told["none"] or told["other"]), "evidence": said}
    assert case == "forged-salt"
    said = f"whoever names the salt is told of {told['own']} of {CHAINS} prompts; nobody checks who that is"
    return {"found": True, "evidence": said}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
