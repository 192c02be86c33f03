"""Ending a principal and its keys: at once, answered as unknown keys are, on record, never the last by oversight."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcustody.console.main import app
from kvcustody.governance.credentials.api_key import prefix_of
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.service import Service
from standins.service.service_world import recorded
from standins.service.web_signers import rsa_signer

UNKNOWN = {"headers": {"Authorization": "Bearer kvcs_0"}}


@pytest.fixture(scope="module")
def custodian(people) -> str:
    people.add("second-custodian", Role.KEY_CUSTODIAN)  # so that no test ends the last one
    return str(people["key-custodian"])


def test_a_disabled_principal_is_an_unknown_one_at_once(service: Service, client, people, custodian) -> None:
    key = people.add("dan", Role.AUDITOR)
    session = client("POST", "/v1/session", key)
    cookie = {"Cookie": session.headers["set-cookie"].split(";")[0]}
    assert client("GET", "/v1/whoami", key).status_code == 200, "control"
    assert client("GET", "/v1/whoami", headers=cookie).status_code == 200, "control: the session"
    answer = client("POST", "/v1/principals:disable", custodian, json={"name": "dan"})
    assert answer.status_code == 200 and answer.json()["disabled_us"] is not None
    unknown = client("GET", "/v1/whoami", **UNKNOWN)
    for refused in (client("GET", "/v1/whoami", key), client("GET", "/v1/whoami", headers=cookie)):
        assert (
            (refused.status_code, refused.content) == (unknown.status_code, unknown.content) == (401, unknown.content)
        )
    assert recorded(service, "dan")[-1] == ("disabled", "key-custodian")
    again = client("POST", "/v1/principals:disable", custodian, json={"name": "dan"})
    assert again.json() == answer.json() and recorded(service, "dan")[-2][0] == "key-issued", "no second event"


@pytest.mark.parametrize("how", ["disabled", "revoked", "expired"])
def test_a_key_that_ended_costs_what_an_unknown_one_does(service: Service, people, how: str) -> None:
    """It was verified a moment ago, is remembered: refusing it costs a comparison all the same; control: it stands."""
    book, name = service.principals, f"timed-{how}"
    key = people.add(name, Role.AUDITOR)
    hasher, prefix = book._hasher, prefix_of(key)
    assert prefix is not None and book.by_key(prefix, key) is not None
    before = hasher.verifications
    assert book.by_key(prefix, key) is not None and hasher.verifications == before, "control: it costs none"
    if how == "disabled":
        book.disable(name, by="test")
    elif how == "revoked":
        book.revoke_key(prefix, by="test")
    else:
        book.issue_key(name, days=1, overlap_days=0, by="test")
    for number in range(1, 4):
        assert book.by_key(prefix, key) is None
        assert hasher.verifications == before + number


def test_enabled_again_nothing_from_before_works(service: Service, client, people, custodian) -> None:
    key = people.add("erin", Role.AUDITOR)
    cookie = {"Cookie": client("POST", "/v1/session", key).headers["set-cookie"].split(";")[0]}
    client("POST", "/v1/principals:disable", custodian, json={"name": "erin"})
    assert client("POST", "/v1/principals:enable", custodian, json={"name": "erin"}).status_code == 403
    enabled = client("POST", "/v1/principals:enable", people["bootstrap"], json={"name": "erin"})
    assert enabled.status_code == 200 and enabled.json()["disabled_us"] is None
    assert client("GET", "/v1/whoami", key).status_code == 401
    assert client("GET", "/v1/whoami", headers=cookie).status_code == 401
    fresh = client("POST", "/v1/principals/erin/keys", people["bootstrap"], json={"days": 1}).json()["key"]
    assert client("GET", "/v1/whoami", fresh).json()["name"] == "erin", "control: a new key works"
    assert recorded(service, "erin")[-2:] == [("enabled", "bootstrap"), ("key-issued", "bootstrap")]


def test_a_custodian_revokes_one_key_or_all(service: Service, client, people, custodian) -> None:
    first = people.add("fay", Role.DPO)
    second = service.principals.issue_key("fay", days=1, by="test").key
    one, two = first.split("_")[1], second.split("_")[1]
    client("GET", "/v1/whoami", first)
    answer = client("POST", "/v1/principals:revoke-keys", custodian, json={"name": "fay", "prefix": one})
    assert {item["prefix"]: item["revoked_us"] is not None for item in answer.json()["items"]} == {
        one: True,
        two: False,
    }
    assert client("GET", "/v1/whoami", first).status_code == 401
    assert client("GET", "/v1/whoami", second).status_code == 200, "control: the other one"
    assert client("POST", "/v1/principals:revoke-keys", custodian, json={"name": "fay"}).status_code == 200
    assert client("GET", "/v1/whoami", second).status_code == 401
    assert recorded(service, "fay")[-2:] == [("key-revoked", "key-custodian")] * 2
    listed = client("GET", "/v1/principals/fay/keys", custodian).json()["items"]
    assert all(key["revoked_us"] is not None for key in listed) and len(listed) == 2


def test_what_is_absent_or_anothers_is_one_answer(client, people, custodian) -> None:
    theirs = people["operator"].split("_")[1]
    asked = [
        {"name": "nobody"},
        {"name": "nobody", "prefix": theirs},
        {"name": "auditor", "prefix": theirs},
        {"name": "auditor", "prefix": "0" * 12},
    ]
    people["auditor"]
    answers = {client("POST", "/v1/principals:revoke-keys", custodian, json=body).content for body in asked}
    answers.add(client("POST", "/v1/principals:disable", custodian, json={"name": "nobody"}).content)
    answers.add(client("POST", "/v1/principals:disable", custodian, json={"name": "no-issuer:eve"}).content)
    assert len(answers) == 1 and json.loads(answers.pop())["status"] == 404
    assert client("GET", "/v1/whoami", people["operator"]).status_code == 200


def test_the_last_who_manages_keys_stays_unless_it_is_meant(make_service, make_client, make_people) -> None:
    service = make_service()
    client, people = make_client(service), make_people(service)
    custodian, two = (people.add(name, Role.KEY_CUSTODIAN) for name in ("one", "two"))
    assert client("POST", "/v1/principals:disable", custodian, json={"name": "two"}).status_code == 200, "control"
    prefix = custodian.split("_")[1]
    for path, body in (
        ("/v1/principals:disable", {"name": "one"}),
        ("/v1/principals:revoke-keys", {"name": "one"}),
        ("/v1/principals:revoke-keys", {"name": "one", "prefix": prefix}),
    ):
        refused = client("POST", path, custodian, json=body)
        assert refused.status_code == 409 and "allow_last" in refused.json()["detail"]
    assert client("DELETE", f"/v1/keys/{prefix}", custodian).status_code == 409
    assert (
        client("GET", "/v1/whoami", custodian).status_code == 200
        and client("GET", "/v1/whoami", two).status_code == 401
    )
    other = service.principals.issue_key("one", days=1, by="test").key
    assert client("DELETE", f"/v1/keys/{prefix}", custodian).status_code == 204, "control: another key is left"
    ended = client("POST", "/v1/principals:disable", other, json={"name": "one", "allow_last": True})
    assert ended.status_code == 200 and client("GET", "/v1/whoami", other).status_code == 401


def test_two_who_end_each_other_leave_one(make_service, make_people) -> None:
    service = make_service()
    people, book = make_people(service), service.principals
    for name in ("one", "two"):
        people.add(name, Role.KEY_CUSTODIAN)
    refused: list[str] = []

    def end(name: str) -> None:
        try:
            book.disable(name, by="test")
        except ProblemError as error:
            refused.append(error.type.name)

    threads = [threading.Thread(target=end, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused == ["conflict"]
    assert sorted(book.get(name).disabled_us is None for name in ("one", "two")) == [False, True]


def test_a_disabled_principals_tokens_count_no_more(
    make_service: Callable[..., Service], make_client: Any, make_people: Any, tmp_path: Path
) -> None:
    signing = rsa_signer("r1")
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": [signing.jwk()]}))
    issuer = {"issuer": "https://id.example", "name": "id", "audience": "kvcustody", "keys": str(path)}
    service = make_service(issuers=[issuer | {"roles": {"kv-auditors": "auditor"}}])
    client, people = make_client(service), make_people(service)

    def token(who: str) -> str:
        ends = int(time.time()) + 600
        claims = {
            "iss": "https://id.example",
            "aud": "kvcustody",
            "sub": who,
            "exp": ends,
            "roles": ["kv-auditors"],
        }
        return signing.sign(claims)

    alice, bob = token("alice"), token("bob")
    assert client("GET", "/v1/whoami", alice).status_code == 200, "control"
    body = {"name": "id:alice"}
    shown = client("POST", "/v1/principals:disable", people["key-custodian"], json=body).json()
    assert (shown["kind"], shown["roles"]) == ("token", [])
    refused, unknown = client("GET", "/v1/whoami", alice), client("GET", "/v1/whoami", **UNKNOWN)
    assert (refused.status_code, refused.content) == (401, unknown.content)
    assert client("GET", "/v1/whoami", bob).status_code == 200, "control: nobody else's"
    issued = client("POST", "/v1/principals/id:alice/keys", people["bootstrap"], json={"days": 1})
    assert issued.status_code == 409
    assert client("POST", "/v1/principals:enable", people["bootstrap"], json=body).status_code == 200
    assert client("GET", "/v1/whoami", alice).status_code == 200
    assert client("POST", "/v1/principals/id:alice/keys", people["bootstrap"], json={"days": 1}).status_code == 409


@pytest.mark.parametrize("by", ["disable", "revoke"])
def test_an_answer_that_is_held_open_is_not_given_to_who_was_ended(
    service: Service, client, people, make_client, custodian, by: str
) -> None:
    """The question waits, its worker is ended, the answer is the refusal. Control: another worker's goes on."""
    key, stays = people.add(f"held-{by}", Role.WORKER), people.add(f"stays-{by}", Role.WORKER)
    asking, other = make_client(service), make_client(service)
    answers: dict[str, Any] = {}

    def ask(name: str, how: Any, credential: str) -> None:
        answers[name] = how("GET", "/v1/worker/scans?wait=30", credential)

    checked, proceed = threading.Event(), service.scans.orders.owed

    def owed(worker: str) -> Any:
        found = proceed(worker)
        if worker == f"held-{by}":
            checked.set()
        return found

    service.scans.orders.owed = owed  # type: ignore[method-assign]
    threads = [
        threading.Thread(target=ask, args=("held", asking, key)),
        threading.Thread(target=ask, args=("stays", other, stays)),
    ]
    try:
        for thread in threads:
            thread.start()
        assert checked.wait(20)
        path = "/v1/principals:disable" if by == "disable" else "/v1/principals:revoke-keys"
        assert client("POST", path, custodian, json={"name": f"held-{by}"}).status_code == 200
        threads[0].join(20)
        assert answers["held"].status_code == 401
        service.stopping.set()
        service.changed()
        threads[1].join(20)
        assert answers["stays"].status_code == 200
    finally:
        service.stopping.clear()
        service.scans.orders.owed = proceed  # type: ignore[method-assign]


def test_an_administrator_moves_a_worker_to_another_certificate(service: Service, client, people) -> None:
    """The new key is bound to what was named, the others end after the overlap; control: without one they stay."""
    book, boot = service.principals, people["bootstrap"]
    people.add("gpu-7", Role.WORKER)
    old, new = "a" * 43, "b" * 43
    for thumbprint, overlap in ((old, {}), (new, {"overlap_days": 0})):
        body = {"days": 1, "certificate": thumbprint, **overlap}
        assert client("POST", "/v1/principals/gpu-7/keys", boot, json=body).status_code == 201
        now_us = service.clock.utc_us()
        valid = [key.certificate for key in book.keys("gpu-7") if key.expires_us > now_us]
        assert valid == ([old, None] if thumbprint == old else [new])


def test_the_commands_end_and_let_back_in_on_the_ledger_itself(tmp_path: Path, migrated: Path, monkeypatch) -> None:
    shutil.copy(migrated, tmp_path / "ledger.db")
    monkeypatch.setenv("KVCUSTODY_SERVICE_DATABASE_URL", f"sqlite:///{tmp_path}/ledger.db")
    monkeypatch.setenv("KVCUSTODY_SERVICE_STATE_PATH", str(tmp_path / "state"))

    def run(*arguments: str) -> Any:
        result = CliRunner().invoke(app, [*arguments, "--json"])
        return json.loads(result.stdout) if result.exit_code == 0 else result

    made = run("principal", "add", "carl", "--role", "key-custodian")
    assert run("principal", "disable", "carl").exit_code != 0, "the last who manages keys"
    assert run("apikey", "revoke", "--all", "--of", "carl").exit_code != 0
    assert run("apikey", "list", "carl")["items"][0]["revoked_us"] is None
    assert run("apikey", "revoke", made["prefix"], "--allow-last")["principal"] == "carl"
    assert run("principal", "disable", "carl")["disabled_us"] is not None, "it could not ask any more"
    assert run("principal", "enable", "carl")["disabled_us"] is None
    assert run("apikey", "revoke").exit_code != 0 and run("apikey", "revoke", "--all").exit_code != 0
