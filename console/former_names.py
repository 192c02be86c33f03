"""Former names of commands and options, with the names that replace them.

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
    """A command's former and present names, without `kvcustody`."""

    old: str
    new: str


class FormerOption(NamedTuple):
    """An option's former and present names; `command` is its command's present name. Former arguments have no
    dashes.
    """

    command: str
    old: str
    new: str


class FormerNames(NamedTuple):
    """All former names."""

    commands: tuple[FormerCommand, ...]
    options: tuple[FormerOption, ...]

    def command_hint(self, typed: Sequence[str]) -> str | None:
        """Return the hint for words that begin with a former command's name, or None."""
        for old, new in self.commands:
            words = old.split()
            if list(typed[: len(words)]) == words:
                return f"`kvcustody {old}` is `kvcustody {new}` now"
        return None

    def argument_hint(self, command: str, missing: Sequence[str]) -> str | None:
        """Return the hint for words that a command once took as an argument and now takes as an option.

        `missing`: the names of the option that was left out, where that is what does not fit.
        """
        for row in self.options:
            fits = not missing or row.new in missing
            if row.command == command and fits and not row.old.startswith("-"):
                return f"`{row.old}` of `kvcustody {command}` is `{row.new} {row.old}` now"
        return None

    def option_hint(self, command: str, option: str) -> str | None:
        """Return the hint for a command's former option, or None."""
        for row in self.options:
            if (row.command, row.old) == (command, option):
                return f"`{option}` of `kvcustody {command}` is `{row.new}` now"
        return None


def _of_operations() -> Iterator[FormerCommand]:
    """Yield the former names of operations, which were commands of a group `api`: `listEvents` was `list-events`."""
    for command in read_commands():
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", command.operation).lower()
        yield FormerCommand(f"api {words}", command.name)


@cache
def former_names() -> FormerNames:
    """Return the former names in the file."""
    read = orjson.loads(files("kvcustody.console").joinpath(FILE).read_bytes())
    return FormerNames(
        (*(FormerCommand(**one) for one in read["commands"]), *_of_operations()),
        tuple(FormerOption(**one) for one in read["options"]),
    )
