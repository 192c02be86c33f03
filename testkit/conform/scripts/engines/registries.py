"""Which connectors, tiers and stores for K/V has what is installed here?

    python registries.py        # reads vllm, sglang and lmcache, those that are there

A registry is asked for its names; one that this Python cannot load says why.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import pkgutil
from typing import Any

# What a registry is called, the package, the module and its class; for LMCache the package whose modules are adapters.
REGISTRIES = (
    ("vllm-connector", "vllm", "vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory"),
    ("vllm-tier", "vllm", "vllm.v1.kv_offload.tiering.factory", "SecondaryTierFactory"),
    ("vllm-offload", "vllm", "vllm.v1.kv_offload.factory", "OffloadingSpecFactory"),
    ("sglang-store", "sglang", "sglang.srt.mem_cache.storage.backend_factory", "StorageBackendFactory"),
    ("lmcache-adapter", "lmcache", "lmcache.v1.distributed.l2_adapters", ""),
    ("lmcache-connector", "lmcache", "lmcache.v1.storage_backend.connector", ""),
)


def names(module: str, factory: str) -> list[str]:
    """What is registered there."""
    loaded: Any = importlib.import_module(module)
    if factory:
        return sorted(getattr(loaded, factory)._registry)
    kept = ("_adapter", "_connector")
    found = [each.name for each in pkgutil.iter_modules(loaded.__path__)]
    return sorted(name for name in found if name.endswith(kept) and not name.startswith("base"))


def main() -> dict[str, Any]:
    """Names by registry; of one that cannot be loaded, why."""
    found: dict[str, Any] = {}
    for registry, package, module, factory in REGISTRIES:
        if importlib.util.find_spec(package) is None:
            continue
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                found[registry] = names(module, factory)
        except Exception as error:
            found[registry] = f"{type(error).__name__}: {error}"[:200]
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
