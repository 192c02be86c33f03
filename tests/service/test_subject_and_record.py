"""A subject's page and the record of processing over the API and, with --server, from the command line."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import uvicorn
from typer.testing import CliRunner

from kvcustody.audit.reports.subject_access import page_of_data, subject_page
from kvcustody.console.main import app
from kvcustody.governance.api.app import create_app
from kvcustody.governance.processing.record import OPEN

POLICY = Path(__file__).resolve().parents[2] / "policies/library/regulated-saas.yaml"
PAGE = "/v1/custody/subject?tenant=acme&subject=user-1"
RECORD = "/v1/reports:processing"


@pytest.fixture(autouse=True)
def quiet() -> None:
    """The server is in this process: its log would be on the stdout that is read here."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@pytest.fixture(scope="module")
def address(shipped: Any) -> Iterator[str]:
    config = uvicorn.Config(create_app(shipped), port=0, log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def test_a_subjects_page_is_the_librarys_own_and_names_nobody(shipped: Any, client: Any, people: Any) -> None:
    answer = client("GET", PAGE, people["dpo"])
    with shipped.reading() as connection:
        names = shipped.names_of("acme", "user-1")
        page = subject_page(connection, "acme", names, now_us=answer.json()["now_us"])
    assert page_of_data(answer.json()) == page and len(page.holdings) == 1
    assert page.holdings[0].pseudonym in names and b"user-1" not in answer.content
    nobody = client("GET", PAGE.replace("user-1", "user-9"), people["dpo"]).json()
    assert nobody["holdings"] == [] == nobody["pseudonyms"]
    unnamed = client("GET", "/v1/custody/subject?subject=user-1", people["dpo"])
    assert unnamed.status_code == 422
    own = client("GET", "/v1/custody/subject?subject=user-1", people["tenant-viewer@acme"]).json()
    assert own["holdings"] == answer.json()["holdings"], "a tenant's own person need not be asked for by tenant"


def test_a_subject_is_asked_about_as_of_a_moment(shipped: Any, client: Any, people: Any) -> None:
    assert client("GET", f"{PAGE}&at=5", people["dpo"]).json()["now_us"] == 5
    assert client("GET", f"{PAGE}&at=-5", people["dpo"]).status_code == 422


def test_a_record_of_processing_is_the_policys_and_the_controllers(shipped: Any, client: Any, people: Any) -> None:
    body = {"policy": POLICY.read_text(), "controller": "Example AG"}
    record = client("POST", RECORD, people["dpo"], json=body, keyed=False).json()
    assert (record["controller"], record["officer"]) == ("Example AG", OPEN)
    assert record["policy"] == "regulated-saas" and record["due"] > 0
    assert len(record["time_limits"]) == 4 and all(item["reader"] for item in record["recipients"])
    assert {item["tiers"] for item in record["time_limits"]} == {"device memory only"}
    plain = POLICY.read_text().replace("internal:     never", "internal: {tiers: [host], encrypt: none, absolute: 10m}")
    told = client("POST", RECORD, people["dpo"], json={**body, "policy": plain}, keyed=False).json()["time_limits"]
    assert told[1]["tiers"] == "device memory; host, in plain memory, at most 10m"
    narrow = client("POST", RECORD, people["dpo"], json={**body, "since": 0, "until": 1}, keyed=False).json()
    assert narrow["due"] == 0
    for wrong in ({"policy": "x: 1"}, {"since": 2, "until": 1}, {"officer": "x" * 1001}, {"of": "me"}):
        assert client("POST", RECORD, people["dpo"], json=body | wrong, keyed=False).status_code == 422, wrong


def test_without_a_policy_and_without_a_release_there_is_no_record(shipped: Any, client: Any, people: Any) -> None:
    none = client("POST", RECORD, people["dpo"], json={}, keyed=False)
    assert none.status_code == 409 and b"send the policy of the record" in none.content


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


@pytest.fixture
def to(address: str, people: Any, tmp_path: Path) -> list[str]:
    key = tmp_path / "dpo.key"
    key.write_text(people["dpo"])
    key.chmod(0o600)
    return ["--server", address, "--api-key-file", str(key)]


def test_a_subjects_page_from_the_command_line(shipped: Any, to: list[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    asked = ["subject", "show", "--tenant", "acme", "--subject", "user-1", "--html", str(page)]
    found = run(*asked, *to, "--json")
    assert found.exit_code == 0, found.output
    over = json.loads(found.stdout)
    direct = run(*asked, "--ledger", str(shipped.settings.database_url), "--json")
    here = json.loads(direct.stdout)
    assert {**over, "now_us": 0} == {**here, "now_us": 0} and over["holdings"]
    assert b"<html" in page.read_bytes() and "user-1" not in page.read_text()
    both = run(*asked, *to, "--ledger", "other.db")
    assert both.exit_code == 2 and "--ledger" in both.output


def test_a_record_from_the_command_line(shipped: Any, to: list[str], tmp_path: Path) -> None:
    asked = [
        "report",
        "ropa",
        "--policy",
        str(POLICY),
        "--controller",
        "Example AG",
        "--format",
        "json,csv,html",
    ]
    over = run(*asked, "--out", str(tmp_path / "over"), *to, "--json")
    assert over.exit_code == 0, over.output
    database = str(shipped.settings.database_url)
    same = ["--as-of", str(json.loads(over.stdout)["record"]["checkpoint"])]
    same += ["--signing-key", str(shipped.settings.report_key_file)]
    here = run(*asked, *same, "--out", str(tmp_path / "here"), "--ledger", database, "--json")
    assert json.loads(over.stdout)["record"] == json.loads(here.stdout)["record"]
    assert json.loads(over.stdout)["record"]["signature"] is not None
    for name in ("ropa.json", "ropa.csv", "ropa.html"):
        assert (tmp_path / "over" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()
    unknown = run("report", "ropa", "--ledger", database, "--out", str(tmp_path / "none"))
    assert unknown.exit_code == 2 and "--policy is needed" in unknown.output
