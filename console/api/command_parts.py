"""The parts of a command that calls an operation."""

from __future__ import annotations

from typing import Any, NamedTuple

FILE = "commands.json"  # every command; made by the build and by `make setup`, not committed


class Part(NamedTuple):
    """One parameter: its name in the document and in the command, its location, and its schema."""

    name: str
    here: str
    place: str  # path, query, header, body
    schema: dict[str, Any]
    required: bool
    says: str

    @property
    def is_argument(self) -> bool:
        """Whether the command takes it as an argument instead of an option."""
        return self.place == "path" or (self.place == "query" and self.required)


class Command(NamedTuple):
    """One operation as a command."""

    name: str
    operation: str
    method: str
    path: str
    says: str
    keyed: bool
    paged: bool
    job: bool
    raw: str  # the media type of a body that is not JSON
    reads: bool  # it only asks a ledger: no service need be open
    parts: tuple[Part, ...]
