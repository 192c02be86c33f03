"""Tables of commands: texts are shown verbatim, whoever wrote them, and no word is cut.

1. A table that fits is printed as it is. In a narrower terminal its cells are wrapped between words.
2. Where not even the longest words and the short cells fit beside each other, the columns are printed in parts, one
   below the other. Each part begins with the first column, so that a row can be followed.
3. A word that is wider than the terminal goes on in the next line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from kvcustody.console.terminal.lines import printable

_GAP = 2  # spaces between columns
_SHORT = 20  # characters of a cell that stays in one line: a time, a number with its unit


class PlainTable(Table):
    """A table that shows its texts verbatim (rule 4 of `command`); highlighted cells are `Text`."""

    def __init__(self, title: str) -> None:
        super().__init__(box=None, header_style="dim", padding=(0, _GAP, 0, 0))
        self.heading = Text(printable(title), "bold") if title else None

    def add_row(self, *cells: Any, **how: Any) -> None:
        """Add a row of texts."""
        super().add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in cells), **how)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Print the table whole, wrapped, or in parts (rules 1 to 3)."""
        needs = [_needed(console, options, column) for column in self.columns]
        if self.heading is not None:  # not the table's own title, which would be wrapped to the table's width
            yield self.heading
        if sum(need.maximum + _GAP for need in needs) <= options.max_width or any(
            column.no_wrap or column.width for column in self.columns
        ):
            yield from super().__rich_console__(console, options)
            return
        for places in _parts([need.minimum for need in needs], options.max_width):
            part = Table(box=None, header_style="dim", padding=(0, _GAP, 0, 0))
            widths = _widths([needs[place] for place in places], options.max_width)
            for place, width in zip(places, widths, strict=True):
                column = self.columns[place]
                part.add_column(column.header, justify=column.justify, width=width, overflow="fold")
            cells = zip(*(self.columns[place].cells for place in places), strict=True)
            for row in cells:
                part.add_row(*row)
            yield part


def _needed(console: Console, options: ConsoleOptions, column: Column) -> Measurement:
    """Return the width of a column's longest word or short cell, and of its longest cell."""
    header = Measurement.get(console, options, column.header)
    cells = [Measurement.get(console, options, cell) for cell in column.cells]
    words = (cell.maximum if cell.maximum <= _SHORT else cell.minimum for cell in cells)
    return Measurement(max(header.minimum, *words, 0), max(header.maximum, *(cell.maximum for cell in cells), 0))


def _parts(minimums: Sequence[int], width: int) -> list[list[int]]:
    """Return the places of the columns of each part; all but the first begin with the first column again."""
    parts = [[0]]
    for place in range(1, len(minimums)):
        if sum(minimums[other] + _GAP for other in (*parts[-1], place)) > width and len(parts[-1]) > 1:
            parts.append([0])
        parts[-1].append(place)
    return parts


def _widths(needs: Sequence[Measurement], width: int) -> list[int]:
    """Return widths that fit together: each column has its longest word, and the rest goes to the narrowest first."""
    room = width - _GAP * len(needs)
    given = [need.minimum for need in needs]
    while sum(given) > room:  # one word is wider than the terminal
        widest = max(range(len(given)), key=given.__getitem__)
        given[widest] -= min(sum(given) - room, max(1, given[widest] // 2))
    left = room - sum(given)
    while left > 0:
        short = [place for place, need in enumerate(needs) if given[place] < need.maximum]
        if not short:
            break
        given[min(short, key=given.__getitem__)] += 1
        left -= 1
    return given
