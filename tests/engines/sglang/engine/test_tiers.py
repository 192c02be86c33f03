"""Tiers in a real engine whose pool is too small: own hits come back and no others, nothing outlives its end."""

from __future__ import annotations

import time

import pytest
from deployment import BRIEF_IDLE_SECONDS
from sglang_tiers import SMALL, TIER_POLICY, certificate, clean, displace, prompt, settings
from sglang_workload import requests, run

WHOLE = 288  # of 301 tokens: eighteen units of sixteen


def _tiered(start, new_deployment, tiers, **options):
    site = new_deployment(policy=TIER_POLICY)
    named = settings(site.folder, tiers)
    return start(deployment=site, settings=named, **{**SMALL, **options}), site, named


@pytest.fixture(scope="module")
def tiered(model, site, new_deployment):
    """One engine with both tiers, for tests with tenants of their own."""
    from sglang_engine import SglangEngine

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
    from deployment import Desk

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


@pytest.mark.parametrize("how", ["fails", "loses", "lies"])
def test_a_store_that_does_what_it_should_not_gives_misses(start, new_deployment, how):
    engine, site, _ = _tiered(start, new_deployment, "host")
    mine, other = prompt(10), prompt(11)
    first = [engine.run(one, site.token("acme")).tokens for one in (mine, other)]
    displace(engine)
    engine.probe("hurt_store", how=how)
    again = [engine.run(one, site.token("acme")) for one in (mine, other)]
    assert [one.tokens for one in again] == first
    assert [one.cached_tokens for one in again] == [0, 0]
    assert engine.run(mine, site.token("acme")).cached_tokens == len(mine) - 1, "from the device by now"
    clean(engine)


def test_another_tenant_would_be_given_copies_without_their_keys(start, new_deployment):
    """The positive control of every `0` here: one domain for everybody, and the copies come."""
    engine, site, _ = _tiered(start, new_deployment, "host")
    mine = prompt(12)
    engine.run(mine, site.token("acme"))
    displace(engine)
    assert engine.run(mine, site.token("beta")).cached_tokens == 0
    displace(engine, "acme")
    engine.probe("open_to_anybody")
    stolen = engine.run(mine, site.token("gamma")).cached_tokens
    print("without keys of its own a tenant finds", stolen, "of", len(mine), "tokens")
    assert stolen == WHOLE


@pytest.mark.parametrize("page_size", [1, 16])
def test_files_are_found_after_a_restart(start, new_deployment, page_size):
    engine, site, named = _tiered(start, new_deployment, "nvme", page_size=page_size)
    mine = prompt(13)
    first = engine.run(mine, site.token("acme"))
    displace(engine)
    assert engine.run(mine, site.token("acme")).cached_tokens == WHOLE, "from nvme"
    displace(engine)
    engine.stop()
    engine.close()
    again = start(deployment=site, settings=named, **SMALL, page_size=page_size)
    assert again.run(mine, site.token("beta")).cached_tokens == 0
    found = again.run(mine, site.token("acme"))
    assert found.cached_tokens == WHOLE and found.tokens == first.tokens
    clean(again)


def _same_tokens(start, new_deployment, work, tiers, page_size):
    engine, site, _ = _tiered(start, new_deployment, tiers, page_size=page_size)
    governed = run(engine, work, site.token)
    clean(engine)
    seen = engine.probe("tiers")
    engine.close()
    assert run(start(**SMALL, page_size=page_size), work, str) == governed
    print("units restored:", {name: one["restored"] for name, one in seen.items()}, "of", len(work), "requests")
    return seen


@pytest.mark.parametrize(("tiers", "page_size"), [("host nvme", 1), ("nvme", 16)])
def test_same_tokens_as_plain_sglang_with_tiers_on(start, new_deployment, tiers, page_size):
    seen = _same_tokens(start, new_deployment, requests(60), tiers, page_size)
    assert sum(one["restored"] for one in seen.values()) > 0, "nothing came back"


@pytest.mark.soak
@pytest.mark.parametrize(("tiers", "page_size"), [("host nvme", 1), ("nvme", 1), ("host", 16)])
def test_same_tokens_over_many_requests_with_tiers_on(start, new_deployment, tiers, page_size):
    seen = _same_tokens(start, new_deployment, requests(520, seed=11), tiers, page_size)
    assert sum(one["restored"] for one in seen.values()) > 100
