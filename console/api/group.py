"""The group `kvcustody api`: of its commands, one for each operation, only the one that is asked for is made."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import orjson
import typer
import typer.main

from kvcustody.console.api.api_commands import FILE, Command, Part, function_of
from kvcustody.console.lazy import LazyGroup

HELP = (
    "Every operation of the API: of a control plane with --server, else of the ledger that the settings name. "
    "docs/build/api.md has them all."
)


def read_commands() -> list[Command]:
    """The command of every operation, from the file that this version was built with; a checkout may lack it."""
    try:
        written = (Path(__file__).parent / FILE).read_bytes()
    except FileNotFoundError:
        from kvcustody.console.api.generate_commands import generated

        written = generated()
    content = orjson.loads(written)
    return [Command(**{**item, "parts": tuple(Part(**part) for part in item["parts"])}) for item in content]


@cache
def _commands() -> dict[str, Command]:
    return {command.name: command for command in sorted(read_commands(), key=lambda one: one.name)}


class ApiGroup(LazyGroup):
    """A group of one command for each operation."""

    def names(self) -> list[str]:
        """The names, in the order of the alphabet."""
        return list(_commands())

    def summary(self, name: str) -> str | None:
        """What the operation does."""
        return _commands()[name].says

    def load(self, name: str) -> Any:
        """The command of an operation."""
        command = _commands()[name]
        arguments = " ".join(part.name.upper() for part in command.parts if part.place == "path")
        example = f"Example: `kvcustody api {name} {arguments}".rstrip() + " --json`"
        made = typer.Typer(rich_markup_mode="markdown")
        made.command(name=name, epilog=example)(function_of(command))
        made.callback()(lambda: None)
        return typer.main.get_group(made).commands[name]


app = typer.Typer(cls=ApiGroup, no_args_is_help=True, help=HELP)


@app.callback()
def _api() -> None:
    pass
