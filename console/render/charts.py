"""Charts of documents as geometry: bars, lines and words with positions, drawn alike by a report's HTML and its PDF.

The console's pages draw theirs with uPlot (`time_chart`); a report runs no script.

1. Every value drawn is also in a table or in the JSON.
2. A chart of nothing says so.
3. Colours are numbered series (1 to 5); the page and the PDF give them colours that also differ in grey.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcustody.console.render.number_format import minute, second
from kvcustody.times import DAY_US, MINUTE_US

WIDTH = 960.0
_LEFT, _RIGHT = 150.0, 230.0
_ROW = 24.0
_LETTER = 8.0  # width of a letter, rather more than it takes


class ChartRectangle(NamedTuple):
    """A filled rectangle; the origin is the top left corner. `hint` is its value as text."""

    x: float
    y: float
    width: float
    height: float
    series: int
    hint: str


class Word(NamedTuple):
    """A text at a baseline; `anchor` is start, middle or end."""

    x: float
    y: float
    text: str
    anchor: str = "start"


class Figure(NamedTuple):
    """A chart; lines are (x1, y1, x2, y2), the legend is (name, series)."""

    title: str
    height: float
    bars: tuple[ChartRectangle, ...]
    texts: tuple[Word, ...]
    lines: tuple[tuple[float, float, float, float], ...]
    legend: tuple[tuple[str, int], ...]


def columns(
    title: str,
    labels: Sequence[str],
    values: Sequence[Sequence[int]],
    legend: Sequence[tuple[str, int]],
    unit: str,
    counted: str,
) -> Figure:
    """Return stacked columns: `values[i]` are the parts of column i, one a legend entry.

    `unit` is that of the labels, `counted` what the height of a column counts.
    """
    largest = max((sum(parts) for parts in values), default=0)
    if largest <= 0:
        return _empty(title)
    base, top = 170.0, f"{largest:,} {counted}"
    left = max(90.0, 8 + len(top) * _LETTER)
    step = (WIDTH - left) / len(values)
    bars: list[ChartRectangle] = []
    texts = [Word(left - 8, 16, top, "end"), Word(left - 8, base, "0", "end")]
    every = max(1, -(-len(values) // 11))
    for place, parts in enumerate(values):
        x, y = left + place * step, base
        for value, (name, series) in zip(parts, legend, strict=True):
            if value:
                height = max(value / largest * (base - 12), 1.0)
                y -= height
                gap = min(2.0, step / 6)
                bars.append(
                    ChartRectangle(x + gap, y, step - 2 * gap, height, series, f"{labels[place]}, {name}: {value:,}")
                )
        if place % every == 0:
            texts.append(_label(x + step / 2, base + 16, labels[place]))
    texts.append(Word(WIDTH, base + 36, unit, "end"))
    axis = ((left, base, WIDTH, base), (left, 12.0, WIDTH, 12.0))
    return Figure(title, base + 42, tuple(bars), tuple(texts), axis, tuple(legend))


def _label(x: float, y: float, text: str) -> Word:
    """Return a word below its column, or as close as the right edge permits."""
    if x + len(text) * _LETTER / 2 > WIDTH:
        return Word(WIDTH, y, text, "end")
    return Word(x, y, text, "middle")


def rows(
    title: str,
    names: Sequence[str],
    values: Sequence[Sequence[int]],
    legend: Sequence[tuple[str, int]],
    notes: Sequence[str],
) -> Figure:
    """Return stacked horizontal bars, one a name, with a note at the end of each."""
    largest = max((sum(parts) for parts in values), default=0)
    if largest <= 0:
        return _empty(title)
    scale = (WIDTH - _LEFT - _RIGHT) / largest
    bars: list[ChartRectangle] = []
    texts: list[Word] = []
    for place, (name, parts, note) in enumerate(zip(names, values, notes, strict=True)):
        x, y = _LEFT, place * _ROW + 4
        texts.append(Word(_LEFT - 8, y + 13, name if len(name) <= 22 else f"{name[:21]}…", "end"))
        for value, (label, series) in zip(parts, legend, strict=True):
            if value:
                width = max(value * scale, 1.0)
                bars.append(ChartRectangle(x, y, width, _ROW - 8, series, f"{name}, {label}: {value:,}"))
                x += width
        texts.append(Word(x + 6, y + 13, note))
    return Figure(title, len(values) * _ROW + 8, tuple(bars), tuple(texts), (), tuple(legend))


def period_labels(starts_us: Sequence[int], period_us: int) -> list[str]:
    """Return the label of each part of a period: a day, a minute, or a second where parts are shorter than a minute."""
    if period_us > 2 * DAY_US:
        return [minute(start)[:10] for start in starts_us]
    step_us = starts_us[1] - starts_us[0] if len(starts_us) > 1 else period_us
    return [second(start)[11:19] if step_us < MINUTE_US else minute(start)[11:16] for start in starts_us]


def without_values(title: str, why: str) -> Figure:
    """Return a figure that states why it is empty."""
    return Figure(title, 40, (), (Word(WIDTH / 2, 24, why, "middle"),), (), ())


def _empty(title: str) -> Figure:
    return without_values(title, "nothing in this period")
