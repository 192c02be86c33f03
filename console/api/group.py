"""Groups with a command for each operation of their name; only the requested command is built.

1. An operation says what its command is called (`Operation.command`).
2. A command that is written for a group is that of the operation of its name. The others are made.
"""

from __future__ import annotations

from typing import Any

import typer
import typer.main

from kvcustody.console.api.command_parts import Command
from kvcustody.console.api.operation_commands import commands_of
from kvcustody.console.api.presenters import PRESENTERS
from kvcustody.console.lazy import TableGroup


class OperationGroup(TableGroup):
    """The commands written for the group, followed by one command for each other operation (rule 2)."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._written = [*self.table, *self.commands]

    def names(self) -> list[str]:
        """Return the names; operations follow in alphabetical order."""
        made = commands_of(self.name or "")
        return [*self._written, *(name for name in made if name not in self._written)]

    def summary(self, name: str) -> str | None:
        """Return the summary from the table, or the operation's."""
        return super().summary(name) if name in self.table else commands_of(self.name or "")[name].says

    def load(self, name: str) -> Any:
        """Return the command from the table, or the operation's command."""
        if name in self.table:
            return super().load(name)
        from kvcustody.console.api.api_commands import function_of

        command = commands_of(self.name or "")[name]
        made = typer.Typer()
        made.command(name=name, epilog=_examples(command))(function_of(command))
        made.callback()(lambda: None)
        return typer.main.get_group(made).commands[name]


def _examples(command: Command) -> str:
    """Return examples: the presenter's, or else one made from the arguments."""
    presenter = PRESENTERS.get(command.operation)
    if presenter is None:
        arguments = " ".join(part.name.upper() for part in command.parts if part.is_argument)
        return f"Example: `kvcustody {command.name} {arguments}".rstrip() + " --json`"
    if len(presenter.examples) == 1:
        return f"Example: `kvcustody {presenter.examples[0]}`"
    return "Examples:" + "".join(f"\n\n    kvcustody {example}" for example in presenter.examples)


def group_of_operations(summary: str, below: str) -> typer.Typer:
    """Return a group whose commands are all operations; `below` ends its help."""
    made = typer.Typer(cls=OperationGroup, no_args_is_help=True, help=summary, epilog=below or None)
    made.callback()(lambda: None)
    return made
