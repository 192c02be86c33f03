"""A scrape and the overview read figures: no leaf, and no row of ends or receipts, is looked at; and nobody waits."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, delete, event, select

from kvcustody.audit.evidence.counters.judge_hours import HourlyJudge, judge
from kvcustody.audit.store.schema.sequences import sequence_spans
from kvcustody.audit.write.fold import DELTAS_MAX
from kvcustody.governance.observability.metrics import exposition
from kvcustody.governance.service.fleet import metrics_collector, metrics_samples
from kvcustody.governance.service.fleet.figure_keeper import FigureKeeper
from kvcustody.governance.service.fleet.metrics_collector import MetricsCollector
from kvcustody.governance.service.service import Service
from standins.service.service_world import OFFSET_US, Worker, register, ship

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


def _without_probes(statement: str) -> str:
    """A statement without its questions whether a row's own leaf is there, which read one place of the key."""
    return re.sub(r"FROM events AS its_leaf", "", statement)


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
    control = [
        statement
        for statement in heard
        if re.search(r"events\.kind (IN|=) ", statement) and "logs.name = ?" in statement
    ]
    assert len(control) <= 5, "what waits or is in force: erasures, policies, orders; few and of the system log"
    routed = [statement for statement in heard if "FROM routes_" in statement]
    assert len(routed) == 4, "receipts of ten minutes, read twice a minute at most"
    apart = [*control, *routed]
    heard = [_without_probes(statement) for statement in heard if statement not in apart]
    assert any("counters" in statement for statement in heard) and not asks(heard)
    assert len(heard) <= 27
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
        service.measuring.ledger.fresh_seconds = service.measuring.routes.fresh_seconds = 0.0
        with listening(service.reader) as heard:
            list(service.measuring.samples())
        return len(heard)

    before = scrape()
    worker = Worker()
    register(client, people["worker"], worker)
    events = [each for _ in range(200) for each in worker.request("acme")]
    assert ship(client, people["worker"], worker, worker.batch([worker.started(), *events])).status_code == 200
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


def test_the_keeper_folds_and_judges_and_goes_on_after_a_failure(lived: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    service, _, _ = lived
    calls: list[str] = []

    def refused(*_: Any, **__: Any) -> int:
        calls.append("fold")
        if len(calls) == 1:
            raise RuntimeError("the database is away")
        return 0

    monkeypatch.setattr("kvcustody.governance.service.fleet.figure_keeper.fold", refused)
    monkeypatch.setattr(HourlyJudge, "judge", lambda *_, **__: calls.append("judge"))
    keeper = FigureKeeper(service.engine, service.reader, service.clock, seconds=0.001)
    while "judge" not in calls:
        pass
    keeper.close()
    assert calls[:3] == ["fold", "fold", "judge"]


def test_what_is_left_is_folded_sooner_once_nobody_waits(lived: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the time while there is more and no worker waits, else a tenth; judged when the time has come."""
    service, _, _ = lived
    left, waits = [DELTAS_MAX], [True]

    def folded(*_: Any) -> int:
        time.sleep(0.001)
        return left[0]

    monkeypatch.setattr("kvcustody.governance.service.fleet.figure_keeper.fold", folded)
    keeper = FigureKeeper(service.engine, service.reader, service.clock, seconds=60, waited=lambda: waits[0])
    keeper.close()

    def rests() -> float:
        return round((keeper._fold_at - keeper._folded_at) / keeper._fold_seconds)

    keeper._ending.clear()
    keeper._folded_at = keeper._fold_seconds = 0.0
    keeper.keep()
    assert rests() == 9, "workers wait"
    waits[0] = False
    assert rests() == 1, "there is more, and nobody waits any more"
    left[0], keeper._folded_at = 0, 0.0
    keeper.keep()
    assert rests() == 9, "nothing is left"
    keeper.close()


def test_whole_sequences_are_kept_in_the_background(lived: Any) -> None:
    """So that the next search for missing ones goes on from there."""
    service, _, _ = lived

    def spans() -> int:
        with service.engine.connect() as connection:
            return len(connection.execute(select(sequence_spans)).all())

    with service.engine.begin() as connection:
        connection.execute(delete(sequence_spans))  # the service's own may have had its turn
    keeper = FigureKeeper(service.engine, service.reader, service.clock, seconds=60)
    keeper.close()
    keeper.keep()
    assert spans() > 0 and keeper._spans_at > time.monotonic(), "and not at once again"


class Reading:
    """Something to be read that waits until it is let through, or fails."""

    def __init__(self) -> None:
        self.begun, self.let = threading.Semaphore(0), threading.Semaphore(0)
        self.value, self.fails = 0, False

    def __call__(self) -> int:
        self.begun.release()
        self.let.acquire()
        if self.fails:
            raise RuntimeError("the database is away")
        return self.value


@pytest.fixture
def reading() -> Iterator[tuple[Reading, MetricsCollector[int]]]:
    """A collector, and what it reads."""
    read = Reading()
    collector = MetricsCollector("test", read)
    yield read, collector
    read.let.release(100)
    collector.close()


def test_what_was_read_last_is_shown_while_the_next_read_hangs(reading: Any) -> None:
    read, collector = reading
    assert collector.latest(0) == (None, None, False)
    collector.ask()
    assert collector.latest(0)[0] is None, "nothing was read yet, and nobody waits"
    read.value = 1
    read.let.release()
    assert collector.latest(60).value == 1
    collector.ask()
    assert read.begun.acquire(timeout=60) and read.begun.acquire(timeout=60)
    read.value = 2
    for _ in range(3):  # one read, whoever asks meanwhile
        collector.ask()
    shown = collector.latest(0)
    assert shown.value == 1 and shown.age_seconds > 0 and collector.latest(0).age_seconds > shown.age_seconds
    read.let.release(2)
    assert collector.latest(60).value == 2, "control: who waits has what was read since it asked"
    assert read.begun.acquire(timeout=60) and not read.begun.acquire(blocking=False)


def test_a_failed_read_is_seen_and_an_old_value_is_not_shown(reading: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read, collector = reading
    read.value = 1
    read.let.release(3)
    collector.ask()
    assert collector.latest(60)[::2] == (1, False)
    read.fails = True
    collector.ask()
    failed = collector.latest(60)
    assert failed[::2] == (1, True)
    monkeypatch.setattr(metrics_collector, "STALE_SECONDS_MAX", 0.0)
    stale = collector.latest(60)
    assert stale.value is None and stale.age_seconds >= failed.age_seconds
    monkeypatch.undo()
    read.fails, read.value = False, 3
    collector.ask()
    assert collector.latest(60)[::2] == (3, False)


@pytest.mark.parametrize("interval_seconds", [5.0, 15.0, 60.0, 99.0])
def test_a_scrape_that_never_waits_shows_the_figures_of_the_one_before(interval_seconds: float) -> None:
    """60 s is Prometheus' default: what was read for one scrape is a minute old at the next."""
    now, goes_on = [0.0], threading.Semaphore(0)

    def read() -> float:
        goes_on.acquire()
        return now[0]

    collector = MetricsCollector("ledger", read, clock=lambda: now[0])
    try:
        shown = []
        for scrape in range(4):
            now[0] = scrape * interval_seconds
            collector.ask()
            shown.append(collector.latest(0).value)
            goes_on.release()
            collector.latest(60)
        assert shown == [None, *(interval_seconds * scrape for scrape in range(3))]
        now[0] += max(60.0, 3 * interval_seconds)
        assert collector.latest(0).value is None, "control: older than three scrapes and a minute"
    finally:
        collector.close()


def test_a_scrape_is_answered_while_the_database_is_not(lived: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the ages of what it shows; what cannot be read is shown to fail, and is left out once it is old."""
    service, people, client = lived
    service.measuring.ledger.fresh_seconds = 0.0

    def scraped() -> dict[str, float]:
        lines = client("GET", "/metrics", people["operator"]).text.splitlines()
        return {
            name.removeprefix("kvcustody_"): float(value)
            for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        }

    before = scraped()
    assert before['metrics_collector_success{collector="ledger"}'] == 1
    hangs, monkeypatched = threading.Event(), service.reading

    @contextmanager
    def hanging() -> Iterator[Any]:
        hangs.wait(60)
        with monkeypatched() as connection:
            yield connection

    monkeypatch.setattr(service, "reading", hanging)
    monkeypatch.setattr(metrics_samples, "PATIENCE_SECONDS", 0.0)
    meanwhile = scraped()
    leaves = [name for name in before if name.startswith("ledger_leaves{")]
    assert len(leaves) == 2 and all(meanwhile[name] == before[name] for name in leaves)
    ages = [each['metrics_collector_age_seconds{collector="ledger"}'] for each in (meanwhile, scraped())]
    assert 0 < ages[0] < ages[1]
    monkeypatch.setattr(metrics_collector, "STALE_SECONDS_MAX", 0.0)
    late = scraped()
    assert not late.keys() & {*leaves} and late['metrics_collector_success{collector="ledger"}'] == 0
    assert late['metrics_collector_age_seconds{collector="ledger"}'] > ages[1]
    hangs.set()


@pytest.mark.system("a batch that waits for its commit holds up other requests")
def test_batches_that_wait_for_their_commit_hold_no_other_request(lived: Any) -> None:
    """More of them than there are threads: a scrape and a probe are answered before the first is committed."""
    service, people, client = lived
    workers = [Worker() for _ in range(60)]
    for worker in workers:
        register(client, people["worker"], worker)
    batches = [worker.batch([worker.started(), *worker.request("acme")]) for worker in workers]
    committing, goes_on, first = threading.Event(), threading.Event(), list[int]()
    commit = service.ingest._commit

    def held(group: Any) -> bool:
        first.append(len(group))  # whoever was there by then: one, or a few
        committing.set()
        goes_on.wait(60)
        return bool(commit(group))

    service.ingest._commit = held

    async def ask(method: str, path: str, key: str, **how: Any) -> Any:
        return await client._http.request(method, path, headers={"Authorization": f"Bearer {key}"}, **how)

    async def busy() -> tuple[list[int], list[int]]:
        shipped = [
            asyncio.ensure_future(ask("PUT", f"{worker.path}/batches/1", people["worker"], content=batch.body))
            for worker, batch in zip(workers, batches, strict=True)
        ]
        try:
            while not committing.is_set() or service.ingest._leaves < (60 - first[0]) * len(batches[0].leaves):
                await asyncio.sleep(0.01)
            asked = [ask("GET", path, people["operator"]) for path in ("/metrics", "/health/ready", "/v1/workers")]
            answers = await asyncio.wait_for(asyncio.gather(*asked), 60)
            assert not any(each.done() for each in shipped)
        finally:
            goes_on.set()
        return [each.status_code for each in answers], [each.status_code for each in await asyncio.gather(*shipped)]

    assert client.run(asyncio.wait_for(busy(), 120)) == ([200] * 3, [200] * 60)
