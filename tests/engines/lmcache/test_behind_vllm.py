"""A governed vLLM with LMCache's own server and connector: own prompts come back from it, nobody else's ever."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from chunk_site import POLICY
from deployment import CONNECTOR, Deployment
from lmcache_server import GOVERNED, OURS, LMCacheServer
from local_engine import BLOCK, LocalEngine
from sqlalchemy import select
from typer.testing import CliRunner

from kvcustody.audit.copies.copy_coverage import copy_coverage
from kvcustody.audit.copies.copy_rows import copy_totals
from kvcustody.audit.database.engine import open_store
from kvcustody.audit.schema.ledger import incarnations
from kvcustody.console.main import app

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


def run(*words: str) -> dict[str, Any]:
    """What a command of ours says, as JSON."""
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def freed_bytes(status: Any) -> int:
    """What our module says that the first tier has zeroed, wherever LMCache shows it."""
    if isinstance(status, dict):
        mine = status.get("kvcustody_first_tier")
        return mine["zeroed_bytes"] if mine else sum(map(freed_bytes, status.values()))
    return sum(map(freed_bytes, status)) if isinstance(status, list) else 0


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
    assert freed_bytes(server.status()) > 0, "the first tier held it on its way"


def test_a_subject_is_erased_in_lmcache_too(
    start: Callable[..., LocalEngine], site_folder: Site, server: LMCacheServer
) -> None:
    engine = start(
        deployment=site_folder,
        kv_transfer_config=transfer(CONNECTOR, server.connector()),
        num_gpu_blocks_override=BLOCKS,
    )
    mine, ledger = prompt(2), ("--ledger", site_folder.ledger_url)
    for subject in ("one", "two"):
        engine.ask(mine, tenant="acme", subject=subject)
    indexed = engine.probe("pool")["indexed"]
    contents = [engine.rpc("block_content", block)[0] for block, is_there in enumerate(indexed) if is_there]
    contents = [content for content in contents if len(set(content)) > 8]
    assert len(contents) >= PREFIX, "positive control: blocks have content"
    time.sleep(1.5)
    displace(engine, 0)
    files = [path for path in (site_folder.folder / "tier").rglob("*") if len(path.name) == 64]
    assert len(files) >= 2 * PREFIX // 2
    pieces = [piece for content in contents for piece in (content[:64], content[512:576])]
    pieces = [piece for piece in pieces if len(set(piece)) > 16]
    assert len(pieces) > PREFIX
    for piece in pieces:
        assert not any(piece in path.read_bytes() for path in files)
    assert engine.ask(mine, tenant="acme", subject="one").cached_tokens == PREFIX * BLOCK, "control"
    displace(engine, 10)
    who = ("--tenant", "acme", "--subject", "one", "--actor", "dpo")
    asked = run("erasure", "request", *who, *ledger)["erasure"]
    state = run("erasure", "status", asked, *ledger, "--wait-seconds", "30")
    assert state["outcome"] == "complete", state
    assert engine.ask(mine, tenant="acme", subject="one").cached_tokens == 0
    displace(engine, 20)
    assert engine.ask(mine, tenant="acme", subject="two").cached_tokens == PREFIX * BLOCK
    engine.close()
    server.close()
    store = open_store(site_folder.ledger_url)
    with store.connect() as connection:
        lives = connection.scalars(select(incarnations.c.id)).all()
        totals = [copy_totals(connection, life).get("nvme") for life in lives]
        [ours] = [one for one in totals if one is not None]
        assert ours.stored >= 2 * PREFIX // 2
        assert ours.ended >= PREFIX // 2, "those of the erased subject, at least"
        [verdict] = [one for one in copy_coverage(connection).by_tier() if one.tier == "nvme"]
        assert verdict.covered >= PREFIX // 2 and verdict.unlinked >= PREFIX // 2
        assert (verdict.late, verdict.disputed) == (0, 0)
    store.dispose()


def test_a_server_that_dies_is_a_miss(
    start: Callable[..., LocalEngine], plain: LocalEngine, site_folder: Site, server: LMCacheServer
) -> None:
    engine = start(
        deployment=site_folder,
        kv_transfer_config=transfer(CONNECTOR, server.connector()),
        num_gpu_blocks_override=BLOCKS,
    )
    mine = prompt(3)
    engine.ask(mine, tenant="acme")
    time.sleep(1.5)
    displace(engine, 0)
    server.kill()
    answer = engine.ask(mine, tenant="acme", max_tokens=8)
    assert (answer.cached_tokens, answer.tokens) == (0, plain.ask(mine, max_tokens=8).tokens)
    assert engine.governance("check") == []


def test_lmcache_alone_gives_a_tenant_anothers_prompt(
    start: Callable[..., LocalEngine], tmp_path: Path
) -> None:
    """The positive control: the same engine and server without salts."""
    bare = LMCacheServer(tmp_path, {}, None)
    try:
        engine = start(kv_transfer_config=transfer(bare.connector()), num_gpu_blocks_override=BLOCKS)
        mine = prompt(4)
        engine.ask(mine)
        time.sleep(1.5)
        for number in range(4):
            engine.ask(prompt(1000 + number), max_tokens=2)
        assert engine.ask(mine).cached_tokens == PREFIX * BLOCK
    finally:
        bare.close()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--l2-store-policy", "default"), "must be `skip_l1`"),
        (("--l2-store-policy", "skip_l1"), None),
    ],
)
def test_a_first_tier_that_keeps_is_refused(
    site_folder: Site, more: tuple[str, ...], says: str | None
) -> None:
    where, environment = site_folder.folder / "lmcache", site_folder.of_server()
    if says is None:
        LMCacheServer(where, environment, OURS, *more, *GOVERNED[2:]).close()
        return
    with pytest.raises(AssertionError, match=says):
        LMCacheServer(where, environment, OURS, *more, *GOVERNED[2:])
