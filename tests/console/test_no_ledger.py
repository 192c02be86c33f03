"""Where no ledger is: a command that reads one refuses, and makes none."""

from __future__ import annotations

import enum
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from typer.testing import CliRunner, Result

import kvcustody
from kvcustody.console.command_table import every_command
from kvcustody.console.main import app
from kvcustody.console.options import DEFAULT
from kvcustody.governance.api.declarations import every_operation

POLICY = "policies/library/single-org.yaml"
MAKERS = {
    "db upgrade": "brings a ledger to this program's schema, a new one as well",
    "init": "prepares a ledger for a control plane",
    "observe": "records what an engine tells, as a worker does",
    "replay": "records a replay, as a worker does",
    "serve": "is the control plane of the ledger",
}
UNREAD = {
    "doctor": "says what is wrong with a ledger, and exits 1",
    "report frameworks": "lists what this program knows",
}
ELSEWHERE = {  # refused for what else they are given here (another file, another database), or for who asks
    "audit sink acknowledge", "audit sink attach", "audit sink detach", "audit timestamp", "clock confirm",
    "db roles", "erasure certificate", "policy grants", "report verify",
}  # fmt: skip
FITTING = {"PREFIX": "0f1e2d3c4b5a"}  # what fits a parameter where `_value` does not
ARGUMENTS = {  # where the least that is required is not enough
    "apikey revoke": ["0f1e2d3c4b5a"],
    "audit odd-times": ["system"],
    "audit prove": ["system", "1"],
    "case open": [
        "--tenant",
        "a",
        "--subject",
        "s",
        "--right",
        "access",
        "--channel",
        "mail",
    ],
    "case step": ["c", "identity", "--outcome", "asked"],
    "custody residencies": ["b", "--tenant", "a"],
    "erasure request": ["--tenant", "a", "--subject", "s"],
    "policy enforce": ["monitor", "--reason", "r"],
    "policy simulate": [str(Path(kvcustody.__file__).parent / POLICY)] * 2,
    "report make": ["--framework", "gdpr"],
    "report schedules add": ["--framework", "gdpr", "--every", "monthly"],
    "worker close": ["i", "--spill-lost", "--actor", "a", "--approver", "b", "--reason", "r"],
}


def commands() -> dict[str, Any]:
    """Every command that works on a ledger which is named."""
    flags = {
        name: {flag for parameter in command.params for flag in parameter.opts} for name, command in every_command()
    }
    found = dict(every_command())
    return {name: found[name] for name, said in flags.items() if "--ledger" in said}


def _value(parameter: Any, given: Path) -> str:
    """Something that the parameter takes."""
    kind = parameter.type_descriptor.annotation
    if get_origin(kind) is list:
        [kind] = get_args(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return str(next(iter(kind)).value)
    if parameter.metavar in FITTING:
        return FITTING[parameter.metavar]
    if kind is Path:
        return str(given / "file")
    if kind in (int, float):
        return "1"
    return "2026-01-01" if parameter.name in ("since", "until") else "ab" * 16


def arguments(name: str, command: Any, given: Path) -> list[str]:
    """What the command can be run with."""
    if name in ARGUMENTS:
        return ARGUMENTS[name]
    made: list[str] = []
    for parameter in command.params:
        if parameter.required:
            value = _value(parameter, given)
            made += [value] if parameter.param_type_name == "argument" else [parameter.opts[0], value]
    return made


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    (folder / "file").write_text("{}")
    return folder


def ran(name: str, given: Path, empty: Path, monkeypatch: pytest.MonkeyPatch) -> Result:
    empty.mkdir()
    monkeypatch.chdir(empty)
    told = arguments(name, commands()[name], given)
    return CliRunner().invoke(app, [*name.split(), *told, "--ledger", f"sqlite:///{empty}/absent.db"])


def test_no_command_is_forgotten() -> None:
    assert len(commands()) > 150
    assert MAKERS.keys() | UNREAD.keys() | ELSEWHERE | ARGUMENTS.keys() <= commands().keys()


@pytest.mark.parametrize("of_operations", [True, False], ids=["operations", "others"])
def test_a_command_makes_no_ledger(
    of_operations: bool, given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {}
    asked = {one.operation.command for one in every_operation().by_name.values()}
    names = [name for name in commands() if (name in asked) is of_operations]
    for number, name in enumerate(sorted(names)):
        if name in MAKERS or name in UNREAD:
            continue
        empty = tmp_path / f"empty-{number}"
        found = ran(name, given, empty, monkeypatch)
        there = sorted(path.name for path in empty.rglob("*"))
        refused = "no ledger here" in found.output or name in ELSEWHERE
        if found.exit_code != 2 or there or not refused:
            wrong[name] = (found.exit_code, there, found.output)
    assert len(names) > 40
    assert wrong == {}


@pytest.mark.parametrize("name", ["init", "db upgrade"])
def test_a_ledger_that_is_made_would_be_seen(
    name: str, given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    found = ran(name, given, tmp_path / "empty", monkeypatch)
    assert found.exit_code == 0 and (tmp_path / "empty" / "absent.db").exists()


def test_no_command_takes_the_ledger_here_where_a_control_plane_is_named(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger that lies here may be another than the control plane's; a ledger that is named is read."""
    monkeypatch.chdir(tmp_path)
    with closing(sqlite3.connect("kvcustody.db")):
        pass
    wrong, asked = {}, 0
    for name, command in commands().items():
        [option] = [one for one in command.params if "--ledger" in one.opts]
        if option.default != DEFAULT or any("--server" in one.opts for one in command.params):
            continue
        asked += 1
        words = [*name.split(), *arguments(name, command, given)]
        refused = CliRunner().invoke(app, words, env={"KVCUSTODY_SERVER": "http://127.0.0.1:1"})
        elsewhere = {
            "KVCUSTODY_SERVER": "http://127.0.0.1:1",
            "KVCUSTODY_DATABASE_URL": f"sqlite:///{tmp_path}/no/x.db",
        }
        read = CliRunner().invoke(app, words, env=elsewhere)
        if "names one: name its ledger with --ledger" not in refused.output or "names one" in read.output:
            wrong[name] = (refused.output, read.output)
    assert asked > 20 and wrong == {}
