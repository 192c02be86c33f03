"""What a process says of its own end: commands and the control plane stop in order; the killed come back as dead."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from typer.testing import CliRunner

from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events, incarnations, workers
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.signing_key import create_signing_key
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.console.main import app
from kvcustody.errors import ConfigError
from kvcustody.governance.service.service import open_service
from kvcustody.governance.service.settings import ServiceSettings
from standins import PLACE

pytestmark = pytest.mark.system

PROCESS = PLACE / "service" / "service_process.py"
Make = Callable[..., ServiceSettings]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServiceSettings:
    given = {
        "database_url": f"sqlite:///{tmp_path}/ledger.db",
        "state_path": str(tmp_path / "state"),
        "listen": f"unix:{tmp_path}/api.sock",
        "signing_key_path": str(tmp_path / "signing.key"),
    }
    for name, value in given.items():
        monkeypatch.setenv(f"KVCUSTODY_SERVICE_{name.upper()}", value)
    monkeypatch.chdir(tmp_path)
    return ServiceSettings(**given)  # type: ignore[arg-type]


def run(*words: str) -> Any:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done


def ends(folder: Path) -> Counter[tuple[str, str | None]]:
    """How each process of a ledger ended, by its name."""
    engine = open_store(folder / "ledger.db", read_only=True)
    try:
        with engine.connect() as connection:
            query = select(workers.c.name, incarnations.c.end).join(workers, workers.c.id == incarnations.c.worker)
            return Counter((row.name, row.end) for row in connection.execute(query))
    finally:
        engine.dispose()


def kinds(folder: Path) -> Counter[str]:
    engine = open_store(folder / "ledger.db", read_only=True)
    try:
        with engine.connect() as connection:
            return Counter(connection.scalars(select(events.c.kind)))
    finally:
        engine.dispose()


def start(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, str(PROCESS), str(folder)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_control_plane_that_a_signal_stops_does_not_come_back_as_dead(tmp_path: Path, number: signal.Signals) -> None:
    for _ in range(2):
        process = start(tmp_path)
        process.send_signal(number)
        process.wait(60)
    assert ends(tmp_path) == {("control-plane", "stopped"): 2}
    assert "worker-died" not in kinds(tmp_path)


def test_control_one_that_is_killed_comes_back_as_dead(tmp_path: Path) -> None:
    process = start(tmp_path)
    process.kill()
    process.wait(60)
    assert ends(tmp_path) == {("control-plane", None): 1}
    process = start(tmp_path)
    process.terminate()
    process.wait(60)
    closed = {("control-plane:closing", "stopped"): 1}  # whose leaves the end of the first one is in
    assert ends(tmp_path) == {("control-plane", "died"): 1, ("control-plane", "stopped"): 1} | closed


def test_commands_on_the_ledger_itself_stop_in_order(settings: ServiceSettings, tmp_path: Path) -> None:
    run("init")
    for name in ("alice", "bob"):
        run("principal", "add", name, "--role", "auditor")
        run("principal", "whoami", "--json")
        run("worker", "status", "--json")
    found = ends(tmp_path)
    assert set(found) == {("control-plane.local", "stopped")}
    assert json.loads(run("worker", "status", "--json").stdout)["items"] == []
    assert "worker-died" not in kinds(tmp_path)


def test_what_fails_inside_has_ended_in_order_too(settings: ServiceSettings, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), open_service(settings):
        raise ZeroDivisionError
    create_signing_key(tmp_path / "other.key", "other")
    failing = settings.model_copy(update={"signing_key_path": tmp_path / "other.key"})
    with pytest.raises(ConfigError):
        open_service(failing)  # behind the opening of its writer
    run("principal", "add", "alice", "--role", "auditor")
    done = CliRunner().invoke(app, ["principal", "disable", "nobody"])
    assert done.exit_code != 0
    assert {end for _, end in ends(tmp_path)} == {"stopped"}


def test_the_end_of_a_control_plane_is_its_last_leaf_and_signed(settings: ServiceSettings, tmp_path: Path) -> None:
    with open_service(settings) as service:
        service.attempts.note("missing", "192.0.2.0/24")  # on record while it closes
        incarnation = service.writer.incarnation
    engine = open_store(tmp_path / "ledger.db", read_only=True)
    with engine.connect() as connection:
        column = events.c
        last = connection.execute(
            select(column.kind, column.idx)
            .join(incarnations, incarnations.c.id == column.incarnation)
            .where(incarnations.c.uuid == incarnation)
            .order_by(column.sequence.desc())
        ).first()
        proofs = LedgerProofs(connection)
        signed = proofs.signed().size
        assert last is not None and last.kind == "worker-stopped"
        assert proofs.head("system", as_of=signed).size > last.idx
    engine.dispose()


def test_control_without_a_record_of_its_end_a_process_comes_back_as_dead(
    settings: ServiceSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EventWriter, "record_end", lambda self: None)
    run("init")
    for name in ("alice", "bob"):
        run("principal", "add", name, "--role", "auditor")
        run("principal", "whoami")
    assert ("control-plane.local", "died") in ends(tmp_path)
