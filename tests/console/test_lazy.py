"""Commands are imported when they are asked for, and others' commands join them."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from operator import le
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
from typer.testing import CliRunner

from kvcustody.audit.store.database.engine import open_store
from kvcustody.console import lazy
from kvcustody.console.main import COMMANDS, app
from kvcustody.migrations.upgrade import upgrade

DATABASE = {"sqlalchemy", "cryptography", "orjson"}
HEAVY = DATABASE | {
    *("torch", "numpy", "fastapi", "starlette", "uvicorn", "alembic", "jinja2", "yaml"),
    *("pydantic", "structlog", "rich.console", "markdown_it", "pygments", "sqlalchemy.dialects.postgresql"),
}
CALL = """
import sys
from kvcustody.governance.observability.logs import configure
from kvcustody.governance.api.local_calls import LocalCalls
from kvcustody.governance.api.operation_request import OperationRequest
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.service import open_service
from kvcustody.governance.service.settings import load_service_settings
configure("warning")
with open_service(load_service_settings(None, database_url=sys.argv[1])) as service, LocalCalls(service) as calls:
    auditor = Caller("local", frozenset({Role.AUDITOR}), None, "local")
    answer = calls.call(auditor, OperationRequest("GET", "/v1/jobs", {}, {}, b""))
assert answer.status == 200, answer
print("\\n", *sorted(sys.modules))
"""
COMMAND = """
import sys
from kvcustody.console.main import app
try: app(sys.argv[1:])
except SystemExit as ended: assert not ended.code, ended.code
print("\\n", *sorted(sys.modules))
"""


def imported(source: str, *arguments: str, folder: Path | None = None) -> set[str]:
    """The modules that a process has imported when it is over."""
    done = subprocess.run(
        [sys.executable, "-c", source, *arguments], capture_output=True, text=True, check=True, cwd=folder
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.fixture
def ledger(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/ledger.db"
    engine = open_store(url)
    upgrade(engine)
    engine.dispose()
    return url


@pytest.mark.system("a command imports the others")
def test_what_a_command_costs_does_not_grow_by_the_others(ledger: str, tmp_path: Path) -> None:
    """By what it imports, and how much: seconds are another's business (`benchmarks/startup.py`)."""
    shown = imported(COMMAND, "--help")
    assert HEAVY & shown == {"orjson", "rich.console"}, (
        "a listing imports none of the commands, nor the packages that they are in"
    )
    version = imported(COMMAND, "version")
    assert HEAVY & version == {"orjson"}
    status = imported(COMMAND, "audit", "status", "--ledger", ledger)
    read = imported(COMMAND, "case", "list", "--ledger", ledger, folder=tmp_path)
    called = imported(CALL, ledger, folder=tmp_path)
    for found in (status, read, called):
        absent = {"torch", "fastapi", "starlette", "uvicorn", "alembic", "structlog"}
        assert found >= DATABASE and not found & (absent | {"markdown_it", "sqlalchemy.dialects.postgresql"})
    sizes = [len(found) for found in (shown, version, status, read, called)]
    assert all(map(le, sizes, (350, 350, 900, 1150, 1150))), sizes


def test_nothing_is_logged_by_a_library_that_is_not_there_yet() -> None:
    """structlog is imported for the first line that the level lets through, and is configured before it."""
    source = """
import sys
from kvcustody.governance.observability.logs import configure
from kvcustody.logger import get_logger
log = get_logger("test")
configure("warning", "json")
log.info("not heard")
assert "structlog" not in sys.modules
log.warning("heard", prompt="said")
log.info("not heard")
assert "structlog" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    [line] = done.stderr.splitlines()
    assert (json.loads(line)["event"], json.loads(line)["level"]) == ("heard", "warning")
    assert json.loads(line)["prompt"] == "[withheld]"
    assert done.stdout == ""


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_summary_is_how_the_commands_own_help_begins(name: str) -> None:
    group: Any = typer.main.get_command(app)
    own = " ".join(group.get_command(None, name).help.split())
    assert own.startswith(COMMANDS[name].summary) and COMMANDS[name].summary.endswith(".")
    assert name in group.list_commands(None)


def test_others_join_by_entry_point_and_take_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = (EntryPoint("size", "no_such_package:app", "g"), EntryPoint("zoo", "no_such_package:app", "g"))
    monkeypatch.setattr(lazy, "installed", lambda: entries)
    run = CliRunner()
    assert run.invoke(app, ["size", "--help"]).exit_code == 0
    told = run.invoke(app, ["zoo"])
    assert told.exit_code == 2 and "cannot be loaded" in told.stderr
    assert "cannot be loaded" in run.invoke(app, ["--help"]).stdout
    assert "no such command" in run.invoke(app, ["zebra"]).stderr.lower()
