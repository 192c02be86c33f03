"""The measured part of docs/reference/measurements/eviction.md: tables between two marks, and a plot of each workload.

Plots are SVG files beside the page's images, readable on light and dark. Every point drawn is in the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import table

BEGIN, END = "<!-- measured: benchmarks/eviction.py --page -->", "<!-- end of what is measured -->"
DRAWN = {
    "offline optimum": "#888888",
    "lru": "#1f77b4",
    "cost": "#d62728",
    "lhd": "#2ca02c",
    "arc": "#9467bd",
    "s3-fifo": "#ff7f0e",
}
WIDTH, HEIGHT, LEFT, BASE, TOP, LEGEND = 640, 280, 56, 236, 20, 150


def write_page(page: Path, found: Mapping[str, Any]) -> None:
    """Replace what stands between the marks of `page`, and write the plots to `images` of the docs."""
    parts = [_summary(found["summary"])]
    for name, result in found["results"].items():
        file = "eviction-" + "".join(c if c.isalnum() else "-" for c in name).replace("--", "-") + ".svg"
        (page.parents[2] / "images" / file).write_text(_plot(name, result))
        parts.append(
            f"### {name[0].upper()}{name[1:]}\n\n{_facts(result)}\n\n![{name}](../../images/{file})\n\n{_rows(result)}"
        )
    text = page.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(before + BEGIN + "\n\n" + "\n\n".join(parts) + "\n\n" + END + after)


def _summary(summary: Mapping[str, Any]) -> str:
    rows = [
        [name, f"{of['least_against_lru']:+.1%}"]
        + [f"{of[key]:+.1%}" if of[key] is not None else "" for key in ("closed_agentic_mean", "closed_agentic_least")]
        for name, of in summary.items()
    ]
    return table(["policy", "least against LRU, anywhere", "closed on agents, mean", "closed on agents, least"], rows)


def _facts(result: Mapping[str, Any]) -> str:
    role = "policies may be tuned on it" if result["role"] == "dev" else "reported"
    return (
        f"{result['requests']:,} requests, {result['blocks']:,} blocks of {result['block_tokens']} tokens, "
        f"{result['distinct_blocks']:,} of them distinct; {role}."
    )


def _rows(result: Mapping[str, Any]) -> str:
    """Shares of prompt tokens found and of prefill seconds avoided (distance closed); tenants in the second pool."""
    pools = result["pools"]
    rows = []
    for policy in pools[0]["policies"]:
        cells = []
        for pool in pools:
            row = pool["policies"][policy]
            closed = "" if row["closed"] is None or policy == "lru" else f" ({row['closed']:+.0%})"
            cells.append(f"{row['hit_share']:.3f} / {row['seconds_share']:.3f}{closed}")
        fair = pools[1]["policies"][policy]
        rows.append([policy, *cells, f"{fair['tenant_min']:.2f} / {fair['tenant_median']:.2f} / {fair['jain']:.3f}"])
    bound = [
        f"≤ {pool['seconds_bound'] * row['seconds_share'] / row['seconds']:.3f}" if row["seconds"] else ""
        for pool in pools
        for row in [pool["policies"]["lru"]]
    ]
    rows.append(["bound on seconds", *bound, ""])
    heads = [f"{pool['capacity']:,} blocks" for pool in pools]
    return table(["policy", *heads, f"tenants at {pools[1]['capacity']:,}: least / median / Jain"], rows)


def _plot(name: str, result: Mapping[str, Any]) -> str:
    """Share of prompt tokens found, over the pool's size."""
    pools = result["pools"]
    shares = {policy: [pool["policies"][policy]["hit_share"] for pool in pools] for policy in DRAWN}
    low = min(map(min, shares.values()))
    high = max(map(max, shares.values()))
    span = (high - low) or 1.0
    step = (WIDTH - LEFT - LEGEND) / max(1, len(pools) - 1)
    lines = []
    for number, (policy, values) in enumerate(shares.items()):
        points = " ".join(
            f"{LEFT + at * step:.1f},{BASE - (value - low) / span * (BASE - TOP):.1f}"
            for at, value in enumerate(values)
        )
        y = TOP + 18 * number
        lines.append(f'<polyline points="{points}" fill="none" stroke="{DRAWN[policy]}" stroke-width="2"/>')
        lines.append(f'<text x="{WIDTH - LEGEND + 20}" y="{y + 4}" fill="{DRAWN[policy]}">{policy}</text>')
    for at, pool in enumerate(pools):
        x = LEFT + at * step
        lines.append(f'<text x="{x:.1f}" y="{BASE + 18}" text-anchor="middle" fill="#888">{pool["capacity"]:,}</text>')
    for value in (low, low + span / 2, high):
        y = BASE - (value - low) / span * (BASE - TOP)
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#888">{value:.2f}</text>')
        lines.append(
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - LEGEND}" y2="{y:.1f}" stroke="#888" stroke-opacity="0.3"/>'
        )
    title = f"{name}: share of prompt tokens found, by blocks of the pool"
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="sans-serif" font-size="12">\n<title>{title}</title>\n{body}\n'
        f'<text x="{LEFT}" y="{HEIGHT - 6}" fill="#888">{title}</text>\n</svg>\n'
    )
