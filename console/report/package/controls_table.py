"""Controls by period as CSV, and a folder of evidence for each control that has any, to upload to a request.

1. Cells that a spreadsheet would run as a formula begin with an apostrophe.
2. Reports of several periods of one framework are one table: a column of statuses for each.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from kvcustody.audit.report.framework import SECTIONS
from kvcustody.audit.report.model import EVIDENCE_PRESENT, Report
from kvcustody.console.report.oscal import control_id
from kvcustody.errors import ConfigError
from kvcustody.times import iso

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def controls_table(reports: Sequence[Report]) -> bytes:
    """Controls in rows, periods in columns, oldest first; raises `ConfigError` for reports of several frameworks."""
    ordered = sorted(reports, key=lambda report: (report.asked.since_us, report.asked.until_us))
    if len({report.framework for report in ordered}) != 1:
        raise ConfigError("one table is of one framework in one edition: make the reports with the same one")
    periods = [f"{iso(report.asked.since_us)} to {iso(report.asked.until_us)}" for report in ordered]
    rows = [("control", "title", *periods, "sections, newest period", "what it does not show")]
    by_period = [{each.control: each for each in report.statuses} for report in ordered]
    for control in ordered[-1].framework.controls:
        found = [statuses[control.id] for statuses in by_period]
        cited = ", ".join(dict.fromkeys(SECTIONS[name] for name in found[-1].sections))
        rows.append((control.id, control.title, *(each.status for each in found), cited, control.limit))
    return as_csv(rows)


def upload_folders(report: Report) -> dict[str, bytes]:
    """Under each control's id a file of what supports it, by path."""
    made = {}
    for each in report.statuses:
        if each.status != EVIDENCE_PRESENT:
            continue
        control = next(one for one in report.framework.controls if one.id == each.control)
        rows = [
            ("field", "value"),
            ("statement", report.statement(control.id)),
            ("what there is", control.supports),
            ("sections of the report", ", ".join(dict.fromkeys(SECTIONS[name] for name in each.sections))),
            ("what it does not show", control.limit),
            ("opinion", report.opinion.kind),
            ("units due", str(report.total.due)),
            ("units covered", str(report.total.covered)),
            ("SHA-256 of the report without its signature", report.digest()),
            ("made again by", report.rerun()),
        ]
        made[f"{control_id(control.id)}/evidence.csv"] = as_csv(rows)
    return made


def as_csv(rows: Sequence[Sequence[str]]) -> bytes:
    """Rows as CSV (rule 1)."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerows(
        [f"'{cell}" if cell.startswith(_FORMULA) else cell for cell in row] for row in rows
    )
    return text.getvalue().encode()
