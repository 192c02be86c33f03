"""`kvcustody db` as people run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcustody.audit.kinds import GapRecorded
from kvcustody.audit.store.database.engine import SCHEMA_REVISION, open_store
from kvcustody.console.main import app
from standins import builders

RUN = CliRunner()


@pytest.fixture
def ledger(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    done = RUN.invoke(app, ["db", "upgrade", "--ledger", url, "--json"])
    assert (done.exit_code, json.loads(done.stdout)) == (0, {"revision": SCHEMA_REVISION})
    engine = open_store(url)
    builders.record(engine, tmp_path, [GapRecorded(1, "test", number, number) for number in range(30)])
    engine.dispose()
    return url


@pytest.mark.system("`db move` moves a ledger twice")
def test_a_ledger_is_moved_once(ledger: str, tmp_path: Path) -> None:
    """Between two files, which the library allows as well; tests/audit/keep/test_move.py moves into PostgreSQL."""
    target = f"sqlite:///{tmp_path / 'other.db'}"
    done = RUN.invoke(app, ["db", "move", ledger, target, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["leaves"] == 30 and found["rows"]["outages"] == 30
    assert len(found["head"]["root"]) == 64
    again = RUN.invoke(app, ["db", "move", ledger, target])
    assert again.exit_code == 2 and "move into an empty ledger" in again.output


def test_roles_of_a_file_are_refused_in_one_line(ledger: str) -> None:
    done = RUN.invoke(app, ["db", "roles", "--ledger", ledger])
    assert done.exit_code == 2 and "roles need PostgreSQL" in done.output
    assert "Traceback" not in done.output


def test_a_file_has_no_months(ledger: str) -> None:
    """On PostgreSQL: tests/audit/keep/test_partitions.py."""
    done = RUN.invoke(app, ["db", "partitions", "--ledger", ledger])
    assert (done.exit_code, done.output) == (0, "this ledger has no partitions: it is one file\n")
