"""LMCache's server with its own adapter for files and our serde, behind vLLM; the control is LMCache's `aesgcm`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from standins.engines.lmcache.lmcache_server import GOVERNED, LMCacheServer
from standins.engines.lmcache.lmcache_site import CLEAR, Site, run, transfer, vouched
from standins.engines.vllm.deployment import CONNECTOR
from standins.engines.vllm.local_engine import BLOCK, LocalEngine
from standins.engines.vllm.tier_engines import BLOCKS, PREFIX, displace, prompt
from standins.integrations.chunk_site import POLICY
from standins.waiting import until

WHOLE, CHUNKS = PREFIX * BLOCK, PREFIX // 2
OURS = "kvcustody"


@pytest.mark.parametrize("serde", [OURS, "aesgcm"])
def test_files_of_lmcaches_own_adapter(
    start: Callable[..., LocalEngine], plain: LocalEngine, tmp_path: Path, serde: str
) -> None:
    site = Site(tmp_path / "site-files", policy=POLICY if serde == OURS else CLEAR)
    site.more["KVCUSTODY_VLLM_CONNECTORS_ALLOWED"] = vouched(site.folder)
    folder, secret = tmp_path / "files", tmp_path / "master.key"
    secret.write_bytes(os.urandom(32))
    how: dict[str, Any] = {"type": serde}
    how |= {"tier": "nvme"} if serde == OURS else {"key_provider": "hkdf", "master_key_path": str(secret)}
    named = {name: value for name, value in site.of_server().items() if "NVME_TIER" not in name}
    server = LMCacheServer(
        site.folder / "lmcache",
        named,
        {"type": "fs", "base_path": str(folder), "serde": how},
        *(GOVERNED if serde == OURS else ("--l2-store-policy", "skip_l1")),
        program=("python", "-m", "kvcustody.integrations.lmcache.server"),
    )
    try:
        engine = start(
            deployment=site,
            kv_transfer_config=transfer(CONNECTOR, server.connector()),
            num_gpu_blocks_override=BLOCKS,
        )

        def store(tokens: list[int], **whose: str) -> list[Path]:
            """Ask, and wait until it is in files; the first chunk's first."""
            before = set(folder.rglob("*.data"))
            assert engine.ask(tokens, max_tokens=8, **whose).cached_tokens == 0
            assert until(lambda: len(set(folder.rglob("*.data")) - before) == CHUNKS), server.log.read_text()[-2000:]
            made = set(folder.rglob("*.data")) - before
            displace(engine)
            return sorted(made, key=lambda path: path.stat().st_mtime_ns)

        mine, other, third = prompt(1), prompt(2), prompt(3)
        answers = [plain.ask(one, max_tokens=8).tokens for one in (mine, other)]
        files = store(mine, tenant="acme", subject="one")
        store(mine, tenant="acme", subject="two")
        again = engine.ask(mine, tenant="acme", subject="one", max_tokens=8)
        assert (again.cached_tokens, again.tokens) == (WHOLE, answers[0])
        displace(engine)
        for whose in ({"tenant": "beta"}, {"tenant": "acme", "subject": "three"}):
            foreign = engine.ask(mine, max_tokens=8, **whose)
            assert (foreign.cached_tokens, foreign.tokens) == (0, answers[0])
            displace(engine)

        others = store(other, tenant="acme", subject="one")
        for path, another in zip(others, files, strict=True):
            path.write_bytes(another.read_bytes())  # moved: another chunk of the same owner
        moved = engine.ask(other, tenant="acme", subject="one", max_tokens=8)
        if serde != OURS:
            assert moved.cached_tokens == WHOLE, "the control: another prompt's content is attached"
            assert moved.tokens != answers[1], "and answered from"
            return
        assert (moved.cached_tokens, moved.tokens) == (0, answers[1])
        displace(engine)

        store(third, tenant="acme", subject="one")
        ledger = ("--ledger", site.ledger_url)
        who = ("--tenant", "acme", "--subject", "one")
        asked = run("erasure", "request", *who, *ledger)["erasure"]
        state = run("erasure", "status", asked, *ledger, "--wait-seconds", "30")
        assert state["outcome"] == "complete", state
        assert engine.ask(mine, tenant="acme", subject="one").cached_tokens == 0, "its shred key is gone"
        displace(engine)
        assert engine.ask(mine, tenant="acme", subject="two").cached_tokens == WHOLE, "control"
        assert engine.governance("check") == []
    finally:
        server.close()
