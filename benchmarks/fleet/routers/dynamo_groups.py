"""Which workers Dynamo's `SelectionService` chooses among, by each of its filters of a request.

    benchmarks/dynamo_env.sh
    .venv-dynamo/bin/python benchmarks/fleet/routers/dynamo_groups.py > benchmarks/results/dynamo-groups.json

Runs in Dynamo's own environment. Workers 1 to 4 are in the default routing group, 1 with the taint `east-1`, the others
with `west-1`; 5 and 6 are in the routing group `east-1`. Each row asks as many times, each time for another prompt. The
control has no filter: without more than one worker in it the table is void.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from importlib.metadata import version
from typing import Any

import zmq
from dynamo.llm import SelectionService

from kvcustody.lab.fleet.dynamo_selection import MODEL, EventSource

ASKED, WORKERS, IN_GROUP = 1000, 6, 4
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "routing_group: east-1": {"routing_group": "east-1"},
    "routing_group: elsewhere": {"routing_group": "elsewhere"},
    "allowed_worker_ids: [2]": {"allowed_worker_ids": [2]},
    "allowed_worker_ids: [9]": {"allowed_worker_ids": [9]},
    "allowed_worker_ids: []": {"allowed_worker_ids": []},
    "required_taints: [east-1]": {"routing_constraints": {"required_taints": ["east-1"]}},
    "required_taints: [elsewhere]": {"routing_constraints": {"required_taints": ["elsewhere"]}},
    "a field that it does not know": {"placement": "east-1"},
}


async def probe() -> dict[str, Any]:
    """How often each worker was chosen, and how often none, by filter."""
    context, service = zmq.Context(), SelectionService(indexer_threads=1)
    for number in range(1, WORKERS + 1):
        record = EventSource(context, number).record | {"taints": ["east-1" if number == 1 else "west-1"]}
        await service.upsert_worker(record if number <= IN_GROUP else record | {"routing_group": "east-1"})
    await asyncio.sleep(2)
    chance, chosen = random.Random(5), dict[str, dict[str, int]]()
    for name, more in FILTERS.items():
        counts = Counter[str]()
        for _ in range(ASKED):
            tokens = [chance.randrange(50_000) for _ in range(64)]
            try:
                answer = await service.select({"model_name": MODEL, "token_ids": tokens, **more})
                counts[str(answer["worker_id"])] += 1
            except Exception as error:
                counts[f"refused: {error}"] += 1
        chosen[name] = dict(sorted(counts.items()))
    service.shutdown()
    if len(chosen["none"]) < 2:
        raise SystemExit("void: without a filter one worker alone is chosen")
    return {"version": version("ai-dynamo-runtime"), "asked": ASKED, "chosen": chosen}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(probe()), indent=1))
