"""What a tenant's own people do with its data is asked of the policy in effect, and on record.

So is whatever else hands leaves over: reports, events by the API, webhooks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcustody.audit.evidence.query.events import EventRow
from kvcustody.audit.kinds import SYSTEM
from kvcustody.audit.siem.cursor_reader import SinkPositions, pull
from kvcustody.audit.siem.delivery import DeliveryPump
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events
from kvcustody.errors import LedgerUnavailable, ServiceError
from standins.service.control_plane_world import APART, ControlPlane, ask
from standins.waiting import until

PERMITS = "rules:\n  - {id: people, effect: permit, action: [export, administer], when: {reader: owner}}\n"
FORBID = "  - {id: ACTION-not, effect: forbid, action: ACTION, when: {owner: holder, classification: low}}\n"
ACTS = {
    "export": ("/v1/exports", {"tenant": "holder"}),
    "administer": ("/v1/erasures", {"tenant": "holder", "classification": "low"}),
}


def policy(forbidden: str = "") -> str:
    rules = PERMITS + (FORBID.replace("ACTION", forbidden) if forbidden else "")
    return APART.replace("rules:\n", rules)


def decisions(plane: ControlPlane, action: str) -> list[tuple[str, str, str, str]]:
    """Effect, tenant, classification and outage class of what is on record about an action."""
    engine = open_store(f"sqlite:///{plane.folder / 'ledger.db'}", read_only=True)
    with engine.connect() as connection:
        leaves = [json.loads(row.leaf) for row in connection.execute(events.select()) if row.kind == "decision"]
    engine.dispose()
    return [
        (leaf["effect"], leaf["reader"], leaf["classification"], leaf["outage"])
        for leaf in leaves
        if leaf["action"] == action
    ]


@pytest.mark.parametrize("action", ACTS)
def test_a_tenant_does_with_its_data_what_the_policy_permits(plane: ControlPlane, action: str) -> None:
    plane.release(policy(action))
    with plane.worker() as worker:
        ask(worker, "holder")
    path, body = ACTS[action]
    with plane.connect("holger") as owner:
        with pytest.raises(ServiceError, match=f"{action}-not") as refused:
            owner.post(path, body)
        assert refused.value.operands["status"] == 403
        assert decisions(plane, action)[-1] == ("deny", "holder", "low", "A")
        plane.release(policy())
        owner.post(path, body)  # control: the same act, permitted
    assert decisions(plane, action)[-1] == ("permit", "holder", "low", "A")


def test_what_the_policy_says_of_a_tenant_binds_nobody_elses_role(plane: ControlPlane) -> None:
    """A data protection officer erases by role: no rule of a policy takes that away."""
    plane.release(policy("administer"))
    with plane.worker() as worker:
        ask(worker, "holder", "user-1")
    before = decisions(plane, "administer")
    with plane.connect("dora") as officer:
        officer.post("/v1/erasures", {"tenant": "holder", "subject": "user-1"})
    assert decisions(plane, "administer") == before


HANDED_OVER = {
    "events": lambda who: who.get("/v1/audit/events", limit=1),
    "stream": lambda who: who.get("/v1/audit/stream", limit=1),
    "report": lambda who: who.post("/v1/reports", {"framework": "gdpr", "formats": ["json"]}),
}


@pytest.mark.parametrize("way", HANDED_OVER)
def test_whatever_hands_leaves_over_is_asked_as_export(plane: ControlPlane, way: str) -> None:
    plane.release(policy("export"))
    with plane.worker() as worker:
        ask(worker, "holder")
    hand_over: Callable[[Any], Any] = HANDED_OVER[way]
    with plane.connect("holger") as owner:
        for _ in range(2):
            with pytest.raises(ServiceError, match="export-not") as refused:
                hand_over(owner)
            assert refused.value.operands["status"] == 403
        # Control: what hands no leaf over is decided by the role; a log is listed once it is sealed.
        until(lambda: owner.get("/v1/audit/logs")["items"])
        before = len(decisions(plane, "export"))
        plane.release(policy())
        for _ in range(2):
            hand_over(owner)
    after = decisions(plane, "export")
    assert after[-1] == ("permit", "holder", "low", "A")
    assert len(after) - before == (2 if way == "report" else 1), "a read is on record once for a revision"


class Receiver:
    """A sink that keeps what it is given."""

    name = "receiver"

    def __init__(self) -> None:
        self.logs: list[str] = []

    content_type = "application/json"

    def deliver(self, identity: str, body: bytes, content_type: str = "") -> None:
        self.logs += json.loads(body)


def logs_of(rows: Sequence[EventRow]) -> bytes:
    return json.dumps([row.log for row in rows]).encode()


@pytest.mark.system("a webhook carries a leaf that may not leave")
def test_a_webhook_is_given_no_leaf_that_may_not_leave(plane: ControlPlane, tmp_path: Path) -> None:
    plane.release(policy("export"))
    with plane.worker() as worker:
        ask(worker, "holder")
        ask(worker, "reader")
    service = plane._service
    assert service is not None
    given, withheld = [], []
    for at, leaving in enumerate((service.exports.leaving, lambda rows: rows)):
        receiver = Receiver()
        pump = DeliveryPump(service.reader, receiver, tmp_path / f"sink-{at}", logs_of, leaving=leaving)
        while pump.step():
            pass
        given.append(set(receiver.logs))
        withheld.append(pump.status().withheld)
    assert given[0] == given[1] - {"tenant/holder"} and "tenant/reader" in given[0]
    assert withheld[0] > 0 == withheld[1], "control: without the question everything leaves"
    assert ("deny", "holder", "low", "A") in decisions(plane, "export")


def test_a_webhook_waits_where_its_permit_cannot_be_recorded(
    plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.release(policy())
    with plane.worker() as worker:
        ask(worker, "holder")
    service = plane._service
    assert service is not None
    with service.reading() as connection:
        rows = list(pull(connection, SinkPositions(), limit=500).rows)

    def away(event: object) -> int:
        raise LedgerUnavailable("away")

    service.policies._authorized.clear()
    with monkeypatch.context() as patch:
        patch.setattr(service.writer, "submit_durable", away)
        with pytest.raises(LedgerUnavailable):
            service.exports.leaving(rows)
        of_system = [row for row in rows if row.log == SYSTEM]
        assert of_system and service.exports.leaving(of_system) == of_system
    assert service.exports.leaving(rows) == rows


def test_where_no_policy_is_released_the_role_decides_and_is_on_record(make_service, make_client, make_people) -> None:
    service = make_service()
    client, people = make_client(service), make_people(service)
    for _ in range(2):
        answer = client("GET", "/v1/audit/events", people["tenant-viewer@acme"])
        assert answer.status_code == 200, answer.text
    asked = {"tenant": "acme", "subject": "ada"}
    assert client("POST", "/v1/erasures", people["tenant-admin@acme"], json=asked).status_code == 202
    assert client("POST", "/v1/erasures", people["tenant-viewer@acme"], json=asked).status_code == 403
    with service.reading() as connection:
        leaves = [json.loads(row.leaf) for row in connection.execute(events.select()) if row.kind == "decision"]
    assert [(leaf["action"], leaf["effect"], leaf["revision"], leaf["reasons"]) for leaf in leaves] == [
        ("export", "permit", 0, ["role:tenant-viewer"]),
        ("administer", "permit", 0, ["role:tenant-admin"]),
    ]
