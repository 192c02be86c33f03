"""A ledger that two issuers' tenants are in, asked over the API and by pages: an id alone is nobody's name there."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import pytest

from kvcustody.audit.kinds import BARE, QUALIFIED
from kvcustody.console.web.page_request import PageRequest
from kvcustody.console.web.pages import custody as custody_pages
from kvcustody.console.web.pages import deletion as deletion_pages
from kvcustody.errors import ConfigError
from kvcustody.governance.service.access.principals import Principals
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.service import Service
from standins.service.service_world import Worker, register, ship

CORP, PARTNER, LABS = "acme", "acme^partner", "labs"


@pytest.fixture(scope="module", autouse=True)
def shipped(client: Any, people: Any) -> None:
    worker = Worker()
    register(client, people["worker"], worker)
    for issuer, tenants in (("corp", BARE), ("partner", QUALIFIED)):
        body = {"issuer": issuer, "tenants": tenants}
        assert client("PUT", "/v1/worker/issuers", people["worker"], json=body).status_code == 200
    events = [worker.started()]
    for tenant, blocks in ((CORP, 2), (PARTNER, 3), (LABS, 1)):
        events += worker.request(tenant, blocks=blocks)
    assert ship(client, people["worker"], worker, worker.batch(events)).status_code == 200
    again = register(client, people["worker"], worker).json()
    assert again["issuers"] == ["corp", "partner"] and not again["new"]


QUESTIONS = [
    "/v1/custody/coverage?since=0&until=9000000000000000",
    "/v1/custody/live?",
    "/v1/audit/events?",
    "/v1/erasures?",
]


@pytest.mark.parametrize("path", QUESTIONS, ids=lambda path: urlsplit(path).path)
def test_who_sees_all_says_whose_tenant_is_meant(client: Any, people: Any, path: str) -> None:
    bare = client("GET", f"{path}&tenant=acme", people["auditor"])
    assert bare.status_code == 422 and "`acme^corp` or `acme^partner`" in bare.text, bare.text
    for said in ("acme^corp", "acme^partner"):
        assert client("GET", f"{path}&tenant={said.replace('^', '%5E')}", people["auditor"]).status_code == 200
    assert client("GET", f"{path}&tenant=acme%5Eevil", people["auditor"]).status_code == 422


def test_each_sees_its_own_and_nothing_of_the_other(client: Any, people: Any) -> None:
    for said, name, blocks in (("acme^corp", CORP, 2), (PARTNER, PARTNER, 3)):
        viewer = people.add(f"viewer-{blocks}", Role.TENANT_VIEWER, said)
        body = client("GET", "/v1/audit/events?limit=100", viewer).json()
        assert {item["log"] for item in body["items"]} == {f"tenant/{name}"}
        rows = client("GET", "/v1/custody/coverage?since=0&until=9000000000000000", viewer).json()["rows"]
        assert [(row["tenant"], row["due"]) for row in rows] == [(name, blocks)]
        other = ({"acme^corp", PARTNER} - {said}).pop().replace("^", "%5E")
        for tenant in (other, "acme%5Eevil", "labs%5Ecorp"):
            assert client("GET", f"/v1/custody/live?tenant={tenant}", viewer).status_code == 404
        assert client("GET", f"/v1/custody/live?tenant={said.replace('^', '%5E')}", viewer).status_code == 200


def test_an_erasure_is_of_the_one_that_was_named(client: Any, people: Any) -> None:
    wrong = client("POST", "/v1/erasures", people["dpo"], json={"tenant": "acme"})
    assert wrong.status_code == 422 and "say whose it is" in wrong.text
    made = client("POST", "/v1/erasures", people["dpo"], json={"tenant": "acme^corp"})
    own = client("POST", "/v1/erasures", people.add("partner-admin", Role.TENANT_ADMIN, PARTNER), json={})
    assert (made.status_code, own.status_code) == (202, 202), (made.text, own.text)
    assert (made.json()["tenant"], own.json()["tenant"]) == (CORP, PARTNER)


def test_an_order_on_keys_is_of_the_one_that_was_named(client: Any, people: Any) -> None:
    path, key = "/v1/keys/tenants:rotate", people["key-custodian"]
    wrong = client("POST", path, key, json={"tenant": "acme", "reason": "yearly"})
    assert wrong.status_code == 422 and "say whose it is" in wrong.text
    made = client("POST", path, key, json={"tenant": PARTNER, "reason": "yearly"})
    assert made.json()["tenant"] == PARTNER


def test_nobody_is_enrolled_for_an_id_that_two_have(service: Service) -> None:
    book: Principals = service.principals
    with pytest.raises(ConfigError, match="say whose it is"):
        book.enrol("somebody", [Role.TENANT_VIEWER], tenant="acme", by="test")
    with pytest.raises(ConfigError, match="no issuer here"):
        book.enrol("somebody", [Role.TENANT_VIEWER], tenant="acme^evil", by="test")


@pytest.mark.parametrize("page", [custody_pages.live, deletion_pages.show])
def test_a_page_answers_about_the_one_that_was_named(service: Service, people: Any, page: Any) -> None:
    caller = service.authenticator.caller(f"Bearer {people['auditor']}", None, "test")

    def asked(tenant: str) -> str:
        query = {"tenant": tenant, "since": "0"}
        visit = PageRequest(service, caller, "/console/custody", {}, query, {}, None)
        return bytes(page(visit).body).decode()

    with pytest.raises((ProblemError, ConfigError), match="say whose it is"):
        asked("acme")
    for said in ("acme^corp", "acme^partner"):
        assert f'value="{said}"' in asked(said), "what was asked stands in the form, and may be asked again"


def test_health_says_whose_the_bare_ids_are(client: Any, people: Any) -> None:
    assert client("GET", "/v1/health", people["operator"]).json()["issuers"] == ["corp", "partner"]
