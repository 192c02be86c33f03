"""Effective classification: the highest of tenant or route default, claim and hint; labels only narrow."""

from __future__ import annotations

import itertools
import random

import pytest

LOW, MID, HIGH = 0, 1, 2
NO_EVERYBODY = ('  - {tenant: "*", as: mid}\n', "")


def test_tenant_default_then_everybody(compiled):
    table = compiled(('  - {tenant: "*", as: mid}\n', '  - {tenant: "*", as: mid}\n  - {tenant: labs, as: low}\n'))
    assert table.classify("labs", None, None, None) == LOW
    assert table.classify("acme", None, None, None) == MID == table.classify("stranger", None, None, None)


def test_routes_claims_and_hints_only_raise(compiled):
    table = compiled()
    assert table.classify("acme", "/v1/hr/people", None, None) == HIGH
    assert table.classify("labs", "/v1/hr/people", None, None) == MID, "the route rule is acme's"
    assert table.classify("acme", "/v1/chat", "low", "low") == MID
    assert table.classify("acme", "/v1/chat", "high", None) == HIGH == table.classify("acme", None, None, "high")
    low_route = compiled(("route: /v1/hr/*, as: high", "route: /v1/hr/*, as: low"))
    assert low_route.classify("acme", "/v1/hr/people", None, None) == MID


def test_none_known_is_the_highest_and_a_hint_alone_is_not_known(compiled):
    table = compiled(NO_EVERYBODY)
    assert table.classify("labs", None, None, None) == HIGH
    assert table.classify("labs", None, None, "low") == HIGH
    assert table.classify("labs", None, "low", None) == LOW
    assert table.classify("labs", None, "low", "mid") == MID


@pytest.mark.parametrize("unknown", ["secret", "", "LOW", "low ", "*"])
def test_an_unknown_claim_or_hint_counts_as_the_highest(compiled, unknown):
    assert compiled().classify("acme", None, unknown, None) == HIGH
    assert compiled().classify("acme", None, None, unknown) == HIGH


@pytest.mark.parametrize("route", ["/v1/hr", "/v1/hr/", "/v1/hr/a", "/v1/hr/a/b/c", "/V1/HR/a", "/v1/hr/a-b.c~d"])
def test_a_route_pattern_covers_everything_below(compiled, route):
    assert compiled().classify("acme", route, None, None) == HIGH


@pytest.mark.parametrize("route", ["/v1/hrx", "/v1", "/v2/hr/a", "/", "/x/v1/hr/a"])
def test_and_nothing_else(compiled, route):
    assert compiled().classify("acme", route, None, None) == MID


@pytest.mark.parametrize(
    "route",
    ["", "v1/hr", "//v1/hr/a", "/v1//hr/a", "/v1/./hr/a", "/v1/../v1/hr/a", "/v1/%68r/a", "/v1/hr\\a",
     "/v1/h\u0443r", "/v1/hr?x=1", "/v1/chat;/../hr", "/" + "a" * 2000, "/v1/chat\n", 7],
)  # fmt: skip
def test_a_route_that_cannot_be_trusted_counts_as_the_highest(compiled, route):
    """Otherwise a spelling that only the engine resolves would escape a route's level."""
    assert compiled().classify("acme", route, None, None) == HIGH


def test_a_star_inside_a_pattern_is_one_segment(compiled):
    table = compiled(("route: /v1/hr/*", "route: /v1/*/files"))
    assert table.classify("acme", "/v1/a/files", None, None) == HIGH
    assert table.classify("acme", "/v1/a/b/files", None, None) == MID == table.classify("acme", "/v1/files", None, None)


def test_a_hint_never_lowers(compiled):
    """Every combination, and many random ones: with any hint the level is at least that without."""
    table = compiled()
    words = [None, "low", "mid", "high", "unknown", ""]
    routes = [None, "/v1/hr/a", "/v1/chat", "//", "/v1/../hr"]
    tenants = ["acme", "labs", "stranger"]
    for tenant, route, claim in itertools.product(tenants, routes, words):
        without = table.classify(tenant, route, claim, None)
        assert all(table.classify(tenant, route, claim, hint) >= without for hint in words)
    rng = random.Random(7)
    for _ in range(5_000):
        hint = "".join(rng.choices("lowmidhgh\x00 ", k=rng.randint(0, 5)))
        assert table.classify("acme", "/v1/hr/x", None, hint) == HIGH


def test_labels_accumulate_and_are_sorted(compiled):
    table = compiled(
        ("labels: {region: [eu, us]}", "labels: {region: [eu, us], purpose: [chat, hr]}"),
        ("route: /v1/hr/*, as: high", "route: /v1/hr/*, labels: {purpose: hr, region: us}"),
    )
    assert table.labels("acme", "/v1/chat") == (("region", "eu"),)
    assert table.labels("acme", "/v1/hr/x") == (("purpose", "hr"), ("region", "eu"), ("region", "us"))
    assert table.labels("acme", "/v1/chat/../hr") == table.labels("acme", "/v1/hr/x")
    assert table.labels("labs", None) == () == table.labels("stranger", "/v1/hr/x")
