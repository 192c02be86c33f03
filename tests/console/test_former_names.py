"""Old names of commands and options: each is answered with the new one, and no text of the repository has one."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcustody.console.command_table import every_command
from kvcustody.console.former_names import FILE, FormerCommand, FormerOption, former_names
from kvcustody.console.main import app

ROOT = Path(__file__).resolve().parents[2]
NAMES = former_names()
SIGN = next(row for row in NAMES.options if row.command == "audit sign")
COMMANDS: dict[str, Any] = dict(every_command())
LITERALS_SIDE_BY_SIDE = re.compile(r"""["']\s*\n\s*f?["']""")
LISTED = r"""["'],\s*["']"""  # between two words of a command line that a program gives as a list


def options_of(command: str) -> set[str]:
    """The options that a command takes now."""
    return {flag for option in COMMANDS[command].params for flag in (*option.opts, *option.secondary_opts)}


@pytest.mark.parametrize("row", NAMES.commands, ids=lambda row: row.old)
def test_an_old_command_is_answered_with_the_new_one(row: FormerCommand) -> None:
    assert row.old not in COMMANDS and row.new in COMMANDS
    for more in ((), ("--json",), ("something", "--no-such-option")):
        answered = CliRunner().invoke(app, [*row.old.split(), *more])
        assert answered.exit_code == 2, answered.output
        assert f"`kvcustody {row.old}` is `kvcustody {row.new}` now" in answered.stderr


@pytest.mark.parametrize("row", NAMES.options, ids=lambda row: f"{row.command} {row.old}")
def test_an_old_option_is_answered_with_the_new_one(row: FormerOption) -> None:
    assert row.old not in options_of(row.command) and row.new in options_of(row.command)
    words = [row.old, "value"] if row.old.startswith("-") else ["some.key"]
    answered = CliRunner().invoke(app, [*row.command.split(), *words])
    assert answered.exit_code == 2, answered.output
    new = row.new if row.old.startswith("-") else f"{row.new} {row.old}"
    assert f"`{row.old}` of `kvcustody {row.command}` is `{new}` now" in answered.stderr


def test_a_name_that_never_was_one_is_no_old_name() -> None:
    for words in (["audit", "nothing"], ["showback", "--nothing"], ["coverage"], ["nothing"]):
        answered = CliRunner().invoke(app, words)
        assert answered.exit_code == 2 and "now" not in answered.stderr.split(), answered.output


def test_like_options_have_like_names() -> None:
    """A period is `--since` and `--until`; a ledger is a path or a URL; a list's other order is `--oldest-first`."""
    every = {name: {flag: one for one in command.params for flag in one.opts} for name, command in COMMANDS.items()}
    metavars = {name: given["--ledger"].metavar for name, given in every.items() if "--ledger" in given}
    assert set(metavars.values()) == {"PATH|URL"} and len(metavars) > 60
    passed = {name for name, given in every.items() if {"--before", "--after"} & given.keys()}
    assert passed == {"protocol pull-policy", "protocol take-epochs"}, "numbers, and no times"
    of_no_period = {
        "policy init",
        "policy segment add",
        "keys rewrap",
        "keys backup",
        "case letter",
        "audit purge",
    }
    ends = {name for name, given in every.items() if {"--from", "--to"} & given.keys()}
    assert ends == of_no_period | {"report schedules add"}


def test_no_text_has_an_old_name() -> None:
    """Docs, examples, packaging, hints, errors, lines that reports are made again with, and the tests."""
    assert list(uses_in_repository()) == []


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("    $ kvcustody audit sign kvcustody-signing.key", SIGN),
        ('run("audit", "sign", str(path))', SIGN),
        ("see `kvcustody coverage recompute --json`", NAMES.commands[0]),
        ('run(["coverage",\n    "recompute"])', NAMES.commands[0]),
        ("kvcustody showback --tenant acme \\\n    --from 2026-01-01", NAMES.options[0]),
        ('("showback", "--tenant",\n  name, "--from", "2026-01-01")', NAMES.options[0]),
        ('"kvcustody showback "\n    "--from 2026"', NAMES.options[0]),
    ],
)
def test_control_an_old_name_is_found(text: str, row: FormerCommand | FormerOption) -> None:
    assert row in uses(text)
    for old, new in (("recompute", "show"), ("--from", "--since"), ('"sign", ', '"sign", "--signing-key", ')):
        text = text.replace(old, new)
    assert row not in uses(text.replace("audit sign k", "audit sign --signing-key k"))


def uses_in_repository() -> Iterator[tuple[str, str]]:
    """The files that name a command or an option by its old name, with that name."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in sorted(listed.decode().split("\0")):
        path = ROOT / name
        if not path.is_file() or path.is_symlink() or path.name in (FILE, Path(__file__).name):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        yield from ((name, f"{row}") for row in uses(text))


def uses(text: str) -> list[FormerCommand | FormerOption]:
    """The rows whose old name a text has on a command line, or in a program's list of its words."""
    joined = LITERALS_SIDE_BY_SIDE.sub("", text)
    rows = (*NAMES.commands, *NAMES.options)
    there = [row for row in rows if sought_word(row) in joined]
    return [row for row in there if any(pattern.search(joined) for pattern in patterns(row))]


def sought_word(row: FormerCommand | FormerOption) -> str:
    """A word that every use of an old name has: looked for first, since most texts have none."""
    if isinstance(row, FormerOption) and not row.old.startswith("-"):
        return row.command.split()[-1]
    return row.old.split()[-1]


def patterns(row: FormerCommand | FormerOption) -> Iterator[re.Pattern[str]]:
    """How a use of an old name looks: typed into a shell, and given as a list."""
    command = row.old if isinstance(row, FormerCommand) else row.command
    typed, listed = rf"(?:kvcustody |`){re.escape(command)}(?![\w-])", LISTED.join(command.split())
    if isinstance(row, FormerCommand):
        yield re.compile(typed if " " in command else rf"kvcustody {command}(?![\w-])")
        yield re.compile(rf"""[\[(]\s*["']{listed}["']""")
        return
    if not row.old.startswith("-"):  # an argument
        yield re.compile(rf"{typed} (?!-)[\w./-]*(?:\.key|KEY|FILE)(?![\w-])")
        yield re.compile(rf"""["']{listed}["'],\s*(?!["']-)[\w"']""")
        return
    yield re.compile(rf"{typed}(?:\\\n|[^\n`;|])*?(?<![\w-]){row.old}(?![\w-])")
    yield re.compile(rf"""["']{listed}["'][^\]`;]{{0,300}}?["']{row.old}["'= ]""")
