"""Two governed vLLMs, each with an LMCache server of its own, over one real store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from standins.engines.lmcache.lmcache_server import LMCacheServer
from standins.engines.lmcache.lmcache_site import Site, run, transfer, vouched
from standins.engines.vllm.deployment import CONNECTOR
from standins.engines.vllm.local_engine import BLOCK, LocalEngine
from standins.engines.vllm.tier_engines import BLOCKS, PREFIX, displace, prompt
from standins.governance.store_servers import StoreServer, ValkeyServer, servers
from standins.integrations.chunk_site import POLICY
from standins.waiting import until

REMOTE = POLICY.replace("tiers: [host, nvme]", "tiers: [remote]")
assert REMOTE != POLICY


class Machine(NamedTuple):
    """An engine with the server beside it."""

    engine: LocalEngine
    server: LMCacheServer


@pytest.fixture
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    for server in servers(tmp_path_factory):
        made: StoreServer = server("valkey")
        assert isinstance(made, ValkeyServer)
        yield made


@pytest.fixture
def machine(
    start: Callable[..., LocalEngine], valkey: ValkeyServer, tmp_path: Path
) -> Iterator[Callable[[str], Machine]]:
    """`machine(name)`: one more of the deployment."""
    (tmp_path / "site").mkdir()
    allowed = vouched(tmp_path / "site")
    running: list[LMCacheServer] = []

    def of(name: str) -> Machine:
        own = {
            "KVCUSTODY_WORKER_NAME": f"engine-{name}",
            "KVCUSTODY_SPILL_PATH": str(tmp_path / f"engine-{name}"),
        }
        site = Site(
            tmp_path / "site",
            policy=REMOTE,
            more={"KVCUSTODY_VLLM_CONNECTORS_ALLOWED": allowed, **own},
        )
        server = LMCacheServer(
            tmp_path / f"lmcache-{name}",
            site.environment()
            | {
                "KVCUSTODY_WORKER_NAME": f"lmcache-{name}",
                "KVCUSTODY_SPILL_PATH": str(tmp_path / f"spill-{name}"),
                "KVCUSTODY_REMOTE_TIER_URL": f"valkey://127.0.0.1:{valkey.port}/0/{tmp_path.name}",
                "KVCUSTODY_REMOTE_TIER_BYTES": str(256 << 20),
                "KVCUSTODY_REMOTE_TIER_TIMEOUT_MS": "5000",
            },
        )
        running.append(server)
        connectors = transfer(CONNECTOR, server.connector())
        return Machine(start(deployment=site, kv_transfer_config=connectors, num_gpu_blocks_override=BLOCKS), server)

    yield of
    for server in running:
        server.close()


def test_another_machine_brings_back_what_one_stored_and_nobody_else_does(
    machine: Callable[[str], Machine], plain: LocalEngine, valkey: ValkeyServer, tmp_path: Path
) -> None:
    """Not after an erasure; and without the store both compute."""
    mine = prompt(1)
    expected = plain.ask(mine, max_tokens=8).tokens
    first, second = machine("1").engine, machine("2").engine
    for subject in ("one", "two"):
        assert first.ask(mine, tenant="acme", subject=subject, max_tokens=8).tokens == expected
        displace(first, rounds=1)

    def asked(engine: LocalEngine, tenant: str, subject: str) -> int:
        """Cached tokens; nothing of it is on the device then."""
        answer = engine.ask(mine, tenant=tenant, subject=subject, max_tokens=8)
        assert answer.tokens == expected
        displace(engine)
        return answer.cached_tokens

    whole = PREFIX * BLOCK
    for subject in ("one", "two"):
        assert until(lambda subject=subject: asked(first, "acme", subject) == whole), "it is stored"  # type: ignore[misc]
    for tenant, subject in (("beta", "one"), ("acme", "other")):
        assert asked(second, tenant, subject) == 0
    assert asked(second, "acme", "one") == whole == asked(second, "acme", "two"), "from the other's copies"
    ledger = ("--ledger", f"sqlite:///{tmp_path / 'site' / 'ledger.db'}")
    erasure = run("erasure", "request", "--tenant", "acme", "--subject", "one", *ledger)["erasure"]
    state = run("erasure", "status", erasure, *ledger, "--wait-seconds", "60")
    assert state["outcome"] == "complete", state
    assert asked(second, "acme", "one") == 0
    assert asked(first, "acme", "two") == whole == asked(second, "acme", "two"), "control"
    valkey.kill()
    assert asked(first, "acme", "two") == 0 == asked(second, "acme", "two")
    for engine in (first, second):
        assert engine.governance("check") == []
