"""A worker's ledger in a service: residencies, releases and ends of two tenants, shipped as a worker ships them."""

from __future__ import annotations

import threading
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import uvicorn
from sqlalchemy import select

from kvcustody.audit.evidence.subjects.pseudonym_directory import SubjectDirectory
from kvcustody.audit.kinds import (
    CustodyEnded,
    Event,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
    WorkerStarted,
)
from kvcustody.audit.kinds.block_runs import gather
from kvcustody.audit.leaf import Context, leaves
from kvcustody.audit.store.schema.ledger import events
from kvcustody.governance.api.app import create_app
from kvcustody.governance.service.access.roles import OF_TENANTS, PERMISSIONS, Permission, Role
from kvcustody.governance.service.ingest.check_leaves import write_batch
from kvcustody.governance.service.service import Service
from kvcustody.governance.service.settings import ServiceSettings

OFFSET_US = 1_790_000_000_000_000
MEDIA = {"Content-Type": "application/x-ndjson"}


def settings_in(folder: Path, **explicit: Any) -> ServiceSettings:
    given = {
        "database_url": f"sqlite:///{folder}/ledger.db",
        "state_path": folder / "state",
        "listen": f"unix:{folder}/api.sock",
        "signing_key_path": folder / "signing.key",
        "checkpoint_seconds": 0.02,
        "requests_per_second": 1e6,
        "requests_burst": 1_000_000,
        "failures_per_minute": 1_000_000,
    }
    return ServiceSettings(**{**given, **explicit})


def who_may(people: Any, action: str) -> str:
    """The key of somebody who may do it, and sees all where there is one; `people` by role, or `role@tenant`."""
    able = [role for role in Role if Permission(action) in PERMISSIONS[role]]
    best = max(able, key=lambda role: (PERMISSIONS[role][Permission(action)].value, role is Role.AUDITOR))
    return str(people[f"{best}@acme" if best in OF_TENANTS else best.value])


class Batch(NamedTuple):
    """A batch as it travels."""

    body: bytes
    leaves: list[bytes]
    first: int
    last: int


class Worker:
    """Makes the events of one incarnation, and their batches."""

    def __init__(self, name: str = "worker", incarnation: str = "") -> None:
        self.name = name
        self.incarnation = incarnation or uuid.uuid4().hex
        self.directory = SubjectDirectory(clear_names=True)
        self.context = Context(self.incarnation, OFFSET_US, self.directory)
        self.sequence = 0
        self.now_us = 1_000_000
        self.residency = 0

    @property
    def path(self) -> str:
        return f"/v1/worker/incarnations/{self.incarnation}"

    def started(self) -> Event:
        return WorkerStarted(self.now_us, self.name, 1000, 1, 4096, "cpu", "test")

    def request(self, tenant: str, subject: str | None = "user-1", blocks: int = 2) -> list[Event]:
        """One request from its opening to the receipt of its end."""
        self.residency += 1
        self.now_us += 1000
        now, first = self.now_us, 10 * self.residency
        runs = gather(np.arange(blocks, dtype=np.int64), np.arange(first, first + blocks, dtype=np.int64))
        opened = ResidencyOpened(
            now,
            self.residency,
            tenant,
            subject,
            None,
            False,
            "internal",
            (),
            (),
            ("own-scope",),
            1,
            now + 10**7,
            runs,
        )
        return [
            opened,
            ResidencyReleased(now + 10, self.residency, tenant, "finish", (), 0),
            CustodyEnded(
                now + 20,
                tenant,
                "internal",
                runs,
                "expired",
                now + 10,
                now + 20,
                now + 10,
                10**6,
                now + 10**7,
            ),
            ReceiptRecorded(
                *(now + 30, self.residency, 0, tenant, "memset", "cpu:0", 8192, now + 20, now + 25),
                *("full", 1.0, blocks, "ok", runs),
            ),
        ]

    def batch(self, events: list[Event]) -> Batch:
        first = self.sequence + 1
        lines: list[bytes] = []
        for event in events:
            self.sequence += 1
            lines += [leaf.data for leaf in leaves(event, self.context, self.sequence)]
        names = self.directory.fresh()
        self.directory.settle(names)
        return Batch(write_batch(names, lines), lines, first, self.sequence)


def ship(client: Any, key: str, worker: Worker, batch: Batch) -> Any:
    return client("PUT", f"{worker.path}/batches/{batch.first}", key, content=batch.body, headers=MEDIA)


def register(client: Any, key: str, worker: Worker) -> Any:
    return client("PUT", worker.path, key, json={"offset_us": OFFSET_US})


def recorded(service: Service, name: str) -> list[tuple[str, str]]:
    """(action, actor) of what is on record of a principal, in order."""
    query = select(events.c.leaf).where(events.c.kind == "principal-changed").order_by(events.c.idx)
    with service.reading() as connection:
        bodies = [orjson.loads(bytes(leaf)) for leaf in connection.scalars(query)]
    return [(body["action"], body["actor"]) for body in bodies if body["principal"] == name]


class Server:
    """A service on loopback that can be ended and begun again on the same port."""

    def __init__(self, service: Service) -> None:
        config = uvicorn.Config(create_app(service), port=0, log_config=None, lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        self.address = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
