"""What every test finds: structlog as it is without us, and a ledger that is migrated already, to be copied."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

PATIENT = (
    "&options=-c%20statement_timeout%3D20000"  # a slow machine is no outage; a lock still is, after 0.3 s
)


def pytest_configure(config: pytest.Config) -> None:
    """The same examples every time, and none judged by the clock: a failure is the change's. A soak draws anew."""
    if config.option.markexpr != "soak" and find_spec("hypothesis"):  # which an engine's environment has not
        from hypothesis import settings

        settings.register_profile("repeatable", derandomize=True, deadline=None)
        settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def unconfigured_logs() -> Iterator[None]:
    yield
    structlog = sys.modules.get("structlog")
    if structlog is not None:
        structlog.reset_defaults()


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite ledger with this program's schema and nothing in it: a copy is a new ledger in a millisecond."""
    from kvcustody.audit.database.engine import open_store
    from kvcustody.migrations.upgrade import upgrade

    path = tmp_path_factory.mktemp("migrated") / "ledger.db"
    engine = open_store(path)
    upgrade(engine)
    engine.dispose()
    return path


@pytest.fixture
def store(tmp_path: Path, migrated: Path) -> Iterator[Any]:
    from standins.builders import ledger

    with ledger(migrated, tmp_path / "ledger.db") as engine:
        yield engine


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    from standins.builders import postgres_server

    with postgres_server() as server:
        yield server.get_uri()


@pytest.fixture(scope="session")
def postgres_migrated(postgres: str) -> str:
    """A database with this program's schema: the template of every other one."""
    import psycopg

    from kvcustody.audit.database.engine import open_store
    from kvcustody.migrations.upgrade import upgrade

    name = "ledger_migrated"
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    engine = open_store(postgres.replace("/postgres?", f"/{name}?") + PATIENT)
    upgrade(engine)
    engine.dispose()
    return name


@pytest.fixture
def postgres_store(postgres: str, postgres_migrated: str) -> Iterator[Any]:
    import psycopg
    from sqlalchemy import event

    from kvcustody.audit.database.engine import open_store

    name = f"ledger_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {postgres_migrated}")
    url = postgres.replace("/postgres?", f"/{name}?") + PATIENT
    engine = open_store(url, timeout_seconds=0.3)
    event.listen(engine, "do_connect", _connect_patiently)
    yield engine
    engine.dispose()


def _connect_patiently(
    _dialect: object, _record: object, _arguments: object, options: dict[str, Any]
) -> None:
    """A slow machine is no outage here either."""
    options["connect_timeout"] = 60


@pytest.fixture(params=["sqlite", "postgresql"])
def any_store(request: pytest.FixtureRequest) -> Any:
    """Both databases, one after the other."""
    return request.getfixturevalue("store" if request.param == "sqlite" else "postgres_store")
