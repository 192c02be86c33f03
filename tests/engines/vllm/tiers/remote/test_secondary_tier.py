"""`CustodyTier` below vLLM's own tiering, in two real engines that nobody governs, started with what KServe renders.

The spec is vLLM's but for its copies between device and host, which its own makes on CUDA alone (`ClearTieringSpec`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from standins.engines.vllm.local_engine import BLOCK, environment
from standins.engines.vllm.tier_engines import PREFIX, prompt
from standins.governance.store_servers import StoreServer, ValkeyServer, servers

if TYPE_CHECKING:
    from standins.engines.vllm.local_engine import LocalEngine

RENDERED = {  # by KServe's `kvCacheOffloading`, but for the tiers
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 16 << 20,
        "eviction_policy": "lru",
    },
}


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], StoreServer]]:
    yield from servers(tmp_path_factory)


def test_an_engine_finds_what_another_demoted(
    start: Callable[..., LocalEngine],
    plain: LocalEngine,
    valkey: Callable[[str], StoreServer],
    tmp_path: Path,
) -> None:
    from vllm.config import KVTransferConfig

    server = valkey("valkey")
    assert isinstance(server, ValkeyServer)
    tier = {
        "type": "CustodyTier",
        "module_path": "kvcustody.integrations.vllm.tiers.custody_tier",
        "owner": "acme",
        "seconds": 600,
        "size_bytes": 64 << 20,
        "url": f"valkey://127.0.0.1:{server.port}/0/{tmp_path.name}",
    }
    rendered = json.loads(json.dumps(RENDERED))
    rendered["kv_connector_extra_config"] |= {
        "spec_name": "ClearTieringSpec",
        "spec_module_path": "standins.engines.vllm.clear_offload",
        "secondary_tiers": [tier],
    }

    @contextmanager
    def as_worker(name: str) -> Iterator[None]:
        files = {"ROOT_KEY": "root.key", "KEYRING": "keyring.json", "SHRED_KEYS": "shred.keys"}
        named = {f"KVCUSTODY_{what}_PATH": str(tmp_path / file) for what, file in files.items()}
        with environment(named | {"KVCUSTODY_WORKER_NAME": name, "KVCUSTODY_REMOTE_TIER_TIMEOUT_MS": "5000"}):
            yield

    mine = prompt(1)
    expected = plain.ask(mine, max_tokens=16).tokens
    engines = []
    for name in ("gpu-1", "gpu-2"):
        with as_worker(name):
            engines.append(start(kv_transfer_config=KVTransferConfig(**rendered)))
    first, second = engines
    assert first.ask(mine, salt="one", max_tokens=16).tokens == expected
    first.ask(prompt(2), salt="one", max_tokens=16)
    other = second.ask(mine, salt="two", max_tokens=16)
    assert (other.cached_tokens, other.tokens) == (0, expected), "vLLM's salt keeps them apart"
    answer = second.ask(mine, salt="one", max_tokens=16)
    assert (answer.cached_tokens, answer.tokens) == (PREFIX * BLOCK, expected)
