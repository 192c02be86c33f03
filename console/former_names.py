"""The names that commands and options had before: whoever types one is told the name of now.

1. `former_names.json` has every old name beside the new one; those of operations follow from the operations' names.
   An old name does nothing: it is answered, with exit 2.
2. An old name is no name of now: a command of that name, or that option of the command, does not exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import orjson

from kvcustody.console.api.operation_commands import read_commands

FILE = "former_names.json"


class FormerCommand(NamedTuple):
    """A command's old and new name, without `kvcustody`."""

    old: str
    new: str


class FormerOption(NamedTuple):
    """An option's old and new name; `command` is the command's name of now. An argument's old name has no dashes."""

    command: str
    old: str
    new: str


class FormerNames(NamedTuple):
    """Every name that is no name any more."""

    commands: tuple[FormerCommand, ...]
    options: tuple[FormerOption, ...]

    def command_hint(self, typed: Sequence[str]) -> str | None:
        """What somebody is told who typed these words after `kvcustody`; None where no old command begins them."""
        for old, new in self.commands:
            words = old.split()
            if list(typed[: len(words)]) == words:
                return f"`kvcustody {old}` is `kvcustody {new}` now"
        return None

    def argument_hint(self, command: str, missing: Sequence[str]) -> str | None:
        """What somebody is told whose words do not fit a command that took an argument, now an option.

        `missing`: the names of the option that was left out, where that is what does not fit.
        """
        for row in self.options:
            fits = not missing or row.new in missing
            if row.command == command and fits and not row.old.startswith("-"):
                return f"`{row.old}` of `kvcustody {command}` is `{row.new} {row.old}` now"
        return None

    def option_hint(self, command: str, option: str) -> str | None:
        """What somebody is told who gave a command this option; None where it never had one of that name."""
        for row in self.options:
            if (row.command, row.old) == (command, option):
                return f"`{option}` of `kvcustody {command}` is `{row.new}` now"
        return None


def _of_operations() -> Iterator[FormerCommand]:
    """Operations had commands of their own names, in the group `api`: that of `listEvents` was `list-events`."""
    for command in read_commands():
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", command.operation).lower()
        yield FormerCommand(f"api {words}", command.name)


@cache
def former_names() -> FormerNames:
    """What the file has."""
    read = orjson.loads(files("kvcustody.console").joinpath(FILE).read_bytes())
    return FormerNames(
        (*(FormerCommand(**one) for one in read["commands"]), *_of_operations()),
        tuple(FormerOption(**one) for one in read["options"]),
    )
