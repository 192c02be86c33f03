"""What a service reads for long - reports, checks, records - holds none of its own writers' log."""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from kvcustody.audit.store.database.dialect import file_of
from standins.audit.write_ahead_log import is_held
from standins.service.service_world import Worker, register, ship

POLICY = Path(__file__).resolve().parents[3] / "policies" / "library" / "regulated-saas.yaml"
JOBS = {
    "report": ("service.reports", "build_report", "/v1/reports", {"framework": "soc2", "formats": ["json"]}),
    "check": ("api.operations.reports_and_checks", "fsck", "/v1/checks", {}),
    "record": (
        "api.operations.privacy.processing_records",
        "build_record",
        "/v1/reports:processing",
        {"policy": POLICY.read_text()},
    ),
}


@pytest.fixture(scope="module")
def worked(client: Any, people: Any) -> None:
    worker = Worker()
    register(client, people["worker"], worker)
    ship(client, people["worker"], worker, worker.batch([worker.started(), *worker.request("acme")]))


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert not list(tmp_path.iterdir()), "a copy was left behind"


def finished(client: Any, key: str, job: dict[str, Any]) -> dict[str, Any]:
    while True:
        found: dict[str, Any] = client("GET", f"/v1/jobs/{job['job']}", key).json()
        if found["ended_us"] is not None:
            return found
        time.sleep(0.01)


def held_by(
    job: str, service: Any, client: Any, people: Any, monkeypatch: pytest.MonkeyPatch, tries: int = 100
) -> bool:
    """Whether a job holds the log in the middle of what takes it long, each of `tries` times that it is looked at."""
    room, name, path, body = JOBS[job]
    module = importlib.import_module(f"kvcustody.governance.{room}")
    long_work, seen, ledger = getattr(module, name), [], file_of(service.engine)

    def work(connection: Any, *given: Any, **more: Any) -> Any:
        connection.execute(text("SELECT count(*) FROM logs")).scalar()
        seen.append(is_held(ledger, tries=tries))
        return long_work(connection, *given, **more)

    monkeypatch.setattr(module, name, work)
    answer = client("POST", path, people["auditor"], json=body)
    assert answer.status_code in (200, 202), answer.text
    if answer.status_code == 202:
        assert finished(client, people["auditor"], answer.json())["state"] == "finished"
    assert seen
    return any(seen)


@pytest.mark.parametrize("job", JOBS)
def test_a_long_job_holds_no_log(
    job: str,
    worked: None,
    service: Any,
    client: Any,
    people: Any,
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not held_by(job, service, client, people, monkeypatch)


@pytest.mark.parametrize("job", JOBS)
def test_control_without_its_copy_it_does(
    job: str, worked: None, service: Any, client: Any, people: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcustody.governance.service.service.at_rest", nullcontext)
    assert held_by(job, service, client, people, monkeypatch, tries=8)
