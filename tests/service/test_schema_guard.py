"""A ledger that was upgraded under a service, or went back: nothing is written by a program of another schema."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, func, select, text

from kvcustody.audit.store.database.engine import SCHEMA_REVISION, VERSION_TABLE, WRITE
from kvcustody.audit.store.schema.ledger import events, incarnations
from kvcustody.audit.store.schema.service import service_principals, service_scan_orders, service_workers
from kvcustody.errors import LedgerError
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.fleet import workers
from kvcustody.governance.service.service import Service
from standins.service.service_world import OFFSET_US, Worker, register, ship

_TABLES = (events, incarnations, service_principals, service_scan_orders, service_workers)


def say_revision(service: Service, revision: str) -> None:
    with service.engine.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '{revision}'"))


def counted(service: Service) -> list[int]:
    with service.reading() as connection:
        return [connection.scalar(select(func.count()).select_from(table)) or 0 for table in _TABLES]


@pytest.mark.parametrize("revision", ["9999", "0041"], ids=["newer", "older"])
def test_nothing_is_written_to_a_ledger_of_another_schema(
    make_service: Callable[..., Service],
    make_client: Any,
    make_people: Any,
    monkeypatch: pytest.MonkeyPatch,
    revision: str,
) -> None:
    """Every way of writing says so, with a code; control: what is asked and writes nothing is answered."""
    service = make_service()
    client, people = make_client(service), make_people(service)
    keys = {name: people[name] for name in ("bootstrap", "operator")}
    mine = people.add("gpu-0", Role.WORKER)
    worker = Worker("gpu-0")
    assert register(client, mine, worker).status_code == 200
    batch = worker.batch([worker.started()])
    client("GET", "/v1/workers", keys["operator"])  # its first use is on record
    assert service.writer.flush()
    service.fleet.flush(now=True)
    writes = [
        lambda: client("PUT", f"/v1/worker/incarnations/{'ab' * 16}", mine, json={"offset_us": OFFSET_US}),
        lambda: ship(client, mine, worker, batch),
        lambda: client("PUT", f"{worker.path}/status", mine, json={"policy_revision": 1}),
        lambda: client("POST", "/v1/principals", keys["bootstrap"], json={"name": "new", "roles": ["worker"]}),
        lambda: client("POST", "/v1/workers/gpu-0/scans", keys["operator"], json={"deadline_seconds": 60}),
    ]
    before = counted(service)
    say_revision(service, revision)
    monkeypatch.setattr(workers, "_FLUSH_SECONDS", 0.0)  # a report is written at once, and not with those of a second
    for write in writes:
        answer = write()
        assert answer.status_code == 503 and answer.json()["type"].endswith(":ledger-schema"), answer.text
    assert counted(service) == before
    assert client("GET", "/v1/worker/scans", mine).status_code == 200, "control: it is asked"
    say_revision(service, SCHEMA_REVISION)
    assert ship(client, mine, worker, batch).status_code == 200, "control: nothing was lost"


def test_the_revision_is_read_in_the_transaction_that_writes(service: Service) -> None:
    """The first statement of each; control: a transaction that reads asks for none."""
    seen: list[str] = []
    here = threading.get_ident()

    def note(*said: Any) -> None:
        if threading.get_ident() == here:
            seen.append(said[2])

    event.listen(service.engine, "before_cursor_execute", note)
    try:
        with service.engine.connect().execution_options(**WRITE) as connection, connection.begin():
            connection.exec_driver_sql("SELECT 1")
        with service.engine.connect() as connection, connection.begin():
            connection.exec_driver_sql("SELECT 2")
    finally:
        event.remove(service.engine, "before_cursor_execute", note)
    asked = [one for one in seen if not one.startswith("BEGIN")]
    assert asked == [f"SELECT max(version_num) FROM {VERSION_TABLE}", "SELECT 1", "SELECT 2"]


def test_a_start_that_may_not_migrate_refuses_what_has_to_be_migrated(
    make_service: Callable[..., Service], tmp_path: Path
) -> None:
    """An older schema and an empty database; controls: one that may, and the schema of this program."""
    empty = f"sqlite:///{tmp_path / 'empty.db'}"
    with pytest.raises(LedgerError, match="holds no kvcustody schema; run `kvcustody db upgrade` first"):
        make_service(migrate=False, database_url=empty)
    make_service(database_url=empty).close()  # control
    service = make_service(migrate=False)
    say_revision(service, "0049")
    service.close()
    with pytest.raises(LedgerError, match=f"`0049` is older than .* `{SCHEMA_REVISION}`; run `kvcustody db upgrade`"):
        make_service(migrate=False)
