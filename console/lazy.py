"""Commands that are imported when they run, so that a command's start time does not depend on the others.

1. A listing (`--help`, shell completion) imports none of ours: it shows the summaries of the table, which a test
   holds to be how the commands' own help begins.
2. A command that runs, or whose own help is shown, is the one that its module makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import typer
import typer.core
import typer.main

from kvcustody.console.command import CustodyGroup, UsageError
from kvcustody.console.plugins import add_absent, add_command, installed, summary_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@dataclass(frozen=True)
class Lazy:
    """One command before its import: a typer app or function as `module:attribute`.

    `summary` is how its help begins (left out: it is read from the module's text). `epilog` names the module's text
    that is shown below a function's help; `example` is one instead. Where `below` is said, the target makes the app, of
    the summary and of this text below it.
    """

    target: str
    summary: str = ""
    epilog: str = "EPILOG"
    example: str = ""
    below: str | None = None


@dataclass(frozen=True)
class Needs:
    """The modules that a command requires, and the extra that provides them."""

    modules: tuple[str, ...]
    extra: str

    @property
    def missing(self) -> tuple[str, ...]:
        """The modules that are not installed."""
        return tuple(name for name in self.modules if find_spec(name) is None)


class LazyGroup(CustodyGroup):
    """A group that builds its commands on demand; a subclass lists them and builds each one."""

    _listing = False

    def names(self) -> list[str]:
        """Return the commands' names in the order of the listing."""
        raise NotImplementedError

    def has(self, name: str) -> bool:
        """Return whether the group has a command of this name."""
        return name in self.names()

    def summary(self, name: str) -> str | None:
        """Return the first sentence of a command's help without building it, or None where that needs the command."""
        raise NotImplementedError

    def load(self, name: str) -> Any:
        """Return the command of this name."""
        raise NotImplementedError

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names."""
        return self.names()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of this name, or None; a listing gets only its summary (rule 1)."""
        if cmd_name not in self.commands:
            if not self.has(cmd_name):
                return None
            summary = self.summary(cmd_name) if self._listing else None
            if summary is not None:
                return typer.core.TyperCommand(cmd_name, help=summary)
            self.commands[cmd_name] = self.load(cmd_name)
        return self.commands[cmd_name]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the typed command; an unknown one is refused with the nearest name."""
        try:
            return super().resolve_command(ctx, args)
        except UsageError as error:
            close = get_close_matches(args[0], self.names()) if args else []
            if close and "Did you mean" not in error.message:
                error.message = f"{error.message.rstrip('.')}. Did you mean {', '.join(map(repr, close))}?"
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the group's help, which is a listing."""
        with self._list():
            super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Return the names that a shell completes, as a listing."""
        with self._list():
            return super().shell_complete(ctx, incomplete)

    @contextmanager
    def _list(self) -> Iterator[None]:
        self._listing = True
        try:
            yield
        finally:
            self._listing = False


class TableGroup(LazyGroup):
    """The commands of `table`, a subclass's own, in its order."""

    table: ClassVar[Mapping[str, Lazy]] = {}

    def names(self) -> list[str]:
        """Return the table's names."""
        return list(self.table)

    def summary(self, name: str) -> str | None:
        """Return the summary from the table, or from the module's text."""
        return self.table[name].summary or summary_of(*self.table[name].target.split(":"))

    def load(self, name: str) -> Any:
        """Return the command from the table."""
        return _loaded(name, self.table[name])


class ExtendedGroup(TableGroup):
    """The table's commands followed by those of other packages, which cannot take a name of the table.

    `elsewhere` names commands of a distribution of ours that may not be installed, and what installs it. `needs` says
    what commands cannot do without: a listing has those alone that run here, and can still be asked for any.
    """

    elsewhere: ClassVar[Mapping[str, str]] = {}
    needs: ClassVar[Mapping[str, Needs]] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands that run here."""
        return [name for name in self.names() if name not in self.absent()]

    def absent(self) -> dict[str, str]:
        """Return the commands that do not run here, each with the missing extra."""
        return {name: needs.extra for name, needs in self.needs.items() if needs.missing and name in self.names()}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command as any group does; one that is not installed says how to install it."""
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in self.elsewhere:
            made = typer.Typer(cls=CustodyGroup)
            add_absent(made, cmd_name, self.elsewhere[cmd_name])
            found = typer.main.get_group(made).commands[cmd_name]
        return found

    def names(self) -> list[str]:
        """Return our names in the table's order, then the others by name."""
        return [*self.table, *(name for name in self._others() if name not in self.table)]

    def has(self, name: str) -> bool:
        """Return whether there is such a command; other packages are searched only for names that are not ours."""
        return name in self.table or super().has(name)

    def summary(self, name: str) -> str | None:
        """Return the summary from the table, or from the other package's text."""
        if name in self.table:
            return super().summary(name)
        entry = self._others()[name]
        return summary_of(entry.module, entry.attr)

    def load(self, name: str) -> Any:
        """Return our command, or the one at the other package's entry point."""
        if name in self.table:
            return super().load(name)
        made = typer.Typer()
        add_command(made, self._others()[name], self.class_of_group(name))
        return typer.main.get_group(made).commands[name]

    def class_of_group(self, name: str) -> type[typer.core.TyperGroup] | None:
        """Return the class for another package's group; None: its own."""
        return None

    def _others(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in installed() if "." not in entry.name}


@cache
def _loaded(name: str, lazy: Lazy) -> Any:
    """Made once in a process: in tests, many command lines run in one."""
    module, _, attribute = lazy.target.partition(":")
    target = getattr(import_module(module), attribute)
    if lazy.below is not None:
        target = target(lazy.summary, lazy.below)
    group = typer.Typer()
    if isinstance(target, typer.Typer):
        group.add_typer(target, name=name)
    else:
        epilog = f"Example: `{lazy.example}`" if lazy.example else getattr(import_module(module), lazy.epilog)
        group.command(name=name, epilog=epilog)(target)
    return typer.main.get_group(group).commands[name]
