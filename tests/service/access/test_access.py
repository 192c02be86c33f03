"""Roles are the design's table; the bootstrap key only enrols; settings that would open the door are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import update

from kvcustody.audit.store.schema.service import service_principals
from kvcustody.errors import ConfigError, IdentityError
from kvcustody.governance.service.access.roles import PERMISSIONS, Permission, Reach, Role, check_roles
from kvcustody.governance.service.settings import load_service_settings

ROOT = Path(__file__).resolve().parents[3]


def test_roles_are_the_table_of_the_design() -> None:
    """Each line is a row of the table of roles: (action, who reaches only the own tenant, who reaches all)."""
    table = [
        (Permission.READ_CUSTODY, {"tenant-viewer", "tenant-admin"}, {"dpo", "auditor"}),
        (Permission.READ_HEALTH, set(), {"dpo", "auditor", "operator"}),
        (Permission.ERASE, {"tenant-admin"}, {"dpo"}),
        (Permission.CONSENT, {"tenant-admin"}, set()),
        (Permission.CERTIFY, {"tenant-admin"}, {"dpo"}),
        (Permission.READ_CERTIFICATE, {"tenant-admin"}, {"dpo", "auditor"}),
        (Permission.READ_POLICY, set(), {"auditor", "author", "approver"}),
        (Permission.WRITE_POLICY, set(), {"author", "approver"}),
        (Permission.APPROVE_POLICY, set(), {"approver"}),
        (Permission.ACTIVATE_POLICY, set(), {"approver"}),
        (Permission.STAGE_POLICY, set(), {"approver", "operator"}),
        (Permission.NARROW_POLICY, set(), {"approver", "break-glass"}),
        (Permission.READ_OPERATIONS, set(), {"auditor", "operator"}),
        (Permission.OPERATE, set(), {"operator"}),
        (Permission.MANAGE_KEYS, set(), {"key-custodian"}),
        (Permission.WORK, set(), {"worker"}),
        (Permission.HAND_IN, set(), {"worker", "door"}),
        (Permission.ENROL, set(), {"bootstrap"}),
        (Permission.SELF, set(), {role.value for role in Role if role is not Role.BOOTSTRAP}),
    ]
    assert {row[0] for row in table} == set(Permission)
    for action, own, everything in table:
        found = {role: PERMISSIONS[role].get(action, Reach.NONE) for role in Role}
        assert {role for role in Role if found[role] is Reach.OWN} == own, action
        assert {role for role in Role if found[role] is Reach.ALL} == everything, action


@pytest.mark.parametrize(
    ("roles", "tenant"),
    [
        ([Role.AUTHOR, Role.APPROVER], None),
        ([Role.WORKER, Role.OPERATOR], None),
        ([Role.BOOTSTRAP, Role.DPO], None),
        ([Role.TENANT_VIEWER], None),
        ([Role.AUDITOR], "acme"),
        ([Role.TENANT_ADMIN, Role.DPO], "acme"),
        ([], None),
    ],
)
def test_roles_that_nobody_holds_together(roles: list[Role], tenant: str | None) -> None:
    with pytest.raises(IdentityError, match="roles"):
        check_roles(roles, tenant)


def test_the_bootstrap_key_enrols_and_nothing_else(client, people, service) -> None:
    key = people["bootstrap"]
    answer = client("POST", "/v1/principals", key, json={"name": "eve", "roles": ["auditor"]})
    assert (
        answer.status_code == 201 and client("GET", "/v1/whoami", answer.json()["key"]["key"]).json()["name"] == "eve"
    )
    for path in ("/v1/whoami", "/v1/audit/events", "/v1/health", "/v1/keys"):
        assert client("GET", path, key).status_code == 403
    both = {"name": "mallory", "roles": ["author", "approver"]}
    assert client("POST", "/v1/principals", key, json=both).status_code == 422
    assert client("POST", "/v1/principals", key, json={"name": "m", "roles": ["bootstrap"]}).status_code == 422
    assert client("POST", "/v1/principals", key, json={"name": "eve", "roles": ["dpo"]}).status_code == 409


def _bootstrap(service, name: str) -> str:
    service.principals.enrol(name, [Role.BOOTSTRAP], kind="machine", by="local:test")
    return service.principals.issue_key(name, days=1, by="local:test").key


@pytest.mark.parametrize("first", ["author", "approver"])
def test_one_bootstrap_key_gives_one_of_two_roles_that_nobody_holds_together(client, service, first) -> None:
    """By a second name, a further key and enabling alike; a second person with a key of their own gives the other."""
    second = {"author": "approver", "approver": "author"}[first]
    bootstrap_key, other = (_bootstrap(service, f"boot-{first}-{number}") for number in (1, 2))

    def enrol(key: str, name: str, role: str) -> int:
        body = {"name": f"{name}-{first}", "roles": [role]}
        return client("POST", "/v1/principals", key, json=body).status_code

    assert enrol(bootstrap_key, "alice", first) == 201 and enrol(bootstrap_key, "amy", first) == 201
    refused = client("POST", "/v1/principals", bootstrap_key, json={"name": f"alice2-{first}", "roles": [second]})
    assert refused.status_code == 409 and f"`{first}`" in refused.json()["detail"]
    assert service.principals.find(f"alice2-{first}") is None
    assert enrol(bootstrap_key, "dan", "dpo") == 201, "control: what may be held together is given"
    assert enrol(other, "bob", second) == 201, "control: another key gives the other role"
    assert client("POST", f"/v1/principals/bob-{first}/keys", bootstrap_key, json={"days": 1}).status_code == 409
    service.principals.disable(f"bob-{first}", by="test")
    named = {"name": f"bob-{first}"}
    assert client("POST", "/v1/principals:enable", bootstrap_key, json=named).status_code == 409
    assert service.principals.get(f"bob-{first}").disabled_us is not None
    assert client("POST", "/v1/principals:enable", other, json=named).status_code == 200


def test_a_side_that_was_taken_by_a_further_key_or_by_enabling_stays(client, service, people) -> None:
    """Whoever lets an author back in first may not enrol an approver after."""
    issuing, enabling = _bootstrap(service, "boot-issuing"), _bootstrap(service, "boot-enabling")
    for name in ("ann", "ben"):
        people.add(name, Role.AUTHOR)
    assert client("POST", "/v1/principals/ann/keys", issuing, json={"days": 1}).status_code == 201
    service.principals.disable("ben", by="test")
    assert client("POST", "/v1/principals:enable", enabling, json={"name": "ben"}).status_code == 200
    for number, key in enumerate((issuing, enabling)):
        body = {"name": f"cat-{number}", "roles": ["approver"]}
        assert client("POST", "/v1/principals", key, json=body).status_code == 409
        assert client("POST", "/v1/principals", key, json=body | {"roles": ["author"]}).status_code == 201


@pytest.mark.parametrize(
    "given",
    [
        {"listen": "0.0.0.0:80"},
        {"listen": "example.com:443"},
        {"listen": "[::]:443"},
        {"listen": "80"},
        {"workers_listen": "127.0.0.1:1"},
        {"tls_key_path": "key.pem"},
        {"issuers": [{"issuer": "https://a", "name": "a", "audience": "b", "keys": "http://a/jwks"}]},
        {"issuers": [{"issuer": "https://a", "name": "a", "audience": "b", "keys": "k", "roles": {"x": "worker"}}]},
        {"issuers": [{"issuer": "https://a", "name": "a", "audience": "b", "keys": "k", "algorithms": ["HS256"]}]},
    ],
)
def test_settings_that_would_open_the_door_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="service settings"):
        load_service_settings(**given)


def test_defaults_listen_to_this_user_alone() -> None:
    assert load_service_settings().listen.startswith("unix:")
    assert load_service_settings(listen="127.0.0.1:8080").listen == "127.0.0.1:8080"


def test_a_role_that_nobody_here_knows_gives_nothing_and_ends_no_list(client, people, service) -> None:
    """As a later release's role beside this one's service. Control: the role that is known gives what it gave."""
    table = service_principals
    for name, roles in (("of-tomorrow", "role-of-tomorrow"), ("of-both", "auditor,role-of-tomorrow")):
        people.add(name, Role.AUDITOR)
        with service.engine.begin() as connection:
            connection.execute(update(table).where(table.c.name == name).values(roles=roles))
    listed = client("GET", "/v1/principals?limit=1000", people["bootstrap"])
    assert listed.status_code == 200, listed.text
    roles = {item["name"]: item["roles"] for item in listed.json()["items"]}
    assert (roles["of-tomorrow"], roles["of-both"]) == ([], ["auditor"])
    for path, who, status in (
        ("/v1/inbox", people["auditor"], 200),
        ("/v1/audit/logs", people.keys["of-both"], 200),
        ("/v1/audit/logs", people.keys["of-tomorrow"], 403),
    ):
        assert client("GET", path, who).status_code == status, (path, status)
