"""The workbench page: every command on it runs, in its order, and every command of ours is on it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvcustody.console.main import app
from kvcustody.console.policy.command import app as policy_app

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "how-to" / "policy" / "write-a-policy.md").read_text()
LANGUAGE = (DOCS / "reference" / "policy-language.md").read_text()
COMMANDS = re.findall(r"^\$ kvcustody (.*)$", PAGE, re.MULTILINE)


@pytest.mark.system("a command on the workflow page no longer runs")
def test_every_command_on_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("cases.yaml").write_text(re.search(r"```yaml cases\n(.*?)```", LANGUAGE, re.DOTALL)[1])
    Path("ids.json").write_text(str(list(range(100))))
    for command in COMMANDS:
        result = CliRunner().invoke(app, shlex.split(command))
        assert result.exit_code == 0, (command, result.output, result.exception)
    assert len(COMMANDS) >= 12 and Path("proof.json").is_file()


def test_every_command_of_the_table_exists_and_is_shown():
    listed = re.findall(r"^\| `([a-z-]+)` \|", PAGE, re.MULTILINE)
    shown = {command.split()[1] for command in COMMANDS if command.startswith("policy ")}
    assert set(listed) == shown
    for name in listed:
        assert CliRunner().invoke(app, ["policy", name, "--help"]).exit_code == 0


def test_every_command_teaches():
    """A summary, an example, a line for each option, and JSON on request."""
    commands = list(paths(typer.main.get_command(policy_app)))
    assert len(commands) > 25
    for path in commands:
        command = typer.main.get_command(policy_app)
        for name in path:
            command = command.commands[name]
        options = [found for found in command.params if found.param_type_name == "option"]
        assert command.help and "Example" in (command.epilog or ""), path
        assert all(option.help for option in options), path
        assert any("--json" in option.opts for option in options), path


def paths(group):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from ((name, *rest) for rest in paths(command))
        else:
            yield (name,)
