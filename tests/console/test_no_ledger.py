"""Where no ledger is: a command that reads one refuses, and makes none."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcustody.console.command_table import every_command
from kvcustody.console.main import app

# Commands that may make a ledger, each with its reason.
MAKERS: dict[str, str] = {}


def commands() -> dict[str, Any]:
    """Every command that works on a ledger which is named."""
    flags = {
        name: {flag for parameter in command.params for flag in parameter.opts}
        for name, command in every_command()
    }
    found = dict(every_command())
    return {name: found[name] for name, said in flags.items() if "--ledger" in said}


def _value(parameter: Any, given: Path) -> str:
    """Something that the parameter takes."""
    kind = type(parameter.type).__name__
    choices = getattr(parameter.type, "choices", None)
    if choices:
        first = next(iter(choices))
        return str(first.value if isinstance(first, enum.Enum) else first)
    if "Path" in kind or "File" in kind:
        return str(given / "file")
    if "Int" in kind or "Float" in kind:
        return "1"
    return "2026-01-01" if parameter.name in ("since", "until") else "ab" * 16


def arguments(command: Any, given: Path) -> list[str]:
    """The least that the command can be run with."""
    made: list[str] = []
    for parameter in command.params:
        if parameter.required:
            value = _value(parameter, given)
            made += [value] if parameter.param_type_name == "argument" else [parameter.opts[0], value]
    return made


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_no_command_is_forgotten() -> None:
    assert len(commands()) > 150
    assert MAKERS.keys() <= commands().keys()


@pytest.mark.parametrize("name", sorted(commands()))
def test_a_command_makes_no_ledger(name: str, empty: Path, tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    (given / "file").write_text("{}")
    command = commands()[name]
    ran = CliRunner().invoke(
        app, [*name.split(), *arguments(command, given), "--ledger", f"sqlite:///{empty}/absent.db"]
    )
    there = sorted(path.name for path in empty.rglob("*"))
    assert ran.exit_code == 2, (ran.exit_code, ran.output, ran.exception)
    assert there == [], ran.output
