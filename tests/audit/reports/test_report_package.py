"""OSCAL by the models of NIST's own JSON schemas, which refuse what is none; tables and folders beside it."""

from __future__ import annotations

import csv
import io
import json
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openpyxl
import pytest
from oscal_bindings.v1.models import (
    AssessmentPlanDocument,
    AssessmentResultsDocument,
    CatalogDocument,
    ComponentDefinitionDocument,
    PlanOfActionAndMilestonesDocument,
    ProfileDocument,
    SystemSecurityPlanDocument,
)
from pydantic import ValidationError
from typer.testing import CliRunner

from kvcustody.audit.reports.build_report import build_report, newest_checkpoint, period
from kvcustody.audit.reports.framework import NAMES
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.store.database.engine import open_store
from kvcustody.console.report.command import app
from kvcustody.console.report.package.controls_table import (
    as_csv,
    as_workbook,
    controls_table,
    controls_workbook,
    upload_folders,
)
from kvcustody.console.report.package.oscal_set import oscal_documents
from kvcustody.errors import ConfigError
from kvcustody.migrations.upgrade import upgrade
from kvcustody.times import iso
from standins.audit.ledgers import report_ledger

DOCUMENTS: dict[str, Any] = {
    "component-definition.json": ComponentDefinitionDocument,
    "profile.json": ProfileDocument,
    "ssp.json": SystemSecurityPlanDocument,
    "assessment-plan.json": AssessmentPlanDocument,
    "assessment-results.json": AssessmentResultsDocument,
    "poam.json": PlanOfActionAndMilestonesDocument,
}


class Reports:
    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def make(self, name: str, *, half: bool = False) -> Report:
        with self.engine.connect() as connection:
            size = newest_checkpoint(connection)
            since, until = period(connection, size, None, None)
            if half:
                until = (since + until) // 2
            asked = ReportParameters(name, size, since, until, sample=2, recount=False)
            return build_report(connection, asked)


@pytest.fixture(scope="module")
def reports(world_class: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reports]:
    folder = tmp_path_factory.mktemp("package")
    engine = open_store(folder / "ledger.db")
    upgrade(engine)
    report_ledger.fill(engine, world_class, folder)
    yield Reports(engine)
    engine.dispose()


@pytest.mark.parametrize("name", NAMES)
def test_every_document_is_valid_and_imports_the_one_before(reports: Reports, name: str) -> None:
    documents = oscal_documents(reports.make(name))
    here = DOCUMENTS if name == "nist-800-53" else {"catalog.json": CatalogDocument, **DOCUMENTS}
    assert set(documents) == set(here)
    for file, model in here.items():
        model.model_validate_json(documents[file])
        body = json.loads(documents[file])
        [part] = body
        del body[part]["metadata"]["title"]
        with pytest.raises(ValidationError):  # control: a document without a title is none
            model.model_validate_json(json.dumps(body))
    bodies = {file: json.loads(data) for file, data in documents.items()}
    [imported] = bodies["profile.json"]["profile"]["imports"]
    if "catalog.json" in documents:
        assert imported["href"] == "catalog.json"
        ids = [control["id"] for control in bodies["catalog.json"]["catalog"]["controls"]]
        assert ids == imported["include-controls"][0]["with-ids"] and len(set(ids)) == len(ids)
    assert bodies["ssp.json"]["system-security-plan"]["import-profile"]["href"] in documents
    assert bodies["assessment-plan.json"]["assessment-plan"]["import-ssp"]["href"] in documents
    assert bodies["assessment-results.json"]["assessment-results"]["import-ap"]["href"] in documents
    assert bodies["poam.json"]["plan-of-action-and-milestones"]["import-ssp"]["href"] in documents
    items = [item["uuid"] for item in bodies["poam.json"]["plan-of-action-and-milestones"]["poam-items"]]
    assert len(set(items)) == len(items)
    text = b"".join(documents.values()).decode()
    for resources in (
        body[part].get("back-matter", {}).get("resources", []) for body in bodies.values() for part in body
    ):
        assert all(f'"#{resource["uuid"]}"' in text for resource in resources), "each is referred to"


def test_ids_are_those_of_the_catalog_and_shares_stand_where_coverage_is_cited(reports: Reports) -> None:
    report = reports.make("nist-800-53")
    documents = {file: json.loads(data) for file, data in oscal_documents(report).items()}
    [imported] = documents["profile.json"]["profile"]["imports"]
    assert imported["href"].endswith("NIST_SP-800-53_rev5_catalog.json")
    assert {"ac-4.21", "ac-6.9", "si-12.3", "mp-6", "sc-4"} <= set(imported["include-controls"][0]["with-ids"])
    [result] = documents["assessment-results.json"]["assessment-results"]["results"]
    for seen in result["observations"]:
        props = {prop["name"]: prop["value"] for prop in seen["props"]}
        cites = any("Coverage" in each["description"] for each in seen["relevant-evidence"])
        assert ("covered-share" in props) is cites, seen["title"]
    assert {each["methods"][0] for each in result["observations"]} == {"TEST", "EXAMINE"}
    items = documents["poam.json"]["plan-of-action-and-milestones"]["poam-items"]
    assert [item["title"] for item in items] == [each.id for each in report["opinion"].exceptions]


def test_a_table_of_controls_by_period_and_a_folder_a_control(reports: Reports) -> None:
    whole, half = reports.make("gdpr"), reports.make("gdpr", half=True)
    rows = list(csv.reader(io.StringIO(controls_table([whole, half]).decode())))
    assert len(rows) == len(whole.framework.controls) + 1 and len(rows[0]) == 6
    assert [row[2] for row in rows[1:]] == [each.status for each in half["statuses"]]
    assert [row[3] for row in rows[1:]] == [each.status for each in whole["statuses"]]
    with pytest.raises(ConfigError, match="one framework"):
        controls_table([whole, reports.make("soc2")])
    folders = upload_folders(whole)
    assert len(folders) == len(whole.cited()) > 3
    assert all(whole.digest() in data.decode() for data in folders.values())
    assert as_csv([("=1+1", "plain")]) == b"'=1+1,plain\r\n"


def test_the_workbook_reads_back_as_the_table_and_is_the_same_bytes_again(
    reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [reports.make("gdpr"), reports.make("gdpr", half=True)]
    data = controls_workbook(both)
    time.sleep(1.1)
    assert controls_workbook(both[::-1]) == data
    with zipfile.ZipFile(io.BytesIO(data)) as parts:
        assert {each.date_time for each in parts.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        dated = iso(both[0]["boundary"].checkpoint.signed_us)[:19]
        assert parts.read("docProps/core.xml").decode().count(dated) == 2
    sheet = openpyxl.load_workbook(io.BytesIO(data)).active
    read = [tuple(cell or "" for cell in row) for row in sheet.iter_rows(values_only=True)]
    assert read == [tuple(row) for row in csv.reader(io.StringIO(controls_table(both).decode()))]
    evil = [("head", "other"), ("=1+1", "@SUM(A1)"), ("https://example.org", "plain")]
    sheet = openpyxl.load_workbook(io.BytesIO(as_workbook(evil, 0))).active
    cells = [cell for row in sheet.iter_rows() for cell in row]
    assert {cell.data_type for cell in cells} == {"s"} and not any(cell.hyperlink for cell in cells)
    assert [cell.value for cell in cells[2:]] == ["'=1+1", "'@SUM(A1)", "https://example.org", "plain"]
    monkeypatch.setitem(sys.modules, "xlsxwriter", None)
    with pytest.raises(ConfigError, match="extra `reports`"):
        as_workbook(evil, 0)


def test_the_command_writes_all_of_it(reports: Reports, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_bytes(reports.make("soc2").to_bytes())
    arguments = ["package", str(tmp_path / "report.json"), "--out", str(tmp_path / "out"), "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert {f"oscal/{name}" for name in DOCUMENTS} | {"controls.csv", "controls.xlsx", "report.json"} <= set(
        said["files"]
    )
    assert all((tmp_path / "out" / name).is_file() for name in said["files"])
    without = CliRunner().invoke(app, [*arguments, "--no-xlsx"])
    assert without.exit_code == 0 and "controls.xlsx" not in json.loads(without.stdout)["files"]
