"""`kvcustody report package`: a signed report's files for governance tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcustody.audit.verify.documents.report_rules import read_report
from kvcustody.console.command import Json, print_json, say
from kvcustody.console.files import read_file, write_files
from kvcustody.console.report.package.controls_table import controls_table, controls_workbook, upload_folders
from kvcustody.console.report.package.oscal_set import oscal_documents
from kvcustody.plurals import several

EPILOG = "Example:\n\n    kvcustody report package q1/report.json q2/report.json --out for-grc"


def package(
    files: Annotated[
        list[Path],
        typer.Argument(help="report.json of one period, or of several; verify them first.", metavar="REPORT..."),
    ],
    *,
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("kvcustody-package"),
    xlsx: Annotated[bool, typer.Option(help="The table as a workbook too; it needs the extra `reports`.")] = True,
    as_json: Json = False,
) -> None:
    """Make OSCAL documents that import each other, a table of controls by period, and a folder a control to upload.

    OSCAL and folders are of the newest period. Nothing is said in them that the report does not say.
    """
    reports = [read_report(read_file(path)) for path in files]
    newest = max(reports, key=lambda report: (report.asked.until_us, report.asked.since_us))
    tables = {"controls.csv": controls_table(reports)}
    if xlsx:
        tables["controls.xlsx"] = controls_workbook(reports)
    documents, folders = oscal_documents(newest), upload_folders(newest)
    write_files(out, tables | {"report.json": newest.to_bytes()})
    write_files(out / "oscal", documents)
    for path, data in folders.items():
        control, name = path.split("/")
        write_files(out / "uploads" / control, {name: data})
    written = [*tables, "report.json", *(f"oscal/{name}" for name in sorted(documents))]
    written += [f"uploads/{path}" for path in sorted(folders)]
    if as_json:
        print_json({"folder": str(out), "files": written, "digest": newest.digest()})
        return
    say(f"{len(documents)} OSCAL documents, a table, and folders of {several(len(folders), 'control')} in {out}")
