"""OSCAL documents as trestle takes them in, from an environment of its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

import standins.audit
from kvcustody.audit.reports.build_report import build_report, newest_checkpoint, period
from kvcustody.audit.reports.framework import NAMES
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.store.database.engine import open_store
from kvcustody.console.report.package.oscal_set import oscal_documents
from kvcustody.migrations.upgrade import upgrade
from standins.audit.ledgers import report_ledger
from standins.tool_environment import programs_of

pytestmark = pytest.mark.system
FOLDERS = {
    "catalog.json": "catalogs",
    "component-definition.json": "component-definitions",
    "profile.json": "profiles",
    "ssp.json": "system-security-plans",
    "assessment-plan.json": "assessment-plans",
    "assessment-results.json": "assessment-results",
    "poam.json": "plan-of-action-and-milestones",
}


@pytest.fixture(scope="module")
def trestle() -> Path:
    return programs_of(".venv-trestle", "compliance-trestle", "5.2.0") / "trestle"


@pytest.fixture(scope="module")
def store(world_class: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("trestle")
    engine = open_store(folder / "ledger.db")
    upgrade(engine)
    report_ledger.fill(engine, world_class, folder)
    yield engine
    engine.dispose()


@pytest.fixture
def workspace(trestle: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    done = run(trestle, folder, "init", "--local")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def run(trestle: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(trestle), *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def report(store: Engine, name: str) -> Report:
    with store.connect() as connection:
        size = newest_checkpoint(connection)
        asked = ReportParameters(name, size, *period(connection, size, None, None), sample=2, recount=False)
        return build_report(connection, asked)


def test_every_model_is_imported_and_validated(trestle: Path, store: Engine, workspace: Path) -> None:
    documents = oscal_documents(report(store, "gdpr"))
    assert set(documents) == set(FOLDERS), "each of our models"
    incoming = workspace.with_name("incoming")
    incoming.mkdir()
    for file, data in documents.items():
        (incoming / file).write_bytes(data)
        (workspace / file).write_bytes(data)  # where trestle looks for what a document imports
    for file, folder in FOLDERS.items():
        name = file.removesuffix(".json")
        done = run(trestle, workspace, "import", "--file", str(incoming / file), "--output", name)
        assert done.returncode == 0, f"{file}: {done.stdout}{done.stderr}"
        [imported] = (workspace / folder / name).glob("*.json")
        assert json.loads(imported.read_bytes()), file
    done = run(trestle, workspace, "validate", "--all")
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_no_oscal_is_not_imported(trestle: Path, store: Engine, workspace: Path) -> None:
    """The control: what a model must have, gone from each in turn."""
    incoming = workspace.with_name("incoming")
    incoming.mkdir()
    for file, data in oscal_documents(report(store, "gdpr")).items():
        body = json.loads(data)
        [part] = body
        del body[part]["metadata"]["title"]
        (incoming / file).write_bytes(json.dumps(body).encode())
        done = run(trestle, workspace, "import", "--file", str(incoming / file), "--output", "bad")
        assert done.returncode != 0, file


def test_models_of_every_framework_parse(trestle: Path, store: Engine, tmp_path: Path) -> None:
    """In one process, for there are many: trestle's models are made of NIST's schemas."""
    for name in NAMES:
        (tmp_path / name).mkdir()
        for file, data in oscal_documents(report(store, name)).items():
            (tmp_path / name / file).write_bytes(data)
    done = subprocess.run(
        [
            str(trestle.with_name("python")),
            str(Path(standins.audit.__file__).with_name("parse_with_trestle.py")),
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) == 7 * len(NAMES) - 1, "NIST publishes a catalog of its own"
