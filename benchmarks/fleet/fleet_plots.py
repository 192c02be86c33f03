"""Plots of what a fleet finds by router: hit tokens, the first token, imbalance, isolation and erasures, as SVG.

    python benchmarks/fleet/fleet_plots.py            # writes docs/images/fleet-*.svg from the kept results

Results are `benchmarks/results/fleet-ROUTER.json`, which `isolation_cost.py --router ROUTER` keeps. A plot is readable
on light and on dark ground; each value is in the table of `docs/reference/measurements/fleet.md`, too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ROUTERS: Final = ("model", "smg", "dynamo")
COLOURS: Final = {"model": "#8a8a8a", "smg": "#2f7ed8", "dynamo": "#d9822b"}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 720, 300, 64, 44, 44
STYLE: Final = "text{fill:#222}.grid{stroke:#bbb}@media (prefers-color-scheme:dark){text{fill:#ddd}.grid{stroke:#555}}"


class Plot(NamedTuple):
    """`part`: the rows of the study that it shows; `figure`: of a row; `form`: of a value, in words."""

    file: str
    title: str
    part: str
    figure: str
    form: str
    scale: float = 1.0

    def text(self, value: float) -> str:
        """A value in words."""
        return self.form.format(value)


PLOTS: Final = (
    Plot("fleet-isolation", "Prompt tokens found, by tenants", "isolation", "found_share", "{:.1%}"),
    Plot("fleet-oracle", "Found, of what the oracle finds, by workers", "workers", "to_oracle", "{:.3f}"),
    Plot("fleet-first-token", "First token, median, s, by workers", "workers", "ttft_p50_ms", "{:.2f}", 1e-3),
    Plot("fleet-imbalance", "Busiest worker over the mean, by workers", "workers", "imbalance", "{:.2f}"),
    Plot("fleet-erasures", "Prompt tokens found, by erasures a day", "erasures", "found_share", "{:.1%}"),
)


def drawn(plot: Plot, rows: dict[str, Sequence[dict[str, Any]]]) -> str:
    """The plot of rows by router: a group of bars for each row's name."""
    of = {
        router: {row["name"]: row[plot.figure] * plot.scale for row in each if row["part"] == plot.part}
        for router, each in rows.items()
    }
    names = list(next(iter(of.values())))
    most = max(value for each in of.values() for value in each.values()) or 1
    group, base = (WIDTH - LEFT - 16) / len(names), HEIGHT - BOTTOM
    bar = min(40.0, group * 0.8 / len(of))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"',
        ' font-family="sans-serif" font-size="12">',
        f"<title>{escape(plot.title)}</title><style>{STYLE}</style>",
        f'<text x="{LEFT}" y="18" font-size="14">{escape(plot.title)}</text>',
    ]
    for place, router in enumerate(of):
        x = LEFT + 110 * place
        parts.append(f'<rect x="{x}" y="26" width="10" height="10" fill="{COLOURS[router]}"/>')
        parts.append(f'<text x="{x + 14}" y="35">{router}</text>')
    for share in (0.0, 0.5, 1.0):
        y, said = base - share * (base - TOP), plot.text(share * most)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 16}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{said}</text>')
    for number, name in enumerate(names):
        start = LEFT + number * group + (group - bar * len(of)) / 2
        for place, (router, values) in enumerate(of.items()):
            height = values[name] / most * (base - TOP)
            about = escape(f"{router}, {name}: {plot.text(values[name])}")
            box = f'x="{start + place * bar:.1f}" y="{base - height:.1f}" width="{bar - 2:.1f}"'
            fill = f'height="{height:.1f}" fill="{COLOURS[router]}"'
            parts.append(f"<rect {box} {fill}><title>{about}</title></rect>")
        middle = start + bar * len(of) / 2
        parts.append(f'<text x="{middle:.1f}" y="{base + 18}" text-anchor="middle">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Write every plot, and say where."""
    kept = {router: json.loads((ROOT / f"benchmarks/results/fleet-{router}.json").read_text()) for router in ROUTERS}
    rows = {router: next(iter(found["traces"].values())) for router, found in kept.items()}
    for plot in PLOTS:
        path = ROOT / f"docs/images/{plot.file}.svg"
        path.write_text(drawn(plot, rows))
        print(path.relative_to(ROOT), file=sys.stderr)


if __name__ == "__main__":
    main()
