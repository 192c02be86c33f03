"""Certificates, reports and checks over the API, on a ledger that a worker filled: each verified by the library."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from kvcustody.audit.reports.erasure.certificate import SelectorOpening
from kvcustody.governance.service.render_protocol import JsonDocuments
from standins.audit.documents import verify_certificate, verify_report
from standins.service.service_world import Worker, register, ship


@pytest.fixture(scope="module")
def worker(client, people) -> Worker:
    made = Worker()
    register(client, people["worker"], made)
    events = [made.started(), *made.request("acme"), *made.request("labs")]
    assert ship(client, people["worker"], made, made.batch(events)).status_code == 200
    return made


@pytest.fixture(scope="module")
def vkey(service) -> str:
    from kvcustody.audit.tlog.signing_key import read_signing_key

    return str(read_signing_key(service.settings.signing_key_path).verifier)


def finished(client: Any, key: str, job: dict[str, Any]) -> dict[str, Any]:
    for _ in range(2000):
        found = client("GET", f"/v1/jobs/{job['job']}", key).json()
        if found["ended_us"] is not None:
            return found
        time.sleep(0.01)
    raise AssertionError(found)


def patiently(ask: Callable[[], Any]) -> Any:
    """The answer, once the newest leaves are under a signed checkpoint."""
    for _ in range(500):
        answer = ask()
        if answer.status_code != 503:
            return answer
        assert answer.headers["retry-after"]
        time.sleep(0.02)
    raise AssertionError(answer.text)


def test_a_certificate_verifies_with_the_public_key_alone(client, people, worker, vkey) -> None:
    body = {"subject": "user-1", "deadline_seconds": 60}
    erasure = client("POST", "/v1/erasures", people["tenant-admin@acme"], json=body).json()["erasure"]
    path, admin = f"/v1/erasures/{erasure}", people["tenant-admin@acme"]
    certificate = patiently(lambda: client("GET", f"{path}/certificate", admin))
    assert certificate.status_code == 200, certificate.text
    opening = SelectorOpening(**client("GET", f"{path}/opening", people["dpo"]).json())
    report = verify_certificate(certificate.content, [vkey], opening)
    assert report.ok and report.shown["opened"] and report.shown["erasure"] == erasure, report.problems
    assert "user-1" in opening.selector and b"user-1" not in certificate.content
    wrong = certificate.content.replace(b'"outcome":"partial"', b'"outcome":"complete"', 1)
    assert wrong != certificate.content and not verify_certificate(wrong, [vkey]).ok, (
        "control: an altered one does not verify"
    )
    page = client("GET", f"{path}/certificate.html", admin)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert erasure in page.text and "default-src 'none'" in page.headers["content-security-policy"]
    again = client("GET", f"{path}/certificate", people["dpo"]).json()
    assert again["request"]["commitment"] == certificate.json()["request"]["commitment"]


def test_a_service_without_renderer_gives_no_page(client, people, worker, service, monkeypatch) -> None:
    erasure = client("POST", "/v1/erasures", people["dpo"], json={"tenant": "acme"}).json()["erasure"]
    patiently(lambda: client("GET", f"/v1/erasures/{erasure}/certificate", people["dpo"]))
    monkeypatch.setattr(service, "documents", JsonDocuments())
    assert client("GET", f"/v1/erasures/{erasure}/certificate.html", people["dpo"]).status_code == 406
    body = {"framework": "soc2", "formats": ["html"]}
    assert client("POST", "/v1/reports", people["auditor"], json=body).status_code == 406


@pytest.mark.system("a report of the service does not verify, or is another when made again")
def test_a_report_verifies_and_is_made_again_by_its_digest(client, people, worker, vkey) -> None:
    asked = {
        "framework": "soc2",
        "sample": 3,
        "recount": True,
        "organisation": "Example AG",
        "prepared_by": "Ada",
    }
    job = client("POST", "/v1/reports", people["auditor"], json=asked).json()
    result = finished(client, people["auditor"], job)["result"]
    assert {item["name"] for item in result["files"]} == {
        "report.json", "report.html", "report.pdf", "oscal.json",
    }  # fmt: skip
    for item in result["files"]:
        path = f"/v1/jobs/{job['job']}/files/{item['name']}"
        data = client("GET", path, people["auditor"]).content
        assert hashlib.sha256(data).hexdigest() == item["sha256"] and len(data) == item["bytes"]
        if item["name"] == "report.json":
            found = verify_report(data, [vkey], expected_digest=result["digest"])
            assert found.ok and found.leaves > 0, found.problems
            stated = json.loads(data)["asked"]
            assert (stated["organisation"], stated["preparer"]) == ("Example AG", "Ada")
    about = client("GET", f"/v1/jobs/{job['job']}", people["auditor"]).json()["parameters"]
    same = asked | {"as_of": result["checkpoint"], "since": about["since_us"], "until": about["until_us"]}
    verdicts = []
    for digest in (result["digest"], "0" * 64):
        body = same | {"formats": ["json"], "expected_digest": digest}
        again = client("POST", "/v1/reports", people["auditor"], json=body).json()
        verdicts.append(finished(client, people["auditor"], again)["result"]["as_expected"])
    assert verdicts == [True, False]


def test_a_format_that_cannot_be_made_costs_no_other(client, people, worker) -> None:
    """No font has the preparer's mark: the PDF is refused by name, and the page is made."""
    asked = {"framework": "soc2", "sample": 0, "recount": False, "prepared_by": "Ada \U0001f9ff"}
    job = client("POST", "/v1/reports", people["auditor"], json=asked | {"formats": ["html", "pdf"]}).json()
    result = finished(client, people["auditor"], job)["result"]
    assert [item["name"] for item in result["files"]] == ["report.html"]
    [lacking] = result["not_made"]
    assert lacking["format"] == "pdf" and "U+1F9FF" in lacking["why"]
    alone = client("POST", "/v1/reports", people["auditor"], json=asked | {"formats": ["pdf"]}).json()
    assert finished(client, people["auditor"], alone)["state"] == "failed"


def test_a_tenants_report_names_no_other(client, people, worker) -> None:
    reports = {}
    for who in ("tenant-viewer@acme", "auditor"):
        job = client("POST", "/v1/reports", people[who], json={"framework": "soc2", "formats": ["json"]})
        assert finished(client, people[who], job.json())["state"] == "finished"
        reports[who] = client("GET", f"/v1/jobs/{job.json()['job']}/files/report.json", people[who]).content
    assert b"labs" in reports["auditor"], "void: nothing to find"
    assert b"labs" not in reports["tenant-viewer@acme"]


def test_an_empty_period_is_refused(client, people, worker) -> None:
    body = {"framework": "soc2", "since": 5_000_000, "until": 4_000_000}
    refused = client("POST", "/v1/reports", people["auditor"], json=body)
    assert refused.status_code == 422 and "period" in refused.json()["detail"]


def test_a_check_finds_the_ledger_sound_and_a_foreign_note_not_its_own(client, people, worker, vkey) -> None:
    note = patiently(lambda: client("GET", "/v1/audit/checkpoints/latest", people["auditor"])).json()["note"]
    other = note.replace(note.splitlines()[2], "A" * 43 + "=", 1)  # another root under the same signature
    verdicts = []
    for notes in ([note], [other]):
        job = client("POST", "/v1/checks", people["auditor"], json={"keys": [vkey], "notes": notes}).json()
        verdicts.append(finished(client, people["auditor"], job)["result"])
    sound, unsound = verdicts
    assert sound["sound"] and sound["verified"] > 0 and sound["leaves"] > 8 and sound["first"] is None
    assert not unsound["sound"] and "note 1" in unsound["problems"][0]["what"]
    refused = client("POST", "/v1/checks", people["auditor"], json={"keys": ["no key"]})
    assert refused.status_code == 422


def test_what_is_asked_for_as_a_job_is_on_record(client, people, worker) -> None:
    job = client("POST", "/v1/checks", people["dpo"], json={})
    assert job.status_code == 202
    found = client("GET", "/v1/audit/events?kind=access&actor=dpo&limit=1000", people["auditor"]).json()
    assert "checkLedger" in [item["leaf"]["operation"] for item in found["items"]]


def test_an_erasure_names_every_part_of_a_domain(client, people) -> None:
    body = {"tenant": "acme", "classification": "internal", "key_epoch": 3, "labels": {"region": "eu"}}
    asked = client("POST", "/v1/erasures", people["dpo"], json=body).json()
    assert asked["selector"] == "domain"
    opening = client("GET", f"/v1/erasures/{asked['erasure']}/opening", people["dpo"]).json()
    assert orjson.loads(opening["selector"]) == body


def test_coverage_is_cut_as_asked(client, people, service) -> None:
    worker = Worker("worker")
    register(client, people["worker"], worker)
    ship(client, people["worker"], worker, worker.batch([worker.started(), *worker.request("acme")]))

    def due(cut: str) -> int:
        path = f"/v1/custody/coverage?tenant=acme&since=1&until=9000000000000000{cut}"
        answer = client("GET", path, people["dpo"])
        assert answer.status_code == 200, answer.text
        return int(answer.json()["total"]["due"])

    whole = due("")
    assert whole == due("&classification=internal") == due("&model=unknown") == due("&tier=device") > 0
    assert due("&classification=secret") == due("&model=0123456789abcdef") == 0
