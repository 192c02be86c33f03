"""What workers ask the control plane to write: issuers that they met, and erasures that their engines began."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import select

from kvcustody.audit.evidence.erasure.requests_and_answers import pending, request
from kvcustody.audit.evidence.processes.sequence_gaps import gaps
from kvcustody.audit.kinds import BARE, QUALIFIED, ErasureRequested, IssuerAssigned, WorkerStarted
from kvcustody.audit.store.schema.ledger import events, incarnations, workers
from kvcustody.clock import SystemClock
from kvcustody.errors import ConfigError, LedgerUnavailable, ServiceError
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.control_plane.remote_ledger import RemoteLedger
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.service import Service
from standins.service.control_plane_world import APART, ControlPlane
from standins.service.service_world import Server

CLOCK = SystemClock()


class Between(ControlPlaneConnection):
    """A connection that can be cut, and that can answer as an older control plane does."""

    away = older = False

    def put(self, path: str, body: Any, *, within_seconds: float | None = None) -> Any:
        if self.away:
            raise ServiceError("cut", problem="unreachable")
        answer = super().put(path, body, within_seconds=within_seconds)
        if self.older:
            answer.pop("protocol", None)
        return answer

    def put_bytes(self, path: str, body: bytes, media: str, *, encoding: str = "") -> Any:
        if self.away:
            raise ServiceError("cut", problem="unreachable")
        return super().put_bytes(path, body, media, encoding=encoding)


class Asker:
    """One worker of a service, and its folder."""

    def __init__(self, server: Server, people: Any, folder: Path, name: str) -> None:
        self.connection = Between(server.address, people.keys.get(name) or people.add(name, Role.WORKER))
        self.folder, self.name = folder / "spill", name

    def open(self) -> RemoteLedger:
        return RemoteLedger(self.connection, worker=self.name, clock=CLOCK, spill_directory=self.folder)

    def started(self) -> WorkerStarted:
        return WorkerStarted(CLOCK.now_us(), self.name, 10, 1, 4096, "cpu", "test")


@pytest.fixture
def asker(server: Server, people: Any, tmp_path: Path) -> Iterator[Asker]:
    made = Asker(server, people, tmp_path, f"asker-{tmp_path.name}"[:60])
    yield made
    made.connection.close()


def begun(erasure: str) -> ErasureRequested:
    now_us = CLOCK.now_us()
    return ErasureRequested(now_us, erasure, "acme", "subject", "erin", None, now_us + 10**9, "somebody else")


def writers_of(service: Service, kind: str) -> list[tuple[str, dict[str, Any]]]:
    """The leaves of a kind, each with the name of who wrote it."""
    query = (
        select(workers.c.name, events.c.leaf)
        .join(incarnations, incarnations.c.id == events.c.incarnation)
        .join(workers, workers.c.id == incarnations.c.worker)
        .where(events.c.kind == kind)
    )
    with service.reading() as connection:
        return [(name, orjson.loads(leaf)) for name, leaf in connection.execute(query)]


def test_the_control_plane_writes_the_request_and_names_the_worker(service: Service, asker: Asker) -> None:
    ledger = asker.open()
    ledger.submit([asker.started(), begun("e-1")])
    assert ledger.flush(30)
    ledger.close()
    with service.reading() as connection:
        asked = request(connection, "e-1")
        assert "e-1" in {one.erasure for one in pending(connection, asker.name)}
        assert [gap for gap in gaps(connection) if gap.incarnation == ledger.incarnation] == []
    assert (asked.actor, asked.tenant, asked.selector) == (asker.name, "acme", "subject")
    [writer] = {name for name, leaf in writers_of(service, "erasure-requested") if leaf["erasure"] == "e-1"}
    assert writer == service.settings.name != asker.name
    assert not (asker.folder / "erasures.json").exists() or (asker.folder / "erasures.json").read_bytes() == b"[]"


def test_a_request_outlives_an_outage_and_the_process(service: Service, asker: Asker) -> None:
    ledger = asker.open()
    ledger.submit([asker.started()])
    assert ledger.flush(30)
    asker.connection.away = True
    ledger.submit([begun("e-2"), asker.started()])
    assert ledger.flush(30), "it is in the spill"
    ledger.close()
    assert b"e-2" in (asker.folder / "erasures.json").read_bytes()
    assert not [leaf for _, leaf in writers_of(service, "erasure-requested") if leaf["erasure"] == "e-2"], "control"
    asker.connection.away = False
    successor = asker.open()
    successor.submit([asker.started()])
    assert successor.flush(30)
    successor.close()
    with service.reading() as connection:
        assert request(connection, "e-2").actor == asker.name
    found = [leaf for _, leaf in writers_of(service, "erasure-requested") if leaf["erasure"] == "e-2"]
    assert len(found) == 1, "once"


def test_an_erasure_of_somebody_elses_id_is_another_and_refused(client: Any, people: Any) -> None:
    body = {"selector": '{"tenant":"acme"}', "deadline_us": 1_900_000_000_000_000}
    path = "/v1/worker/erasures/e-3"
    assert client("PUT", path, people["worker"], json=body).json() == {"new": True}
    assert client("PUT", path, people["worker"], json=body).json() == {"new": False}, "control: the same again"
    other = people.keys.get("second") or people.add("second", Role.WORKER)
    assert client("PUT", path, other, json=body).status_code == 409
    for wrong in ('{"tenant":"acme"', "{}", '{"subject":"erin"}'):
        answer = client("PUT", "/v1/worker/erasures/e-4", people["worker"], json=body | {"selector": wrong})
        assert answer.status_code == 422, answer.text


def test_the_control_plane_assigns_an_issuer_once(service: Service, asker: Asker) -> None:
    ledger = asker.open()
    for _ in range(2):
        ledger.submit_durable(IssuerAssigned(CLOCK.now_us(), "corp", BARE, "governor"))
        ledger.submit_durable(IssuerAssigned(CLOCK.now_us(), "partner", QUALIFIED, "governor"))
    ledger.submit_durable(IssuerAssigned(CLOCK.now_us(), "evil", BARE, "governor"))
    assert ledger.issuers().all == ("corp", "partner"), "a second claim to the bare ids is none"
    asker.connection.away = True
    with pytest.raises(LedgerUnavailable, match="not done because it could not be recorded"):
        ledger.submit_durable(IssuerAssigned(CLOCK.now_us(), "labs", QUALIFIED, "governor"))
    ledger.close()
    found = writers_of(service, "issuer-assigned")
    assert [(writer, leaf["issuer"], leaf["actor"]) for writer, leaf in found] == [
        (service.settings.name, "corp", asker.name),
        (service.settings.name, "partner", asker.name),
    ]


def test_where_a_released_policy_lists_issuers_no_other_is_assigned(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path)
    try:
        with plane.connect("gpu-0") as worker:
            path, refused = "/v1/worker/issuers", {"issuer": "evil", "tenants": "bare"}
            document = APART.replace("scope: tenant\n", "scope: tenant\nissuers: [corp, partner]\n")
            for tenant in ("holder", "reader"):
                document = document.replace(f"{tenant}: {{quota", f"{tenant}^corp: {{quota")
            plane.release(document)
            for wrong in (refused, {"issuer": "partner", "tenants": "bare"}):
                with pytest.raises(ServiceError, match="lists the issuer"):
                    worker.put(path, wrong)
            assert worker.put(path, {"issuer": "corp", "tenants": "bare"}) == {"issuers": ["corp"]}, "control"
            with pytest.raises(ServiceError, match="lists the issuer"):
                worker.put(path, {"issuer": "evil", "tenants": "qualified"})
            worker.put(path, {"issuer": "partner", "tenants": "qualified"})
    finally:
        plane.end()


def test_a_worker_does_not_start_at_an_older_control_plane(asker: Asker) -> None:
    asker.connection.older = True
    with pytest.raises(ConfigError, match="upgrade the control plane first"):
        asker.open()
    asker.connection.older = False
    asker.open().close()
