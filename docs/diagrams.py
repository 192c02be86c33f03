"""The diagrams of the documentation, as SVG files in docs/images/diagrams; nothing is fetched from elsewhere.

    python docs/diagrams.py            # writes every diagram
    python docs/diagrams.py --check    # names those that are stale; exit status 1

A box stands in a cell of a grid. An arrow goes from box to box, with a label in its middle.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from html import escape
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent / "images" / "diagrams"
WIDTH, HEIGHT, ACROSS, DOWN, MARGIN = 150, 52, 92, 50, 16
STYLE = """
  text { font: 13px system-ui, sans-serif; text-anchor: middle; fill: #222 }
  .label { font-size: 11px; fill: #555; stroke: #fff; stroke-width: 4px; paint-order: stroke }
  rect { fill: #eef2fb; stroke: #4a5fa8; rx: 6 }
  .end { fill: #fbeeee; stroke: #a84a4a }
  .kept { fill: #eefbf1; stroke: #3f8a55 }
  path { fill: none; stroke: #555; stroke-width: 1.4; marker-end: url(#head) }
  .back { stroke-dasharray: 5 4 }
  @media (prefers-color-scheme: dark) {
    text { fill: #eee } .label { fill: #bbb; stroke: #1e2129 } path { stroke: #bbb } #head polygon { fill: #bbb }
    rect { fill: #26304f } .end { fill: #4f2626 } .kept { fill: #224a2e }
  }
"""


class Box(NamedTuple):
    """A name in a cell; `kind` is its colour: empty, `end` or `kept`. A `|` breaks its text."""

    column: float
    row: float
    text: str
    kind: str = ""


class Arrow(NamedTuple):
    """From one box to another; `dashed` for what happens later or in the background."""

    start: str
    end: str
    label: str = ""
    dashed: bool = False


class Diagram(NamedTuple):
    """What it shows, as a sentence for people who do not see it, and its parts."""

    shows: str
    boxes: dict[str, Box]
    arrows: tuple[Arrow, ...]


DIAGRAMS = {
    "request-path": Diagram(
        "A request goes through the door, the router and the engine, where policy decides before blocks are reused.",
        {
            "client": Box(0, 0, "client"),
            "door": Box(1, 0, "door|who is asking?"),
            "router": Box(2, 0, "your router|which worker?"),
            "admit": Box(3, 0, "worker: admission|identity, quota"),
            "decide": Box(3, 1, "policy|may it reuse?"),
            "lookup": Box(2, 1, "look-up|tenant's own keys"),
            "compute": Box(1, 1, "engine computes|the rest"),
            "publish": Box(0, 1, "blocks published|under a deadline"),
            "ledger": Box(2, 2, "signed ledger|decision, blocks, end", "kept"),
        },
        (
            Arrow("client", "door", "API key"),
            Arrow("door", "router", "token"),
            Arrow("router", "admit"),
            Arrow("admit", "decide"),
            Arrow("decide", "lookup", "scopes"),
            Arrow("lookup", "compute", "prefix"),
            Arrow("compute", "publish"),
            Arrow("lookup", "ledger", "on record", dashed=True),
        ),
    ),
    "block-lifecycle": Diagram(
        "A block is clean, active, cached, fenced, dirty and clean again; a block that fails is quarantined.",
        {
            "CLEAN": Box(0, 0, "CLEAN|every byte zero", "kept"),
            "ACTIVE": Box(1, 0, "ACTIVE|a request uses it"),
            "CACHED": Box(2, 0, "CACHED|held until its|deadline"),
            "FENCED": Box(2, 1, "FENCED|device work may|touch it", "end"),
            "DIRTY": Box(0, 1, "DIRTY|waits for its scrub", "end"),
            "QUARANTINED": Box(1, 2, "QUARANTINED|never handed out", "end"),
        },
        (
            Arrow("CLEAN", "ACTIVE", "hand-out"),
            Arrow("ACTIVE", "CACHED", "released"),
            Arrow("CACHED", "ACTIVE", "attached"),
            Arrow("ACTIVE", "FENCED", "ended"),
            Arrow("CACHED", "FENCED", "ended"),
            Arrow("FENCED", "DIRTY", "fences retired"),
            Arrow("FENCED", "QUARANTINED", "fence stuck"),
            Arrow("DIRTY", "CLEAN", "zeroed, verified"),
            Arrow("DIRTY", "QUARANTINED", "not zero"),
            Arrow("QUARANTINED", "DIRTY", "late fence retired"),
        ),
    ),
    "ledger": Diagram(
        "Events of workers become leaves of tenant logs; the root log commits to them, is signed and witnessed.",
        {
            "event": Box(0, 0, "event|on the hot path"),
            "leaf": Box(1, 0, "leaf|canonical bytes"),
            "spill": Box(0, 1, "spill|database away"),
            "log": Box(2, 0, "tenant's log|Merkle tree"),
            "rows": Box(1, 1, "rows|for queries"),
            "root": Box(3, 0, "root log|one head a log"),
            "signed": Box(3, 1, "checkpoint|signed", "kept"),
            "witness": Box(2, 1, "witness|cosigns growth", "kept"),
        },
        (
            Arrow("event", "leaf", "writer"),
            Arrow("event", "spill", "", dashed=True),
            Arrow("leaf", "log", "commit"),
            Arrow("leaf", "rows", "projection"),
            Arrow("log", "root", "seal"),
            Arrow("root", "signed", "every second"),
            Arrow("signed", "witness", "", dashed=True),
        ),
    ),
    "fleet": Diagram(
        "Doors authenticate and sign tokens, routers place by namespace, workers verify and share one control plane.",
        {
            "clients": Box(0, 0.5, "clients"),
            "door a": Box(1, 0, "door"),
            "door b": Box(1, 1, "door"),
            "router": Box(2, 0.5, "router|sees namespaces"),
            "worker a": Box(3, 0, "worker|verifies the token"),
            "worker b": Box(3, 1, "worker|verifies the token"),
            "plane": Box(2, 2, "control plane|ledger, epochs, orders", "kept"),
        },
        (
            Arrow("clients", "door a"),
            Arrow("clients", "door b"),
            Arrow("door a", "router"),
            Arrow("door b", "router"),
            Arrow("router", "worker a", "token"),
            Arrow("router", "worker b", "token"),
            Arrow("worker b", "plane", "leaves", dashed=True),
            Arrow("door b", "plane", "leaves", dashed=True),
        ),
    ),
}


def drawn(diagram: Diagram) -> str:
    """The SVG of a diagram; equal input gives equal bytes."""
    columns = max(box.column for box in diagram.boxes.values()) + 1
    rows = max(box.row for box in diagram.boxes.values()) + 1
    width, height = columns * (WIDTH + ACROSS) - ACROSS + 2 * MARGIN, rows * (HEIGHT + DOWN) - DOWN + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">',
        f"<title>{escape(diagram.shows)}</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<polygon points="0,0 8,4 0,8" fill="#555"/></marker></defs>',
    ]
    ways = {(arrow.start, arrow.end) for arrow in diagram.arrows}
    drawn_arrows = [_line(diagram.boxes, arrow, both=(arrow.end, arrow.start) in ways) for arrow in diagram.arrows]
    parts += [line for line, _ in drawn_arrows] + [label for _, label in drawn_arrows if label]
    parts += [_box(box) for box in diagram.boxes.values()]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _corner(box: Box) -> tuple[float, float]:
    return MARGIN + box.column * (WIDTH + ACROSS), MARGIN + box.row * (HEIGHT + DOWN)


def _box(box: Box) -> str:
    x, y = _corner(box)
    lines = box.text.split("|")
    top = y + HEIGHT / 2 + 4.5 - (len(lines) - 1) * 7.5
    texts = "".join(
        f'<text x="{x + WIDTH / 2:g}" y="{top + 15 * n:g}">{escape(line)}</text>' for n, line in enumerate(lines)
    )
    return f'<rect class="{box.kind}" x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}"/>{texts}'


def _line(boxes: dict[str, Box], arrow: Arrow, *, both: bool) -> tuple[str, str]:
    """The line and its label, from the side that faces the other box; `both`: beside the arrow that comes back."""
    start, end = boxes[arrow.start], boxes[arrow.end]
    (x1, y1), (x2, y2) = _corner(start), _corner(end)
    across, down = end.column - start.column, end.row - start.row
    if across:
        x1, x2 = x1 + WIDTH * (across > 0), x2 + WIDTH * (across < 0)
        y1, y2 = y1 + HEIGHT / 2, y2 + HEIGHT / 2
    else:
        x1, x2 = x1 + WIDTH / 2, x2 + WIDTH / 2
        y1, y2 = y1 + HEIGHT * (down > 0), y2 + HEIGHT * (down < 0)
    if both and across:
        y1, y2 = (y1 - 14, y2 - 14) if across > 0 else (y1 + 14, y2 + 14)
    elif both:
        x1, x2 = (x1 - 14, x2 - 14) if down > 0 else (x1 + 14, x2 + 14)
    kind = ' class="back"' if arrow.dashed else ""
    line = f'<path{kind} d="M{x1:g},{y1:g} L{x2:g},{y2:g}"/>'
    if not arrow.label:
        return line, ""
    beside = 10 + 3 * len(arrow.label)
    aside = 0 if across else -beside if both and down > 0 else beside
    text = f'<text class="label" x="{(x1 + x2) / 2 + aside:g}" y="{(y1 + y2) / 2 - 4:g}">{escape(arrow.label)}</text>'
    return line, text


def write(folder: Path = FOLDER, *, check: bool = False) -> list[Path]:
    """Write all diagrams, or only `check` them; returns those that were stale."""
    stale = []
    for name, diagram in DIAGRAMS.items():
        path, text = folder / f"{name}.svg", drawn(diagram)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path)
            if not check:
                folder.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    return stale


def main() -> int:
    """Write or check the diagrams."""
    parser = ArgumentParser(description="Draw the diagrams of docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 and name what is stale")
    options = parser.parse_args()
    stale = write(check=options.check)
    for path in stale:
        print(f"{path}: {'stale; draw it with `python docs/diagrams.py`' if options.check else 'written'}")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
