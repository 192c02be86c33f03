"""Do two tenants' requests with the same prompt get the same keys from LMCache in the engine's process?

    python lmcache_in_process.py salt-dropped        # needs: lmcache

What its vLLM adapter hands to the engine's cache is read from its source: where it never mentions `cache_salt`, no
salt reaches the keys.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

MODULES = (
    "integration/vllm/vllm_v1_adapter.py",
    "integration/vllm/lmcache_connector_v1.py",
    "v1/cache_engine.py",
    "v1/token_database.py",
)


def main(case: str) -> dict[str, Any]:
    """What was seen."""
    assert case == "salt-dropped"
    spec = importlib.util.find_spec("lmcache")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    said = {name: (root / name).read_text().count("cache_salt") for name in MODULES}
    return {
        "found": not any(said.values()),
        "evidence": "; ".join(f"{name}: {count} mentions of `cache_salt`" for name, count in said.items()),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
