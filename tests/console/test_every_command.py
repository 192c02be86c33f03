"""All commands at once: one name for the ledger and for the service, JSON, help for everything, and how each ends."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcustody.console.api import operation_commands
from kvcustody.console.api.generate_commands import generated
from kvcustody.console.command import progress_bar
from kvcustody.console.command_table import ANSWERS, every_command, rows
from kvcustody.console.main import app
from kvcustody.console.terminal import progress
from kvcustody.files import READABLE, write_file

ROOT = Path(__file__).resolve().parents[2]
OTHER_NAMES = {"--db", "--database", "--database-url", "--url-of-ledger", "--control-plane", "--host"}


@pytest.fixture(scope="module")
def all_commands() -> dict[str, Any]:
    return dict(every_command())


def test_there_are_as_many_as_help_shows(all_commands: dict[str, Any]) -> None:
    assert len(all_commands) > 200 and {"replay", "audit fsck", "audit query", "custody block"} <= all_commands.keys()


def test_each_says_what_it_takes_under_the_names_that_all_have(all_commands: dict[str, Any]) -> None:
    assert [name for name, command in all_commands.items() if not command.help] == []
    parameters = [(name, each) for name, command in all_commands.items() for each in command.params]
    assert [(name, each.name) for name, each in parameters if not each.help] == []
    assert [(name, each.opts) for name, each in parameters if OTHER_NAMES & set(each.opts)] == []


def test_every_command_but_those_that_go_on_gives_json() -> None:
    assert [row.name for row in rows() if not row.as_json] == [
        "serve",
        "audit ship",
        "witness serve",
        "door serve",
        "door proxy",
        "events keep",
    ]
    assert all(row.lasting for row in rows() if not row.as_json)


def test_the_page_has_every_command(all_commands: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in all_commands)


OTHER_ENDS = {"EXIT_ERROR", "EXIT_INTERRUPTED", "_INTERRUPTED", "0"}


def _exits_with_no(function: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> bool:
    """Whether a function, or one of its module that it calls, may end the command with 1."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called == "typer.Exit" and (not node.args or ast.unparse(node.args[0]) not in OTHER_ENDS):
            return True
        if called == "following":  # `console.command`: what was lost decides how it ends
            return True
        inner = functions.get(called)
        if inner is not None and inner is not function and _exits_with_no(inner, functions):
            return True
    return False


def test_the_table_says_which_commands_answer_with_one(all_commands: dict[str, Any]) -> None:
    answering = set()
    for name, command in all_commands.items():
        function = inspect.unwrap(command.callback)
        source = Path(inspect.getsourcefile(function) or "").read_text(encoding="utf-8")
        functions = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
        if _exits_with_no(functions[function.__code__.co_name], functions):
            answering.add(name)
    assert answering == ANSWERS.keys()


def test_short_help_version_and_what_may_have_been_meant() -> None:
    run = CliRunner()
    assert run.invoke(app, ["audit", "-h"]).stdout == run.invoke(app, ["audit", "--help"]).stdout != ""
    assert run.invoke(app, ["--version"]).stdout.startswith("kvcustody ")
    assert "did you mean 'policy'" in run.invoke(app, ["polcy"]).stderr.lower()
    assert "did you mean 'tile'" in run.invoke(app, ["audit", "tilee"]).stderr.lower()
    assert "did you mean 'status'" in run.invoke(app, ["audit", "statu"]).stderr.lower()


def test_long_work_says_where_it_is_even_to_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    with progress_bar() as bar:
        task = bar.add_task("leaves", total=20_000)
        for _ in range(8):
            bar.advance(task, 1_000)
    told = capsys.readouterr().err.splitlines()
    assert 2 <= len(told) <= 4 and told == sorted(told) and told[0].endswith("of 20,000"), told
    assert all(line.startswith("leaves: ") for line in told)


@pytest.fixture
def commands_file() -> None:
    """The file of commands, as `make setup` makes it, is this checkout's."""
    file, content = Path(operation_commands.__file__).with_name(operation_commands.FILE), generated()
    if not file.exists() or file.read_bytes() != content:
        write_file(file, content, mode=READABLE)


@pytest.mark.system("commands differ where the built file of commands is missing")
def test_the_commands_of_the_api_are_the_same_without_their_file(monkeypatch: pytest.MonkeyPatch) -> None:
    built = operation_commands.read_commands()
    assert built[0].says, "control"
    monkeypatch.setattr(operation_commands, "FILE", "absent.json")
    operation_commands.read_commands.cache_clear()
    try:
        assert operation_commands.read_commands() == built
    finally:
        operation_commands.read_commands.cache_clear()


def test_a_value_that_an_operation_does_not_know_is_refused_before_it_is_asked() -> None:
    told = CliRunner().invoke(app, ["job", "report", "--framework", "gdprr", "--server", "http://127.0.0.1:9"])
    assert told.exit_code == 2 and "gdpr" in told.stderr and "KVC100" in told.stderr


def test_asking_a_server_imports_no_server(commands_file: None) -> None:
    source = (
        "import sys; from kvcustody.console.main import app\n"
        "try: app(['service', 'version', '--server', 'http://127.0.0.1:9', '--api-key-file', '/dev/null'])\n"
        "except SystemExit: pass\n"
        "print('fastapi' in sys.modules, 'numpy' in sys.modules, 'httpx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-3] == "False"


def test_an_option_of_one_value_is_not_given_twice() -> None:
    """The second would stand for both. An option that may be repeated is the control."""
    run = CliRunner()
    twice = run.invoke(app, ["audit", "query", "--kind", "receipt", "--kind=decision"])
    assert twice.exit_code == 2 and "`--kind` takes one value, and is given 2" in twice.stderr
    repeated = run.invoke(app, ["audit", "tail", "--kind", "receipt", "--kind", "decision", "--ledger", "none.db"])
    assert repeated.exit_code == 2 and "takes one value" not in repeated.stderr


@pytest.mark.system("a help page cuts an option at 80 columns")
def test_help_shows_every_option_in_80_columns(all_commands: dict[str, Any]) -> None:
    """Each by its whole name, with how its text begins, however many values it offers."""
    cut = {}
    for name, command in all_commands.items():
        shown = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
        assert shown.exit_code == 0, name
        wanted = [flag for each in command.params for flag in each.opts if flag.startswith("--")]
        wanted += [each.help.split()[0].strip("`:,").replace("`", "") for each in command.params if each.help]
        missing = [text for text in wanted if text not in shown.output]
        if missing:
            cut[name] = missing
    assert cut == {}
