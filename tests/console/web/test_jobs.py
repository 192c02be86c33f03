"""The page of a job opens whatever its kind: while it runs, and once it has ended."""

from __future__ import annotations

import re
import time
from pathlib import Path

import httpx
import pytest

from standins.console.web_world import World

KINDS = {
    "check": ("/v1/checks", {}),
    "export": ("/v1/exports", {}),
    "report": ("/v1/reports", {"framework": "gdpr"}),
    "scan": ("/v1/orphans/scans", None),
}
ROOT = Path(__file__).resolve().parents[3]


def test_every_kind_of_job_is_tried() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "governance").rglob("*.py"))
    assert set(re.findall(r"jobs\.start\(\s*\"([a-z]+)\"", sources)) == set(KINDS)


@pytest.mark.parametrize(
    "kind",
    [
        *sorted(KINDS.keys() - {"report"}),
        pytest.param("report", marks=pytest.mark.system("the page of a finished report does not open")),
    ],
)
def test_the_page_of_a_finished_job_opens(world: World, kind: str) -> None:
    path, body = KINDS[kind]
    who = "operator" if kind == "scan" else "auditor"
    with httpx.Client(base_url=world.url) as client:
        assert client.post("/console/login", data={"key": world.keys[who]}).status_code == 303
        mine = {"Authorization": f"Bearer {world.keys[who]}", "Idempotency-Key": f"job-{kind}"}
        with httpx.Client(base_url=world.url) as direct:
            job = direct.post(path, json=body, headers=mine).json()["job"]
            deadline = time.monotonic() + 60
            while direct.get(f"/v1/jobs/{job}", headers=mine).json()["ended_us"] is None:
                assert time.monotonic() < deadline
                assert client.get(f"/console/reports/{job}").status_code == 200
                time.sleep(0.02)
            result = direct.get(f"/v1/jobs/{job}", headers=mine).json()["result"]
        shown = client.get(f"/console/reports/{job}")
        assert shown.status_code == 200 and "finished" in shown.text
        for item in result.get("files", ()):
            assert item["sha256"] in shown.text
        if kind == "check":
            assert "sound" in shown.text and "root leaves" in shown.text
        assert client.get("/console/reports").status_code == 200
