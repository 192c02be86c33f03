"""An LMCache server that keeps what it is given in clear, beside a governed vLLM: only what policy lets rest so."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from standins.engines.lmcache.lmcache_server import LMCacheServer
from standins.engines.lmcache.lmcache_site import CLEAR, Site, transfer, vouched
from standins.engines.vllm.deployment import CONNECTOR
from standins.engines.vllm.local_engine import LocalEngine
from standins.engines.vllm.tier_engines import BLOCKS, prompt
from standins.integrations.chunk_site import POLICY

STRICT = POLICY.replace("profile: shared", "profile: strict").replace("borrow: true", "borrow: false")


def governed(start: Callable[..., LocalEngine], site: Site, server: LMCacheServer) -> LocalEngine:
    return start(
        deployment=site,
        kv_transfer_config=transfer(CONNECTOR, server.connector()),
        num_gpu_blocks_override=BLOCKS,
    )


def site_of(folder: Path, policy: str) -> Site:
    folder.mkdir()
    return Site(folder, policy=policy, more={"KVCUSTODY_VLLM_CONNECTORS_ALLOWED": vouched(folder)})


def test_it_takes_what_policy_lets_rest_in_clear_alone(start: Callable[..., LocalEngine], tmp_path: Path) -> None:
    assert CLEAR != POLICY
    bare = LMCacheServer(tmp_path / "bare", {}, None)
    try:
        engine = governed(start, site_of(tmp_path / "sealed", POLICY), bare)
        answer = engine.ask(prompt(1), tenant="acme")
        assert (answer.tokens, answer.reason) == ([], "error")
        engine.close()
        engine = governed(start, site_of(tmp_path / "clear", CLEAR), bare)
        answer = engine.ask(prompt(1), tenant="acme")
        assert answer.reason == "length", "control: the same server, where policy lets it"
        engine.close()
    finally:
        bare.close()


def test_a_plain_server_in_the_place_of_one_that_seals_is_found_out(
    start: Callable[..., LocalEngine], tmp_path: Path
) -> None:
    site = site_of(tmp_path / "site", POLICY)
    sealing = LMCacheServer(tmp_path / "server", site.of_server())
    engine = governed(start, site, sealing)
    assert engine.ask(prompt(1), tenant="acme").reason == "length", "it seals"
    sealing.kill()
    assert engine.ask(prompt(2), tenant="acme").reason == "length", "nobody is there to take a copy"
    bare = LMCacheServer(tmp_path / "bare", {}, None, port=sealing.port)
    try:
        time.sleep(1.1)
        assert engine.ask(prompt(3), tenant="acme").reason == "error"
    finally:
        bare.close()


def test_a_profile_that_isolates_does_not_start_beside_it(start: Callable[..., LocalEngine], tmp_path: Path) -> None:
    bare = LMCacheServer(tmp_path / "bare", {}, None)
    try:
        site = site_of(tmp_path / "site", STRICT)
        with pytest.raises(Exception, match="Engine core initialization failed"):
            governed(start, site, bare)
    finally:
        bare.close()
