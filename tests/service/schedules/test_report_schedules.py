"""Schedules make each report once: over restarts, with two services on one ledger, and as whoever made them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import event, select, update

from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.service import service_jobs, service_report_schedules, service_reports
from kvcustody.audit.verify.documents.report_rules import read_report
from kvcustody.errors import ConfigError
from kvcustody.governance.api.app import create_app
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.schedules import report_scheduler, signed_verdicts
from kvcustody.governance.service.schedules.folder_delivery import FolderDelivery
from kvcustody.governance.service.schedules.made_reports import Verdict, made_reports, report_figures
from kvcustody.governance.service.schedules.signed_verdicts import DOCUMENT, SignedVerdicts
from kvcustody.governance.service.service import Service
from kvcustody.governance.service.settings import ReportFolder
from standins.service.schedules_world import LATER, made, move_back, on_record, reports, set_rows, settled
from standins.service.service_world import Worker, register, ship

pytestmark = pytest.mark.system


@pytest.fixture
def share(tmp_path: Path) -> Path:
    path = tmp_path / "share"
    path.mkdir(mode=0o700)
    return path


class World:
    """A service with a folder to deliver to, a person who sees all, and a client."""

    def __init__(self, service: Service, client: Any, people: Any) -> None:
        self.service, self.client, self.people = service, client, people

    def schedule(self, who: str = "auditor", **what: Any) -> dict[str, Any]:
        return made(self.client, self.people[who], **{"destinations": ["share"], **what})

    def settled(self, schedule: dict[str, Any], who: str = "auditor") -> list[dict[str, Any]]:
        return settled(self.service, self.client, self.people[who], schedule["schedule"])


@pytest.fixture
def open_world(
    make_service: Callable[..., Service], make_client: Any, make_people: Any, share: Path
) -> Iterator[Callable[..., World]]:
    def make(**explicit: Any) -> World:
        folder = ReportFolder(kind="folder", name="share", path=share, tenants=("acme",))
        service = make_service(**{**LATER, "report_destinations": (folder,), **explicit})
        return World(service, make_client(service), make_people(service))

    yield make


@pytest.fixture
def world(open_world: Callable[..., World]) -> World:
    return with_custody(open_world())


@pytest.fixture(params=["sqlite", "postgresql"])
def on_both(request: pytest.FixtureRequest, open_world: Callable[..., World], tmp_path: Path) -> World:
    if request.param == "sqlite":
        return with_custody(open_world())
    url = request.getfixturevalue("postgres_store").url.render_as_string(hide_password=False)
    return with_custody(open_world(database_url=url, subject_keys_url=f"sqlite:///{tmp_path}/people.db"))


def with_custody(opened: World) -> World:
    worker = Worker()
    register(opened.client, opened.people["worker"], worker)
    batch = worker.batch([worker.started(), *worker.request("acme"), *worker.request("globex")])
    assert ship(opened.client, opened.people["worker"], worker, batch).status_code == 200
    return opened


def test_a_month_that_has_ended_is_made_once_and_delivered(world: World, share: Path) -> None:
    schedule = world.schedule()
    world.service.scheduler.turn()
    assert reports(world.client, world.people["auditor"], schedule["schedule"]) == []  # nothing is due yet
    move_back(world.service, schedule["schedule"], 31)
    [report] = world.settled(schedule)
    assert report["state"] == "made" and report["opinion"] in ("unqualified", "qualified", "adverse")
    assert (report["opinion"] == "unqualified") == (not report["reasons"])
    own = f"kvcustody.example/ledger/{world.service.identity}/report+"
    assert report["signed_by"].startswith(own) and len(report["digest"]) == 64
    [delivery] = report["deliveries"]
    assert delivery["state"] == "delivered" and delivery["tries"] == 1
    [folder] = share.iterdir()
    assert folder.name == delivery["place"] and folder.name.startswith("soc2-")
    stated = orjson.loads((folder / "report.json").read_bytes())
    assert stated["asked"]["since_us"] == report["since_us"] and stated["signature"]
    before = (folder / "report.json").stat().st_mtime_ns
    for _ in range(3):
        world.service.scheduler.turn()
    assert len(reports(world.client, world.people["auditor"], schedule["schedule"])) == 1
    assert (folder / "report.json").stat().st_mtime_ns == before
    [event] = on_record(world.service, "scheduled-report-made")
    assert event["digest"] == report["digest"] and event["opinion"] == report["opinion"]
    assert event["actor"] == "auditor" and event["schedule"] == schedule["schedule"]
    actions = [each["action"] for each in on_record(world.service, "report-delivery")]
    assert actions == ["begun", "delivered"]


def test_missed_months_are_each_made_once_over_a_restart(
    world: World, open_world: Callable[..., World], make_client: Any
) -> None:
    schedule = world.schedule()
    key = world.people["auditor"]
    move_back(world.service, schedule["schedule"], 95)
    world.service.scheduler.turn()  # begun, and not awaited
    started = {each["report"] for each in reports(world.client, key, schedule["schedule"])}
    assert len(started) == 3
    world.service.close()
    again = open_world()
    again.people.keys = world.people.keys
    found = settled(again.service, again.client, key, schedule["schedule"])
    assert {each["report"] for each in found} == started and all(each["state"] == "made" for each in found)
    ends = [each["until_us"] for each in found]
    assert [each["since_us"] for each in found[1:]] == ends[:-1]  # without a hole
    events = [each["report"] for each in on_record(again.service, "scheduled-report-made")]
    assert sorted(events) == sorted(started)
    delivered = [each for each in on_record(again.service, "report-delivery") if each["action"] == "delivered"]
    assert sorted(each["report"] for each in delivered) == sorted(started)


def test_what_was_missed_beyond_a_year_is_listed_and_not_made(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_scheduler, "_CAUGHT_UP_MAX", 2)
    schedule = world.schedule(destinations=[])
    move_back(world.service, schedule["schedule"], 125)
    found = world.settled(schedule)
    assert [each["state"] for each in found] == ["skipped", "skipped", "made", "made"]
    assert all("missed" in each["error"] for each in found[:2])


def test_two_services_on_one_ledger_make_each_once(on_both: World, tmp_path: Path, share: Path) -> None:
    from kvcustody.console.documents import ConsoleDocuments
    from kvcustody.governance.service.service import open_service

    settings = on_both.service.settings
    second = settings.model_copy(
        update={"name": "second", "state_path": tmp_path / "second", "listen": f"unix:{tmp_path}/2.sock"}
    )
    with open_service(second, documents=ConsoleDocuments()) as other:
        schedule = on_both.schedule()
        move_back(on_both.service, schedule["schedule"], 160)
        threads = [threading.Thread(target=each.scheduler.turn) for _ in range(4) for each in (on_both.service, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for _ in range(200):
            other.scheduler.turn()
            listed = reports(on_both.client, on_both.people["auditor"], schedule["schedule"])
            on_both.service.scheduler.turn()
            if all(d["state"] == "delivered" for each in listed for d in each["deliveries"]) and all(
                each["state"] == "made" for each in listed
            ):
                break
            threading.Event().wait(0.05)
        assert len(listed) == 5 and all(each["state"] == "made" for each in listed)
        events = [each["report"] for each in on_record(other, "scheduled-report-made")]
        assert sorted(events) == sorted(each["report"] for each in listed)
        delivered = [each for each in on_record(other, "report-delivery") if each["action"] == "delivered"]
        assert len(delivered) == 5 and len(list(share.iterdir())) == 5


def test_another_service_takes_over_where_a_lease_ran_out(world: World, tmp_path: Path, share: Path) -> None:
    """One ends after it made a report and before it handed it over; its files are on its own machine."""
    from kvcustody.console.documents import ConsoleDocuments
    from kvcustody.governance.service.service import open_service

    schedule = world.schedule()
    key = world.people["auditor"]
    share.chmod(0o777)  # refused: what is made waits
    move_back(world.service, schedule["schedule"], 31)
    [report] = world.settled(schedule)
    assert report["state"] == "made" and report["deliveries"][0]["state"] == "waiting"
    settings = world.service.settings
    world.service.close()
    share.chmod(0o700)
    second = settings.model_copy(update={"name": "second", "state_path": tmp_path / "second"})
    with open_service(second, documents=ConsoleDocuments()) as other:
        other.scheduler.turn()
        client = type(world.client)(create_app(other))
        assert reports(client, key)[0]["deliveries"][0]["state"] == "waiting"  # whose lease is running yet
        set_rows(other, lease_us=0)
        other.scheduler.turn()
        from sqlalchemy import update

        from kvcustody.audit.store.database.engine import WRITE
        from kvcustody.audit.store.schema.service import service_report_deliveries

        for _ in range(200):
            with other.engine.connect().execution_options(**WRITE) as connection, connection.begin():
                connection.execute(
                    update(service_report_deliveries)
                    .where(service_report_deliveries.c.state == "waiting")
                    .values(next_us=0)
                )
            other.scheduler.turn()
            [now] = reports(client, key)
            if now["deliveries"][0]["state"] == "delivered":
                break
            threading.Event().wait(0.05)
        client.close()
        assert now["state"] == "made" and now["deliveries"][0]["state"] == "delivered"
        assert now["digest"] == report["digest"] and now["checkpoint"] == report["checkpoint"]
        assert len(on_record(other, "scheduled-report-made")) == 1


def test_whoever_may_not_see_it_any_more_has_nothing_made(world: World) -> None:
    schedule = world.schedule("dpo", destinations=[])
    move_back(world.service, schedule["schedule"], 31)
    world.service.principals.disable("dpo", by="test", allow_last=True)
    [report] = world.settled(schedule)
    assert report["state"] == "failed" and "may not" in report["error"] and report["digest"] is None
    shown = world.client("GET", "/v1/reports/schedules", world.people["auditor"]).json()["items"]
    assert [each["state"] for each in shown] == ["paused"]
    changed = on_record(world.service, "report-schedule-changed")
    assert [(each["action"], each["actor"]) for each in changed] == [
        ("made", "dpo"),
        ("paused", world.service.settings.name),
    ]
    items = world.client("GET", "/v1/inbox", world.people["auditor"]).json()["items"]
    assert [item["state"] for item in items if item["kind"] == "report"] == ["overdue"]


def test_a_tenant_has_its_own_made_and_sees_no_others(world: World) -> None:
    mine = world.schedule("tenant-admin@acme")
    every = world.schedule("auditor", destinations=[])
    assert mine["tenant"] == "acme" and every["tenant"] is None
    for who, seen in (("tenant-viewer@acme", {mine["schedule"]}), ("tenant-admin@globex", set())):
        found = world.client("GET", "/v1/reports/schedules", world.people[who]).json()["items"]
        assert {each["schedule"] for each in found} == seen
    for act in ("pause", "resume", "delete"):
        path = f"/v1/reports/schedules/{mine['schedule']}/{act}"
        assert world.client("POST", path, world.people["tenant-admin@globex"], json={}).status_code == 404
        assert world.client("POST", path, world.people["tenant-viewer@acme"], json={}).status_code == 403
    foreign = f"/v1/reports/schedules/{every['schedule']}/delete"
    assert world.client("POST", foreign, world.people["tenant-admin@acme"], json={}).status_code == 404


def test_only_destinations_of_the_settings_are_reached(world: World) -> None:
    """Nobody names an address; and people of a tenant only what the settings open to their tenant."""
    ask = {"framework": "soc2", "every": "weekly", "formats": ["json"]}
    path = "/v1/reports/schedules"
    for name, status in (("share", 201), ("elsewhere", 422), ("http://169.254.169.254/", 422), ("/tmp", 422)):
        answer = world.client("POST", path, world.people["auditor"], json={**ask, "destinations": [name]})
        assert answer.status_code == status, (name, answer.text)
    for who, status in (("tenant-admin@acme", 201), ("tenant-admin@globex", 422)):
        answer = world.client("POST", path, world.people[who], json={**ask, "destinations": ["share"]})
        assert answer.status_code == status, (who, answer.text)
        listed = world.client("GET", "/v1/reports/destinations", world.people[who]).json()["items"]
        assert listed == ([{"name": "share", "kind": "folder"}] if status == 201 else [])


def test_a_verdict_is_the_reports_and_not_its_rows(world: World, share: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One UPDATE makes every row unqualified: list, job, page and parcel say what the report says. Control: the row."""
    schedule = world.schedule("auditor", destinations=["share"])
    ask = {"framework": "soc2", "formats": ["json"]}
    job = world.client("POST", "/v1/reports", world.people["auditor"], json=ask).json()["job"]
    deadline = time.monotonic() + 120
    while world.client("GET", f"/v1/jobs/{job}", world.people["auditor"]).json()["state"] != "finished":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    real = {one["report"]: one for one in reports(world.client, world.people["auditor"])}[job]
    forged = {"opinion": "forged", "reasons": "[]", "signed_by": "somebody+00000000"}

    def rows(**values: Any) -> None:
        with world.service.engine.connect().execution_options(**WRITE) as connection, connection.begin():
            connection.execute(update(service_reports).where(service_reports.c.state == "made").values(**values))
            if "opinion" in values:
                for kept in connection.execute(select(service_jobs)).all():
                    if kept.result:
                        result = {**orjson.loads(kept.result), "opinion": "forged"}
                        where = service_jobs.c.job == kept.job
                        connection.execute(
                            update(service_jobs).where(where).values(result=orjson.dumps(result).decode())
                        )

    rows(**forged)
    shown = {one["report"]: one for one in reports(world.client, world.people["auditor"])}[job]
    assert {name: shown[name] for name in ("opinion", "reasons", "signed_by")} == {
        name: real[name] for name in ("opinion", "reasons", "signed_by")
    }
    assert (
        world.client("GET", f"/v1/jobs/{job}", world.people["auditor"]).json()["result"]["opinion"] == real["opinion"]
    )
    with world.service.reading() as connection:
        believed, _ = made_reports(connection, only=job, verdicts=believe_the_row)
        assert believed[0].opinion == "forged", "without the report it would be shown"
    rows(digest="0" * 64)
    shown = {one["report"]: one for one in reports(world.client, world.people["auditor"])}[job]
    assert shown["opinion"] is None and shown["digest"] is None and "not shown" in shown["error"]
    move_back(world.service, schedule["schedule"], 31)
    deliver = FolderDelivery.deliver

    def late(self: FolderDelivery, parcel: Any) -> str:
        assert parcel.facts["opinion"] != "forged"
        return deliver(self, parcel)

    monkeypatch.setattr(FolderDelivery, "deliver", late)
    [handed] = [one for one in world.settled(schedule) if one["schedule"] is not None]
    assert handed["deliveries"][0]["state"] == "delivered"


@pytest.mark.parametrize("verifies", [True, False], ids=["signature verified", "control: not verified"])
@pytest.mark.parametrize("signed", [True, False], ids=["signature kept", "signature removed"])
def test_a_forged_report_in_the_place_of_the_signed_one_has_no_verdict(
    world: World, monkeypatch: pytest.MonkeyPatch, signed: bool, verifies: bool
) -> None:
    """Whoever has the jobs' folder and the database writes a report that is its row's, but for the signature."""
    schedule = world.schedule("auditor", destinations=[])
    move_back(world.service, schedule["schedule"], 31)
    [real] = world.settled(schedule)
    [path] = (world.service.settings.state_path / "jobs").glob(f"{real['job']}/{DOCUMENT}")
    report = read_report(path.read_bytes())
    assert report.signature is not None and real["opinion"] == "adverse"
    forged = report.replace(
        opinion=report["opinion"]._replace(kind="unqualified"), signature=report.signature if signed else None
    )
    path.write_bytes(forged.to_bytes())
    set_rows(world.service, digest=forged.digest(), schedule=None)
    if not verifies:
        monkeypatch.setattr(signed_verdicts, "signature_problems", lambda *given: [])
        monkeypatch.setattr(world.service, "signer", None)
    with world.service.reading() as connection:
        [found], _ = made_reports(connection, only=real["report"], verdicts=world.service.verdicts)
        figures = report_figures(connection, world.service.verdicts)["reports"]
    assert found.opinion == (None if verifies else "unqualified")
    assert figures == ({} if verifies else {"unqualified": 1})


def test_a_page_reads_the_leaves_of_reports_once_and_the_metric_counts_verdicts(world: World) -> None:
    """What rows say of opinions is counted nowhere."""
    schedule = world.schedule("auditor", destinations=[])
    move_back(world.service, schedule["schedule"], 100)
    delivered = world.settled(schedule)
    assert len(delivered) > 1
    set_rows(world.service, opinion="forged")
    elsewhere, asked = SignedVerdicts(), []

    def counted(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "scheduled-report-made" in str(_[0]) or "events.leaf" in statement:
            asked.append(statement)

    event.listen(world.service.engine, "before_cursor_execute", counted)
    try:
        with world.service.engine.connect() as connection:
            recorded, _ = made_reports(connection, verdicts=elsewhere)
            figures = report_figures(connection, elsewhere)["reports"]
    finally:
        event.remove(world.service.engine, "before_cursor_execute", counted)
    assert len(asked) == 2, asked
    opinions = Counter(one["opinion"] for one in delivered)
    assert Counter(one.opinion for one in recorded if one.state == "made") == opinions == figures


def test_a_report_that_another_process_made_has_the_verdict_of_its_leaf(world: World) -> None:
    """And one that is in no leaf, and whose file is gone, has none."""
    schedule = world.schedule("auditor", destinations=[])
    move_back(world.service, schedule["schedule"], 31)
    [real] = world.settled(schedule)
    elsewhere = SignedVerdicts()
    with world.service.reading() as connection:
        [recorded], _ = made_reports(connection, only=real["report"], verdicts=elsewhere)
    assert (recorded.opinion, recorded.digest, recorded.signed_by) == (
        real["opinion"],
        real["digest"],
        real["signed_by"],
    )
    set_rows(world.service, schedule=None)
    with world.service.reading() as connection:
        [recorded], _ = made_reports(connection, only=real["report"], verdicts=elsewhere)
    assert recorded.opinion is None and recorded.error


def believe_the_row(connection: Any, rows: Any) -> dict[str, Verdict]:
    return {row.report: Verdict(row.digest, row.opinion, orjson.loads(row.reasons), row.signed_by) for row in rows}


def test_a_tenants_viewer_has_nothing_handed_over(world: World, share: Path) -> None:
    """It reads reports, and sends none: not when it makes a schedule, resumes or retries one, nor once it was admin.

    Control: the administrator's schedule is handed over; the viewer's own, which goes nowhere, is made.
    """
    path, viewer = "/v1/reports/schedules", world.people["tenant-viewer@acme"]
    ask = {"framework": "soc2", "every": "monthly", "formats": ["json"]}
    refused = world.client("POST", path, viewer, json={**ask, "destinations": ["share"]})
    assert refused.status_code == 403 and "administrator" in refused.json()["detail"]
    assert world.client("POST", path, viewer, json={**ask, "destinations": []}).status_code == 201
    mine = world.schedule("tenant-admin@acme")
    move_back(world.service, mine["schedule"], 31)
    [report] = world.settled(mine)
    assert report["deliveries"][0]["state"] == "delivered" and list(share.iterdir())
    retried = world.client("POST", f"/v1/reports/{report['report']}/retry", viewer, json={})
    assert retried.status_code == 403, retried.text


def test_who_is_no_longer_administrator_has_nothing_handed_over(
    world: World, share: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = world.schedule("tenant-admin@acme")
    find = world.service.principals.find

    def demoted(name: str) -> Any:
        found = find(name)
        return found._replace(roles=frozenset({Role.TENANT_VIEWER})) if name == "tenant-admin@acme" else found

    monkeypatch.setattr(world.service.principals, "find", demoted)
    move_back(world.service, mine["schedule"], 31)
    [report] = world.settled(mine)
    assert report["deliveries"][0]["state"] == "waiting"
    assert "may not have reports handed over" in report["deliveries"][0]["error"] and not list(share.iterdir())


def test_a_destination_that_was_closed_to_a_tenant_gets_nothing(
    world: World, share: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = world.schedule("tenant-admin@acme")
    closed = ReportFolder(kind="folder", name="share", path=share)
    monkeypatch.setattr(world.service.schedules, "destinations", {"share": closed})
    move_back(world.service, schedule["schedule"], 31)
    [report] = world.settled(schedule)
    assert report["deliveries"][0]["state"] == "waiting" and "no such destination" in report["deliveries"][0]["error"]
    assert list(share.iterdir()) == []


def test_what_falls_due_while_it_is_paused_is_not_made(world: World) -> None:
    schedule = world.schedule(destinations=[])
    key, path = world.people["auditor"], f"/v1/reports/schedules/{schedule['schedule']}"
    paused = world.client("POST", f"{path}/pause", key, json={"reason": "holiday"}).json()
    assert paused["state"] == "paused" and paused["next_us"] is None
    move_back(world.service, schedule["schedule"], 70)
    world.service.scheduler.turn()
    assert reports(world.client, key) == []
    assert world.client("POST", f"{path}/resume", key, json={}).json()["state"] == "active"
    world.service.scheduler.turn()
    assert reports(world.client, key) == []
    assert world.client("POST", f"{path}/delete", key, json={}).json()["state"] == "deleted"
    assert world.client("POST", f"{path}/resume", key, json={}).status_code == 404
    assert world.client("GET", "/v1/reports/schedules", key).json()["items"] == []
    actions = [each["action"] for each in on_record(world.service, "report-schedule-changed")]
    assert actions == ["made", "paused", "resumed", "deleted"]
    assert on_record(world.service, "report-schedule-changed")[1]["reason"] == "holiday"


def test_a_report_by_hand_is_on_the_list_with_its_verdict(world: World) -> None:
    key = world.people["auditor"]
    asked = {"framework": "gdpr", "tenant": "acme", "formats": ["json"]}
    job = world.client("POST", "/v1/reports", key, json=asked).json()["job"]
    while (found := world.client("GET", f"/v1/jobs/{job}", key).json())["ended_us"] is None:
        threading.Event().wait(0.02)
    assert found["state"] == "finished", found
    [report] = reports(world.client, key)
    assert (report["report"], report["schedule"], report["principal"]) == (job, None, "auditor")
    assert report["digest"] == found["result"]["digest"] and report["opinion"] == found["result"]["opinion"]
    assert len(reports(world.client, world.people["tenant-viewer@acme"])) == 1
    assert reports(world.client, world.people["tenant-viewer@globex"]) == []


def test_a_clock_in_doubt_makes_nothing_due(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = world.schedule(destinations=[])
    move_back(world.service, schedule["schedule"], 31)
    with monkeypatch.context() as patch:
        patch.setattr(world.service.clock, "in_doubt", True)
        world.service.scheduler.turn()
        assert reports(world.client, world.people["auditor"]) == []
    world.service.scheduler.turn()  # positive control: the clock alone kept it
    assert len(reports(world.client, world.people["auditor"])) == 1


def test_a_period_is_claimed_by_its_key_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control: without the step by which one service moves a schedule on, the key of the row still holds."""
    schedule = world.schedule(destinations=[])
    move_back(world.service, schedule["schedule"], 31)
    world.service.scheduler.turn()
    move_back(world.service, schedule["schedule"], 31)  # as a service that read it before sees it
    found = world.settled(schedule)
    assert len({each["since_us"] for each in found}) == len(found)
    with world.service.engine.connect() as connection:
        rows = connection.execute(service_reports.select()).all()
    assert len(rows) == len(found)


@pytest.mark.parametrize(
    ("odd", "named"),
    [
        ({"zone": "Nowhere/Land"}, "`Nowhere/Land`"),
        ({"every": "fortnightly"}, "`fortnightly`"),
        ({"hour": 99}, "99"),
    ],
    ids=str,
)
def test_a_schedule_of_a_time_that_this_machine_lacks_ends_no_list(
    world: World, share: Path, odd: dict[str, Any], named: str
) -> None:
    """It is named with what is wrong, and the others are made. Control: its calendar alone gives no date."""
    afar, other = world.schedule(), world.schedule()
    with world.service.engine.connect().execution_options(**WRITE) as connection, connection.begin():
        mine = service_report_schedules.c.schedule == afar["schedule"]
        connection.execute(update(service_report_schedules).where(mine).values(**odd))
    found = world.client("GET", "/v1/reports/schedules", world.people["auditor"]).json()["items"]
    assert {one["schedule"]: (one["next_us"] is None, named in one["unread"]) for one in found} == {
        afar["schedule"]: (True, True),
        other["schedule"]: (False, False),
    }
    move_back(world.service, other["schedule"], 31)
    assert world.settled(other)
    with pytest.raises(ConfigError, match=named):
        world.service.schedules.get(afar["schedule"]).calendar.next(0)
    gone = world.client("POST", f"/v1/reports/schedules/{afar['schedule']}/delete", world.people["auditor"], json={})
    assert gone.status_code == 200 and gone.json()["state"] == "deleted"
