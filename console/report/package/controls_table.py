"""Controls by period as CSV and XLSX, and a folder of evidence for each control, to upload to a request.

1. Cells that a spreadsheet would run as a formula begin with an apostrophe, in both; in XLSX all cells are text.
2. Reports of several periods of one framework are one table: a column of statuses for each.
3. The same reports give the same bytes: a workbook is dated when the newest report's checkpoint was signed.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from datetime import UTC, datetime

from kvcustody.audit.exports.csv_table import csv_text, disarmed
from kvcustody.audit.reports.framework import EVIDENCE_PRESENT
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.section import citations
from kvcustody.audit.reports.sections.boundary import SECTION as BOUNDARY
from kvcustody.audit.reports.sections.controls import SECTION as CONTROLS
from kvcustody.audit.reports.sections.coverage import SECTION as COVERAGE
from kvcustody.audit.reports.sections.opinion import SECTION as OPINION
from kvcustody.console.report.oscal import control_id
from kvcustody.errors import ConfigError
from kvcustody.times import iso

_COLUMN_CHARACTERS = 28


def controls_table(reports: Sequence[Report]) -> bytes:
    """Return `table_rows` as CSV."""
    return as_csv(table_rows(reports))


def controls_workbook(reports: Sequence[Report]) -> bytes:
    """Return `table_rows` as XLSX.

    Raises:
        ConfigError: the extra `reports` is not installed.
    """
    signed_us = max(report[BOUNDARY].checkpoint.signed_us for report in reports)
    return as_workbook(table_rows(reports), signed_us)


def table_rows(reports: Sequence[Report]) -> list[tuple[str, ...]]:
    """Return controls in rows and periods in columns, oldest first.

    Raises:
        ConfigError: the reports have several frameworks.
    """
    ordered = sorted(reports, key=lambda report: (report.asked.since_us, report.asked.until_us))
    if len({report.framework for report in ordered}) != 1:
        raise ConfigError("one table is of one framework in one edition: make the reports with the same one")
    periods = [f"{iso(report.asked.since_us)} to {iso(report.asked.until_us)}" for report in ordered]
    rows = [("control", "title", *periods, "sections, newest period", "what it does not show")]
    by_period = [{each.control: each for each in report[CONTROLS]} for report in ordered]
    for control in ordered[-1].framework.controls:
        found = [statuses[control.id] for statuses in by_period]
        cited = ", ".join(dict.fromkeys(citations()[name].title for name in found[-1].sections))
        rows.append((control.id, control.title, *(each.status for each in found), cited, control.limit))
    return rows


def upload_folders(report: Report) -> dict[str, bytes]:
    """Return the supporting files by path, below each control's id."""
    files = {}
    for each in report[CONTROLS]:
        if each.status != EVIDENCE_PRESENT:
            continue
        control = next(one for one in report.framework.controls if one.id == each.control)
        rows = [
            ("field", "value"),
            ("statement", report.statement(control.id)),
            ("what the sections show", control.supports),
            (
                "sections of the report",
                ", ".join(dict.fromkeys(citations()[name].title for name in each.sections)),
            ),
            ("what it does not show", control.limit),
            ("opinion", report[OPINION].kind),
            ("units due", str(report[COVERAGE].total.due)),
            ("units covered", str(report[COVERAGE].total.covered)),
            ("SHA-256 of the report without its signature", report.digest()),
            ("made again by", report.rerun()),
        ]
        files[f"{control_id(control.id)}/evidence.csv"] = as_csv(rows)
    return files


def as_csv(rows: Sequence[Sequence[str]]) -> bytes:
    """Return rows as CSV (rule 1)."""
    return csv_text(rows).encode()


def as_workbook(rows: Sequence[Sequence[str]], at_us: int) -> bytes:
    """Return rows as a sheet with the first as its header (rules 1 and 3)."""
    try:
        from xlsxwriter import Workbook
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a workbook needs `{error.name}`: install kvcustody with the extra `reports`", missing=error.name
        ) from None
    buffer = io.BytesIO()
    book = Workbook(buffer, {"in_memory": True, "strings_to_formulas": False, "strings_to_urls": False})
    book.set_properties({"title": "Controls by period", "created": datetime.fromtimestamp(at_us // 1_000_000, UTC)})
    head, body = book.add_format({"bold": True, "text_wrap": True}), book.add_format({"text_wrap": True})
    sheet = book.add_worksheet("controls")
    for number, row in enumerate(rows):
        for column, cell in enumerate(row):
            sheet.write_string(number, column, str(disarmed(cell)), head if number == 0 else body)
    sheet.set_column(0, len(rows[0]) - 1, _COLUMN_CHARACTERS)
    sheet.freeze_panes(1, 1)
    book.close()
    return buffer.getvalue()
