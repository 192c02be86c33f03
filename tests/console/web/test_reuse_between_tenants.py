"""How much one tenant reused of another in a period has one answer: API, command and page, beside the leaves."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from sqlalchemy import Engine
from typer.testing import CliRunner

from kvcustody.audit.kinds import HitCounters, WorkerStarted
from kvcustody.console.main import app
from kvcustody.times import DAY_US, iso
from standins.audit.falsified import OFFSET_US
from standins.audit.one_process import OneProcess
from standins.console.page_tables import rows_of
from standins.console.web_world import running

EARLY, LATER = 20 * 1_000_000, 3 * DAY_US
BLOCKS = {EARLY: 12, LATER: 30}


def reused(at_us: int) -> HitCounters:
    blocks = BLOCKS[at_us]
    return HitCounters(
        at_us, "labs", "acme", "reuse", "permit", "labs-reads-acme", 1, at_us - 1, 2, blocks, 16 * blocks
    )


@pytest.mark.system("the page of reuse shows another period than was asked for")
def test_a_period_has_one_answer(store: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page without a period is the control: its last day has none of it."""
    monkeypatch.chdir(tmp_path)  # a command takes the signing key that lies where it runs
    ledger = f"sqlite:///{tmp_path / 'ledger.db'}"
    started = WorkerStarted(1, "worker-1", 64, 1, 4096, "cpu", "test")
    OneProcess(store, tmp_path).fill([started, reused(EARLY), reused(LATER)])
    (tmp_path / "console").mkdir()
    with running(tmp_path / "console", ledger) as opened:
        key = opened.keys["auditor"]
        with httpx.Client(base_url=opened.url, timeout=60) as client:
            assert client.post("/console/login", data={"key": key}).status_code == 303
            for at, blocks in BLOCKS.items():
                since, until = OFFSET_US + at - 10**6, OFFSET_US + at + 10**6
                period = {"since": iso(since)[:19], "until": iso(until)[:19]}
                page = client.get("/console/reuse", params=period | {"owner": "acme", "reader": "labs"}).text
                shown = ["labs", "acme", "labs-reads-acme", "2", str(blocks), str(16 * blocks)]
                [row] = rows_of(page, "Reuse between tenants")
                assert row[:6] == shown
                first, last = (iso(OFFSET_US + moment)[:19].replace("T", " ") for moment in (at - 1, at))
                assert row[6].startswith(first) and row[7].startswith(last)
                for other in ({"owner": "labs"}, {"reader": "acme"}):
                    fewer = client.get("/console/reuse", params=period | other).text
                    assert "No reuse fits these filters" in fewer
                bounds = {"since": since, "until": until}
                known = {"authorization": f"Bearer {key}"}
                items = client.get("/v1/custody/reuse", params=bounds, headers=known).json()["items"]
                assert [[str(value) for value in row.values()][:6] for row in items] == [shown]
                assert [(row["first_us"], row["last_us"]) for row in items] == [(OFFSET_US + at - 1, OFFSET_US + at)]
                none = client.get("/v1/custody/reuse", params=bounds | {"owner": "labs"}, headers=known).json()
                assert none["items"] == []
                words = ["custody", "reuse", "--since", str(since), "--until", str(until), "--json"]
                done = CliRunner().invoke(app, [*words, "--ledger", ledger])
                assert done.exit_code == 0, done.output
                assert json.loads(done.stdout)["items"] == items
            assert "No tenant reused another" in client.get("/console/reuse").text
            meant = client.get("/console/reuse?owner=acne").text
            assert "did you mean <code>acme</code>?" in meant
