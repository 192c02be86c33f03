"""Prints the findings of orphan scans as a table."""

from __future__ import annotations

from typing import Any

from kvcustody.console.command import make_table, print_more, say, stdout

_COLUMNS = ("orphan", "tenant", "cause", "action", "outcome", "blocks")


def print_findings(answer: dict[str, Any]) -> None:
    """Print every scan finding, and its outcome."""
    if not answer["items"]:
        say("nothing found")
        return
    table = make_table("", *_COLUMNS, left=len(_COLUMNS))
    for row in answer["items"]:
        table.add_row(*(str(row[name] if row[name] is not None else "") for name in _COLUMNS))
    stdout().print(table)
    print_more(answer)
