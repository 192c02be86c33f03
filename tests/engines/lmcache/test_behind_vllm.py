"""A governed vLLM with LMCache's own server and connector: own prompts come back from it, nobody else's ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import select

from kvcustody.audit.evidence.copies.copy_coverage import copy_coverage
from kvcustody.audit.evidence.copies.copy_rows import copy_totals
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import incarnations
from standins.engines.lmcache.lmcache_server import GOVERNED, OURS, LMCacheServer
from standins.engines.lmcache.lmcache_site import Site, freed_bytes, run, transfer, vouched
from standins.engines.vllm.deployment import CONNECTOR
from standins.engines.vllm.local_engine import BLOCK, LocalEngine
from standins.engines.vllm.tier_engines import BLOCKS, PREFIX, displace, prompt


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
    displace(engine)
    again = engine.ask(mine, tenant="acme", max_tokens=8)
    assert (again.cached_tokens, again.tokens) == (PREFIX * BLOCK, expected), server.log.read_text()[-4000:]
    displace(engine)
    for whose in ({"tenant": "beta"}, {"tenant": "acme", "subject": "other"}):
        foreign = engine.ask(mine, max_tokens=8, **whose)
        assert (foreign.cached_tokens, foreign.tokens) == (0, expected)
        displace(engine)
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
    displace(engine)
    files = [path for path in (site_folder.folder / "tier").rglob("*") if len(path.name) == 64]
    assert len(files) >= 2 * PREFIX // 2
    pieces = [piece for content in contents for piece in (content[:64], content[512:576])]
    pieces = [piece for piece in pieces if len(set(piece)) > 16]
    assert len(pieces) > PREFIX
    for piece in pieces:
        assert not any(piece in path.read_bytes() for path in files)
    assert engine.ask(mine, tenant="acme", subject="one").cached_tokens == PREFIX * BLOCK, "control"
    displace(engine)
    who = ("--tenant", "acme", "--subject", "one")
    asked = run("erasure", "request", *who, *ledger)["erasure"]
    state = run("erasure", "status", asked, *ledger, "--wait-seconds", "30")
    assert state["outcome"] == "complete", state
    assert engine.ask(mine, tenant="acme", subject="one").cached_tokens == 0
    displace(engine)
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
    displace(engine)
    server.kill()
    answer = engine.ask(mine, tenant="acme", max_tokens=8)
    assert (answer.cached_tokens, answer.tokens) == (0, plain.ask(mine, max_tokens=8).tokens)
    assert engine.governance("check") == []


def test_lmcache_alone_gives_a_tenant_anothers_prompt(start: Callable[..., LocalEngine], tmp_path: Path) -> None:
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
        (("--l2-store-policy", "default", *GOVERNED[2:4]), "must be `skip_l1`"),
        ((*GOVERNED[:2], "--l1-read-ttl-seconds", "300"), "say at most 60"),
        (GOVERNED[:4], None),
    ],
)
def test_a_first_tier_that_keeps_is_refused(site_folder: Site, more: tuple[str, ...], says: str | None) -> None:
    where, environment = site_folder.folder / "lmcache", site_folder.of_server()
    if says is None:
        LMCacheServer(where, environment, OURS, *more, *GOVERNED[4:]).close()
        return
    with pytest.raises(AssertionError, match=says):
        LMCacheServer(where, environment, OURS, *more, *GOVERNED[4:])
