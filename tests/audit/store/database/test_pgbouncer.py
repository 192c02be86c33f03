"""A real PgBouncer between the ledger and PostgreSQL: refused when it is first met, in one line with the next step."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from kvcustody.audit.store.database.engine import check_store, open_store
from kvcustody.errors import LedgerError
from kvcustody.migrations.upgrade import upgrade
from standins.postgres import volatile_server

BINARY = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(BINARY is None, reason="pgbouncer is not installed (Debian: apt-get install pgbouncer)"),
]
SETTINGS = """[databases]
* = host={host} user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
{more}
logfile = {folder}/log
"""
IGNORED = "ignore_startup_parameters = options"
Pooler = Callable[..., str]


@pytest.fixture(scope="module")
def server() -> Iterator[Path]:
    """The folder of a server with an upgraded ledger, whose socket lies there too."""
    with volatile_server() as started:
        engine = open_store(started.get_uri())
        upgrade(engine)
        engine.dispose()
        yield Path(started.pgdata)


@pytest.fixture
def pooler(server: Path) -> Iterator[Pooler]:
    """Starts a PgBouncer in front of the server; gives the address of the ledger behind it."""
    running: list[subprocess.Popen[bytes]] = []

    def start(mode: str, more: str = IGNORED) -> str:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        owner = pwd.getpwuid(server.stat().st_uid)
        folder = server / f"pgbouncer-{port}"
        folder.mkdir()
        file = folder / "pgbouncer.ini"
        file.write_text(SETTINGS.format(host=server, port=port, mode=mode, more=more, folder=folder))
        for path in (folder, file):
            os.chown(path, owner.pw_uid, owner.pw_gid)
        as_owner = {"user": owner.pw_uid, "group": owner.pw_gid} if os.geteuid() == 0 else {}  # it refuses root
        running.append(subprocess.Popen([str(BINARY), str(file)], stderr=subprocess.DEVNULL, **as_owner))
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with suppress(psycopg.OperationalError):
                psycopg.connect(f"host=127.0.0.1 port={port} user=postgres dbname=postgres").close()
                return f"postgresql://postgres@127.0.0.1:{port}/postgres"
            time.sleep(0.05)
        raise AssertionError((folder / "log").read_text())

    yield start
    for process in running:
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize(("mode", "more"), [("transaction", IGNORED), ("transaction", ""), ("session", IGNORED)])
@pytest.mark.parametrize("read_only", [True, False])
def test_a_pooler_is_refused_in_one_line(pooler: Pooler, mode: str, more: str, *, read_only: bool) -> None:
    engine = open_store(pooler(mode, more), read_only=read_only)
    try:
        with pytest.raises(LedgerError) as refused:
            check_store(engine)
    finally:
        engine.dispose()
    assert "PgBouncer" in refused.value.message and "name the server itself" in refused.value.message
    assert "\n" not in refused.value.message


def test_control_the_pooler_loses_bounds_and_role_unseen(pooler: Pooler) -> None:
    asked = "SELECT current_setting('statement_timeout'), current_user"
    options = "-c statement_timeout=300 -c role=pg_monitor"
    with psycopg.connect(pooler("transaction"), options=options) as session:
        assert session.execute(asked).fetchone() == ("0", "postgres")
