"""Which connectors, tiers and stores for K/V do the packages installed here have?

    python registries.py        # reads vllm, sglang and lmcache, those that are there

A registry is asked for its names; one that this Python cannot load says why.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

# What a registry is called, the package, and the module and class that know its names.
REGISTRIES = (
    ("vllm-connector", "vllm", "vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory"),
    ("vllm-tier", "vllm", "vllm.v1.kv_offload.tiering.factory", "SecondaryTierFactory"),
    ("vllm-offload", "vllm", "vllm.v1.kv_offload.factory", "OffloadingSpecFactory"),
    ("sglang-store", "sglang", "sglang.srt.mem_cache.storage.backend_factory", "StorageBackendFactory"),
)
# LMCache finds its parts by their modules' names, and imports one when it is asked for: so files are listed, and
# neither torch nor a part's own packages are needed.
FOLDERS = (
    ("lmcache-adapter", "lmcache", "v1/distributed/l2_adapters", "_l2_adapter"),
    ("lmcache-connector", "lmcache", "v1/storage_backend/connector", "_connector"),
    ("lmcache-backend", "lmcache", "v1/storage_backend", "_backend"),
    ("lmcache-serde", "lmcache", "v1/distributed/serde", ""),
)
_NO_PARTS = {"__init__", "async_processor", "base", "factory", "key_provider", "utils"}  # of them all


def names(module: str, factory: str) -> list[str]:
    """Return the names in a registry."""
    loaded: Any = importlib.import_module(module)
    return sorted(getattr(loaded, factory)._registry)


def files(package: str, folder: str, ending: str) -> list[str]:
    """Return the modules in a package's folder whose names end with `ending`, without helper modules."""
    spec = importlib.util.find_spec(package)
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    found = {entry for place in places for entry in (Path(place) / folder).iterdir()}
    stems = {entry.stem for entry in found if entry.suffix == ".py" or (entry / "__init__.py").is_file()}
    return sorted(
        stem
        for stem in stems - _NO_PARTS
        if stem.endswith(ending) and not stem.startswith(("base_", "abstract_", "instrumented_"))
    )


def main() -> dict[str, Any]:
    """Return names by registry; for one that cannot be loaded, the reason."""
    registries: dict[str, Any] = {}
    for registry, package, module, factory in REGISTRIES:
        if importlib.util.find_spec(package) is None:
            continue
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                registries[registry] = names(module, factory)
        except Exception as error:
            registries[registry] = f"{type(error).__name__}: {error}"[:200]
    for registry, package, folder, ending in FOLDERS:
        if importlib.util.find_spec(package) is None:
            continue
        try:
            registries[registry] = files(package, folder, ending)
        except OSError as error:
            registries[registry] = f"{type(error).__name__}: {error}"[:200]
    return registries


if __name__ == "__main__":
    print(json.dumps(main()))
