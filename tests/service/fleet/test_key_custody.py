"""Key custodians: the signing key changes hands under a running service, a subject's link goes, tenants' keys end."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from sqlalchemy import select

from kvcustody.audit.keep.purge_and_legal_hold import lift_hold, place_hold
from kvcustody.audit.store.schema.ledger import events
from kvcustody.audit.tlog.checkpoint import open_checkpoint
from kvcustody.audit.tlog.signed_note import NoteError, parse_vkey
from kvcustody.audit.tlog.signing_key import read_signing_key
from kvcustody.errors import LedgerUnavailable
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.identity.domain_spec import tenant_owner
from kvcustody.governance.service.access.roles import Role
from standins.service.control_plane_world import ControlPlane, ask, until
from standins.service.service_world import Worker, register, ship

REASON = {"reason": "yearly"}


def bodies(service: Any, kind: str) -> list[dict[str, Any]]:
    query = select(events.c.leaf).where(events.c.kind == kind).order_by(events.c.log, events.c.idx)
    with service.reading() as connection:
        return [orjson.loads(bytes(leaf)) for leaf in connection.scalars(query)]


@pytest.mark.system("a new signing key needs a restart")
def test_the_signing_key_changes_hands_under_a_running_service(service: Any, client: Any, people: Any) -> None:
    path, custodian = service.settings.signing_key_path, people["key-custodian"]
    old = read_signing_key(path)
    [before] = client("GET", "/v1/keys/signing", custodian).json()["items"]
    assert before == {"key": str(old.verifier), "first_size": 0, "last_size": None}
    answer = client("POST", "/v1/keys/signing:rotate", custodian, json={})
    assert answer.status_code == 200, answer.text
    first, second = answer.json()["items"]
    assert first["last_size"] == second["first_size"] and second["last_size"] is None
    assert second["key"] == str(read_signing_key(path).verifier) != first["key"]
    assert read_signing_key(path.with_name(f"{path.name}.{old.verifier.key_id.hex()}")).verifier == old.verifier
    people.add("after-the-handover", Role.AUDITOR)  # what comes next is signed by the new key
    size = first["last_size"]
    until(lambda: service.signer.status().size > size)
    note = client("GET", "/v1/audit/checkpoints/latest", people["auditor"]).json()["note"].encode()
    open_checkpoint(note, [parse_vkey(second["key"])])
    with pytest.raises(NoteError, match="no trusted key signed"):
        open_checkpoint(note, [parse_vkey(first["key"])])  # control: the old one signed nothing newer
    assert bodies(service, "signing-key")[-1]["actor"] == "key-custodian"


def test_a_handover_that_cannot_be_recorded_does_not_happen(
    service: Any, client: Any, people: Any, monkeypatch: Any
) -> None:
    path = service.settings.signing_key_path
    before, custodian = read_signing_key(path).verifier, people["key-custodian"]

    def away(*_: object, **__: object) -> None:
        raise LedgerUnavailable("away")

    with monkeypatch.context() as broken:
        broken.setattr(service.writer, "submit_durable", away)
        assert client("POST", "/v1/keys/signing:rotate", custodian, json={}).status_code == 503
    assert read_signing_key(path).verifier == before
    people.add("still-signed", Role.AUDITOR)
    assert service.signer.sign_once() is not None


def test_a_subjects_link_is_destroyed_on_record(service: Any, client: Any, people: Any) -> None:
    worker = Worker("redacted")
    people.add("redacted", Role.WORKER)
    register(client, people["redacted"], worker)
    asked = [worker.started(), *worker.request("acme", "user-1"), *worker.request("acme", "user-2")]
    ship(client, people["redacted"], worker, worker.batch(asked))
    assert service.names_of("acme", "user-1"), "void: nobody is known"
    body = {"tenant": "acme", "subject": "user-1", "reason": "request 12"}
    place_hold(service.engine, "case-9", "acme", actor="counsel", reason="case 9", clock=service.clock)
    held = client("POST", "/v1/keys/subjects:destroy", people["key-custodian"], json=body)
    assert held.status_code == 409 and "legal hold" in held.json()["detail"]
    lift_hold(service.engine, "case-9", actor="counsel", reason="closed", clock=service.clock)
    done = client("POST", "/v1/keys/subjects:destroy", people["key-custodian"], json=body).json()
    assert (done["pseudonyms"], done["keys"], done["remains"]) == (1, 1, [])
    assert service.names_of("acme", "user-1") == [] and service.names_of("acme", "user-2"), "control: nobody else"
    [leaf] = bodies(service, "subject-unlinked")
    assert (leaf["actor"], leaf["reason"]) == ("key-custodian", "request 12") and "user-1" not in str(leaf)


@pytest.mark.system("a worker keeps a tenant's destroyed key")
def test_tenants_keys_are_rotated_and_destroyed_on_every_worker(plane: ControlPlane) -> None:
    """It hits before (control); an order; both workers begin an epoch and miss; another tenant's keys stay."""
    service = plane._service
    assert service is not None
    service.principals.enrol("carl", [Role.KEY_CUSTODIAN], by="test")
    key = service.principals.issue_key("carl", days=1, by="test").key
    holder, reader = (tenant_owner("idp", name) for name in ("holder", "reader"))
    workers = [plane.worker(name) for name in ("gpu-0", "gpu-1")]

    def epochs(worker: Any, owner: Any) -> tuple[int, ...]:
        found: tuple[int, ...] = worker.governor._keyring.epochs(owner)
        return found

    try:
        for worker in workers:
            ask(worker, "holder")
            ask(worker, "reader")
            assert ask(worker, "holder") > 0, "control: it hits before"
        with ControlPlaneConnection(plane.address, key) as custodian:
            for path, after in (("rotate", (1, 2)), ("destroy", (3,))):
                made = custodian.post(f"/v1/keys/tenants:{path}", {"tenant": "holder", **REASON})
                assert (made["action"], made["actor"]) == (path, "carl")
                for worker in workers:
                    until(lambda worker=worker, after=after: epochs(worker, holder) == after, worker)
                    assert ask(worker, "holder") == 0 and ask(worker, "holder") > 0
                    assert epochs(worker, reader) == (1,), "control: nobody else's"
            listed = custodian.get("/v1/keys/tenants")["items"]
            assert [order["action"] for order in listed] == ["destroy", "rotate"]
    finally:
        for worker in workers:
            worker.close()
    kinds = [leaf["action"] for leaf in bodies(service, "key-event") if leaf["tenant"] == "holder"]
    assert sorted(kinds) == sorted(["created", "rotated", "rotated", "destroyed", "destroyed"] * 2)
    assert [leaf["of_tenant"] for leaf in bodies(service, "keys-ordered")] == ["holder", "holder"]
