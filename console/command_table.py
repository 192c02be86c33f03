"""Every command with its parameters and exit codes: the table in docs/reference/commands.md, made from the commands.

Every command ends with 0 when it was done, 2 when it could not be (`error: …` on stderr) and 130 when it was
interrupted. A command that answers a question ends with 1 when the answer is no.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from enum import Enum
from functools import cache
from typing import Any, NamedTuple, get_args

import typer.main

from kvcustody.console.main import app

ANSWERS = {
    "simulate fleet": "isolation or doors cost more than the page on fleets says",
    "doctor": "something is a problem: it does not work, or protects less than it says",
    "audit fsck": "the ledger is not sound",
    "audit push": "batches were given up, or a restore or a purge was met",
    "audit recompute": "tables and leaves differ",
    "audit ship": "a restore or a purge was met",
    "audit sink status": "the receiver fails, batches were given up, or leaves were lost",
    "audit tail": "with `--follow`: a restore or a purge was met",
    "audit verify": "the export does not verify",
    "conformance": "a case fails, or a mutant lives",
    "demo attack": "an attack succeeded",
    "known-bugs": "a case was found",
    "policy check-no-new-access": "something is newly allowed",
    "policy explain": "it is denied",
    "policy fmt": "a file is not formatted",
    "policy lint": "there is a finding, with `--fail`",
    "policy prove": "a property does not hold",
    "policy test": "a case fails",
    "policy validate": "a policy is wrong",
    "policy verify-bundle": "the bundle does not verify",
    "replay": "the golden figures differ",
    "report verify": "the report does not verify",
    "scan worker": "the worker did not answer in time",
}  # with 1


class CommandRow(NamedTuple):
    """One command."""

    name: str
    as_json: bool
    ledger: bool
    server: bool
    choices: tuple[str, ...]  # options whose values the shell offers
    lasting: bool  # it runs until it is told to stop, and prints as it goes


def every_command() -> Iterator[tuple[str, Any]]:
    """Yield the name and the command of everything that can be run."""

    def walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        if not isinstance(command, typer.core.TyperGroup):
            yield " ".join(words), command
            return
        for name in command.list_commands(None):  # type: ignore[arg-type]
            yield from walk(command.get_command(None, name), (*words, name))  # type: ignore[arg-type]

    return walk(_program(), ())


@cache
def _program() -> Any:
    return typer.main.get_command(app)


def rows() -> list[CommandRow]:
    """Return every command in the order of the help."""
    return [_row(name, command) for name, command in every_command()]


def _row(name: str, command: Any) -> CommandRow:
    flags = {flag: option for option in command.params for flag in option.opts}
    offered = _offered(command.callback)
    choices = tuple(sorted(option.opts[0] for option in command.params if option.name in offered))
    return CommandRow(
        name,
        "--json" in flags,
        "--ledger" in flags,
        "--server" in flags,
        choices,
        name in ("serve", "witness serve", "audit ship", "door serve", "door proxy", "events keep"),
    )


def _offered(function: Any) -> set[str]:
    """Return a command's parameters with known values: those of an enumeration, or with their own list."""
    names = set()
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        kind, *said = get_args(parameter.annotation) or (parameter.annotation,)
        kinds = [kind, *get_args(kind)]
        if any(isinstance(one, type) and issubclass(one, Enum) for one in kinds) or any(
            getattr(one, "autocompletion", None) for one in said
        ):
            names.add(name)
    return names


def commands_table() -> str:
    """Return the table in Markdown."""
    lines = [
        "| command | `--json` | `--ledger` | `--server` | values offered | ends with 1 when |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows():
        marks = ["yes" if mark else "" for mark in (row.as_json, row.ledger, row.server)]
        marks[0] = marks[0] or "prints as it goes"
        choices = ", ".join(f"`{flag}`" for flag in row.choices)
        lines.append(f"| `{row.name}` | {' | '.join(marks)} | {choices} | {ANSWERS.get(row.name, '')} |")
    return "\n".join(lines) + "\n"
