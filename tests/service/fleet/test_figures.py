"""A scrape and the overview read figures: no leaf, and no row of ends or receipts, is looked at."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from service_world import OFFSET_US, Worker, register, ship
from sqlalchemy import Engine, event

from kvcustody.audit.counters.judge_hours import HourlyJudge, judge
from kvcustody.governance.observability.metrics import exposition
from kvcustody.governance.service.fleet.figure_keeper import FigureKeeper
from kvcustody.governance.service.service import Service

EVIDENCE = ("events", "custody_ends", "receipts", "releases", "residencies", "decisions", "hit_counters")


@contextmanager
def listening(engine: Engine) -> Iterator[list[str]]:
    """The statements that an engine is given meanwhile."""
    heard: list[str] = []

    def hear(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        heard.append(statement)

    event.listen(engine, "before_cursor_execute", hear)
    yield heard
    event.remove(engine, "before_cursor_execute", hear)


def asks(heard: list[str]) -> set[str]:
    return {name for name in EVIDENCE if any(re.search(rf"\b(from|join) {name}\b", s, re.I) for s in heard)}


@pytest.fixture
def lived(make_service: Callable[..., Service], make_people: Any, make_client: Any) -> Any:
    """A service with custody of two tenants on record, judged; nothing runs in its background."""
    service = make_service()
    service.figures.close()
    people, client = make_people(service), make_client(service)
    worker, key = Worker(), people["worker"]
    register(client, key, worker)
    for _ in range(3):
        events = [*worker.request("acme"), *worker.request("labs")]
        first = [] if worker.sequence else [worker.started()]
        assert ship(client, key, worker, worker.batch([*first, *events])).status_code == 200
    assert service.writer.seal()  # verdicts are of the newest checkpoint
    assert judge(service.reader, service.engine, now_us=OFFSET_US + 60_000_000) is not None
    return service, people, client


def test_a_scrape_asks_for_no_evidence(lived: Any) -> None:
    service, people, client = lived
    with listening(service.reader) as heard:
        text = exposition(service.measuring.samples()).decode()
    assert any("counters" in statement for statement in heard) and not asks(heard)
    assert len(heard) <= 20
    assert "kvcustody_deletion_due_units" in text and "kvcustody_deletion_judged_age_seconds" in text
    due = re.findall(r"kvcustody_deletion_due_units\{.*\} (\S+)", text)
    covered = re.findall(r"kvcustody_deletion_covered_units\{.*\} (\S+)", text)
    assert sorted(map(float, due)) == sorted(map(float, covered)) == [6.0, 6.0]
    with listening(service.reader) as heard:  # control: what recomputes is heard
        assert client("GET", "/v1/custody/coverage", people["auditor"]).status_code == 200
    assert asks(heard) >= {"custody_ends", "events"}


def test_a_scrape_asks_as_often_whatever_was_recorded(lived: Any) -> None:
    service, people, client = lived

    def scrape() -> int:
        service.measuring._asked = -100.0
        with listening(service.reader) as heard:
            list(service.measuring.samples())
        return len(heard)

    before = scrape()
    worker = Worker()
    register(client, people["worker"], worker)
    events = [each for _ in range(200) for each in worker.request("acme")]
    assert (
        ship(client, people["worker"], worker, worker.batch([worker.started(), *events])).status_code == 200
    )
    assert scrape() == before


def test_the_api_counts_and_shows_hours(lived: Any) -> None:
    _, people, client = lived
    every = client("GET", "/v1/audit/counts", people["auditor"]).json()["items"]
    counts = {(row["log"], row["kind"], row["outcome"]): row["events"] for row in every}
    assert counts["tenant/acme", "receipt", "ok"] == 3 and counts["tenant/labs", "residency-opened", ""] == 3
    mine = client("GET", "/v1/audit/counts", people["tenant-viewer@acme"]).json()["items"]
    assert {row["log"] for row in mine} == {"tenant/acme"}
    one = client("GET", "/v1/audit/counts?kind=receipt&since=1", people["tenant-viewer@acme"]).json()["items"]
    assert [(row["kind"], row["events"]) for row in one] == [("receipt", 3)]
    hours = client("GET", "/v1/custody/coverage/hours", people["tenant-viewer@acme"]).json()
    assert hours["judged_us"] == OFFSET_US + 60_000_000 and hours["as_of"] > 0
    assert [(row["row"]["tenant"], row["row"]["due"]) for row in hours["items"]] == [("acme", 6)]


def test_the_keeper_folds_and_judges_and_goes_on_after_a_failure(
    lived: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, _, _ = lived
    made: list[str] = []

    def refused(*_: Any, **__: Any) -> int:
        made.append("fold")
        if len(made) == 1:
            raise RuntimeError("the database is away")
        return 0

    monkeypatch.setattr("kvcustody.governance.service.fleet.figure_keeper.fold", refused)
    monkeypatch.setattr(HourlyJudge, "judge", lambda *_, **__: made.append("judge"))
    keeper = FigureKeeper(service.engine, service.reader, service.clock, seconds=0.001)
    while "judge" not in made:
        pass
    keeper.close()
    assert made[:3] == ["fold", "fold", "judge"]
