"""What every test finds: structlog as it is without us, and a ledger that is migrated already, to be copied."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples every time, and none judged by the clock: a failure is the change's. A soak draws anew.
settings.register_profile("repeatable", derandomize=True, deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "soak":
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
    from kvcustody.audit.store import open_store
    from kvcustody.migrations.upgrade import upgrade

    path = tmp_path_factory.mktemp("migrated") / "ledger.db"
    engine = open_store(path)
    upgrade(engine)
    engine.dispose()
    return path
