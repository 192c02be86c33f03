"""A control plane at an address with a tenant that a worker serves, and people who may erase there."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.service.service import Service
from standins.service.service_world import Server, Worker, register, ship


class Fleet(NamedTuple):
    """A service at an address, whose ledger knows the issuer `corp`."""

    service: Service
    client: Any
    people: Any
    server: Server

    def connect(self, who: str = "door") -> ControlPlaneConnection:
        return ControlPlaneConnection(self.server.address, self.people[who])

    def erase(self, subject: str = "ana", tenant: str = "acme") -> str:
        body = {"tenant": tenant, "subject": subject, "deadline_seconds": 3600}
        answer = self.client("POST", "/v1/erasures", self.people["dpo"], json=body)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["erasure"])


def serve(service: Service, client: Any, people: Any) -> Fleet:
    """The service at an address, after a worker has served `ana` of `acme`."""
    worker = Worker("worker")
    register(client, people["worker"], worker)
    assert (
        client("PUT", "/v1/worker/issuers", people["worker"], json={"issuer": "corp", "tenants": "bare"}).status_code
        == 200
    )
    batch = worker.batch([worker.started(), *worker.request("acme", "ana")])
    assert ship(client, people["worker"], worker, batch).status_code == 200
    return Fleet(service, client, people, Server(service))
