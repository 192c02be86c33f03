"""Heads that a log must have had on the way: those that the root log sealed, and those that the reader kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcustody.audit.tlog.merkle import Frontier, TreeHead
from kvcustody.audit.tlog.tiles import ExportError


class KeptHead(NamedTuple):
    """A head of a sub-log that the reader kept from earlier."""

    log: str
    head: TreeHead


class DueHeads:
    """Heads of one log that its leaves must give on the way: those of the root log, and those that were kept."""

    def __init__(
        self, name: str, heads: dict[str, dict[int, bytes]] | None, kept: Sequence[KeptHead]
    ) -> None:
        self._name = name
        due = [TreeHead(*head) for head in (heads or {}).get(name, {}).items()]
        due += [item.head for item in kept if item.log == name]
        self._due = sorted(due, reverse=True)
        self._past = 0

    def check(self, frontier: Frontier, hashes: Sequence[bytes]) -> None:
        """Raise `ExportError` where a head within these leaves is not what they give."""
        end = frontier.size + len(hashes)
        while self._due and self._due[-1][0] <= end:
            size, root = self._due.pop()
            if size < frontier.size:
                self._past += 1
                continue
            frontier, hashes = (
                frontier.extend(hashes[: size - frontier.size]).frontier,
                hashes[size - frontier.size :],
            )
            if frontier.root() != root:
                raise ExportError(f"`{self._name}` had another history at `{size}` leaves")

    def unchecked(self, first: int, size: int) -> int:
        """How many heads could not be compared; raises `ExportError` for one beyond the log's end: it was cut."""
        beyond = [due for due in self._due if due[0] > size]
        if beyond:
            raise ExportError(f"`{self._name}` was cut: it had `{beyond[0][0]}` leaves, and has {size}")
        return self._past + len(self._due)
