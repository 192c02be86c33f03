"""B1, decision equivalence: the compiled table against a reference that evaluates the YAML's data each time.

The reference knows nothing of the loader, the typed form or the compiler; it reads plain dicts. Positive control:
the same harness with the reference's default flipped must disagree.
"""

from __future__ import annotations

import json
import random
from collections import Counter

import numpy as np
import pytest

from kvcustody.policies.document.model import Action, Scope, Via
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.table.crossing import Barriers
from kvcustody.policies.table.model import AccessColumns
from standins.policies.decide_reference import VIAS, WORDS, call, random_document, random_request, reference


def compare(seed, policies, requests, default=False):
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    disagreements = []
    for _ in range(policies):
        doc = random_document(rng)
        revoked = frozenset(rng.sample(["g0", "g1", "s0", "red"], rng.randint(0, 1)))
        text = json.dumps(doc)  # JSON is YAML
        table = compile_policy(load_policy(text, name="random.yaml"), revision=1, revoked=revoked)
        asked = [random_request(rng, doc) for _ in range(requests)]
        for request in asked:
            expected = reference(doc, revoked, *request, default=default)
            got = call(table, request)
            if (got.permitted, got.reasons) != expected or got.errors:
                disagreements.append((request, expected, got))
            effect = "permit" if got.permitted else "deny"
            seen.update(["total", effect, f"{effect}:{request[0]}", f"{effect}:{request[5]}"])
            seen.update(f"{effect}:{reason.split(':')[0].rstrip('0123456789')}" for reason in got.reasons)
        agree_in_bulk(table, [request for request in asked if request[7] is None])
    return seen, disagreements


def agree_in_bulk(table, requests):
    """`decide_many` answers as `decide` does, at each of the instants asked for."""
    for now in {request[6] for request in requests}:
        here = [request for request in requests if request[6] == now]
        mask = table.decide_many(
            AccessColumns(
                np.array([Action[r[0].upper()] for r in here]), [r[1] for r in here], [r[2] for r in here],
                np.array([r[3] for r in here]), np.array([Scope[r[4].upper()] for r in here]),
                np.array([Via[r[5].upper()] for r in here]),
            ), now,
        )  # fmt: skip
        assert mask.tolist() == [call(table, request).permitted for request in here]


def check_coverage(seen):
    assert seen["permit"] >= 0.3 * seen["total"]
    for effect in ("permit", "deny"):
        for via in VIAS:
            assert seen[f"{effect}:{via}"], (effect, via)
        for action in WORDS:
            assert seen[f"{effect}:{action}"], (effect, action)
    for reason in ("permit:g", "permit:s", "permit:r", "permit:own", "permit:tenants", "permit:retention",
                   "permit:offload", "deny:r", "deny:retention", "deny:offload", "deny:default-deny"):  # fmt: skip
        assert seen[reason], reason
    assert any(key.startswith(("permit:red~", "permit:blue~")) for key in seen)


def test_compiled_table_equals_the_reference():
    seen, disagreements = compare(seed=1, policies=240, requests=50)
    assert seen["total"] >= 10_000 and not disagreements, disagreements[:3]
    check_coverage(seen)


def test_positive_control_flipped_default_disagrees():
    seen, disagreements = compare(seed=1, policies=20, requests=100, default=True)
    assert len(disagreements) >= 0.2 * seen["total"]


def test_positive_control_a_compiler_that_does_not_look_at_labels_disagrees(monkeypatch):
    monkeypatch.setattr(Barriers, "never_equal", lambda *asked: ())
    seen, disagreements = compare(seed=1, policies=60, requests=50)
    assert len(disagreements) >= 0.02 * seen["total"]
    assert any(got.permitted and not expected[0] for _, expected, got in disagreements)


@pytest.mark.soak
def test_compiled_table_equals_the_reference_at_full_size():
    seen, disagreements = compare(seed=2, policies=5_000, requests=200)
    assert seen["total"] == 1_000_000 and not disagreements, disagreements[:3]
    check_coverage(seen)
