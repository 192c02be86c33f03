"""Little room, many requests, chunked prefill, preemption: the same tokens as plain SGLang, and clean books."""

from __future__ import annotations

import pytest

from standins.engines.sglang.sglang_workload import requests, run

SMALL = {"max_total_tokens": 1024, "chunked_prefill_size": 64, "max_running_requests": 6}
RETRACTS = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
RANKED = "eviction: {policy: lfu}"


def _clean(engine) -> None:
    assert engine.probe("check") == []
    assert engine.probe("scan") == []
    free, held = engine.probe("free"), engine.probe("held")
    assert free["soiled"] == 0
    assert free["free"] + held["evictable"] + held["protected"] == free["slots"]
    assert held["protected"] == 0, "an idle engine holds nothing"
    assert engine.probe("written")["soiled"] == 0


def _both(start, new_deployment, work, settings, policy=None, **options) -> tuple:
    named = {} if policy is None else {"policy": policy}
    site = new_deployment(**named)
    engine = start(deployment=site, settings=settings, **options)
    governed = run(engine, work, site.token)
    _clean(engine)
    seen = {name: engine.probe(name) for name in ("stats", "written")}
    engine.close()
    plain = run(start(settings=settings, **options), work, str)
    return governed, plain, seen


@pytest.mark.parametrize("page_size", [1, 16])
def test_same_tokens_as_plain_sglang_under_pressure(start, new_deployment, page_size):
    work = requests(60)
    governed, plain, seen = _both(start, new_deployment, work, RETRACTS, page_size=page_size, **SMALL)
    assert governed == plain
    assert seen["written"]["retracted"] > 0, "nothing was preempted"
    assert seen["stats"]["evicted"], "nothing was evicted"
    assert sum(one["hit_blocks"] for one in seen["stats"]["tenants"].values()) > 0, "nothing was reused"


@pytest.mark.soak
@pytest.mark.parametrize("page_size", [1, 16])
def test_same_tokens_over_many_requests(start, new_deployment, page_size):
    work = requests(520, seed=11)
    governed, plain, _ = _both(start, new_deployment, work, {}, page_size=page_size, **SMALL)
    assert len(governed) >= 500 and governed == plain


def test_the_order_of_eviction_is_the_policys(start, new_deployment):
    from standins.engines.vllm.deployment import POLICY

    policy = POLICY.replace("eviction: {policy: lru}", RANKED)
    assert policy != POLICY
    site = new_deployment(policy=policy)
    engine = start(deployment=site, **SMALL)
    often = [16 + (at * 5) % 480 for at in range(100)]
    for _ in range(4):
        engine.run(often, site.token("acme"))
    for number in range(16):
        engine.run([16 + (number * 29 + at * 3) % 480 for at in range(90)], site.token("acme"))
    assert engine.probe("stats")["evicted"]
    assert engine.run(often, site.token("acme")).cached_tokens == len(often) - 1, "used most, and gone"
    _clean(engine)


def test_who_is_over_quota_waits_alone(start, new_deployment):
    site = new_deployment()
    engine = start(deployment=site, **SMALL)
    small = [[16 + (number * 37 + at) % 480 for at in range(90)] for number in range(4)]
    batch = [(prompt, site.token("small")) for prompt in small]
    batch.append(([16 + at for at in range(200)], site.token("acme")))
    answers = engine.run_all(batch)
    assert all(len(answer.tokens) == 8 for answer in answers)
    assert engine.probe("stats")["tenants"]["small"]["deferred"].get("over-quota", 0) > 0
    too_long = engine.run([16 + at % 400 for at in range(300)], site.token("small"))
    assert too_long.reason["type"] == "abort" and "kvcustody" in too_long.reason["message"]
    _clean(engine)
