"""Obligations: every classification has all of them, and several sources combine to the strictest."""

from __future__ import annotations

import itertools
import random

import pytest

from kvcustody.errors import PolicyError
from kvcustody.policies.document.model import OnOutage, Tier
from kvcustody.policies.table.obligations import Obligations, combine

SECOND, MINUTE, HOUR, DAY = 10**6, 60 * 10**6, 3600 * 10**6, 86400 * 10**6


def random_obligations(rng):
    tiers = tuple(tier for tier in Tier if rng.random() < 0.6)
    match = tuple(sorted(rng.sample(["region", "purpose"], rng.randint(0, 2))))
    return Obligations(
        rng.randint(0, 9), rng.randint(0, 9), rng.randint(1, 9), rng.randint(1, 9), rng.choice([0, 0.5, 1.0]),
        tiers, rng.random() < 0.5, OnOutage.DENY,
        rng.choice([OnOutage.SPILL, OnOutage.DENY]), rng.choice(list(OnOutage)), 0.0,
        *(tuple(rng.randint(1, 9) if tier in tiers else 0 for tier in Tier) for _ in range(3)),
        match if Tier.REMOTE in tiers else (),
    )  # fmt: skip


def test_values_of_the_policy(compiled):
    assert compiled().obligations("acme", 0) == Obligations(
        DAY, 7 * DAY, 2 * HOUR, SECOND, 1 / 64, (Tier.HOST, Tier.NVME), True, OnOutage.DENY, OnOutage.SPILL,
        OnOutage.AGGREGATE, 0.0, (7 * DAY, 7 * DAY, 0), (7 * DAY // 16, 7 * DAY // 16, 0),
        (2 * HOUR, 2 * HOUR, 0),
    )  # fmt: skip
    high = compiled().obligations("acme", 2)
    assert (high.idle_us, high.scrub_within_us, high.verify_share, high.tiers) == (0, 250_000, 1.0, ())
    assert not high.cacheable and compiled().obligations("acme", 0).cacheable
    assert compiled().obligations("acme", 1).encrypt is False


def test_a_tenants_own_obligations_tighten_its_own_alone(compiled):
    table = compiled()
    assert table.obligations("globex", 0).idle_us == HOUR and table.obligations("globex", 0).absolute_us == DAY
    assert table.obligations("globex", 1) == table.obligations("acme", 1)


def test_audit_by_classification_is_the_stricter(compiled):
    table = compiled(("own_hits: aggregate}", "own_hits: spill}\n  by_classification: {high: {lifecycle: deny}}"))
    assert table.obligations("acme", 0).on_outage_own_hits is OnOutage.SPILL
    high = table.obligations("acme", 2)
    assert (high.on_outage_lifecycle, high.on_outage_own_hits) == (OnOutage.DENY, OnOutage.SPILL)


def test_custody_of_a_tenant_that_is_not_admitted_ends(compiled):
    line = "  default: {quota: {guaranteed: 1%, cap: 10%}, tenants_max: 20}\n"
    owed = compiled((line, "")).obligations("stranger", 0)
    assert (owed.idle_us, owed.absolute_us, owed.scrub_within_us, owed.verify_share, owed.tiers) == (
        0,
        0,
        250_000,
        1.0,
        (),
    )
    assert compiled().obligations("stranger", 0).idle_us == DAY


@pytest.mark.parametrize("level", [-1, 3, 99])
def test_a_level_that_does_not_exist_is_refused(compiled, level):
    with pytest.raises(PolicyError, match=f"level `{level}`"):
        compiled().obligations("acme", level)


def test_combine_is_the_strictest_of_each_field():
    one = Obligations(5, 9, 3, 7, 0.5, (Tier.HOST, Tier.NVME), False, OnOutage.DENY, OnOutage.SPILL, OnOutage.AGGREGATE)
    two = Obligations(6, 8, 4, 2, 1.0, (Tier.NVME, Tier.REMOTE), True, OnOutage.DENY, OnOutage.DENY, OnOutage.SPILL)
    strict = Obligations(5, 8, 3, 2, 1.0, (Tier.NVME,), True, OnOutage.DENY, OnOutage.DENY, OnOutage.SPILL)
    assert combine(one, two) == strict == combine(two, one)


def test_combine_is_a_semilattice():
    rng = random.Random(3)
    some = [random_obligations(rng) for _ in range(12)]
    for a, b, c in itertools.product(some, some, some[:4]):
        assert combine(a, a) == a and combine(a, b) == combine(b, a)
        assert combine(a, b, c) == combine(a, combine(b, c))


INTEGRITY = ("audit:\n", "integrity: {default: {verify: 1/64}, high: {verify: all}}\naudit:\n")


def test_without_an_integrity_section_nothing_is_compared_with_its_checksum(compiled):
    table = compiled()
    assert [table.obligations("acme", level).integrity_share for level in range(3)] == [0, 0, 0]
    assert not table.policy.checks_integrity


def test_integrity_is_owed_by_classification_and_by_tenant(compiled):
    table = compiled(INTEGRITY)
    assert [table.obligations("acme", level).integrity_share for level in range(3)] == [1 / 64, 1 / 64, 1]
    assert table.policy.checks_integrity
    own = ("globex: {scope", "globex: {integrity: {low: {verify: 1/8}}, scope")
    table = compiled(INTEGRITY, own)
    assert [table.obligations("globex", level).integrity_share for level in range(3)] == [1 / 8, 1 / 64, 1]
    assert table.obligations("acme", 0).integrity_share == 1 / 64
    alone = compiled(own)
    assert alone.policy.checks_integrity and alone.obligations("globex", 0).integrity_share == 1 / 8


def test_a_tenants_own_integrity_may_only_be_stricter(compiled):
    own = ("globex: {scope", "globex: {integrity: {high: {verify: 1/2}}, scope")
    with pytest.raises(PolicyError, match="tenant `integrity` for `high` is looser"):
        compiled(INTEGRITY, own)
