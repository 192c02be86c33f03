"""Charts as SVG made by the server: no scripts, and colours from the page's CSS variables for light, dark and print.

1. Every value drawn is also in the report's tables or JSON; a chart adds a title and a description for readers that
   cannot see it.
2. A chart of nothing says "no data" instead of drawing an empty frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

WIDTH = 960
_LABEL = 140
_RIGHT = 70
_ROW = 26

environment = Environment(
    loader=PackageLoader("kvcustody.lab.replay", "."),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


class Series(NamedTuple):
    """One colour of a chart: a name for the legend, and a CSS class (`s1` to `s5`)."""

    name: str
    css: str


class StackedBar(NamedTuple):
    """A row of `stacked_bars`: its name, one value a series, and a note at the bar's end."""

    label: str
    values: Sequence[float]
    note: str


class _Rect(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    css: str
    title: str


class _Text(NamedTuple):
    x: float
    y: float
    text: str
    css: str


class _Line(NamedTuple):
    x1: float
    y1: float
    x2: float
    y2: float


class _Path(NamedTuple):
    d: str
    css: str
    title: str


def stacked_bars(title: str, rows: Sequence[StackedBar], series: Sequence[Series]) -> Markup:
    """Return one horizontal bar per row, its parts side by side."""
    largest = max((sum(row.values) for row in rows), default=0)
    if largest <= 0:
        return _empty(title)
    scale = (WIDTH - _LABEL - _RIGHT) / largest
    rects: list[_Rect] = []
    texts: list[_Text] = []
    for index, row in enumerate(rows):
        x, y = float(_LABEL), index * _ROW + 4
        texts.append(_Text(_LABEL - 8, y + 14, row.label, "end"))
        for part, value in zip(series, row.values, strict=True):
            if value > 0:
                width = max(value * scale - 1, 0.5)
                hint = f"{row.label}, {part.name}: {value:,.0f}"
                rects.append(_Rect(x, y, width, _ROW - 8, part.css, hint))
                x += value * scale
        texts.append(_Text(x + 6, y + 14, row.note, "note"))
    return _render(title, len(rows) * _ROW + 8, series, rects=rects, texts=texts)


def histogram(title: str, counts: Sequence[int], edges: Sequence[str], unit: str) -> Markup:
    """Return vertical bars over labelled bins (`edges` has one label a bin)."""
    largest = max(counts, default=0)
    if largest <= 0:
        return _empty(title)
    height, base = 180, 150
    step = (WIDTH - 60) / len(counts)
    rects: list[_Rect] = []
    texts = [_Text(50, 12, f"{largest:,}", "end"), _Text(50, base, "0", "end")]
    texts.append(_Text(WIDTH, height - 2, unit, "end"))
    for index, count in enumerate(counts):
        x = 56 + index * step
        bar = count / largest * (base - 8)
        if count:
            rects.append(_Rect(x + 1, base - bar, step - 2, bar, "s1", f"{edges[index]}: {count:,}"))
        texts.append(_Text(x + step / 2, base + 15, edges[index], "middle"))
    return _render(title, height, (), rects=rects, texts=texts, lines=[_Line(56, base, WIDTH, base)])


def stacked_areas(
    title: str, times: Sequence[float], series: Sequence[Series], values: Sequence[Sequence[float]], unit: str
) -> Markup:
    """Return stacked areas over time in seconds; `values[i][j]` is series i at times[j]."""
    if len(times) < 2 or not any(any(row) for row in values):
        return _empty(title)
    height, base, left = 240, 205, 56.0
    top = max(sum(column) for column in zip(*values, strict=True))
    span = (times[-1] - times[0]) or 1.0
    xs = [left + (t - times[0]) / span * (WIDTH - left - 8) for t in times]
    floor = [0.0] * len(times)
    paths: list[_Path] = []
    for part, row in zip(series, values, strict=True):
        roof = [low + value for low, value in zip(floor, row, strict=True)]
        ys, zs = ([base - v / top * (base - 12) for v in edge] for edge in (roof, floor))
        there = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        back = " ".join(f"{x:.1f},{z:.1f}" for x, z in zip(reversed(xs), reversed(zs), strict=True))
        paths.append(_Path(f"M{there} L{back} Z", part.css, part.name))
        floor = roof
    texts: list[_Text] = []
    lines: list[_Line] = []
    for share in (0, 0.5, 1):
        y = base - share * (base - 12)
        texts.append(_Text(left - 6, y + 4, f"{top * share:,.0f}", "end"))
        lines.append(_Line(left, y, WIDTH - 8, y))
    for share, align in ((0, "start"), (0.25, "middle"), (0.5, "middle"), (0.75, "middle"), (1, "end")):
        x = xs[0] + share * (xs[-1] - xs[0])
        texts.append(_Text(x, base + 15, clock_text(times[0] + share * span), align))
    texts.append(_Text(WIDTH - 8, height - 2, unit, "end"))
    return _render(title, height, series, paths=paths, texts=texts, lines=lines)


def clock_text(seconds: float) -> str:
    """Return seconds as h:mm:ss, for axes."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _empty(title: str) -> Markup:
    return _render(title, 40, (), texts=[_Text(WIDTH / 2, 24, "no data", "middle")])


def _render(
    title: str,
    height: float,
    series: Sequence[Series],
    *,
    rects: Sequence[_Rect] = (),
    paths: Sequence[_Path] = (),
    texts: Sequence[_Text] = (),
    lines: Sequence[_Line] = (),
) -> Markup:
    text = environment.get_template("chart.svg").render(
        title=title,
        width=WIDTH,
        height=height,
        series=series,
        rects=rects,
        paths=paths,
        texts=texts,
        lines=lines,
    )
    return Markup(text)  # noqa: S704 - rendered with autoescape above
