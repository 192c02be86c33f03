"""To whom does Dynamo's SelectionService reveal where a prompt's blocks are?

    python dynamo_select.py forged-salt        # needs: ai-dynamo-runtime, pyzmq and msgspec

It runs without etcd or NATS. Workers are publishers on loopback that tell blocks in vLLM's form, under a salt.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

BLOCKS, CHAINS = 16, 40
os.environ |= {"DYN_LOG": "error"}
# Its environment need not have the package or repository that this script is of.
sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "lab" / "fleet"))
dynamo_selection: Any = importlib.import_module("dynamo_selection")


async def _asked(salts: dict[str, str | None]) -> dict[str, int]:
    """Return, for each salt, how many of a tenant's `CHAINS` prompts the service reveals to it."""
    import zmq
    from dynamo.llm import SelectionService

    context = zmq.Context()
    source = dynamo_selection.EventSource(context, 1)
    service = SelectionService(indexer_threads=1)
    await service.upsert_worker(source.record)
    await asyncio.sleep(2)
    chance, prompts = random.Random(3), []  # noqa: S311 - prompts are no secrets
    for number in range(CHAINS):
        tokens = [chance.randrange(50_000) for _ in range(dynamo_selection.BLOCK_TOKENS * BLOCKS)]
        prompts.append(tokens)
        source.store(range(number * BLOCKS + 1, (number + 1) * BLOCKS + 1), tokens, "salt-of-acme")
    await asyncio.sleep(3)
    overlaps = {}
    for name, salt in salts.items():
        scope = {} if salt is None else {"cache_salt": salt}
        asked = [{"model_name": dynamo_selection.MODEL, "token_ids": tokens, **scope} for tokens in prompts]
        answers = [await service.overlap_scores(each) for each in asked]
        overlaps[name] = sum(dynamo_selection.overlap(answer) > 0 for answer in answers)
    service.shutdown()
    context.destroy(linger=0)
    return overlaps


def main(case: str) -> dict[str, Any]:
    """Return what was seen."""
    overlaps = asyncio.run(_asked({"own": "salt-of-acme", "other": "another", "none": None}))
    assert overlaps["own"] == CHAINS, f"void: its owner is told of {overlaps['own']} of {CHAINS}"
    if case == "placement-oracle":
        evidence = (
            f"of {CHAINS} prompts, who names no salt is told of {overlaps['none']}, another salt of {overlaps['other']}"
        )
        return {"found": bool(overlaps["none"] or overlaps["other"]), "evidence": evidence}
    assert case == "forged-salt"
    evidence = f"whoever names the salt is told of {overlaps['own']} of {CHAINS} prompts; nobody checks who that is"
    return {"found": True, "evidence": evidence}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
