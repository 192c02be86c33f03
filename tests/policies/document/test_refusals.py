"""No caller and no author can lower a classification, declare a segment, or write what the code refuses."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvcustody.governance.request import Hints
from kvcustody.policies.document.problems import PolicyRejected
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.workbench.validate import validate
from standins.redteam.two_worlds import World, table

HERE = Path(__file__).parents[1]
HIGH = '  - {tenant: victim, as: high}\n  - {tenant: "*", route: /v1/hr/*, as: sealed}'


def codes(text):
    return {problem.code for problem in validate(text, name="p.yaml").problems}


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("  high: {idle: 0s, absolute: 0s, active_max: 15m}\n", "", "KVP501"),
        ("  default: {within: 1s, verify: 1/64}\n", "", "KVP502"),
        ("  high: never\n", "", "KVP503"),
        ("reader: labs", "reader: nobody", "KVP401"),
        ("tenants: [acme, labs]", "tenants: [acme, nobody]", "KVP401"),
        ("when: {reader: owner}", "when: {reader: [nobody]}", "KVP401"),
    ],
)
def test_an_omission_or_a_tenant_outside_the_policy_is_refused(base, old, new, code):
    assert codes(base) == set()
    assert old in base and code in codes(base.replace(old, new, 1))


GRANT = "grants: [{id: g, owner: acme, reader: labs, at_most: low, until: 2027-01-01, reason: x}]\n"
SEGMENT = (
    "segments: [{id: s, owner: acme, tenants: [acme, labs], digest: 'hmac:%s', tokens: 64, classification: low, "
    "expires: 2027-01-01}]\n"
)
GROUP = "groups: {fam: {share: true, at_most: low}}\n"


@pytest.mark.parametrize("profile", ["strict", "dedicated"])
@pytest.mark.parametrize(("section", "code"), [(GRANT, "KVP604"), (SEGMENT % ("0" * 64), "KVP605"), (GROUP, "KVP607")])
def test_an_isolating_profile_with_any_cross_tenant_permit_is_refused(profile, section, code):
    text = (HERE / "strict.yaml").read_text().replace("profile: strict", f"profile: {profile}")
    text = text.replace("labs: {}", "labs: {quota: {guaranteed: 5%, cap: 5%}, group: fam}")
    assert code in codes(text + section)
    with pytest.raises(PolicyRejected):
        load_policy(text + section, name="p.yaml")


def hint_effects(decisions, requests, seed):
    """Return how many requests end up lower than without their hint, or in a segment, by their callers' hints."""
    rng = random.Random(seed)
    world = World(decisions, blocks=2048)
    policy = decisions.policy
    words = [
        "low",
        "high",
        "sealed",
        "public",
        "",
        "LOW",
        "low ",
        "support-agent",
        "segment:s",
        "*",
        "0",
        "default",
    ]
    routes = [None, "/v1/hr/a", "/v1/chat", "/V1/HR/a", "/v1/../hr", "//", "/v1/hr%2fa"]
    effects = 0
    for _ in range(requests):
        tenant, route = rng.choice(["victim", "attacker", "stranger"]), rng.choice(routes)
        word = rng.choice([*words, "".join(rng.choices("lowhigsealed-:/", k=rng.randint(1, 8)))])
        hint = Hints(word, None)
        principal = world.principal(tenant, "s")
        book, moment = world.governor._book, world.clock.utc_us()
        plain = book.plan((principal, b"m" * 32, route, None, None, None), moment)
        told = book.plan((principal, b"m" * 32, route, hint.classification, None, None), moment)
        effects += told.level < plain.level or bool(told.segments) or told.level >= len(policy.classifications)
    return effects


def test_a_hint_lowers_nothing_and_declares_nothing():
    assert hint_effects(table(classify=HIGH), 2_000, seed=1) == 0


@pytest.mark.soak
def test_a_hint_has_no_effect_in_a_hundred_thousand_requests():
    assert hint_effects(table(classify=HIGH), 100_000, seed=2) == 0


def test_positive_control_a_classifier_that_believes_hints(monkeypatch):
    decisions = table(classify=HIGH)
    real = decisions._classifier
    believing = type("Believing", (), {
        "labels": real.labels,
        "classify": lambda self, tenant, route, claim, hint:
            {"low": 0, "high": 1}.get(hint, real.classify(tenant, route, claim, None)),
    })()  # fmt: skip
    monkeypatch.setattr(decisions, "_classifier", believing)
    assert hint_effects(decisions, 2_000, seed=1) > 0
