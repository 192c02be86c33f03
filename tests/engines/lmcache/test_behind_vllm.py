"""A governed vLLM with LMCache's own server and connector: own prompts come back from it, nobody else's ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from chunk_world import POLICY
from deployment import CONNECTOR, Deployment
from lmcache_server import LMCacheServer
from local_engine import BLOCK, LocalEngine

BLOCKS = 40
PREFIX = 12  # blocks: six chunks


@dataclass
class Site(Deployment):
    """A deployment whose engine may have LMCache's connector beside ours; the server has the same settings."""

    policy: str = POLICY
    more: dict[str, str] = field(default_factory=dict)

    def environment(self, worker: str = "engine-0") -> dict[str, str]:
        """Of either process."""
        salts = {"KVCUSTODY_SCOPE_SALTS_PATH": str(self.folder / "salts")}
        return {**super().environment(worker), **salts, **self.more}

    def of_server(self) -> dict[str, str]:
        """The server's: a worker of its own, with a tier."""
        tier = {
            "KVCUSTODY_NVME_TIER_PATH": str(self.folder / "tier"),
            "KVCUSTODY_NVME_TIER_BYTES": str(256 << 20),
            "KVCUSTODY_TIER_TIMEOUT_MS": "5000",
            "KVCUSTODY_SPILL_PATH": str(self.folder / "lmcache-spill"),
        }
        return {**self.environment("lmcache-0"), **tier}


def vouched(folder: Path) -> str:
    """A record for LMCache's connector as an operator signs it off: the setting that lets it run beside ours."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvcustody.integrations.vllm.conformance_record import digest_of, subject_of
    from kvcustody.testkit.conformance import ALL, CaseVerdict, ConformanceReport
    from kvcustody.testkit.conformance.report import record

    tested = KVConnectorFactory.get_connector_class_by_name("LMCacheMPConnector")
    verdicts = tuple(CaseVerdict(case.name, "pass", "", 0.1, 1) for case in ALL)
    path = folder / "lmcache.json"
    path.write_bytes(record(ConformanceReport("LMCache behind salts of ours", verdicts), subject_of(tested)))
    return f"LMCacheMPConnector={path}#{digest_of(path.read_bytes())}"


def transfer(*connectors: dict[str, Any]) -> Any:
    """vLLM's configuration of several connectors."""
    from vllm.config import KVTransferConfig

    extra = {"connectors": list(connectors)}
    return KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=extra)


def prompt(seed: int, blocks: int = PREFIX) -> list[int]:
    """`blocks` whole blocks that no other seed shares, and one token."""
    return [(seed * 131 + at * (seed % 7 + 3) + at // 29) % 480 + 20 for at in range(blocks * BLOCK)] + [17]


def displace(engine: LocalEngine, start: int, tenant: str = "churner") -> None:
    """Other work takes the whole pool."""
    for number in range(4):
        engine.ask(prompt(1000 + start + number), tenant=tenant, max_tokens=2)


@pytest.fixture
def site_folder(tmp_path: Path) -> Site:
    folder = tmp_path / "site-files"
    folder.mkdir()
    return Site(folder, more={"KVCUSTODY_VLLM_CONNECTORS_ALLOWED": vouched(folder)})


@pytest.fixture
def server(site_folder: Site) -> Iterator[LMCacheServer]:
    made = LMCacheServer(site_folder.folder / "lmcache", site_folder.of_server())
    yield made
    made.close()


def test_own_prompts_come_back_and_foreign_ones_never(
    start: Callable[..., LocalEngine], plain: LocalEngine, site_folder: Site, server: LMCacheServer
) -> None:
    mine = prompt(1)
    expected = plain.ask(mine, max_tokens=8).tokens
    engine = start(
        deployment=site_folder,
        kv_transfer_config=transfer(CONNECTOR, server.connector()),
        num_gpu_blocks_override=BLOCKS,
    )
    first = engine.ask(mine, tenant="acme", max_tokens=8)
    assert (first.cached_tokens, first.tokens) == (0, expected)
    time.sleep(1.5)
    displace(engine, 0)
    again = engine.ask(mine, tenant="acme", max_tokens=8)
    assert (again.cached_tokens, again.tokens) == (PREFIX * BLOCK, expected), server.log.read_text()[-4000:]
    displace(engine, 10)
    for whose in ({"tenant": "beta"}, {"tenant": "acme", "subject": "other"}):
        foreign = engine.ask(mine, max_tokens=8, **whose)
        assert (foreign.cached_tokens, foreign.tokens) == (0, expected)
        displace(engine, 20)
    assert engine.governance("check") == []
