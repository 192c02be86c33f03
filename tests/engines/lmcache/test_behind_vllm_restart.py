"""vLLM and LMCache's server, stopped in order and killed: what the next start has closed, ended and still finds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from kvcustody.audit.evidence.copies.copy_coverage import copy_coverage
from kvcustody.audit.evidence.processes.sequence_gaps import gaps
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from standins.engines.lmcache.lmcache_server import LMCacheServer
from standins.engines.lmcache.lmcache_site import SERVER, Site, transfer, vouched
from standins.engines.vllm.deployment import CONNECTOR
from standins.engines.vllm.local_engine import BLOCK, LocalEngine
from standins.engines.vllm.tier_engines import BLOCKS, PREFIX, displace, prompt
from standins.integrations.chunk_site import POLICY, lives
from standins.waiting import until

WHOLE, CHUNKS = PREFIX * BLOCK, PREFIX // 2
# A busy machine needs seconds between a copy that is there and the kill: only what is due after that ends late.
LONGER, IDLE_SECONDS = ("brief:      {idle: 2s", "brief:      {idle: 15s"), 15.0


def test_after_a_stop_and_after_a_kill_own_prompts_are_found_and_the_dead_are_closed(
    start: Callable[..., LocalEngine], plain: LocalEngine, tmp_path: Path
) -> None:
    site = Site(tmp_path / "site-files", policy=POLICY.replace(*LONGER))
    site.more["KVCUSTODY_VLLM_CONNECTORS_ALLOWED"] = vouched(site.folder)
    servers: list[LMCacheServer] = []

    def serve() -> LMCacheServer:
        servers.append(LMCacheServer(site.folder / "lmcache", site.of_server()))
        return servers[-1]

    def engine_of(server: LMCacheServer) -> LocalEngine:
        between = transfer(CONNECTOR, server.connector())
        return start(deployment=site, kv_transfer_config=between, num_gpu_blocks_override=BLOCKS)

    def files() -> set[Path]:
        return {path for path in (site.folder / "tier").rglob("*") if len(path.name) == 64}

    mine = prompt(1)
    expected = plain.ask(mine, max_tokens=8).tokens

    def finds(engine: LocalEngine, *foreigners: str) -> None:
        """Own full, foreign 0, the plain engine's answers. A foreigner's own copy is there from then on."""
        own = engine.ask(mine, tenant="acme", max_tokens=8)
        assert (own.cached_tokens, own.tokens) == (WHOLE, expected), servers[-1].status()
        displace(engine)
        for foreigner in foreigners:
            for whose in ({"tenant": foreigner}, {"tenant": "acme", "subject": foreigner}):
                foreign = engine.ask(mine, max_tokens=8, **whose)
                assert (foreign.cached_tokens, foreign.tokens) == (0, expected)
                displace(engine)
        assert engine.governance("check") == []

    try:
        server = serve()
        engine = engine_of(server)
        assert engine.ask(mine, tenant="acme", max_tokens=8).tokens == expected
        assert until(lambda: len(files()) >= CHUNKS)
        engine.close()
        server.close()

        server = serve()
        assert until(lambda: len(lives(site.ledger_url, SERVER)) == 2), "before anybody asks"
        engine = engine_of(server)
        finds(engine, "beta")
        time.sleep(1.0)  # what others asked for is stored
        before = files()
        engine.ask(prompt(2), tenant="brief")
        assert until(lambda: len(files() - before) == CHUNKS)
        stored = time.monotonic()
        short = files() - before
        time.sleep(1.0)  # the ledger's writer has had its turn
        for process in (engine.core_pid, engine.worker_pid):
            os.kill(process, signal.SIGKILL)
        server.kill()
        engine.close()
        kept_file = min(before)
        planted = kept_file.with_name(kept_file.name[:2] + 62 * "0")
        planted.write_bytes(kept_file.read_bytes())
        assert lives(site.ledger_url, SERVER) == ["stopped", None]

        time.sleep(max(0.0, stored + IDLE_SECONDS + 1.0 - time.monotonic()))
        server = serve()
        assert until(lambda: not files() & {planted, *short}), "nobody asked"
        assert until(lambda: lives(site.ledger_url, SERVER)[1] not in (None, "stopped"))
        engine = engine_of(server)
        assert lives(site.ledger_url, "engine-0")[1] not in (None, "stopped")
        finds(engine, "gamma")
        assert engine.ask(prompt(2), tenant="brief").cached_tokens == 0
        engine.close()
        server.close()
    finally:
        for server in servers:
            server.close()
    ledger = open_store(site.ledger_url)
    with ledger.connect() as connection:
        [verdict] = [row for row in copy_coverage(connection).by_tier() if row.tier == "nvme"]
        left, report = gaps(connection), fsck(connection)
    ledger.dispose()
    # Of the killed process: what was due while nobody lived ended late, and what three owners keep has no evidence yet.
    assert (verdict.late, verdict.unproven, verdict.disputed, verdict.open) == (CHUNKS, 3 * CHUNKS, 0, 0)
    assert verdict.covered == verdict.due - 4 * CHUNKS > CHUNKS, verdict
    assert left == () and report.ok, report.problems
    assert lives(site.ledger_url, SERVER)[2] == lives(site.ledger_url, "engine-0")[2] == "stopped"
