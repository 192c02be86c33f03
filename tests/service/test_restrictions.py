"""A restriction on record reaches workers as an order, is refused what it forbids, and is lifted the same way."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from kvcustody.audit.evidence.cases.restrictions import restrictions_in_force
from kvcustody.audit.kinds import ProcessingRestricted
from kvcustody.clock import SystemClock
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.control_plane.erasures import RemoteInbox
from kvcustody.governance.erasure.erasure_inbox import ErasureInbox
from kvcustody.governance.restriction.restricted_subjects import RestrictedSubject, RestrictedSubjects
from standins.service.service_world import Server, Worker, register, ship

CASES = "/v1/cases"


def opened(client: Any, key: str, subject: str) -> str:
    body = {"tenant": "acme", "subject": subject, "right": "restriction", "channel": "mail"}
    return str(client("POST", CASES, key, json=body).json()["case_id"])


def stepped(client: Any, key: str, case: str, step: str, **more: Any) -> Any:
    return client("POST", f"{CASES}/{case}/steps", key, json={"step": step} | more)


class Heard:
    """What is told to a facade, at once."""

    def __init__(self) -> None:
        self.restricted: list[RestrictedSubjects] = []

    def restrict(self, ordered: RestrictedSubjects) -> None:
        self.restricted.append(ordered)

    def renew_custody(self, source: str, until_us: int) -> None:
        pass

    def call(self, command: Any) -> Any:
        return command(self)

    def end_keys_in_service(self) -> None: ...

    def follow_keys(self, orders: object) -> int:
        return 0

    def order_enforcement(self, order: object) -> None:
        raise AssertionError("nobody gave one")

    def erase(self, *_: object, **__: object) -> None:
        """Orders of other tests."""


def test_it_reaches_workers_on_the_ledger_and_behind_the_control_plane(
    shipped: Any, client: Any, people: Any, server: Server
) -> None:
    dpo = people["dpo"]
    case = opened(client, dpo, "user-1")
    wanted = RestrictedSubject(case, "acme", "user-1")
    at_ledger, at_plane = Heard(), Heard()
    inbox = ErasureInbox(shipped.engine, "worker", 0, shipped.subject_keys)
    with ControlPlaneConnection(server.address, people["worker"]) as connection:
        remote = RemoteInbox(connection, 0, clock=SystemClock(), lease_seconds=300)
        inbox.recover_pending(at_ledger)  # type: ignore[arg-type]
        remote.recover_pending(at_plane)  # type: ignore[arg-type]
        assert [wanted in found.orders for found in at_ledger.restricted] == [False]
        assert stepped(client, dpo, case, "restrict", ground="18(1)(a)").status_code == 200
        inbox.look(at_ledger)  # type: ignore[arg-type]
        remote.look(at_plane)  # type: ignore[arg-type]
        for heard in (at_ledger, at_plane):
            assert len(heard.restricted) == 2 and wanted in heard.restricted[-1].orders
        inbox.look(at_ledger)  # type: ignore[arg-type]
        assert len(at_ledger.restricted) == 2, "what has not changed is told once"
        fresh = Heard()
        ErasureInbox(shipped.engine, "worker", 0, shipped.subject_keys).recover_pending(fresh)  # type: ignore[arg-type]
        assert wanted in fresh.restricted[0].orders, "and a later process hears it before its first request"
        lifted = stepped(client, dpo, case, "lift-restriction", reason="checked, it is accurate")
        assert lifted.status_code == 200
        inbox.look(at_ledger)  # type: ignore[arg-type]
        remote.look(at_plane)  # type: ignore[arg-type]
        for heard in (at_ledger, at_plane):
            assert wanted not in heard.restricted[-1].orders


def test_a_worker_that_waits_hears_it_at_once(shipped: Any, client: Any, people: Any, server: Server) -> None:
    dpo = people["dpo"]
    case = opened(client, dpo, "user-2")
    with ControlPlaneConnection(server.address, people["worker"]) as connection:
        first = connection.get("/v1/worker/erasures")
        known = ",".join(item["erasure"] for item in first["items"]) or None
        had = RestrictedSubjects(
            RestrictedSubject(one["case_id"], one["tenant"], one["subject"]) for one in first["restrictions"]
        )

        def restrict() -> None:
            time.sleep(0.3)
            assert stepped(client, dpo, case, "restrict", ground="18(1)(c)").status_code == 200

        thread = threading.Thread(target=restrict)
        thread.start()
        begun = time.monotonic()
        found = connection.get("/v1/worker/erasures", wait=20, known=known, restrictions=had.digest())
        waited = time.monotonic() - begun
        thread.join()
    assert waited < 10
    assert {"case_id": case, "tenant": "acme", "subject": "user-2"} in found["restrictions"]
    assert stepped(client, dpo, case, "lift-restriction", reason="over").status_code == 200


def test_what_it_forbids_is_refused_until_it_is_lifted(shipped: Any, client: Any, people: Any) -> None:
    dpo = people["dpo"]
    case = opened(client, dpo, "user-1")
    assert stepped(client, dpo, case, "restrict", ground="18(1)(b)").status_code == 200
    for body in ({"tenant": "acme", "subject": "user-1"}, {"tenant": "acme"}):
        refused = client("POST", "/v1/erasures", dpo, json=body)
        assert refused.status_code == 409 and case in refused.json()["detail"], refused.content
    other = client("POST", "/v1/erasures", dpo, json={"tenant": "acme", "subject": "user-3"})
    assert other.status_code == 202, "control: another person's"
    destroyed = client(
        "POST",
        "/v1/keys/tenants:destroy",
        people["key-custodian"],
        json={"tenant": "acme", "reason": "leaves"},
    )
    assert destroyed.status_code == 409 and case in destroyed.json()["detail"], destroyed.content
    named = {"tenant": "acme", "subject": "user-1", "reason": "as asked"}
    unlinked = client("POST", "/v1/keys/subjects:destroy", people["key-custodian"], json=named)
    assert unlinked.status_code == 409 and case in unlinked.json()["detail"], unlinked.content
    assert stepped(client, dpo, case, "lift-restriction", reason="over").status_code == 200
    assert client("POST", "/v1/erasures", dpo, json={"tenant": "acme", "subject": "user-1"}).status_code == 202


@pytest.fixture
def worker(client: Any, people: Any) -> Worker:
    made = Worker()
    register(client, people["worker"], made)
    assert ship(client, people["worker"], made, made.batch([made.started()])).status_code == 200
    return made


def test_a_case_shows_who_follows_it_and_who_has_not_said_so(
    shipped: Any, client: Any, people: Any, worker: Any
) -> None:
    dpo = people["dpo"]
    case = opened(client, dpo, "user-2")
    assert stepped(client, dpo, case, "restrict", ground="18(1)(a)").status_code == 200
    body = client("GET", f"{CASES}/{case}", dpo).json()
    assert body["restricted"] and "worker" in body["not_followed_by"]
    assert any("do not follow the restriction yet" in duty for duty in body["duties"])
    event = ProcessingRestricted(worker.now_us, case, "acme", "user-2", "restricted")
    ship(client, people["worker"], worker, worker.batch([event]))
    body = client("GET", f"{CASES}/{case}", dpo).json()
    assert "worker" in body["followed_by"] and "worker" not in body["not_followed_by"]
    with shipped.reading() as connection:
        assert case in {one.case_id for one in restrictions_in_force(connection)}
    assert stepped(client, dpo, case, "lift-restriction", reason="over").status_code == 200
    with shipped.reading() as connection:
        assert case not in {one.case_id for one in restrictions_in_force(connection)}
    assert client("GET", f"{CASES}/{case}", dpo).json()["followed_by"] == []
