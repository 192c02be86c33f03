"""Two real engines over one real store: what one stored the other brings back, for the same domain alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvcustody.audit.evidence.copies.transfers import RecordedTransfer, TransferFilter, transfers
from kvcustody.audit.store.database.engine import open_store
from standins.engines.vllm.local_engine import BLOCK
from standins.engines.vllm.tier_engines import PREFIX, TIER_POLICY, displace, options, prompt, tier
from standins.governance.store_servers import StoreServer, ValkeyServer, servers
from standins.waiting import until

if TYPE_CHECKING:
    from standins.engines.vllm.deployment import Deployment
    from standins.engines.vllm.local_engine import LocalEngine

Start = Callable[..., "LocalEngine"]
POLICY = TIER_POLICY.replace("tiers: [host, nvme]", "tiers: [remote]")
assert POLICY != TIER_POLICY
WINDOW = 2  # blocks of a sliding window that a hit needs


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    for server in servers(tmp_path_factory):
        made: StoreServer = server("valkey")
        assert isinstance(made, ValkeyServer)
        yield made


def remote(server: ValkeyServer, prefix: str, **settings: Any) -> dict[str, Any]:
    """What an engine with nothing but the shared store is started with."""
    defaults = {
        "host_tier_bytes": 0,
        "remote_tier_url": f"valkey://127.0.0.1:{server.port}/0/{prefix}",
        "remote_tier_bytes": 256 << 20,
        "remote_tier_timeout_ms": 2000,
    }
    return options(**(defaults | settings))


def deployment(folder: Path, worker: str, policy: str = POLICY) -> Deployment:
    """The deployment as a worker of this name has it."""
    from standins.engines.vllm.prefill_and_decode import WorkerDeployment

    class Sharing(WorkerDeployment):
        def environment(self, worker: str = "") -> dict[str, str]:
            said = super().environment(worker)
            return {name: value for name, value in said.items() if "HANDOVER" not in name}

    return Sharing(folder, policy=policy, worker=worker)


def test_nothing_goes_to_a_store_with_other_labels(start: Start, valkey: ValkeyServer, tmp_path: Path) -> None:
    labelled = POLICY.replace("  alpha: {quota", "  alpha: {labels: {region: eu}, quota")
    labelled += "labels: {region: [eu, us]}\n"
    assert "region: eu}, quota" in labelled
    there = remote(valkey, tmp_path.name, remote_tier_labels="region=us")
    engine = start(deployment=deployment(tmp_path / "site", "gpu-1", labelled), **there)
    for tenant in ("alpha", "beta"):
        engine.ask(prompt(1), tenant=tenant, max_tokens=4)
    until(lambda: engine.probe("tier_copies", "remote").get("beta", 0) >= PREFIX)
    displace(engine)
    assert "alpha" not in engine.probe("tier_copies", "remote")
    brought = {one: engine.ask(prompt(1), tenant=one, max_tokens=4).cached_tokens for one in ("alpha", "beta")}
    assert brought == {"alpha": 0, "beta": PREFIX * BLOCK}, "the control has no label"


def decided(engine: LocalEngine) -> list[RecordedTransfer]:
    """What every worker of the deployment decided to bring back, oldest first."""
    assert engine.deployment is not None
    store = open_store(engine.deployment.ledger_url, read_only=True)
    with store.connect() as connection:
        found = transfers(connection, TransferFilter(action="restore"), limit=1000)
    store.dispose()
    return list(reversed(found.transfers))


def drop_windows(server: ValkeyServer, prefix: str) -> None:
    """What of this prefix is shorter than a whole object: windows are."""
    import valkey

    client: Any = valkey.Valkey(port=server.port)
    sizes = {key: client.strlen(key) for key in client.scan_iter(match=f"{prefix}:*:o:*")}
    assert client.delete(*[key for key, size in sizes.items() if size < max(sizes.values())])
    client.close()


def test_of_a_model_of_two_layer_groups_another_worker_brings_back_both(
    start: Start, windowed_model: Path, valkey: ValkeyServer, tmp_path: Path
) -> None:
    """Full attention whole, of the sliding window what a hit needs; where a window is gone nothing comes."""
    site, there = tmp_path / "site", remote(valkey, tmp_path.name)
    there["prefix_cache_retention_interval"] = 0  # a window's blocks are kept at the ends of prompts
    mine, other = prompt(1), prompt(2)
    plain = start(windowed_model)
    expected, of_other = (plain.ask(one, max_tokens=16).tokens for one in (mine, other))
    first = start(windowed_model, deployment=deployment(site, "gpu-1"), **there)
    second = start(windowed_model, deployment=deployment(site, "gpu-2"), **there)
    for tokens in (mine, other):
        first.ask(tokens, tenant="beta", max_tokens=16)
        displace(first, rounds=1)
    until(lambda: first.probe("tier_copies", "remote").get("beta", 0) >= 2 * (PREFIX + WINDOW))
    foreign = second.ask(mine, tenant="gamma", max_tokens=16)
    assert (foreign.cached_tokens, foreign.tokens) == (0, expected)
    displace(second, rounds=1)
    before = tier(second)["restored_blocks"]
    answer = second.ask(mine, tenant="beta", max_tokens=16)
    assert (answer.cached_tokens, answer.tokens) == (PREFIX * BLOCK, expected)
    assert tier(second)["restored_blocks"] - before == PREFIX + WINDOW
    assert second.probe("tier_copies", "remote").get("beta", 0) < PREFIX, "its owner alone has custody"
    longer = [*mine[:-1], *prompt(4, 2)]
    displace(second)
    again = second.ask(longer, tenant="beta", max_tokens=16)
    assert again.cached_tokens == PREFIX * BLOCK
    assert again.tokens == plain.ask(longer, max_tokens=16).tokens
    drop_windows(valkey, tmp_path.name)
    answer = second.ask(other, tenant="beta", max_tokens=16)
    assert (answer.cached_tokens, answer.tokens) == (0, of_other)
    for engine in (first, second):
        assert engine.governance("check") == []


def test_another_worker_brings_back_what_one_stored_and_nobody_else_does(
    start: Start, plain: LocalEngine, valkey: ValkeyServer, tmp_path: Path
) -> None:
    """Also after a restart; not after an erasure; and without the store both compute."""
    site, there = tmp_path / "site", remote(valkey, tmp_path.name)
    mine = prompt(1)
    expected = plain.ask(mine, max_tokens=16).tokens
    first = start(deployment=deployment(site, "gpu-1"), **there)
    second = start(deployment=deployment(site, "gpu-2"), **there)
    assert second.ask(mine, tenant="alpha", max_tokens=16).cached_tokens == 0, "nobody has stored it"
    displace(second)
    for tenant in ("beta", "delta"):
        assert first.ask(mine, tenant=tenant, max_tokens=16).tokens == expected
        displace(first, rounds=1)

    def stored(engine: LocalEngine) -> int:
        return int(engine.probe("tier_copies", "remote").get("beta", 0))

    until(lambda: stored(first) >= PREFIX)
    for whose in ({"tenant": "gamma"}, {"tenant": "beta", "subject": "other"}):
        foreign = second.ask(mine, max_tokens=16, **whose)
        assert (foreign.cached_tokens, foreign.tokens) == (0, expected)
        displace(second, rounds=1)
    own = stored(second)
    answer = second.ask(mine, tenant="beta", max_tokens=16)
    assert (answer.cached_tokens, answer.tokens) == (PREFIX * BLOCK, expected)
    assert (stored(first), stored(second)) == (PREFIX, own), "its owner alone has custody"
    for engine in (first, second):
        assert engine.governance("scan") == engine.governance("check") == []

    second.close()
    second = start(deployment=deployment(site, "gpu-2"), **there)
    answer = second.ask(mine, tenant="beta", max_tokens=16)
    assert (answer.cached_tokens, answer.tokens) == (PREFIX * BLOCK, expected), "after a restart"
    restores = until(lambda: len(found := [one for one in decided(second) if one.tenant == "beta"]) == 2 and found)
    assert {one.outcome for one in restores} == {"done"}
    displace(second)
    first.governance("erase", "beta", None, None)
    answer = second.ask(mine, tenant="beta", max_tokens=16)
    assert (answer.cached_tokens, answer.tokens) == (0, expected), "its owner erased it"

    for engine in (first, second):
        displace(engine)
    valkey.kill()
    for engine in (first, second):
        answer = engine.ask(mine, tenant="delta", max_tokens=16)
        assert (answer.cached_tokens, answer.tokens) == (0, expected), "the store is away"
