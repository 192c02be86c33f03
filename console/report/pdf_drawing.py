"""Charts in a PDF, and the colours of its words and series."""

from __future__ import annotations

from typing import Any

from kvcustody.console.report.charts import WIDTH, Figure
from kvcustody.console.report.pdf_text import plain

INK, SOFT, LINE, TINT, GOOD, BAD = "#1c2126", "#59626b", "#c9ced2", "#f3f4f2", "#176b4d", "#b3261e"
SERIES = {1: "#2a6f97", 2: "#e08e2b", 3: "#8a5a9e", 4: "#b5483a", 5: "#8c979f"}


def draw(figure: Figure, width: float) -> Any:
    """A figure as reportlab's drawing, `width` points wide."""
    from reportlab.graphics.shapes import Drawing, Line, Rect, String
    from reportlab.lib.colors import HexColor

    scale = width / WIDTH
    drawing = Drawing(width, figure.height * scale + 8)
    top = figure.height * scale + 4
    for x1, y1, x2, y2 in figure.lines:
        line = Line(x1 * scale, top - y1 * scale, x2 * scale, top - y2 * scale)
        line.strokeColor, line.strokeWidth = HexColor(LINE), 0.5
        drawing.add(line)
    for bar in figure.bars:
        low = top - (bar.y + bar.height) * scale
        rect = Rect(bar.x * scale, low, bar.width * scale, bar.height * scale)
        rect.fillColor, rect.strokeColor = HexColor(SERIES[bar.series]), None
        drawing.add(rect)
    for word in figure.texts:
        text = String(word.x * scale, top - word.y * scale, plain(word.text), textAnchor=word.anchor)
        text.fontName, text.fontSize, text.fillColor = "Helvetica", 6.6, HexColor(SOFT)
        drawing.add(text)
    return drawing
