"""The same tokens as plain SGLang where pages leave and come back all the time."""

from __future__ import annotations

import pytest

from kvcustody.audit.evidence.copies.copy_coverage import copy_coverage
from kvcustody.audit.evidence.coverage.summary import coverage
from kvcustody.audit.store.database.engine import open_store
from standins.engines.sglang.sglang_tiers import SMALL, clean, tiered
from standins.engines.sglang.sglang_workload import requests, run


def _same_tokens(start, new_deployment, work, tiers, page_size):
    engine, site, _ = tiered(start, new_deployment, tiers, page_size=page_size)
    governed = run(engine, work, site.token)
    clean(engine)
    seen = engine.probe("tiers")
    engine.stop()
    engine.close()
    assert run(start(**SMALL, page_size=page_size), work, str) == governed
    ledger = open_store(site.ledger_url)
    with ledger.connect() as connection:
        total, copies = coverage(connection).total, copy_coverage(connection).by_tier()
    ledger.dispose()
    restored = {name: one["restored"] for name, one in seen.items()}
    print("units restored in", len(work), "requests:", restored, *copies, sep="\n  ")
    assert total.coverage == 1.0 and all(one.coverage == 1.0 for one in copies)
    return sum(restored.values())


@pytest.mark.parametrize(("tiers", "page_size"), [("host nvme", 1), ("nvme", 16)])
def test_same_tokens_as_plain_sglang_with_tiers_on(start, new_deployment, tiers, page_size):
    assert _same_tokens(start, new_deployment, requests(60), tiers, page_size) > 0, "nothing came back"


@pytest.mark.soak
@pytest.mark.parametrize(("tiers", "page_size"), [("host nvme", 1), ("nvme", 1), ("host", 16)])
def test_same_tokens_over_many_requests_with_tiers_on(start, new_deployment, tiers, page_size):
    assert _same_tokens(start, new_deployment, requests(520, seed=11), tiers, page_size) > 100
