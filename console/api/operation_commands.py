"""The command of every operation, as the build writes it from the API document: reading the document costs a second."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import orjson

from kvcustody.console.api.command_parts import FILE, Command, Part


@cache
def read_commands() -> tuple[Command, ...]:
    """The commands, from the file that this version was built with; a checkout may lack it."""
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
    """The command of an operation."""
    return _by_operation()[name]


def commands_of(group: str) -> dict[str, Command]:
    """Those of one group, by their last word, in the order of the alphabet."""
    words = [(*command.name.rpartition(" ")[::2], command) for command in read_commands()]
    return dict(
        sorted((name, command) for place, name, command in words if place == group or place.endswith(f" {group}"))
    )
