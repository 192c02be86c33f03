"""`kvcustody policy validate`: a policy's problems, their places, and their fixes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvcustody.console.command import Json, print_json, progress_bar, say
from kvcustody.console.policy.sarif_junit import junit, sarif, validation_data
from kvcustody.errors import PolicyError
from kvcustody.plurals import several
from kvcustody.policies.document.problems import Problem
from kvcustody.policies.workbench.validate import Validation, read_source, validate

EXIT_NO = 1
_SHOWN_CHARACTERS = 110
Files = Annotated[list[Path], typer.Argument(help="Policy files.", metavar="FILE...")]
File = Annotated[Path, typer.Argument(help="A policy file.", metavar="FILE")]


class ProblemFormat(StrEnum):
    """The format of printed problems."""

    TEXT = "text"
    JSON = "json"
    SARIF = "sarif"
    JUNIT = "junit"


FormatOption = Annotated[
    ProblemFormat, typer.Option("--format", help="text; json; sarif for code review; junit for CI.")
]


def add_to(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(name="validate", epilog=_EPILOG)(validate_command)


_EPILOG = (
    "Examples:\n\n    kvcustody policy validate policy.yaml\n\n"
    "    kvcustody policy validate policies/*.yaml --format sarif > policy.sarif"
)


def validate_command(files: Files, *, style: FormatOption = ProblemFormat.TEXT, as_json: Json = False) -> None:
    """Check policies as activation would: each problem with file, line, column, code and what to do.

    Every file is reported on, whatever is wrong with others. Nothing is guessed or repaired. Exit 0: all are sound; 1:
    at least one is not; 2: a file cannot be read.
    """
    sources: dict[str, str] = {}
    unread: list[PolicyError] = []
    validations: list[Validation] = []
    with progress_bar() as bar:
        for path in bar.track(files, description="validating"):
            try:
                source = read_source(path)
            except PolicyError as error:
                unread.append(error)
                continue
            sources[str(path)] = source.decode(errors="replace")  # to be shown
            validations.append(validate(source, name=str(path)))
    style = ProblemFormat.JSON if as_json else style
    if style is ProblemFormat.JSON:
        print_json([validation_data(item) for item in validations])
    elif style is ProblemFormat.TEXT:
        _print(validations, sources)
    else:
        problems = [problem for item in validations for problem in item.problems]
        say(
            sarif(problems)
            if style is ProblemFormat.SARIF
            else junit("validate", [(v.file, v.problems) for v in validations])
        )
    for refused in unread[:-1]:
        say(f"error: {refused}", file=sys.stderr)
    if unread:
        raise unread[-1]
    if not all(item.sound for item in validations):
        raise typer.Exit(EXIT_NO)


def _print(found: list[Validation], sources: dict[str, str]) -> None:
    for item in found:
        lines = sources[item.file].removeprefix("\ufeff").split("\n")
        for problem in item.problems:
            say(problem)
            for line in shown_at(lines, problem):
                say(line)
        if item.omitted:
            say(f"{item.file}: not shown: {several(item.omitted, 'more problem')}")
        if item.sound:
            say(f"{item.file}: sound, {item.digest}")


def shown_at(lines: Sequence[str], problem: Problem) -> list[str]:
    """Return a problem's line with a caret under its column; nothing where there is no such line.

    A long line is cut around the place. What is not printable stands as `?`: no line can move the cursor.
    """
    if not 0 < problem.line <= len(lines) or not lines[problem.line - 1].strip():
        return []
    text = "".join(char if char.isprintable() else " " if char == "\t" else "?" for char in lines[problem.line - 1])
    text = text.rstrip("?") if text.endswith("?") and lines[problem.line - 1].endswith("\r") else text
    column = min(max(0, problem.column - 1), len(text))
    cut = max(0, column - _SHOWN_CHARACTERS // 2) if len(text) > _SHOWN_CHARACTERS else 0
    number = f"{problem.line:>5} | "
    return [
        number + text[cut : cut + _SHOWN_CHARACTERS],
        " " * (len(number) - 2) + "| " + " " * (column - cut) + "^",
    ]
