"""Makes the worlds of the robust and simulation tests importable here, and a store to write to."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from sqlalchemy import Engine

from kvcustody.audit.database.engine import open_store

TESTS = Path(__file__).parent.parent
for folder in (TESTS / "robust", TESTS / "simulation", Path(__file__).parent):
    sys.path.insert(0, str(folder))


@pytest.fixture
def store(tmp_path: Path, migrated: Path) -> Iterator[Engine]:
    shutil.copy(migrated, tmp_path / "ledger.db")
    engine = open_store(tmp_path / "ledger.db")
    yield engine
    engine.dispose()


@pytest.fixture(autouse=True)
def quiet(unconfigured_logs: None) -> None:
    """A line an erasure would be most of what these tests do."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
