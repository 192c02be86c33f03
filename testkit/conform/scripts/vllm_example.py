"""Does vLLM's ExampleConnector keep two tenants' blocks of one prompt apart?

python vllm_example.py salt-dropped        # needs: vllm
"""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
from typing import Any


def main(case: str) -> dict[str, Any]:
    """What was seen."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_connector

    assert case == "salt-dropped"
    kind = example_connector.ExampleConnector
    with tempfile.TemporaryDirectory() as folder:
        made = object.__new__(kind)
        made._storage_path = folder
        tokens = torch.arange(600)
        names = {made._generate_foldername_debug(tokens, []) for _ in ("acme", "beta")}
    salts = inspect.getsource(example_connector).count("cache_salt")
    return {
        "found": len(names) == 1 and salts == 0,
        "evidence": f"600 tokens have {len(names)} folder for two tenants; `cache_salt` is read {salts} times",
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
