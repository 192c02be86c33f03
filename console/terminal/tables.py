"""Tables of commands: texts are shown verbatim, whoever wrote them."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from kvcustody.console.terminal.lines import printable


class PlainTable(Table):
    """A table that shows its texts verbatim (rule 4 of `command`); highlighted cells are `Text`."""

    def __init__(self, title: str) -> None:
        super().__init__(
            title=Text(printable(title)) if title else None,
            title_justify="left",
            title_style="bold",
            box=None,
            header_style="dim",
            padding=(0, 2, 0, 0),
        )

    def add_row(self, *cells: Any, **how: Any) -> None:
        """Add a row of texts."""
        super().add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in cells), **how)
