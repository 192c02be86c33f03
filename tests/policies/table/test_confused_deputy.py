"""Chains of grants lead nowhere, and a block keeps the strictest label of its sources.

Random directed graphs of grants, and random derivations along them: who fills from whom, at which classification. The
decisions are the table's, level and domain are what `classify` and the grants allow.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvcustody.policies.document.model import Action, Grant, RuleEffect, Scope, Via
from kvcustody.policies.table import compile as compiler
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.table.model import AccessRequest

NOW = 1_790_000_000_000_000
NAMES = [f"t{i}" for i in range(6)]
LEVELS = ("low", "mid", "high")


def graph(rng, base):
    """Return (table, levels by (owner, reader)): a random graph without a forbid, so that only grants decide."""
    pairs = [(a, b) for a in NAMES for b in NAMES if a != b]
    chosen = {pair: rng.randrange(3) for pair in rng.sample(pairs, rng.randint(3, 14))}
    grants = tuple(Grant(f"g{i}", o, r, top, None, None, "x") for i, ((o, r), top) in enumerate(chosen.items()))
    tenants = tuple(replace(base.tenants[0], id=name, group=None, scope=Scope.TENANT) for name in NAMES)
    rules = tuple(rule for rule in base.rules if rule.effect is RuleEffect.PERMIT)
    policy = replace(base, tenants=tenants, grants=grants, groups=(), segments=(), rules=rules, classify=())
    return compile_policy(policy, revision=1), chosen


def derive(rng, table, chosen, hint_lowers=False, transitive=False):
    """(pairs read without a grant of their own, derivations whose label went down) along one random path."""
    strayed = lowered = 0
    owner = rng.choice(NAMES)
    level = rng.randrange(3)
    contributors = [(owner, level)]
    for _ in range(4):
        reader = rng.choice([name for name in NAMES if name != owner])
        hint = rng.choice([None, *LEVELS])
        claim = LEVELS[level]  # what is derived from a block carries its label as a claim
        derived = table.classify(reader, None, claim, hint)
        if hint_lowers and hint is not None:
            derived = LEVELS.index(hint)
        ask = AccessRequest(Action.REUSE, reader, owner, derived, Scope.TENANT, Via.GRANT)
        permitted = table.decide(ask, NOW).permitted or (
            transitive and any((owner, via) in chosen and (via, reader) in chosen for via in NAMES)
        )
        if not permitted:
            continue
        lowered += derived < max(label for _, label in contributors)
        strayed += chosen.get((owner, reader), -1) < derived
        # what the reader adds is its own, in its own domain: whoever reads the owner does not read it
        contributors.append((reader, derived))
        owner, level = reader, derived
    return strayed, lowered


def run(base, seed, graphs, paths, **faults):
    rng = random.Random(seed)
    total = [0, 0]
    for _ in range(graphs):
        table, chosen = graph(rng, base)
        for _ in range(paths):
            for place, found in enumerate(derive(rng, table, chosen, **faults)):
                total[place] += found
    return tuple(total)


@pytest.fixture
def policy(compiled):
    return compiled().policy


def test_no_chain_opens_and_no_label_goes_down(policy):
    assert run(policy, seed=1, graphs=100, paths=20) == (0, 0)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 12))
def test_no_chain_opens_in_a_hundred_thousand_graphs(policy, seed, monkeypatch):
    """In ten parts; without the digest of each policy, which decides nothing and is half of the time."""
    monkeypatch.setattr(compiler, "digest", lambda policy: "sha256:none")
    assert run(policy, seed, graphs=10_000, paths=1) == (0, 0)


def test_positive_controls(policy):
    assert run(policy, seed=1, graphs=30, paths=20, hint_lowers=True)[1] > 0
    assert run(policy, seed=1, graphs=30, paths=20, transitive=True)[0] > 0
