"""Commands are imported when they are asked for, and others' commands join them."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import typer
import typer.main
from typer.testing import CliRunner

from kvcustody.console import lazy
from kvcustody.console.main import COMMANDS, app

HEAVY = {"sqlalchemy", "torch", "numpy", "fastapi", "yaml", "cryptography"}


def loaded(*arguments: str) -> set[str]:
    """Which of the heavy libraries a process has imported when the command is over."""
    source = (
        "import sys; from kvcustody.console.main import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print('\\n', *sorted(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", source, *arguments], capture_output=True, text=True, check=True
    )
    return HEAVY & set(done.stdout.splitlines()[-1].split())


def test_what_a_command_costs_does_not_grow_by_the_others() -> None:
    assert loaded("version") == set()
    assert loaded("--help") == set(), (
        "a listing imports none of the commands, nor the packages that they are in"
    )
    assert loaded("db", "--help") >= {"sqlalchemy"}, "void: nothing would be seen"


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
