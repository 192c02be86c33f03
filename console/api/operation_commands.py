"""Every operation's command, as the build wrote it from the API document, because reading the document takes a
second.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import orjson

from kvcustody.console.api.command_parts import FILE, Command, Part


@cache
def read_commands() -> tuple[Command, ...]:
    """Return the commands from the file of this build; a checkout may lack it."""
    try:
        written = (Path(__file__).parent / FILE).read_bytes()
    except FileNotFoundError:
        from kvcustody.console.api.generate_commands import generated

        written = generated()
    rows = orjson.loads(written)
    return tuple(Command(**{**row, "parts": tuple(Part(**part) for part in row["parts"])}) for row in rows)


@cache
def _by_operation() -> dict[str, Command]:
    return {command.operation: command for command in read_commands()}


def by_operation(name: str) -> Command:
    """Return an operation's command."""
    return _by_operation()[name]


def commands_of(group: str) -> dict[str, Command]:
    """Return one group's commands by their last word, in alphabetical order."""
    words = [(*command.name.rpartition(" ")[::2], command) for command in read_commands()]
    return dict(
        sorted((name, command) for place, name, command in words if place == group or place.endswith(f" {group}"))
    )
