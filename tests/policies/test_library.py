"""The library's policies load, compile, and do what their comments promise."""

from __future__ import annotations

import pytest

from kvcustody.errors import ConfigError
from kvcustody.policies import library
from kvcustody.policies.document.model import Action, Profile, Scope, Via
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.table.crossing import rules_without_effect
from kvcustody.policies.table.model import AccessRequest

NOW = 1_790_000_000_000_000


@pytest.fixture(params=library.names())
def table(request):
    return compile_policy(library.load(request.param), revision=1)


def test_names():
    assert library.names() == ("public-api", "regulated-saas", "single-org")


def test_each_has_its_name_a_description_and_a_rationale(table):
    text = library.source(table.policy.name)
    assert table.policy.description and text.startswith(f"# {table.policy.name}:")
    assert sum(line.startswith("#") for line in text.splitlines()) >= 10


@pytest.mark.parametrize(
    ("scope", "closed"),
    [("", 0), ("scope: subject, ", 1)],
    ids=["as it is shipped", "control: its owner has a narrow scope"],
)
def test_what_it_opens_can_be_opened(table, scope, closed):
    """`kvcustody up` and first-steps take their grants from here: none may open nothing, by scope or by labels."""
    text = library.source(table.policy.name)
    if scope:
        text = text.replace("scope: tenant, ", scope)
    policy = load_policy(text, name="shipped.yaml")
    grants = {grant.id for grant in (*policy.grants, *policy.group_grants())}
    found = {id_ for id_, _ in rules_without_effect(policy)}
    assert found == (grants if closed else set())


def test_own_reuse_is_permitted_and_crossing_is_named(table):
    known = [tenant.id for tenant in table.policy.tenants]
    for reader in known:
        scope = table.tenant(reader).scope
        assert table.decide(AccessRequest(Action.REUSE, reader, reader, 0, scope, Via.OWN), NOW)
        for owner in {*known, "stranger"} - {reader}:
            assert not table.decide(AccessRequest(Action.REUSE, reader, owner, 0, scope, Via.OWN), NOW)


def test_no_classification_is_missing_an_obligation(table):
    for level in range(len(table.policy.classifications)):
        owed = table.obligations(table.policy.tenants[0].id, level)
        assert owed.active_max_us > 0 and owed.scrub_within_us > 0


def test_public_api_lets_nothing_cross_or_leave():
    table = compile_policy(library.load("public-api"), revision=1)
    policy = table.policy
    assert policy.profile is Profile.STRICT and not policy.grants and not policy.segments
    tenants = [*policy.tenants, policy.default]
    assert all(tenant.guaranteed == tenant.cap and not tenant.borrow for tenant in tenants)
    assert sum(tenant.guaranteed * (tenant.tenants_max or 1) for tenant in tenants) <= 1
    assert table.decide(AccessRequest(Action.REUSE, "key-1", "key-1", 0, Scope.SESSION, Via.OWN), NOW)
    assert not table.decide(AccessRequest(Action.REUSE, "key-1", "key-1", 0, Scope.SUBJECT, Via.OWN), NOW)
    assert not table.decide(AccessRequest(Action.OFFLOAD, "operator", "operator", 0, Scope.SESSION, Via.OWN), NOW)


def test_regulated_saas_shares_by_name_and_date_only():
    table = compile_policy(library.load("regulated-saas"), revision=1)
    ask = lambda reader, owner, level, via=Via.GRANT: table.decide(  # noqa: E731
        AccessRequest(Action.REUSE, reader, owner, level, Scope.TENANT, via), NOW
    )
    assert ask("acme-labs", "acme", 1).reasons == ("labs-reads-acme",) and not ask("acme", "acme-labs", 1)
    assert ask("acme-labs", "acme", 1, Via.SEGMENT).reasons == ("support-agent-v3",)
    assert not ask("globex", "acme", 0) and not ask("stranger", "acme", 0, Via.SEGMENT)
    restricted = table.level("restricted")
    assert not table.decide(AccessRequest(Action.REUSE, "acme", "acme", restricted, Scope.SESSION, Via.OWN), NOW)
    assert table.classify("globex", "/v1/health/a", None, "public") == restricted
    assert table.obligations("stranger", 0).idle_us < table.obligations("acme", 0).idle_us
    assert table.tenant("northwind-bank").scope is Scope.SESSION


def test_single_org_admits_its_tenant_alone():
    table = compile_policy(library.load("single-org"), revision=1)
    assert table.decide(AccessRequest(Action.REUSE, "org", "org", 1, Scope.TENANT, Via.OWN), NOW)
    assert not table.decide(AccessRequest(Action.ADMIT, "guest", "guest", 0, Scope.SESSION, Via.OWN), NOW)
    assert table.tenant("guest") is None


def test_unknown_name():
    with pytest.raises(ConfigError, match="did you mean `public-api`"):
        library.load("public-ap")
