"""One replay serves every question about what reuse was worth."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine
from typer.testing import CliRunner

from kvcustody.audit.store.database.engine import open_store
from kvcustody.console.main import app


@pytest.fixture(scope="session")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a replay in which tenants reuse what they and others wrote, through grants and segments."""
    folder = tmp_path_factory.mktemp("replayed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        found = CliRunner().invoke(app, ["replay", "--limit", "300", "--pool-blocks", "2048"])
        assert found.exit_code == 0, found.output
    return folder


@pytest.fixture(scope="session")
def replayed_ledger(replayed: Path) -> Iterator[Engine]:
    """Its ledger, to be read."""
    engine = open_store(replayed / "kvcustody.db", read_only=True)
    yield engine
    engine.dispose()
