"""Does Dynamo's index of prefixes tell one tenant's request where another tenant's blocks are?

python dynamo_indexer.py salt-dropped        # needs: ai-dynamo-runtime
"""

from __future__ import annotations

import json
import sys
from typing import Any

BLOCK, BLOCKS = 16, 32


def _stored(hashes: list[int]) -> bytes:
    blocks = [{"block_hash": hash_ & (2**63 - 1), "tokens_hash": hash_} for hash_ in hashes]
    stored = {"parent_hash": None, "blocks": blocks}
    return json.dumps({"event_id": 1, "dp_rank": 0, "data": {"stored": stored}}).encode()


def main(case: str) -> dict[str, Any]:
    """What was seen."""
    from dynamo._core import RadixTree, compute_block_hash_for_seq

    assert case == "salt-dropped"
    tokens = list(range(BLOCK * BLOCKS))
    names = {
        tenant: compute_block_hash_for_seq(tokens, BLOCK, cache_namespace=tenant)
        for tenant in (None, "acme", "beta")
    }
    tree = RadixTree()
    tree.apply_event(1, _stored(names["acme"]))
    found = {tenant: sum(tree.find_matches(names[tenant]).scores.values()) for tenant in names}
    assert found["acme"] == BLOCKS, "own blocks are found"
    foreign = found["beta"] + found[None]
    return {
        "found": foreign > 0,
        "evidence": f"{foreign} of {BLOCKS} blocks of `acme` are told to `beta` and to nobody's namespace",
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
