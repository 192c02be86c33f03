"""A full scan of a running vLLM has each worker compare its store with its own index, and ends what differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import select

from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.leaf_tables import orphan_findings, orphan_scans
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

STRAY, LOST = "tier object without index", "index without tier object"


@pytest.fixture
def engine(start: Callable[..., LocalEngine], tmp_path: Path) -> LocalEngine:
    """With sealed copies in host memory, and a ledger of its own."""
    return start(deployment=deployment_with(tmp_path / "site"), **options())


def found(engine: LocalEngine) -> Counter[tuple[str, str, str, str]]:
    """Class, cause, action and outcome of every finding on record."""
    assert engine.deployment is not None
    ledger = open_store(engine.deployment.ledger_url)
    column = orphan_findings.c
    with ledger.connect() as connection:
        rows = connection.execute(select(column.orphan, column.cause, column.action, column.outcome)).all()
    ledger.dispose()
    return Counter(tuple(row) for row in rows)


def modes(engine: LocalEngine) -> Counter[str]:
    """Scans on record."""
    assert engine.deployment is not None
    ledger = open_store(engine.deployment.ledger_url)
    with ledger.connect() as connection:
        rows = connection.scalars(select(orphan_scans.c.mode)).all()
    ledger.dispose()
    return Counter(rows)


def test_what_a_worker_s_store_and_index_disagree_about_is_found_and_ended(engine: LocalEngine, plain: LocalEngine):
    mine = prompt(1)
    expected = plain.ask(mine, max_tokens=12).tokens
    engine.ask(mine, tenant="alpha", max_tokens=12)
    assert until(lambda: tier(engine)["copies"] == PREFIX // OBJECT)
    copies = tier(engine)["copies"]
    assert engine.rpc("plant_orphans", "host") == [OBJECT]
    assert engine.governance("scan") == [], "only looks, and the workers are not asked"
    assert engine.rpc("store_has", "host") == [True]
    assert engine.governance("scan", True) == [], "what the engine's process has agrees; the workers answer later"
    expected_findings = Counter(
        {
            (STRAY, "in tier `host`", "destroyed", "recovered"): 1,
            (LOST, "in tier `host`", "forgotten", "recovered"): 1,
        }
    )
    assert until(lambda: found(engine) == expected_findings), found(engine)
    assert until(lambda: modes(engine) == {"full": 1, "workers": 1})
    assert engine.rpc("store_has", "host") == [False]
    assert tier(engine)["copies"] == copies - 1, "the scheduler's half finds the one that is lost no more"
    assert tier(engine)["steps"]["ended orphan"] == 1
    displace(engine)
    answer = engine.ask(mine, tenant="alpha", max_tokens=12)
    assert (answer.cached_tokens % (OBJECT * BLOCK), answer.tokens) == (0, expected)
    assert tier(engine)["failed_loads"] == 0
    assert engine.governance("scan", True) == []
    displace(engine, rounds=1)
    assert until(lambda: modes(engine)["full"] == 2)
    assert modes(engine)["workers"] == 1 and found(engine) == expected_findings, "once"


def test_what_is_on_its_way_is_no_orphan(engine: LocalEngine):
    """Copies that a worker has made and not told of, and one that has ended and waits for a store that is away."""
    scans = 1
    engine.rpc("tier_fault", "host", "stores slow", 0.05)
    try:
        for seed in range(3):
            engine.submit(prompt(20 + seed), tenant="alpha", subject=f"s{seed}")
            while engine.engine.has_unfinished_requests():
                engine.step()
                scans += 1
                assert engine.governance("scan", True) == []
        assert until(lambda: tier(engine)["copies"] == 3 * PREFIX // OBJECT)
    finally:
        engine.rpc("tier_fault", "host", "deletes fail")
    engine.governance("erase", "alpha", "s1", None)
    displace(engine, rounds=1)
    assert tier(engine)["steps"]["ended erased"] == PREFIX // OBJECT
    assert engine.governance("scan", True) == []
    displace(engine, rounds=1)
    assert until(lambda: modes(engine)["full"] == scans)
    assert set(modes(engine)) == {"full"} and not found(engine)
    engine.rpc("tier_fault", "host", "none")
    assert until(lambda: tier(engine)["steps"].get("destroyed zeroed", 0) >= PREFIX // OBJECT)
