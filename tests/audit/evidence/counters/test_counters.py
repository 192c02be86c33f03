"""Figures equal what the leaves give: on random histories, whoever folds, whatever is killed, before and after."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from sqlalchemy import Connection, Engine, delete, func, insert, literal, select, text
from sqlalchemy.exc import DBAPIError, OperationalError

from kvcustody.audit.evidence.counters import judge_hours
from kvcustody.audit.evidence.counters.hourly_coverage import judged_rows, judged_state, recent, recent_sums
from kvcustody.audit.evidence.counters.judge_hours import HourlyJudge, Spans, judge
from kvcustody.audit.evidence.counters.read_figures import (
    TenantTotals,
    denials_by_rule,
    event_counts,
    hourly_counts,
    largest_tenants,
    leaves_by_tenant,
    orphans_by_class,
    tenant_totals,
)
from kvcustody.audit.evidence.coverage.leaf_record import LeafRecord
from kvcustody.audit.evidence.coverage.summary import coverage
from kvcustody.audit.keep.uncount import uncount
from kvcustody.audit.kinds import (
    CustodyEnded,
    DecisionRecorded,
    Event,
    HitCounters,
    OrphanFound,
    ReceiptRecorded,
    ResidencyOpened,
    RetentionPurged,
    WorkerStarted,
)
from kvcustody.audit.kinds.block_runs import Run
from kvcustody.audit.leaf.change_items import plain_bodies
from kvcustody.audit.project import EVENTS
from kvcustody.audit.store.database.bulk_insert import Inserts
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import WRITE, open_store
from kvcustody.audit.store.schema.counters import (
    ALL_HOURS,
    ALL_LOGS,
    counter_deltas,
    counters,
    coverage_hours,
)
from kvcustody.audit.store.schema.leaf_tables import (
    attachments,
    custody_ends,
    decisions,
    hit_counters,
    orphan_findings,
    releases,
    residencies,
)
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.write import committer
from kvcustody.audit.write.append_leaves import write_deltas
from kvcustody.audit.write.fold import add_to_sums, fold, fold_some
from kvcustody.clock import VirtualClock
from kvcustody.times import HOUR_US
from standins import builders


def more(world: Any) -> list[Event]:
    """Decisions, hits and orphans, of which a world has none."""
    at, (reader, other, *_) = world.now, world.tenants
    events: list[Event] = []
    for number in range(6):
        effect = ("permit", "deny")[number % 2]
        rules = ("rule",) if number % 3 else ()
        events += [
            DecisionRecorded(at, "attach", effect, reader, other, "internal", rules, 1, "grant"),
            HitCounters(at, other, reader, "attach", effect, "own-scope", number % 2, at, 3, 2, 1),
        ]
    return [*events, OrphanFound(at, 1, 1, "leaked", "test", reader, 5, (), "none", "left")]


def written(engine: Engine, make_writer: Any, world: Any, seed: int = 3) -> Any:
    """A random history, in commits of a few events; its writer."""
    played = world(seed, tenants=3).run(120)
    writer = make_writer(engine)
    history = [*played.events, *more(played)]
    for start in range(0, len(history), 40):
        writer.submit(history[start : start + 40])
        assert writer.flush()
    return writer


def totals_from_rows(connection: Connection) -> tuple[TenantTotals, ...]:
    """The same from the rows of evidence, by SQL."""

    def grouped(table: Any, *what: Any) -> dict[str, tuple[int, ...]]:
        rows = connection.execute(select(table.c.tenant, *what).group_by(table.c.tenant))
        return {row[0]: tuple(int(value or 0) for value in row[1:]) for row in rows}

    into, out = residencies.c, releases.c
    opened = grouped(
        residencies,
        func.count().filter(into.part == 1),
        func.sum(into.attached_blocks),
        func.sum(into.written_blocks),
    )
    joined = grouped(attachments, func.sum(attachments.c.attached_blocks))
    left = grouped(releases, func.count().filter(out.part == 1, out.final), func.sum(out.written_blocks))
    ended = grouped(custody_ends, func.sum(custody_ends.c.blocks))
    sizes = connection.execute(select(logs.c.name, logs.c.size).where(logs.c.name.like("tenant/%"))).all()
    totals = []
    for name, size in sorted(map(tuple, sizes)):
        tenant = name.removeprefix("tenant/")
        count, attached, handed = opened.get(tenant, (0, 0, 0))
        gone, later = left.get(tenant, (0, 0))
        attached += joined.get(tenant, (0,))[0]
        written, over = handed + later, ended.get(tenant, (0,))[0]
        numbers = (attached, written, over, size, 0, 0, written - over)
        totals.append(TenantTotals(tenant, count, gone, *numbers))
    return tuple(totals)


def denials_from_rows(connection: Connection) -> Counter[tuple[Any, ...]]:
    one, many = decisions.c, hit_counters.c
    denials: Counter[tuple[Any, ...]] = Counter()
    for query in (
        select(one.reader, one.owner, one.rule, one.revision, literal(1)).where(one.effect == "deny"),
        select(many.tenant, many.owner, many.rule, many.revision, many.requests).where(many.effect == "deny"),
    ):
        for *key, requests in connection.execute(query):
            denials[tuple(key)] += requests
    return denials


def events_from_leaves(connection: Connection) -> Counter[tuple[str, str, int]]:
    """Log, kind and hour of every event, from the bodies of leaves one by one."""
    found: Counter[tuple[str, str, int]] = Counter()
    for leaf in connection.scalars(select(events.c.leaf)):
        for body in plain_bodies(orjson.loads(bytes(leaf))):
            if int(body["part"]) == 1:
                found[body["log"], body["kind"], int(body["at_us"]) // HOUR_US * HOUR_US] += 1
    return found


def agree(engine: Engine) -> None:
    """Every figure is that of the rows and leaves, and `fsck` says so too."""
    with engine.connect() as connection:
        assert tenant_totals(connection) == totals_from_rows(connection)
        rows = denials_from_rows(connection)
        every = denials_by_rule(connection)
        assert {row[:-1]: row.requests for row in every} == rows and rows
        assert denials_by_rule(connection, since_us=0) == every, "a period that holds all of them"
        assert not denials_by_rule(connection, until_us=1), "and one before any"
        by_class = select(orphan_findings.c.orphan, func.count()).group_by(orphan_findings.c.orphan)
        assert orphans_by_class(connection) == Counter(dict(map(tuple, connection.execute(by_class)))) != {}
        expected = events_from_leaves(connection)
        whole: Counter[tuple[str, str]] = Counter()
        for (log, kind, _), number in expected.items():
            whole[log, kind] += number
        found: Counter[tuple[str, str]] = Counter()
        for count in event_counts(connection):
            found[count.log, count.kind] += count.events
        assert found == whole
        for hour in {key[2] for key in expected}:
            for log, kind in {key[:2] for key in expected}:
                if log == "system":
                    continue
                tenant = log.removeprefix("tenant/")
                period = {"since_us": hour + 5, "until_us": hour + 6}
                counted = event_counts(connection, tenant=tenant, kind=kind, **period)
                assert sum(each.events for each in counted) == expected[log, kind, hour]
        assert fsck(connection).problems == []


def sums(engine: Engine) -> list[Any]:
    with engine.connect() as connection:
        return connection.execute(select(counters).order_by(*counters.primary_key.columns)).all()


@pytest.mark.parametrize("seed", [1, 2])
def test_figures_are_those_of_the_leaves_before_and_after_folding(
    any_store: Engine, make_writer: Any, world: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "DELTAS_MAX", 3)  # the writer folds on its way
    writer = written(any_store, make_writer, world, seed)
    assert sums(any_store)
    agree(any_store)
    monkeypatch.setattr(committer, "DELTAS_MAX", 1000)
    writer.submit(more(world(seed)))
    assert writer.flush()
    assert fold(any_store, deltas_max=2) == 2  # a bounded turn
    agree(any_store)
    while fold(any_store):
        pass
    with any_store.connect() as connection:
        assert connection.execute(select(counter_deltas)).first() is None
    agree(any_store)
    once = sums(any_store)
    assert fold(any_store) == 0 and sums(any_store) == once


def test_a_commit_that_fails_counts_nothing(store: Engine, make_writer: Any, world: Any) -> None:
    """Leaf and figure are of one transaction: what is rolled back takes both."""
    writer = written(store, make_writer, world)
    writer.close(5)
    before = sums(store)
    with store.connect() as connection:
        deltas = connection.scalar(select(func.count()).select_from(counter_deltas))
        leaves = connection.scalar(select(func.count()).select_from(events))
    with store.connect().execution_options(**WRITE) as connection:
        transaction = connection.begin()
        inserts = Inserts(connection)
        write_deltas(inserts, {(False, 1, 0): {("gap", EVENTS, "", "", ""): 5}}, {1: 10**6})
        inserts.finish()
        assert connection.scalar(select(func.count()).select_from(counter_deltas)) == deltas + 1
        transaction.rollback()
    with store.connect() as connection:
        assert connection.scalar(select(func.count()).select_from(counter_deltas)) == deltas
        assert connection.scalar(select(func.count()).select_from(events)) == leaves
    assert sums(store) == before


KILLED = """
import os, signal, sys
from kvcustody.audit.write.fold import fold_some
from kvcustody.audit.store.database.engine import WRITE, open_store
engine = open_store(sys.argv[1], timeout_seconds=10)
with engine.connect().execution_options(**WRITE) as connection, connection.begin():
    assert fold_some(connection) > 5
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_fold_that_is_killed_has_folded_nothing(any_store: Engine, make_writer: Any, world: Any) -> None:
    written(any_store, make_writer, world)
    before = sums(any_store)
    url = builders.address_of(any_store)
    ended = subprocess.run([sys.executable, "-c", KILLED, url], check=False, timeout=60)
    assert ended.returncode == -9
    assert sums(any_store) == before
    agree(any_store)
    assert fold(any_store) > 5
    agree(any_store)


def test_several_write_and_several_fold_at_once(
    any_store: Engine, make_writer: Any, world: Any, tmp_path: Path
) -> None:
    engine = any_store
    ending, problems = threading.Event(), list[BaseException]()

    def folds() -> None:
        while not ending.is_set():
            try:
                fold(engine, deltas_max=11)
            except DBAPIError:  # SQLite has one writer at a time: a turn may find it taken
                pass
            except BaseException as problem:
                problems.append(problem)
                return
            ending.wait(0.005)  # a writer's turn comes too

    played = [world(seed, tenants=3).run(80) for seed in (5, 6)]
    writers = [
        make_writer(engine, worker=f"w-{number}", spill_directory=tmp_path / f"spill-{number}") for number in range(2)
    ]
    histories = [
        [
            each._replace(worker=f"w-{number}") if isinstance(each, WorkerStarted) else each
            for each in (*lived.events, *more(lived))
        ]
        for number, lived in enumerate(played)
    ]
    threads = [threading.Thread(target=folds) for _ in range(2)]
    for thread in threads:
        thread.start()
    for step in range(0, max(map(len, histories)), 20):
        for writer, history in zip(writers, histories, strict=True):
            writer.submit(history[step : step + 20])
    for writer in writers:
        assert writer.flush(60)
    ending.set()
    for thread in threads:
        thread.join()
    assert not problems
    agree(engine)


def test_two_transactions_write_deltas_of_one_figure_without_waiting(postgres_store: Engine) -> None:
    """With its control: adding to a sum, as a row of the tenant's would be, does wait."""
    figure = {(False, 1, 0): {("gap", EVENTS, "", "", ""): 1}}
    with postgres_store.connect() as first, postgres_store.connect() as second:
        for connection in (first, second):
            dialect_of(connection).wait_for_locks_at_most(connection, 200)
        for number, connection in enumerate((first, second)):
            inserts = Inserts(connection)
            write_deltas(inserts, figure, {1: number + 1})
            inserts.finish()
        sums = {(False, 0, 1): {("gap", EVENTS, "", "", ""): 1}}
        add_to_sums(first, {**sums})
        with pytest.raises(OperationalError, match="lock timeout"):
            add_to_sums(second, sums)


def test_one_folds_at_a_time(postgres_store: Engine, make_writer: Any, world: Any) -> None:
    written(postgres_store, make_writer, world)
    with postgres_store.connect().execution_options(**WRITE) as one, one.begin():
        assert fold_some(one, deltas_max=3) == 3
        assert fold(postgres_store) == 0
    assert fold(postgres_store) > 0  # and the control
    agree(postgres_store)


def _add_logs(store: Engine, count: int) -> None:
    """Logs of tenants, long enough for every delta of these tests."""
    rows = [{"id": log, "name": f"tenant/t{log}", "size": 100, "frontier": b""} for log in range(1, count + 1)]
    with store.begin() as connection:
        connection.execute(insert(logs), rows)


def test_what_all_time_costs_does_not_grow_with_history(store: Engine) -> None:
    """Ten times the hours: the sums that a scrape reads are as many, and are found by their key."""
    _add_logs(store, 1)
    counts = []
    for hours in (3, 27):
        figures = {
            (False, 1, hour * HOUR_US): {(kind, EVENTS, "", "", ""): 1 for kind in ("gap", "x")}
            for hour in range(hours)
        }
        with store.connect().execution_options(**WRITE) as connection, connection.begin():
            inserts = Inserts(connection)
            write_deltas(inserts, figures, {1: hours})
            inserts.finish()
            while fold_some(connection):
                pass
            whole = counters.c.hour_us == ALL_HOURS
            counts.append(connection.scalar(select(func.count()).select_from(counters).where(whole)))
    assert counts == [1, 1]
    plans = []
    with store.connect() as connection:
        raw = connection.connection.driver_connection
        assert raw is not None
        seen: list[str] = []
        raw.set_trace_callback(seen.append)
        tenant_totals(connection)
        raw.set_trace_callback(None)
        for statement in (each for each in seen if each.startswith("SELECT") and "counters" in each):
            plans += [row[3] for row in raw.execute(f"EXPLAIN QUERY PLAN {statement}")]
    assert any("SEARCH counters" in plan and "hour_us=?" in plan for plan in plans), plans


def test_what_a_history_of_all_logs_costs_does_not_grow_with_them(store: Engine) -> None:
    """Ten times the tenants: as many rows are read for the hours, and they say the same as the logs together."""
    _add_logs(store, 30)
    read = []
    for tenants in (3, 30):
        figures = {
            (False, log, hour * HOUR_US): {("gap", EVENTS, "x", f"of {log}", ""): log}
            for hour in range(5)
            for log in range(1, tenants + 1)
        }
        with store.connect().execution_options(**WRITE) as connection, connection.begin():
            connection.execute(delete(counters))
            inserts = Inserts(connection)
            write_deltas(inserts, figures, dict.fromkeys(range(1, tenants + 1), tenants))
            inserts.finish()
            while fold_some(connection):
                pass
            rows = list(hourly_counts(connection, None))
            assert Counter({hour: events for hour, _, _, events in rows}) == Counter(
                {hour * HOUR_US: tenants * (tenants + 1) // 2 for hour in range(5)}
            )
            assert len(list(hourly_counts(connection, None, since_us=HOUR_US, until_us=2 * HOUR_US))) == 1
            read.append(len(rows))
    assert read == [5, 5]


def test_the_tenants_with_most_leaves_and_the_rest(store: Engine, make_writer: Any, world: Any) -> None:
    written(store, make_writer, world)
    with store.connect() as connection:
        every = leaves_by_tenant(connection)
        assert len(every) == 3
        for limit in range(5):
            named = sorted(every, key=lambda tenant: (-every[tenant], tenant))[:limit]
            found = largest_tenants(connection, limit)
            assert list(found.leaves.items()) == [(tenant, every[tenant]) for tenant in named]
            assert found.others == sum(every.values()) - sum(found.leaves.values())


def test_verdicts_by_hour_are_those_of_coverage(any_store: Engine, make_writer: Any, world: Any) -> None:
    writer = written(any_store, make_writer, world)
    now_us = writer.offset_us + world(3, tenants=3).run(120).now + 60_000_000
    assert judge(any_store, any_store, now_us=now_us) is not None
    with any_store.connect() as connection:
        judged = recent(connection)
        hours = connection.scalar(select(func.count()).select_from(coverage_hours))
        expected = coverage(connection, since_us=now_us - HOUR_US * 23, until_us=now_us, as_of_us=now_us)
        assert hours and judged.rows == expected.rows and judged.lag_us_max == expected.lag_us_max
        assert judged.total.due > 20 and judged.total.covered > 5
        assert recent(connection, tenant="tenant-1").rows == tuple(
            row for row in expected.rows if row.tenant == "tenant-1"
        )
        for tenants in ((), ("tenant-1",), tuple({row.tenant for row in expected.rows})):
            sums = recent_sums(connection, tenants)  # what a scrape reads: the same, added up
            for one in sums:
                mine = [r for r in expected.rows if (r.tenant if r.tenant in tenants else "") == one.tenant]
                assert one[1:5] == tuple(
                    sum(getattr(row, name) for row in mine) for name in ("due", "covered", "overdue", "unproven")
                )
            assert sum(one.due for one in sums) == judged.total.due
            assert max(one.lag_us_max for one in sums) == judged.lag_us_max
        state = judged_state(connection)
        assert state is not None
    earlier = judge(any_store, any_store, now_us=now_us - 1)  # of two the later stays
    with any_store.connect() as connection:
        assert judged_state(connection) == state == earlier
        assert fsck(connection).problems == []


def test_a_pass_during_which_retention_drops_leaves_judged_nothing(
    any_store: Engine, make_writer: Any, world: Any, unguarded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its control: the same pass stays where nothing was dropped."""
    writer = written(any_store, make_writer, world)
    now_us = writer.offset_us + 60_000_000
    assert judge(any_store, any_store, now_us=now_us) == judge(any_store, any_store, now_us=now_us)
    judging = HourlyJudge(any_store, any_store)
    judged, drops = judging._judged, [True]

    def meanwhile(*given: Any) -> Any:
        if drops.pop():
            drops.append(False)
            writer.submit_durable(RetentionPurged(1, "tenant/tenant-0", 0, 1, 1, "sha256:2", "one", "two", "age"))
            with any_store.connect().execution_options(**WRITE) as other, other.begin():
                log = other.scalar(select(logs.c.id).where(logs.c.name == "tenant/tenant-0"))
                unguarded(other)
                leaf = other.scalar(select(events.c.leaf).where(events.c.log == log, events.c.idx == 0))
                uncount(other, log, 0, [bytes(leaf)])
                other.execute(delete(events).where(events.c.log == log, events.c.idx == 0))
        return judged(*given)

    monkeypatch.setattr(judging, "_judged", meanwhile)
    assert judging.judge(now_us=now_us + 1) is None and judging.behind
    with any_store.connect() as connection:
        assert connection.execute(select(coverage_hours)).all() == [] and judged_state(connection) is None


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
@pytest.mark.parametrize("step", [40, 10**6])
def test_a_pass_reads_what_is_new_and_stores_what_a_judge_of_everything_would(
    any_store: Engine, make_writer: Any, world: Any, monkeypatch: pytest.MonkeyPatch, seed: int, step: int
) -> None:
    monkeypatch.setattr(judge_hours, "STEP_LEAVES", step)
    played = world(seed, tenants=3).run(400)
    writer, judging = make_writer(any_store), HourlyJudge(any_store, any_store)
    history = [*played.events, *more(played)]
    for start in range(0, len(history), 100):
        writer.submit(history[start : start + 100])
        assert writer.flush()
        now_us = writer.offset_us + max(event.at_us for event in history[: start + 100]) + 2_000_000
        while judging.judge(now_us=now_us) is None or judging.behind:
            assert_judged(any_store)
        assert_judged(any_store)
    with any_store.connect() as connection:
        assert sum(row.due for row in recent(connection).rows) > 20
        leaves = connection.scalar(select(func.count()).select_from(events))
    assert 0 < len(judging._kept) < leaves / 2
    for hours in (1, 23, 25):  # with nothing new
        assert judging.judge(now_us=now_us + hours * HOUR_US) is not None
        assert_judged(any_store)


@pytest.mark.parametrize("blind", [False, True])
def test_evidence_after_the_verdict_begins_everything_anew(
    store: Engine, make_writer: Any, world: Any, monkeypatch: pytest.MonkeyPatch, blind: bool
) -> None:
    """A use of a block that is on record after what proved the block gone; and the control, which does not look."""
    played = world(1, tenants=3).run(300)
    writer, judging = make_writer(store), HourlyJudge(store, store)
    writer.submit(played.events)
    assert writer.flush()
    now_us = writer.offset_us + played.now + 60_000_000
    assert judging.judge(now_us=now_us) is not None
    ended = [each for each in played.events if isinstance(each, CustodyEnded)]
    opened = next(each for each in played.events if isinstance(each, ResidencyOpened))
    moment = max(each.at_us for each in played.events)
    for late in ended:  # somebody says to use it to this day
        writer.submit([opened._replace(residency=10**6 + late.at_us, attached=late.runs, at_us=moment)])
    assert writer.flush()
    if blind:
        monkeypatch.setattr(LeafRecord, "names_any", lambda *_: False)
    judging.judge(now_us=now_us)
    assert judging.behind is not blind
    while judging.behind:
        judging.judge(now_us=now_us)
    if blind:
        with pytest.raises(AssertionError):
            assert_judged(store)
    else:
        assert_judged(store)


class _Impatient(HourlyJudge):
    """The control: it waits no longer after a late leaf."""

    _wait_us = property(lambda _: judge_hours._WAIT_US, lambda *_: None)  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [HourlyJudge, _Impatient])
def test_evidence_of_days_later_is_met_in_the_end(
    store: Engine, make_writer: Any, monkeypatch: pytest.MonkeyPatch, kind: type[HourlyJudge]
) -> None:
    """A receipt that comes three days late, beyond a step's end: each longer wait begins anew once, and then none."""
    monkeypatch.setattr(judge_hours, "STEP_LEAVES", 1)
    clock = VirtualClock(1, 1_800_000_000_000_000)
    writer, judging = make_writer(store, clock=clock), kind(store, store)
    run = (Run(np.arange(4), 1),)
    opened = ResidencyOpened(1, 1, "acme", None, None, True, "internal", (), (), ("own",), 1, 10**9, run)
    ended = CustodyEnded(20, "acme", "internal", run, "expired", 10, 20, 5, 1_000_000, 10**9)

    two, three = (1 + days * 24 * HOUR_US for days in (2, 3))
    receipt = ReceiptRecorded(three, 1, 0, "acme", "memset", "cpu", 4, 30, 40, "full", 1.0, 4, "ok", run)
    history = [
        (0, WorkerStarted(1, "w", 64, 1, 4096, "cpu", "test"), opened, ended),
        (2, DecisionRecorded(two, "attach", "deny", "acme", "acme", "internal", (), 1, "")),
        (1, receipt),
    ]
    for days, *recorded in history:
        clock.advance(days * 24 * HOUR_US)
        writer.submit(recorded)
        assert writer.flush() and writer.seal()
    passes = 0
    while passes < 30 and (judging.judge(now_us=clock.utc_us()) is None or judging.behind):
        passes += 1
    assert judging.behind is (kind is _Impatient)
    if kind is HourlyJudge:
        assert_judged(store)


def assert_judged(engine: Engine) -> None:
    with engine.connect() as connection:
        state = judged_state(connection)
        if state is not None:
            stored = connection.execute(select(coverage_hours).order_by(*coverage_hours.primary_key.columns))
            assert [tuple(row) for row in stored] == sorted(judged_rows(connection, state))


def test_one_of_all_judges(postgres_store: Engine) -> None:
    one, other = (HourlyJudge(postgres_store, postgres_store) for _ in range(2))
    assert one.leads() and one.leads() and not other.leads()
    one.close()
    assert other.leads() and not one.leads()
    other.close()
    one.close()


def test_spans_are_a_set() -> None:
    chance, spans, every = np.random.default_rng(3), Spans(), set[int]()
    for _ in range(50):
        values = chance.integers(0, 300, 9)
        spans.add(values)
        every |= set(values.tolist())
        asked = np.arange(-3, 305)
        assert spans.has(asked).tolist() == [value in every for value in asked.tolist()]
    assert len(spans._first) < len(every)


ONE_MORE = "figures = replace(figures, '\"events\",', '\"even\",')"


def test_an_edited_figure_is_found(any_store: Engine, make_writer: Any, world: Any) -> None:
    written(any_store, make_writer, world)
    assert fold(any_store, deltas_max=2) == 2
    edits = (
        f"UPDATE counters SET {ONE_MORE} WHERE hour_us = -1 AND NOT scraped",
        f"UPDATE counters SET {ONE_MORE} WHERE hour_us <> -1 AND NOT scraped",
        f"UPDATE counter_deltas SET {ONE_MORE} WHERE NOT scraped",
        "UPDATE counter_deltas SET figures = 'x'",
        "UPDATE counters SET figures = '[[1]]'",
        f"UPDATE counters SET {ONE_MORE} WHERE log = {ALL_LOGS} AND NOT scraped",
        f"DELETE FROM counters WHERE log = {ALL_LOGS}",
        "UPDATE counters SET scraped = true WHERE log = (SELECT max(log) FROM counters) AND NOT scraped"
        " AND NOT EXISTS (SELECT 1 FROM counters AS o WHERE o.scraped AND o.log = counters.log)",
        "DELETE FROM counter_deltas WHERE NOT scraped",
        "INSERT INTO counters (scraped, hour_us, log, figures) VALUES (false, 0, 999, '[]')",
    )
    for edit in ("SELECT 1", *edits):  # and the control
        with any_store.connect() as connection:
            if edit in edits:
                assert connection.execute(text(edit)).rowcount > 0
            found = [problem.what for problem in fsck(connection).problems]
            connection.rollback()
        assert bool(found) == (edit in edits) and all("counter" in what for what in found), (edit, found)


def test_a_readers_statement_ends(postgres_store: Engine) -> None:
    """And one that may take longer does, where the reader says so for its transaction."""
    url = postgres_store.url.difference_update_query(["options"]).render_as_string(False)
    engine = open_store(url, read_only=True, statement_seconds=0.2)
    with engine.connect() as connection:
        with pytest.raises(DBAPIError, match="statement timeout"):
            connection.execute(text("SELECT pg_sleep(5)"))
        connection.rollback()
        dialect_of(connection).as_long_as_it_takes(connection)
        assert connection.scalar(text("SELECT 7 FROM pg_sleep(0.5)")) == 7
    engine.dispose()
