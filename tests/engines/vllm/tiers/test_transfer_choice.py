"""A governed engine loads and stores where that is expected to be faster, and each decision is on record with both."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import select

from kvcustody.audit.evidence.copies.transfers import RecordedTransfer, TransferFilter, transfers
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import incarnations
from kvcustody.governance.observability.prefill_cost import LEARNED_MIN
from kvcustody.governance.tiers.tier_link import TRIED
from standins.engines.vllm.local_engine import BLOCK, LocalEngine
from standins.engines.vllm.tier_engines import (
    OBJECT,
    PREFIX,
    deployment_with,
    displace,
    options,
    prompt,
    tier,
)
from standins.waiting import until

SLOW = 0.4  # seconds that the store takes for each object; nothing of this model takes so long to compute


def decided(url: str, action: str) -> list[RecordedTransfer]:
    """Decisions on record, oldest first."""
    store = open_store(url)
    with store.connect() as connection:
        assert connection.scalars(select(incarnations.c.uuid)).all()
        found = transfers(connection, TransferFilter(action=action), limit=1000)
    store.dispose()
    return list(reversed(found.transfers))


def test_a_tier_that_is_slower_is_left_alone_and_looked_at_again(
    start: Callable[..., LocalEngine], plain: LocalEngine, tmp_path: Path
):
    deployment = deployment_with(tmp_path / "site")
    engine = start(deployment=deployment, **options(tier_transfers="measured"))
    mine = prompt(1)
    expected = plain.ask(mine, max_tokens=8).tokens
    for seed in range(LEARNED_MIN + 2):  # what computing takes is known then
        engine.ask(prompt(60 + seed), tenant="churner", max_tokens=2)
    engine.ask(mine, tenant="alpha")
    displace(engine)
    engine.rpc("tier_fault", "host", "slow", SLOW)
    first = engine.ask(mine, tenant="alpha", max_tokens=8)
    assert (first.cached_tokens, first.tokens) == (PREFIX * BLOCK, expected), "only trying tells"
    displace(engine)
    alone = tier(engine)["left_alone"]
    second = engine.ask(mine, tenant="alpha", max_tokens=8)
    assert (second.cached_tokens, second.tokens) == (0, expected), "computing is faster"
    assert tier(engine)["left_alone"] == alone + 1
    serving = engine.governance("stats")["tier_figures"]
    assert serving["tier_left_alone.host"] >= 1
    assert serving["tier_restored_blocks.host"] == PREFIX
    assert serving["tier_capacity_bytes.host"] == 64 << 20
    assert 0 < serving["tier_used_bytes.host"] < 64 << 20
    engine.rpc("tier_fault", "host", "none")
    displace(engine)
    time.sleep(1.5)  # a link that is left alone is looked at after a second
    third = engine.ask(mine, tenant="alpha", max_tokens=8)
    assert (third.cached_tokens, third.tokens) == (PREFIX * BLOCK, expected)
    assert engine.governance("check") == []
    assert until(lambda: len(decided(deployment.ledger_url, "restore")) >= 3)
    engine.close()
    restores = [one for one in decided(deployment.ledger_url, "restore") if one.tenant == "alpha"]
    assert [(one.reason, one.choice, one.outcome) for one in restores] == [
        ("not measured yet", "transfer", "done"),
        ("slower", "recompute", ""),
        ("tried", "transfer", "done"),
    ]
    tried, left, looked = restores
    assert tried.transfer_us == 0 and tried.actual_us > SLOW * 1e6 and tried.blocks == PREFIX
    assert left.transfer_us > left.recompute_us > 0 and left.actual_us == 0
    assert looked.transfer_us > looked.recompute_us > 0 and looked.actual_us < tried.actual_us
    stores = decided(deployment.ledger_url, "store")
    assert {one.outcome for one in stores if one.choice == "transfer"} == {"done"}
    assert any(one.reason == "does not pay" for one in stores), "what would not be loaded is not stored"


@pytest.mark.parametrize("remembers", [True, False])
def test_a_trial_takes_along_what_goes_before_it(
    start: Callable[..., LocalEngine], plain: LocalEngine, tmp_path: Path, remembers: bool
):
    """A prompt's first runs are refused, its last is tried. Control: nothing comes back behind the hole."""
    deployment = deployment_with(tmp_path / "site")
    engine = start(deployment=deployment, **options(tier_transfers="measured"))
    runs, mine = PREFIX // OBJECT, prompt(1)
    expected = plain.ask(mine, max_tokens=8).tokens
    engine.ask(prompt(60), tenant="churner", max_tokens=2)
    if not remembers:
        engine.probe("forget_refused_runs")
    engine.probe("tier_cost", ("host", 0, TRIED - runs))  # nothing seems to pay, and the third run is tried
    engine.ask(mine, tenant="alpha")
    until(lambda: engine.probe("tier_copies", "host").get("alpha") == (PREFIX if remembers else OBJECT))
    engine.probe("tier_cost", ("host", 1 << 40, 0))  # from here on whatever comes back is faster
    displace(engine)
    answer = engine.ask(mine, tenant="alpha", max_tokens=8)
    assert (answer.cached_tokens, answer.tokens) == (PREFIX * BLOCK if remembers else 0, expected)
    assert engine.governance("check") == []
    engine.close()
    stores = [one for one in decided(deployment.ledger_url, "store") if one.tenant == "alpha"][: 5 if remembers else 3]
    reasons = ["does not pay", "does not pay", "tried", *(["tried", "tried"] if remembers else [])]
    assert [one.reason for one in stores] == reasons


def test_a_request_says_its_class_and_what_is_chosen_follows(
    start: Callable[..., LocalEngine], plain: LocalEngine, tmp_path: Path
):
    """`interactive` tries nothing and waits for what a worker reads for nobody; what is no class says nothing."""
    deployment = deployment_with(tmp_path / "site")
    engine = start(deployment=deployment, **options(tier_transfers="measured"))
    mine = prompt(1)
    expected = plain.ask(mine, max_tokens=8).tokens
    for seed in range(LEARNED_MIN + 2):
        engine.ask(prompt(60 + seed), tenant="churner", max_tokens=2)
    engine.ask(mine, tenant="alpha")

    def ask(latency: str) -> int:
        displace(engine)
        answer = engine.ask(mine, tenant="alpha", max_tokens=8, latency=latency)
        assert answer.tokens == expected
        return answer.cached_tokens

    assert ask("interactive") == 0, "what a load takes is not known, and it is in a hurry"
    time.sleep(1.5)
    displace(engine)  # a step of these has a worker read an object, and a later one fetches what it took
    for latency in ("interactive", "batch", "urgent"):
        ask(latency)
    assert engine.governance("check") == []
    assert until(lambda: len(decided(deployment.ledger_url, "restore")) >= 4)
    engine.close()
    restores = [one for one in decided(deployment.ledger_url, "restore") if one.tenant == "alpha"]
    assert [one.latency_class for one in restores] == ["interactive", "interactive", "batch", ""]
    assert (restores[0].reason, restores[0].choice, restores[0].transfer_us) == ("untried", "recompute", 0)
    assert restores[1].transfer_us > 0, "it was measured for nobody"
    assert restores[1].reason not in ("untried", "tried")
