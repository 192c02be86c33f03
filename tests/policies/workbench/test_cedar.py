"""Decision equivalence with Cedar, an independent engine: the exported policy decides every request alike."""

from __future__ import annotations

import json
import random
import re
from collections import Counter

import pytest

from kvcustody.policies.document.model import Action, Scope, Via
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.workbench.cedar import cedar_entity, cedar_request, to_cedar
from kvcustody.policies.workbench.request import Request
from standins.policies.decide_reference import VIAS, WORDS, call, random_document, random_request

cedarpy = pytest.importorskip("cedarpy")


def as_request(asked):
    action, reader, owner, level, scope, via, now, source = asked
    way = Via[via.upper()]
    return Request(Action[action.upper()], reader, owner, level, Scope[scope.upper()], way, now, source)


def compare(seed, policies, requests, spoil=str):
    """Return (counts, disagreements); `spoil` edits the Cedar text, for controls."""
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    wrong = []
    for _ in range(policies):
        doc = random_document(rng)
        revoked = frozenset(rng.sample(["g0", "g1", "s0", "red"], rng.randint(0, 1)))
        policy = load_policy(json.dumps(doc), name="random.yaml")
        table = compile_policy(policy, revision=1, revoked=revoked)
        asked = [random_request(rng, doc) for _ in range(requests)]
        cedar = to_cedar(policy, revoked=revoked)
        names = {name for request in asked for name in request[1:3]} | {t.id for t in policy.tenants}
        entities = [cedar_entity(policy, name) for name in sorted(names)]
        answers = cedarpy.is_authorized_batch(
            [cedar_request(as_request(request)) for request in asked], spoil(cedar.text), entities
        )
        for request, answer in zip(asked, answers, strict=True):
            got = call(table, request)
            assert not answer.diagnostics.errors, (answer.diagnostics.errors, request)
            if got.permitted != answer.allowed:
                wrong.append((request, got, answer.diagnostics.reasons))
            effect = "permit" if got.permitted else "deny"
            seen.update(["total", effect, f"{effect}:{request[0]}", f"{effect}:{request[5]}"])
    return seen, wrong


def check(seen, wrong):
    assert not wrong, wrong[:3]
    assert seen["permit"] >= 0.3 * seen["total"]
    for effect in ("permit", "deny"):
        assert all(seen[f"{effect}:{word}"] for word in (*WORDS, *VIAS)), seen


def test_cedar_agrees():
    check(*compare(seed=5, policies=25, requests=120))


def test_positive_control_a_lost_forbid_disagrees():
    """Cedar without its forbids: the comparison has to notice."""
    _, wrong = compare(seed=5, policies=25, requests=120, spoil=lambda text: text.replace("\nforbid (", "\npermit ("))
    assert wrong


def test_positive_control_statements_without_their_labels_disagree():
    labels = re.compile(r" && !?principal\.labels(_any)?\.contains(All|Any)\(\[[^]]*\]\)")
    _, wrong = compare(seed=5, policies=25, requests=120, spoil=lambda text: labels.sub("", text))
    assert wrong


@pytest.mark.soak
def test_cedar_agrees_on_a_hundred_thousand():
    seen, wrong = compare(seed=6, policies=500, requests=200)
    assert seen["total"] == 100_000
    check(seen, wrong)


def test_the_library_exports_and_names_its_rules(base):
    policy = load_policy(base, name="base.yaml")
    text = to_cedar(policy, revoked=frozenset({"agent"})).text
    for rule in policy.rules:
        assert f'@id("{rule.id}")' in text
    assert '@id("labs-reads-acme")' in text and '@id("agent")' not in text
