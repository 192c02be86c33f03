"""Commands that are imported when they are asked for: what one costs to start does not grow by the others.

1. A listing (`--help`, shell completion) imports none of ours: it shows the summaries of the table, which a test
   holds to be how the commands' own help begins.
2. A command that runs, or whose own help is shown, is the one that its module makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import typer
import typer.core
import typer.main

from kvcustody.console.command import CustodyGroup
from kvcustody.console.plugins import add_command, installed


@dataclass(frozen=True)
class Lazy:
    """One command before its import: a typer app or a function as `module:attribute`, and its summary.

    `epilog` names the module's text that is shown below a function's help.
    """

    target: str
    summary: str
    epilog: str = "EPILOG"


class LazyGroup(CustodyGroup):
    """The commands of `table`, then those that other packages add. A subclass brings the table."""

    table: ClassVar[Mapping[str, Lazy]] = {}
    _listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        """Ours in the order of the table, then the others by name; a name of ours cannot be taken."""
        return [*self.table, *(name for name in self._plugins() if name not in self.table)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name; within a listing its summary alone (rule 1)."""
        if cmd_name not in self.commands:
            lazy, entry = self.table.get(cmd_name), self._plugins().get(cmd_name)
            if lazy is not None and self._listing:
                return typer.core.TyperCommand(cmd_name, help=lazy.summary)
            if lazy is not None:
                self.commands[cmd_name] = _loaded(cmd_name, lazy)
            elif entry is not None:
                made = typer.Typer(rich_markup_mode="markdown")
                add_command(made, entry)
                self.commands[cmd_name] = typer.main.get_group(made).commands[cmd_name]
        return self.commands.get(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The help of the group: a listing."""
        with self._list():
            super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """The names that a shell offers: a listing."""
        with self._list():
            return super().shell_complete(ctx, incomplete)

    def _plugins(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in installed()}

    @contextmanager
    def _list(self) -> Iterator[None]:
        self._listing = True
        try:
            yield
        finally:
            self._listing = False


def _loaded(name: str, lazy: Lazy) -> Any:
    module, _, attribute = lazy.target.partition(":")
    found = getattr(import_module(module), attribute)
    made = typer.Typer(rich_markup_mode="markdown")
    if isinstance(found, typer.Typer):
        made.add_typer(found, name=name)
    else:
        made.command(name=name, epilog=getattr(import_module(module), lazy.epilog))(found)
    return typer.main.get_group(made).commands[name]
