"""By which scope requests are named: what several policies say together, and that doors and workers name alike."""

from __future__ import annotations

from itertools import product

import pytest

from kvcustody.errors import ServiceError
from kvcustody.governance.edge.name_scopes import NARROWEST, NameScopes
from kvcustody.governance.edge.named_requester import named_requester
from kvcustody.governance.identity.domain_spec import ScopeKind, own_domain
from kvcustody.governance.identity.principal import Principal
from kvcustody.integrations.events.block_event import places_of
from kvcustody.policies.document.model import Policy
from kvcustody.policies.reading.load_policy import load_policy
from standins.builders import policy

OWN = (ScopeKind.SESSION, ScopeKind.SUBJECT, ScopeKind.TENANT)


def made(scope: str, *, affinity: str = "private", **scopes: str) -> Policy:
    """A policy of this scope, with tenants of their own."""
    tenants = {"acme": "{guaranteed: 0%, cap: 100%}"} | {
        name: f"{{guaranteed: 0%, cap: 100%}}, {said}" for name, said in scopes.items()
    }
    return load_policy(policy(tenants, scope=scope, more=f"affinity: {affinity}\n"), name="p.yaml")


def test_a_tenants_own_scope_and_affinity_hold_before_the_policys() -> None:
    scopes = NameScopes.of_policies(
        [made("subject", wide="scope: tenant", near="scope: session", shared="affinity: segment")]
    )
    found = {name: scopes.of("corp", name) for name in ("acme", "wide", "near", "shared", "unlisted")}
    assert found == {
        "acme": ScopeKind.SUBJECT,
        "wide": ScopeKind.TENANT,
        "near": ScopeKind.SESSION,
        "shared": ScopeKind.TENANT,
        "unlisted": NARROWEST,
    }
    everybody = NameScopes.of_policies([made("subject", affinity="segment", own="affinity: private")])
    assert everybody.of("corp", "acme") is ScopeKind.TENANT and everybody.of("corp", "own") is ScopeKind.SUBJECT


@pytest.mark.parametrize(("one", "other", "narrower"), [
    ("tenant", "subject", ScopeKind.SUBJECT),
    ("subject", "session", ScopeKind.SESSION),
    ("tenant", "tenant", ScopeKind.TENANT),
])  # fmt: skip
def test_of_several_policies_the_narrowest_holds(one: str, other: str, narrower: ScopeKind) -> None:
    for pair in ([made(one), made(other)], [made(other), made(one)]):
        assert NameScopes.of_policies(pair).of("corp", "acme") is narrower
    only_one = NameScopes.of_policies([made(one), made(other, extra="scope: tenant")])
    assert only_one.of("corp", "extra") is ScopeKind.TENANT, "the other does not admit it"


def test_what_nobody_says_is_as_narrow_as_can_be() -> None:
    for scopes in (NameScopes(), NameScopes.of_policies([])):
        assert not scopes.is_known and scopes.of("corp", "acme") is ScopeKind.SESSION


def test_tenants_go_by_their_names_in_the_policy() -> None:
    text = policy({"acme^corp": "{guaranteed: 0%, cap: 100%}",
                   "acme^partner": "{guaranteed: 0%, cap: 100%}, scope: session"}, scope="tenant",
                  more="issuers: [corp, partner]\n")  # fmt: skip
    scopes = NameScopes.of_policies([load_policy(text, name="p.yaml")])
    assert (scopes.of("corp", "acme"), scopes.of("partner", "acme")) == (ScopeKind.TENANT, ScopeKind.SESSION)
    mixed = NameScopes.of_policies([load_policy(text, name="p.yaml"), made("tenant")])
    assert not mixed.is_known, "two policies that call tenants otherwise"


def test_they_travel_whole_and_malformed_ones_are_refused() -> None:
    scopes = NameScopes.of_policies([made("subject", wide="scope: tenant")])
    again = NameScopes.from_data(scopes.data())
    assert again.digest == scopes.digest != NameScopes().digest
    assert again.of("corp", "wide") is ScopeKind.TENANT
    for wrong in ({}, {**scopes.data(), "default": "world"}, {**scopes.data(), "tenants": {"a": 3}}):
        with pytest.raises(ServiceError):
            NameScopes.from_data(wrong)


def test_a_door_names_a_request_as_its_worker_tells_the_blocks() -> None:
    """For every scope, and whether a subject or a session is there; the tenant's name for all of them, too."""
    for scope, subject, session in product(OWN, (None, "ann"), (None, "s1")):
        who = Principal("corp", "acme", subject, session)
        spec = own_domain(who, scope=scope, classification="low", model=bytes(32), key_epoch=1)
        told = places_of(spec)
        assert told.owner == told.asker == named_requester(who, scope)
        assert (told.owner is None) is (spec is None)
        shared = places_of(spec, by_tenant=True)
        if spec is not None:
            assert shared.owner == shared.asker == named_requester(who, ScopeKind.TENANT)
            assert (shared.wide is not None) is (scope is ScopeKind.TENANT), "only such blocks others may use"
