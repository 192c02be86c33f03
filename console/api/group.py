"""The group `kvcustody api`, whose commands are made when the first of them is asked for.

1. What the rest of the command line costs does not grow by the API: its document is read only here.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import orjson
import typer
import typer.core
import typer.main

from kvcustody.errors import ConfigError

HELP = (
    "Every operation of the API: of a control plane with --server, else of the ledger that the settings name. "
    "docs/build/api.md has them all."
)


class ApiGroup(typer.core.TyperGroup):
    """A group of one command for each operation."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in the order of the alphabet."""
        return sorted(api_commands())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name."""
        return api_commands().get(cmd_name)


@cache
def api_commands() -> dict[str, Any]:
    """Every command by name."""
    try:
        from kvcustody.governance.api.app import create_api
    except ImportError as error:
        raise ConfigError(f"`{error.name}` is not installed; pip install 'kvcustody[service]'") from None
    from kvcustody.console.api.generate_commands import commands, function_of

    made = typer.Typer()
    for command in commands(orjson.loads(create_api(None).document())):
        arguments = " ".join(part.name.upper() for part in command.parts if part.place == "path")
        example = f"Example: `kvcustody api {command.name} {arguments}".rstrip() + " --json`"
        made.command(name=command.name, epilog=example)(function_of(command))
    group = typer.main.get_group(made)
    return dict(group.commands)


app = typer.Typer(cls=ApiGroup, no_args_is_help=True, help=HELP)


@app.callback()
def _api() -> None:
    pass
