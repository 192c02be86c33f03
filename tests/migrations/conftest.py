from __future__ import annotations

import shutil
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine

from kvcustody.audit.store.database.engine import open_store
from standins.audit.ledgers import whole_ledger
from standins.builders import ledger
from standins.migrations import first_schema
from standins.migrations.next_program import ChangedRows, changed_rows, take_back
from standins.postgres import TEMPLATE, address_of, database_like, run_statement, set_up_roles_in_turn


@pytest.fixture(params=first_schema.DATABASES)
def database(request: pytest.FixtureRequest) -> str:
    """Both databases, one after the other."""
    kind: str = request.param
    return kind


@pytest.fixture
def empty(request: pytest.FixtureRequest, database: str, tmp_path: Path) -> Iterator[Engine]:
    """A database with nothing in it."""
    if database == "sqlite":
        with _opened(f"sqlite:///{tmp_path / 'ledger.db'}") as engine:
            yield engine
        return
    yield request.getfixturevalue("empty_server")


@pytest.fixture
def empty_server(postgres: str) -> Iterator[Engine]:
    """A PostgreSQL database with nothing in it."""
    with database_like(postgres) as url, _opened(url) as engine:
        yield engine


@pytest.fixture
def recorded(request: pytest.FixtureRequest, database: str, tmp_path: Path) -> Iterator[tuple[Engine, str]]:
    """The ledger that commit f6818e1f wrote, before any upgrade, and its URL."""
    if database == "sqlite":
        url = first_schema.restore_sqlite(tmp_path / "recorded.db")
        with _opened(url) as engine:
            yield engine, url
        return
    template = request.getfixturevalue("recorded_template")
    with database_like(request.getfixturevalue("postgres"), template) as url, _opened(url) as engine:
        yield engine, url


@pytest.fixture(scope="session")
def recorded_template(postgres: str) -> Iterator[str]:
    """A database of that ledger, to be copied."""
    name = f"recorded_{uuid.uuid4().hex[:12]}"
    first_schema.restore_postgres(postgres, name)
    yield name
    run_statement(postgres, f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def _opened(url: str) -> Iterator[Engine]:
    engine = open_store(url, timeout_seconds=20)
    yield engine
    engine.dispose()


@pytest.fixture(scope="session")
def file_before(tmp_path_factory: pytest.TempPathFactory, migrated: Path) -> tuple[Path, ChangedRows]:
    """A SQLite ledger as the predecessor of the next program left it, and the rows that it will have."""
    folder = tmp_path_factory.mktemp("before")
    with ledger(migrated, folder / "ledger.db", timeout_seconds=0.3) as engine:
        whole_ledger.fill(engine, folder, whole_ledger.locked)
        rows = changed_rows(engine)
        take_back(engine)
    whole = folder / "whole.db"
    with closing(sqlite3.connect(folder / "ledger.db")) as connection:
        connection.execute("VACUUM INTO ?", (str(whole),))  # with what only the log of the file has
    shutil.copymode(folder / "ledger.db", whole)
    return whole, rows


@pytest.fixture(scope="session")
def database_before(postgres: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ChangedRows]]:
    """The same as the name of a PostgreSQL database to be copied; it has roles."""
    name = f"before_{uuid.uuid4().hex[:12]}"
    run_statement(postgres, f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
    engine = open_store(address_of(postgres, name), timeout_seconds=0.3)
    whole_ledger.fill(engine, tmp_path_factory.mktemp("before"), whole_ledger.locked)
    set_up_roles_in_turn(engine)
    rows = changed_rows(engine)
    take_back(engine)
    engine.dispose()
    run_statement(postgres, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
    yield name, rows
    run_statement(postgres, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def predecessor(
    request: pytest.FixtureRequest, database: str, tmp_path: Path
) -> Iterator[tuple[Engine, str, ChangedRows]]:
    """That ledger, its URL, and the rows that it will have."""
    if database == "sqlite":
        path, rows = request.getfixturevalue("file_before")
        url = f"sqlite:///{shutil.copy(path, tmp_path / 'before.db')}"
        with _opened(url) as engine:
            yield engine, url, rows
        return
    template, rows = request.getfixturevalue("database_before")
    with database_like(request.getfixturevalue("postgres"), template) as url, _opened(url) as engine:
        yield engine, url, rows
