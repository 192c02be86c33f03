"""`kvcustody report schedules`, `list` and `retry`: the same on the ledger itself and asked of a control plane."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from typer.testing import CliRunner

from kvcustody.console.main import app
from kvcustody.governance.service.access.local_administration import local_name
from kvcustody.governance.service.schedules import report_scheduler
from kvcustody.governance.service.service import Service
from kvcustody.governance.service.settings import ReportFolder
from standins.service.schedules_world import LATER, move_back, on_record, settled
from standins.service.service_world import Server, Worker, register, ship


class Run:
    """Runs commands with the options of one way to the schedules."""

    def __init__(self, ways: dict[str, list[str]]) -> None:
        self._ways = ways
        self.has_leaves_alone = "--ledger" in ways["list"]

    def __call__(self, *words: str, exit_code: int = 0) -> str:
        options = self._ways["list" if words[0] == "list" else "schedules"]
        found = CliRunner().invoke(app, ["report", *words, *options])
        structlog.reset_defaults()  # its log ends with it: the service of the test has one of its own
        assert found.exit_code == exit_code, (words, found.output, found.stderr)
        return found.stdout if not exit_code else found.stderr

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--json"))


@pytest.fixture(params=["ledger", "server"])
def opened(
    request: pytest.FixtureRequest,
    make_service: Callable[..., Service],
    make_client: Any,
    make_people: Any,
    tmp_path: Path,
) -> Any:
    share = tmp_path / "share"
    share.mkdir(mode=0o700)
    folder = ReportFolder(kind="folder", name="share", path=share)
    service = make_service(**LATER, report_destinations=(folder,))
    client, people = make_client(service), make_people(service)
    worker = Worker()
    register(client, people["worker"], worker)
    ship(client, people["worker"], worker, worker.batch([worker.started(), *worker.request("acme")]))
    if request.param == "ledger":
        config = tmp_path / "service.yaml"
        config.write_text(f"report_destinations:\n  - {{kind: folder, name: share, path: {share}}}\n")
        ledger = ["--ledger", service.settings.database_url]
        run = Run({"list": ledger, "schedules": ["--config", str(config), *ledger]})
        yield run, service, client, people, local_name()
        return
    key = tmp_path / "auditor.key"
    key.write_text(people["auditor"])
    key.chmod(0o600)
    server = Server(service)
    way = ["--server", server.address, "--api-key-file", str(key)]
    yield Run({"list": way, "schedules": way}), service, client, people, "auditor"
    server.close()


@pytest.mark.system("a schedule's commands fail on one of the two doors")
def test_a_schedule_from_its_making_to_its_end(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, service, client, people, who = opened
    assert "there is no schedule" in run("schedules", "list") and "no report was made" in run("list")
    words = ["add", "--framework", "soc2", "--every", "monthly", "--format", "json", "--tenant", "acme"]
    schedule = run.json("schedules", *words, "--zone", "Europe/Berlin", "--to", "share")
    assert (schedule["principal"], schedule["tenant"], schedule["zone"]) == (who, "acme", "Europe/Berlin")
    [listed] = run.json("schedules", "list")["items"]
    assert listed == schedule
    assert schedule["schedule"] in run("schedules", "list")
    move_back(service, schedule["schedule"], 31)
    [report] = settled(service, client, people["auditor"], schedule["schedule"])
    assert report["deliveries"][0]["state"] == "delivered"
    [item] = run.json("list")["items"]
    if run.has_leaves_alone:  # a verdict is that of its leaf there, which has no reasons
        assert report["reasons"] and item == {**report, "reasons": []}
    else:
        assert item == report
    shown = run("list", "--tenant", "acme")
    assert report["digest"][:12] in shown and report["opinion"] in shown.replace("\n", "")
    assert "nothing of this report failed" in run("retry", report["report"], exit_code=2)

    monkeypatch.setattr(report_scheduler, "_TRIES_MAX", 1)
    (service.settings.report_destinations[0].path).chmod(0o777)
    move_back(service, schedule["schedule"], 62)
    second = settled(service, client, people["auditor"], schedule["schedule"])[0]
    assert second["deliveries"][0]["state"] == "given-up"
    assert run.json("retry", second["report"])["deliveries"][0]["state"] == "waiting"
    service.settings.report_destinations[0].path.chmod(0o700)
    again = settled(service, client, people["auditor"], schedule["schedule"])[0]
    assert again["deliveries"][0]["state"] == "delivered"

    for act, state in (("pause", "paused"), ("resume", "active"), ("delete", "deleted")):
        assert run.json("schedules", act, schedule["schedule"], "--reason", "why")["state"] == state
    assert run.json("schedules", "list")["items"] == []
    changed = on_record(service, "report-schedule-changed")
    assert [each["action"] for each in changed] == ["made", "paused", "resumed", "deleted"]
    assert {each["actor"] for each in changed} == {who} and changed[1]["reason"] == "why"


def test_what_is_wrong_is_one_line(opened: Any) -> None:
    run = opened[0]
    add = ["schedules", "add", "--every", "weekly", "--framework"]
    assert "none of" in run(*add, "nis3", exit_code=2)
    assert "destination" in run(*add, "soc2", "--to", "http://169.254.169.254/", exit_code=2)
    assert "time zone" in run(*add, "soc2", "--zone", "Mars/Olympus", exit_code=2)
    assert "no id" in run("schedules", "pause", "../../keys", exit_code=2)
    run("schedules", "pause", "ab" * 8, exit_code=2)
    run("retry", "ab" * 16, exit_code=2)
