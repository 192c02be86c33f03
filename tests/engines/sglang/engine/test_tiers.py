"""Tiers in a real engine whose pool is too small: own hits come back and no others, nothing outlives its end."""

from __future__ import annotations

import time

import pytest

from standins.engines.sglang.sglang_tiers import (
    SMALL,
    TIER_POLICY,
    WHOLE,
    certificate,
    clean,
    displace,
    prompt,
    settings,
)
from standins.engines.vllm.deployment import BRIEF_IDLE_SECONDS


@pytest.fixture(scope="module")
def tiered(model, site, new_deployment):
    """One engine with both tiers, for tests with tenants of their own."""
    from standins.engines.sglang.sglang_engine import SglangEngine

    deployment = new_deployment(policy=TIER_POLICY)
    engine = SglangEngine(
        model, site, deployment=deployment, settings=settings(deployment.folder, "host nvme"), **SMALL
    )
    yield engine
    engine.close()


def test_own_hits_come_back_from_host_and_foreign_ones_do_not(tiered):
    site, mine = tiered.deployment, prompt(1)
    first = tiered.run(mine, site.token("acme"))
    assert first.cached_tokens == 0
    displace(tiered)
    foreign = tiered.run(mine, site.token("beta"))
    other = tiered.run(mine, site.token("acme", "another"))
    assert foreign.cached_tokens == other.cached_tokens == 0
    displace(tiered)
    again = tiered.run(mine, site.token("acme"))
    assert again.cached_tokens == WHOLE, "from host"
    assert tiered.probe("tiers")["host"]["restored"] >= WHOLE // 16
    assert first.tokens == again.tokens == foreign.tokens == other.tokens
    clean(tiered)


def test_extra_key_only_narrows_in_tiers_too(tiered):
    site, mine = tiered.deployment, prompt(2)
    tiered.run(mine, site.token("delta"))
    displace(tiered)
    assert tiered.run(mine, site.token("delta"), extra_key="mine").cached_tokens == 0
    displace(tiered)
    assert tiered.run(mine, site.token("delta"), extra_key="mine").cached_tokens == WHOLE
    assert tiered.run(mine, site.token("delta")).cached_tokens == WHOLE
    clean(tiered)


def test_no_identity_finds_no_copy(tiered):
    site, mine = tiered.deployment, prompt(3)
    tiered.run(mine, site.token("gamma"))
    displace(tiered)
    for said in (None, "gamma", site.token("gamma")[:-4] + "AAAA"):
        assert tiered.run(mine, said).cached_tokens == 0, said


def test_a_deadline_passes_in_a_tier_of_an_idle_engine(tiered):
    site, mine = tiered.deployment, prompt(4)
    tiered.run(mine, site.token("brief"))
    displace(tiered)
    assert "brief" in tiered.probe("tiers")["host"]["tenants"]
    time.sleep(BRIEF_IDLE_SECONDS + 1.0)
    assert "brief" not in tiered.probe("tiers")["host"]["tenants"], "ended without any request"
    assert tiered.run(mine, site.token("brief")).cached_tokens == 0
    clean(tiered)


def test_what_is_restricted_never_leaves(tiered):
    site, mine = tiered.deployment, prompt(5)
    tiered.run(mine, site.token("secret"))
    displace(tiered)
    assert all("secret" not in one["tenants"] for one in tiered.probe("tiers").values())
    assert tiered.run(mine, site.token("secret")).cached_tokens == 0


def test_an_erased_subject_has_no_copy_and_the_certificate_says_so(tiered):
    site, mine = tiered.deployment, prompt(6)
    tiered.run(mine, site.token("zeta", "erased"))
    displace(tiered)
    assert "zeta" in tiered.probe("tiers")["host"]["tenants"]
    erasure = tiered.probe("erase", tenant="zeta", subject="erased")["erasure"]
    assert all("zeta" not in one["tenants"] for one in tiered.probe("tiers").values())
    figures = certificate(tiered, erasure, "zeta", "erased")["figures"]
    print("certificate by tier:", figures["copies"])
    assert sum(one["ended"] for one in figures["copies"].values()) >= 4
    assert all(one["waiting"] == 0 for one in figures["copies"].values())
    assert all(one["key_destroyed"] == one["ended"] for one in figures["copies"].values())
    assert tiered.run(mine, site.token("zeta", "erased")).cached_tokens == 0
    clean(tiered)


def test_restores_are_on_record(tiered):
    from standins.engines.vllm.deployment import Desk

    site, mine = tiered.deployment, prompt(7)
    tiered.run(mine, site.token("acme"))
    displace(tiered)
    assert tiered.run(mine, site.token("acme")).cached_tokens == WHOLE
    clean(tiered)
    desk = Desk(site, site.folder)
    decided = desk.bodies("transfer-decided")
    done = [one for one in decided if one["action"] == "restore" and one["outcome"] == "done"]
    assert done and {one["tenant"] for one in decided} >= {"acme"}
    assert all(desk.bodies(kind) for kind in ("copies-stored", "copies-ended"))
