"""`kvcustody policy validate`: what is wrong with a policy, where, and what to do about it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvcustody.console.command import Json, print_json, progress_bar
from kvcustody.console.policy.sarif_junit import junit, sarif, validation_data
from kvcustody.policies.workbench.validate import Validation, read_source, validate

EXIT_NO = 1
Files = Annotated[list[Path], typer.Argument(help="Policy files.", metavar="FILE...")]
File = Annotated[Path, typer.Argument(help="A policy file.", metavar="FILE")]


class ProblemFormat(StrEnum):
    """How problems are printed."""

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


def validate_command(
    files: Files, *, style: FormatOption = ProblemFormat.TEXT, as_json: Json = False
) -> None:
    """Check policies as activation would: each problem with file, line, column, code and what to do.

    Nothing is guessed or repaired. Exit 0: all are sound; 1: at least one is not; 2: a file cannot be read.
    """
    with progress_bar() as bar:
        paths = bar.track(files, description="validating")
        found = [validate(read_source(path), name=str(path)) for path in paths]
    style = ProblemFormat.JSON if as_json else style
    if style is ProblemFormat.JSON:
        print_json([validation_data(item) for item in found])
    elif style is ProblemFormat.TEXT:
        _print(found)
    else:
        problems = [problem for item in found for problem in item.problems]
        print(
            sarif(problems)
            if style is ProblemFormat.SARIF
            else junit("validate", [(v.file, v.problems) for v in found])
        )
    if not all(item.sound for item in found):
        raise typer.Exit(EXIT_NO)


def _print(found: list[Validation]) -> None:
    for item in found:
        for problem in item.problems:
            print(problem)
        if item.omitted:
            print(f"{item.file}: {item.omitted} more problems are not shown")
        if item.sound:
            print(f"{item.file}: sound, {item.digest}")
