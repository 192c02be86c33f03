"""The single-file HTML summary of a replay: tables and charts made by the server, no scripts, no requests."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from markupsafe import Markup

from kvcustody.errors import ConfigError
from kvcustody.files import evidence_mode, write_file
from kvcustody.lab.replay.charts import (
    Series,
    StackedBar,
    environment,
    histogram,
    stacked_areas,
    stacked_bars,
)
from kvcustody.lab.replay.report import (
    ReplayCoverage,
    ReplayReport,
    Spread,
    TenantResult,
    pressure_findings,
)
from kvcustody.plurals import several

AGE_EDGES_US = [s * 1_000_000 for s in (1, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400)]
AGE_LABELS = ["1 s", "10 s", "30 s", "1 m", "2 m", "5 m", "10 m", "20 m", "30 m", "1 h", "2 h", "4 h", "more"]
LAG_EDGES_US = [100, 1_000, 10_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_000_000, 5_000_000]
LAG_LABELS = ["0.1 ms", "1 ms", "10 ms", "50 ms", "0.1 s", "0.25 s", "0.5 s", "1 s", "2 s", "5 s", "more"]


def write_summary(report: ReplayReport, path: Path) -> None:
    """Write the page to `path`.

    Raises:
        ConfigError: it cannot be written.
    """
    text = render_summary(report)
    try:
        write_file(path, text.encode(), mode=evidence_mode())
    except OSError as error:
        raise ConfigError(f"cannot write summary `{path}`: {error.strerror or error}", path=str(path)) from None


def check_page(path: Path) -> None:
    """Refuse, before the replay, a page that cannot be written.

    Raises:
        ConfigError: it cannot be written.
    """
    problem = ""
    if path.is_dir():
        problem = "it is a folder"
    elif not path.parent.is_dir():
        problem = "no such folder"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "permission is denied"
    if problem:
        raise ConfigError(f"cannot write summary `{path}`: {problem}", path=str(path))


def render_summary(report: ReplayReport) -> str:
    """Return the page as text."""
    totals = report.totals
    return environment.get_template("summary.html").render(
        report=report,
        totals=totals,
        charts=_charts(report),
        causes=causes(totals.ended_blocks),
        rules=sorted({rule for row in report.tenants for rule in row.denials}),
        percent=percent,
        several=several,
        findings=pressure_findings(report),
        pressure=pressure_rows(report),
        thrashing=lambda row: thrashing_text(report, row),
        duration=duration,
        count=lambda value: "not observed" if value is None else f"{value:,}",
        coverage_fields=ReplayCoverage._fields,
        age_rows=[(name, spread) for name, spread in sorted(report.retention_age.items())],
    )


def causes(ended: Counter[str]) -> list[str]:
    """Return causes of the ends, most frequent first."""
    return [cause for cause, _ in ended.most_common()]


def thrashing_text(report: ReplayReport, row: TenantResult) -> str:
    """Return the share of the samples in which a tenant thrashed; nothing for all tenants together."""
    if not report.samples or row not in report.tenants:
        return ""
    return f"{row.thrashing_samples / len(report.samples):.0%}"


def pressure_rows(report: ReplayReport) -> list[tuple[str, str]]:
    """Return the rows that show that a pool is too small, or its blocks too large."""
    status, total = report.status, report.totals
    advised = int(status.get("advised_blocks", 0))
    return [
        ("blocks computed again after they were evicted", f"{total.recomputed_blocks:,}"),
        ("pool that would have kept them", f"{advised:,} blocks" if advised else "this one"),
        ("requests that waited, by reason", _listed(total.deferrals)),
        ("running requests without room for a token", f"{int(status.get('stalled', 0)):,} times"),
        ("preempted, to be computed again", f"{total.preempted:,}"),
        ("hand-outs that waited for clean blocks", f"{int(status.get('clean_waits', 0)):,}"),
        ("empty room in running requests' blocks", percent(report.waste)),
    ]


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items())) or "0"


def percent(value: float | None) -> str:
    """Return a share as a percentage with two digits after the point."""
    return "no data" if value is None else f"{100 * value:.2f} %"


def duration(value_us: int | None) -> str:
    """Return microseconds in the unit that a person would use."""
    if value_us is None:
        return "no data"
    for limit, unit, scale in ((1_000, "µs", 1), (1_000_000, "ms", 1_000), (120_000_000, "s", 1_000_000)):
        if abs(value_us) < limit:
            return f"{value_us / scale:.3g} {unit}"
    if value_us < 7_200_000_000:
        return f"{value_us / 60_000_000:.3g} min"
    return f"{value_us / 3_600_000_000:.3g} h"


def spread_text(spread: Spread) -> str:
    """Return median and 99th percentile of a time."""
    return f"{duration(spread.p50_us)} / {duration(spread.p99_us)}"


def _found(row: TenantResult) -> tuple[int, int]:
    """Return the prompt tokens found and computed."""
    return row.hit_tokens, row.input_tokens - row.hit_tokens


def _charts(report: ReplayReport) -> list[Markup]:
    samples = report.samples
    top = causes(report.totals.ended_blocks)[:5]
    return [
        stacked_bars(
            "Prompt tokens by tenant: found in the cache, and computed",
            [StackedBar(row.tenant, _found(row), percent(row.prefill_avoided)) for row in report.shown_tenants],
            (Series("found", "s1"), Series("computed", "s5")),
        ),
        stacked_areas(
            "Blocks by state over the replay's clock",
            [sample.at_us / 1e6 for sample in samples],
            (Series("active", "s2"), Series("cached", "s1"), Series("leaving custody", "s3")),
            [[s.active for s in samples], [s.cached for s in samples], [s.leaving for s in samples]],
            "h:mm:ss",
        ),
        stacked_bars(
            "Blocks whose custody ended, by tenant and cause",
            [
                StackedBar(row.tenant, [row.ended_blocks[c] for c in top], f"{row.ended_blocks.total():,}")
                for row in report.shown_tenants
            ],
            tuple(Series(cause, f"s{index}") for index, cause in enumerate(top, start=1)),
        ),
        histogram("Age of blocks when their custody ended", report.age_histogram, AGE_LABELS, "blocks by age, up to"),
        histogram(
            "Scrub lag: from the end of custody to zeroed",
            report.lag_histogram,
            LAG_LABELS,
            "blocks by lag, up to",
        ),
    ]
