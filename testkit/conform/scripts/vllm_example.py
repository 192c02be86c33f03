"""Does vLLM's ExampleConnector keep two tenants' blocks of one prompt apart?

python vllm_example.py salt-dropped        # needs: vllm
"""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any


def main(case: str) -> dict[str, Any]:
    """What was seen."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_connector

    assert case == "salt-dropped"
    given = inspect.signature(example_connector.ExampleConnector._generate_foldername_debug).parameters
    told = [name for name in given if "salt" in name or "tenant" in name]
    read = inspect.getsource(example_connector).count("cache_salt")
    return {
        "found": not told and read == 0,
        "evidence": f"a folder is named by {', '.join(list(given)[1:])}; the module mentions `cache_salt` {read} times",
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
