"""Months of leaves on PostgreSQL: what the wider keys leave open is kept, and a month goes at once."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
from sqlalchemy import Connection, Engine, func, insert, select
from sqlalchemy.exc import DBAPIError, IntegrityError
from typer.testing import CliRunner

from kvcustody.audit.evidence.processes.sequence_gaps import dropped_spans, gaps, kept_spans
from kvcustody.audit.evidence.query.events import EventFilter, find_events
from kvcustody.audit.exports.export_writer import write_export
from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.keep import streamed_purge, truncate_month
from kvcustody.audit.keep.counted_months import CountedMonths
from kvcustody.audit.keep.purge_and_legal_hold import (
    LogPlan,
    drop_runs,
    expired_leaves,
    lift_hold,
    place_hold,
    plan_purge,
    purge,
    purge_months,
    read_back,
    record_purges,
)
from kvcustody.audit.keep.streamed_purge import purge_to
from kvcustody.audit.kinds import ResidencyOpened, WorkerStarted, WorkerStopped
from kvcustody.audit.store.database.bulk_insert import insert_rows
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.database.monthly_partitions import (
    create_partitions,
    ensure_partitions,
    month_of,
    months_from,
    partitioned,
    partitions,
)
from kvcustody.audit.store.database.postgres_roles import READER, RETENTION, WRITER
from kvcustody.audit.store.schema.all_tables import MONTHLY, every_table
from kvcustody.audit.store.schema.leaf_tables import residencies
from kvcustody.audit.store.schema.ledger import events, logs
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import SystemClock, VirtualClock
from kvcustody.console.main import app
from kvcustody.migrations.upgrade import upgrade
from standins.postgres import set_up_roles_in_turn

KEY = SigningKey.generate("ledger.example/months")
DAY_US = 86_400 * 1_000_000


def instant(year: int, month: int, day: int) -> int:
    return int(datetime(year, month, day, tzinfo=UTC).timestamp()) * 1_000_000


def opening(number: int, at_us: int, tenant: str, subject: str) -> ResidencyOpened:
    return ResidencyOpened(at_us, number, tenant, subject, None, False, "internal", (), (), (), 1, at_us + 9)


class Lived(NamedTuple):
    """A server that has the ledger `half_a_year`, and an export of the whole of it."""

    server: str
    export: Path


@pytest.fixture(scope="module")
def half_a_year(postgres: str, tmp_path_factory: pytest.TempPathFactory) -> Lived:
    """Two tenants and one process a month, from January 2026: 84 leaves a month, and the process's two."""
    folder = tmp_path_factory.mktemp("lived")
    engine = opened(postgres, "half_a_year")
    upgrade(engine)
    with engine.begin() as connection:
        made = create_partitions(connection, instant(2026, 1, 1), 5)
    assert made == tuple(f"2026_0{month}" for month in range(1, 7))
    for month in range(1, 7):
        clock = VirtualClock(1, instant(2026, month, 1))
        writer = EventWriter(engine, worker="w", clock=clock, spill_directory=folder / f"{month}", clear_names=True)
        writer.submit([WorkerStarted(1, "w", 8, 1, 4096, "cpu", "test")])
        first = 84 * month
        writer.submit(
            [opening(first + n, 1 + n * DAY_US // 3, ("acme", "beta")[n % 2], f"{clock.utc_us()}") for n in range(84)]
        )
        writer.submit([WorkerStopped(28 * DAY_US, "w", "stopped", 0, (0,))])
        assert writer.flush()
        writer.close()
    assert CheckpointSigner(engine, [KEY], memory=folder / "signed", clock=SystemClock()).sign_once()
    write_export(folder / "export", LedgerSource(engine), made_at_us=1)
    engine.dispose()  # a template has no connections
    return Lived(postgres, folder / "export")


@pytest.fixture
def lived(half_a_year: Lived) -> Iterator[Engine]:
    """A copy of that ledger for each test."""
    name = f"lived_{uuid.uuid4().hex[:12]}"
    engine = opened(half_a_year.server, name, "TEMPLATE half_a_year")
    yield engine
    engine.dispose()


def opened(server: str, name: str, like: str = "") -> Engine:
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} {like}")
    return open_store(server.replace("/postgres?", f"/{name}?"), timeout_seconds=5.0)


def drop(half_a_year: Lived, engine: Engine, before_us: int) -> tuple[tuple[LogPlan, ...], set[str]]:
    """Purge; what went, and the logs of which rows went one by one."""
    rows: set[str] = set()
    gone = purge(
        engine,
        before_us,
        half_a_year.export,
        [str(KEY.verifier)],
        actor="operator",
        approver="dpo",
        reason="schedule",
        progress=lambda log, done, total: rows.add(log),
    )
    return gone, rows


def count(connection: Connection, table: str) -> int:
    return int(connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar() or 0)


def months_of_tables(connection: Connection) -> list[str]:
    """The months that every table has: the same ones, and no table of a month besides."""
    query = "SELECT relname FROM pg_class WHERE relispartition AND relkind = 'r' AND relname LIKE %s"
    every = [part.name for part in partitions(connection)]
    for table in partitioned(connection):
        found = set(connection.exec_driver_sql(query, (f"{table}\\_%",)).scalars())
        assert found == {f"{table}_{name}" for name in every}
    return every


def size_of(connection: Connection, log: int) -> int:
    return int(connection.scalars(select(logs.c.size).where(logs.c.id == log)).one())


def test_each_leaf_lies_in_its_month(lived: Engine) -> None:
    """P1, and a question about some days reads their months alone."""
    with lived.connect() as connection:
        for month in range(1, 7):
            assert count(connection, f"events_2026_0{month}") == 86
            assert count(connection, f"residencies_2026_0{month}") == 84
        assert count(connection, "events_rest") == count(connection, "residencies_rest") == 0
        assert partitioned(connection) == tuple(MONTHLY)
        assert months_of_tables(connection)[:6] == [f"2026_0{month}" for month in range(1, 7)]
        days = EventFilter(tenant="acme", since_us=instant(2026, 3, 30), until_us=instant(2026, 4, 2))
        assert len(find_events(connection, days).rows) == 2  # April 1st; the last of March has none
        plan = connection.exec_driver_sql(
            "EXPLAIN SELECT leaf FROM events WHERE log = 2"
            f" AND at_us >= {instant(2026, 3, 30)} AND at_us < {instant(2026, 4, 2)}"
        )
        text = " ".join(plan.scalars())
        assert "events_2026_03" in text and "events_2026_04" in text and "events_2026_05" not in text
        assert fsck(connection).ok


def test_a_place_is_given_once_and_in_order(lived: Engine, unguarded: Callable[[Connection], None]) -> None:
    """What a unique index of (log, idx) kept, and that there is no gap; the control is the table without it."""
    with lived.connect() as connection:
        last = connection.execute(
            select(events).where(events.c.kind == "residency-opened").order_by(events.c.at_us.desc()).limit(1)
        ).one()
        size = size_of(connection, last.log)
    other = {
        "sequence": 10**6,
        "at_us": instant(2026, 2, 2),
        "log": last.log,
    }  # of another month than the one there
    place = last._asdict() | other
    for idx, fits in ((last.idx, False), (0, False), (size + 1, False), (size, True)):
        with lived.connect() as connection, connection.begin() as transaction:
            if fits:
                connection.execute(insert(events).values(place | {"idx": idx}))
            else:
                with pytest.raises(IntegrityError, match="appended at the end of their log"):
                    connection.execute(insert(events).values(place | {"idx": idx}))
            transaction.rollback()
    doubled = [tuple((place | {"idx": size, "at_us": place["at_us"] + n}).values()) for n in range(2)]
    with lived.connect() as connection, pytest.raises(DBAPIError, match="appended"), connection.begin():
        insert_rows(connection, events, doubled)  # binary COPY meets the trigger too
    with lived.begin() as connection:
        unguarded(connection)
        connection.execute(insert(events).values(place | {"idx": 0}))
    with lived.connect() as connection:
        what = [problem.what for problem in fsck(connection).problems]
    assert "there is more than one leaf at this place" in what


def test_a_replayed_leaf_meets_itself(lived: Engine, unguarded: Callable[[Connection], None]) -> None:
    """The same bytes have the same time; another leaf under the name is for fsck."""
    with lived.connect() as connection:
        leaf = connection.execute(select(events).order_by(events.c.at_us).limit(1)).one()._asdict()
        size = size_of(connection, leaf["log"])
        with pytest.raises(IntegrityError, match="sequence"), connection.begin_nested():
            connection.execute(insert(events).values(leaf | {"idx": size}))
        connection.execute(insert(events).values(leaf | {"idx": size, "at_us": leaf["at_us"] + 1}))
        what = [problem.what for problem in fsck(connection).problems]
        assert "another leaf has the same name" in what


BOUNDED = {
    "logs": "one row for each tenant, and the system log's",
    "tenants": "one row for each tenant",
    "workers": "one row for each name of a worker",
    "incarnations": "one row for each start of a process",
    "subjects": "one row for each person and session, whatever they ask for; a row is of no month, as one that is used "
    "again is the same, and goes when the name is unlinked",
    "subject_unlinkings": "one row",
    "schema_changes": "one row for each table that has two forms, none as a rule",
    "schema_change_logs": "one row for each log and table that has two forms, none as a rule",
    "policy_revisions": "one row for each policy that was activated, which a person does",
    "policy_release": "one row for each step of a policy's release, which a person does",
    "outages": "one row for each loss or outage of the ledger's database",
    "erasures": "one row for each erasure that somebody asks for",
    "erasure_results": "one row for each erasure and process",
    "erasure_effects": "rows of one erasure in one process, a part each",
    "erasure_remains": "rows of one erasure in one process, a reason and part each",
    "erasure_rereads": "one row for each erasure and process",
    "epoch_raises": "one row for each scope that an erasure narrows",
    "epochs_taken": "one row for each raise that a door took, at most one a second",
    "orphan_scans": "one row for each scan, which have an interval",
    "orphan_findings": "one row for each thing that a scan found wrong",
    "retention_purges": "one row for each purge and log",
    "cases": "one row for each request of a person that somebody records",
    "case_steps": "one row for each step of a case, which a person takes",
    "legal_holds": "one row for each act on a legal hold",
    "tree_nodes": "a fifteenth of the leaves, and what a purge keeps of those that it dropped: by place and not by "
    "time, as proofs of everything later need them, whatever month they are of",
    "root_log": "one row",
    "root_leaves": "one row for each log that grew in an interval of sealing",
    "checkpoints": "one row for each interval of sealing",
    "signed_checkpoints": "one row for each signature, at most one a second",
    "unsealed_heads": "what waits for the next seal",
    "cosignatures": "one row for each signed checkpoint and witness",
    "timestamps": "one row for each checkpoint that was timestamped",
    "counters": "rows for each hour and log, one a figure, however many leaves it counts",
    "counter_deltas": "what waits to be folded",
    "sequence_spans": "one row for each process, and one more for each range that it lacks",
    "coverage_hours": "one row for each hour, log and classification",
    "coverage_pass": "one row",
    "service_principals": "one row for each principal",
    "service_keys": "one row for each key that was issued",
    "service_sessions": "sessions of people that have not expired",
    "service_answers": "answers that are kept for as long as a request may be repeated",
    "service_jobs": "one row for each export or report that somebody starts",
    "service_workers": "one row for each start of a process",
    "service_scan_orders": "one row for each scan that somebody orders",
    "erase_epochs": "raises of scopes whose names may still be somewhere: they end",
    "service_epoch_takers": "one row for each worker and door",
    "service_report_schedules": "one row for each schedule that somebody makes",
    "service_reports": "one row for each report that is made, or was due by a schedule",
    "service_report_deliveries": "one row for each of them and destination",
}


def test_every_table_has_months_or_a_bound() -> None:
    """A table that is added says how it grows: by month, where each request adds to it."""
    tables = {table.name for table in every_table()}
    assert tables == MONTHLY.keys() | BOUNDED.keys() and not MONTHLY.keys() & BOUNDED.keys()
    for table in every_table():
        if table.name in MONTHLY:
            assert MONTHLY[table.name] in table.c


def test_a_row_that_is_there_twice_is_found(lived: Engine, tmp_path: Path) -> None:
    """What the narrower keys of projections kept: one row of a leaf, and one opening of a residency."""
    with lived.connect() as connection:
        row = connection.execute(select(residencies).limit(1)).one()._asdict()
        with pytest.raises(IntegrityError), connection.begin_nested():
            connection.execute(insert(residencies).values(row))
        moved = {"opened_us": row["opened_us"] + 40 * DAY_US, "residency": 10**6}
        connection.execute(insert(residencies).values(row | moved))
        problems = fsck(connection).problems
        assert [problem.what for problem in problems] == ["its row in `residencies` differs from the leaf"]
        assert problems[0].idx == row["idx"]
    writer = EventWriter(
        lived,
        worker="w",
        clock=VirtualClock(1, instant(2026, 6, 29)),
        spill_directory=tmp_path,
        clear_names=True,
    )
    writer.submit([opening(7, 1, "acme", "user"), opening(7, 3 * DAY_US, "beta", "user")])
    assert writer.flush()
    writer.close()
    with lived.connect() as connection:
        problems = fsck(connection).problems
    assert {problem.log for problem in problems} == {"tenant/acme", "tenant/beta"}
    assert {problem.what for problem in problems} == {"another leaf opens residency `7` too"}


def test_months_are_made_beside_writers_and_readers(lived: Engine) -> None:
    """An open transaction that has written, and one that has read a month, wait for nothing and hold up nothing."""
    writing = open_store(lived.url.render_as_string(False), timeout_seconds=0.3)
    try:
        with writing.connect() as writer, writer.begin():
            june = events.c.at_us.between(instant(2026, 6, 1), instant(2026, 6, 30))
            leaf = writer.execute(select(events).where(june).limit(1)).one()
            place = {"log": leaf.log, "sequence": 10**6}
            size = size_of(writer, leaf.log)
            writer.execute(insert(events).values(leaf._asdict() | place | {"idx": size}))
            made = ensure_partitions(lived, instant(2026, 7, 15), 1)
            assert made == ("2026_07", "2026_08")
            more = place | {"idx": size + 1, "sequence": 10**6 + 1, "at_us": instant(2026, 7, 3)}
            writer.execute(insert(events).values(leaf._asdict() | more))
            assert count(writer, "events_2026_07") == 1
    finally:
        writing.dispose()


def test_the_rest_takes_what_has_no_month_and_gives_it_back(lived: Engine) -> None:
    with lived.connect() as connection, connection.begin() as transaction:
        leaf = connection.execute(select(events).limit(1)).one()._asdict()
        size = size_of(connection, leaf["log"])
        late = {"idx": size, "sequence": 10**6, "at_us": instant(2031, 5, 5)}
        connection.execute(insert(events).values(leaf | late))
        assert count(connection, "events_rest") == 1
        assert create_partitions(connection, instant(2031, 5, 1), 0) == ("2031_05",)
        assert count(connection, "events_rest") == 0 and count(connection, "events_2031_05") == 1
        assert create_partitions(connection, instant(2031, 5, 1), 0) == ()
        transaction.rollback()


@pytest.mark.parametrize("table", MONTHLY)
def test_a_partition_is_walled_off(lived: Engine, table: str) -> None:
    """Rights and policies are the table's; nothing reaches a month beside it, the owner's TRUNCATE included."""
    set_up_roles_in_turn(lived)
    month = f"{table}_2026_03"

    def refused(statement: str, role: str = "") -> bool:
        with lived.connect() as connection, connection.begin() as transaction:
            if role:
                connection.exec_driver_sql(f"SET LOCAL ROLE {role}")
            try:
                connection.exec_driver_sql(statement)
            except DBAPIError:
                return True
            transaction.rollback()
        return False

    for role in (READER, WRITER, RETENTION):
        for statement in (f"SELECT * FROM {month}", f"DELETE FROM {month}", f"TRUNCATE {month}"):
            assert refused(statement, role), (role, statement)
    leaves = (f"UPDATE {month} SET leaf = leaf", f"DELETE FROM {month}") if table == "events" else ()
    for statement in (*leaves, f"TRUNCATE {month}", f"TRUNCATE {table}"):
        assert refused(statement), statement
    with lived.begin() as connection:  # a slip of the administrator's; security by row still shows nobody's rows
        connection.exec_driver_sql(f"GRANT SELECT ON {month} TO {READER}")
        connection.exec_driver_sql(f"SET LOCAL ROLE {READER}")
        connection.exec_driver_sql("SET LOCAL kvcustody.tenant = 'acme'")
        assert count(connection, month) == 0
        assert count(connection, table) == (6 * 42 if table in ("events", "residencies") else 0)
    assert not refused(f"SELECT * FROM {table}", READER)


def test_a_month_goes_at_once_and_every_proof_stays(half_a_year: Lived, lived: Engine) -> None:
    """Hashes stay, and what has to stay is put back. Where most of a month is held, rows go one by one."""
    with lived.connect() as connection:
        before = LedgerProofs(connection)
        size, heads = before.signed().size, {log.name: log.head for log in before.logs()}
        kept = before.inclusion("tenant/acme", 170, as_of=size)
    place_hold(lived, "case", "beta", actor="counsel", reason="case")
    gone, rows = drop(half_a_year, lived, instant(2026, 3, 15))
    assert [plan[:3] for plan in gone] == [("tenant/acme", 0, 84)] and rows == {"tenant/acme"}
    lift_hold(lived, "case", actor="counsel", reason="closed")
    gone, rows = drop(half_a_year, lived, instant(2026, 5, 1))
    assert [plan[:3] for plan in gone] == [("tenant/acme", 84, 168), ("tenant/beta", 0, 168)]
    assert rows == set()
    with lived.connect() as connection:
        assert [count(connection, f"events_2026_0{month}") for month in (5, 6)] == [86, 86]
        # Four months went whole: what is left of them is the system log's, together, and they have no table any more.
        assert count(connection, "events_first") == 2 * 4 and count(connection, "residencies_first") == 0
        names = [part.name for part in partitions(connection)]
        assert names[:3] == ["first", "2026_05", "2026_06"] and months_of_tables(connection) == names
        assert connection.scalar(select(func.count()).select_from(residencies)) == 2 * 84
        report = fsck(connection, keys=[KEY.verifier])
        assert report.problems == [] and report.purged == 2 * 168
        after = LedgerProofs(connection)
        now = {log.name: log.head for log in after.logs()}
        assert now["tenant/acme"] == heads["tenant/acme"]  # the others were told of the hold
        assert after.inclusion("tenant/acme", 170, as_of=size) == kept


PEOPLE = {"actor": "operator", "approver": "dpo", "reason": "schedule"}


@pytest.mark.system("a purge with its own export leaves months behind")
@pytest.mark.parametrize("cut", [None, "purge_months", "_empty"])
def test_a_purge_that_writes_its_own_export_empties_months_too(
    lived: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str | None
) -> None:
    """What goes was counted while it was verified: no leaf of it is read again. Cut off, it is finished by asking."""
    monkeypatch.setattr(streamed_purge, "PART_LEAVES_MIN", 256)
    monkeypatch.setattr(streamed_purge, "PART_LEAVES_MAX", 256)
    dropped: list[int] = []

    def tell(what: str, done: int, total: int) -> None:
        if what == "dropped":
            dropped.append(done)

    def go() -> None:
        purge_to(lived, instant(2026, 5, 15), tmp_path / "out", [str(KEY.verifier)], progress=tell, **PEOPLE)

    if cut:
        module = streamed_purge if cut == "purge_months" else truncate_month
        real, calls = getattr(module, cut), [0]

        def killed(*given: Any) -> Any:
            calls[0] += 1
            if module is streamed_purge or calls[0] == 3:
                raise KeyboardInterrupt
            return real(*given)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(module, cut, killed)
            go()
        with lived.connect() as connection:
            assert fsck(connection, keys=[KEY.verifier]).problems == []
            assert count(connection, "events_2026_01") == (86 if module is streamed_purge else 2)
            assert count(connection, "events_2026_03") == 86
    assert dropped == []
    with monkeypatch.context() as patch:
        patch.setattr(truncate_month, "_uncount", None)
        go()
    assert dropped == sorted(dropped) and dropped[-1] == (4 if cut != "_empty" else 2) * 84
    with lived.connect() as connection:
        report = fsck(connection, keys=[KEY.verifier])
        assert report.problems == [] and report.purged == 4 * 84
        assert gaps(connection) == ()
        assert bool(dropped_spans(connection, 1)) and kept_spans(connection, 1) == [(1, 86)]
        assert count(connection, "events_first") == 2 * 4
        assert connection.scalar(select(func.count()).select_from(residencies)) == 2 * 84


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_month_of_which_some_went_before_is_taken_off_by_what_is_there(
    half_a_year: Lived, lived: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_asked: bool
) -> None:
    """With its control: what was counted before cannot be taken off beside what went of it."""
    with lived.connect() as connection:
        plans = [plan for plan in plan_purge(connection, instant(2026, 2, 1)) if plan.leaves]
    going = expired_leaves(lived, plans)
    with CountedMonths(truncate_month.old_months(lived, instant(2026, 2, 1)), going, tmp_path) as counted:
        people = ("operator", "dpo", "schedule")
        _, facts = read_back(lived, half_a_year.export, [str(KEY.verifier)], people, counted)
        assert counted.leaves("2026_01") == 84 and counted.leaves("2026_02") == 0
        record_purges(lived, plans, facts)
        drop_runs(lived, {"tenant/acme": going["tenant/acme"]._replace(below=10)})
        if not is_asked:
            monkeypatch.setattr(counted, "leaves", lambda month: 74)
            with pytest.raises(IntegrityError):
                purge_months(lived, going, counted)
            return
        assert purge_months(lived, going, counted) == 74
    with lived.connect() as connection:
        assert fsck(connection, keys=[KEY.verifier]).problems == []


def test_a_reader_in_the_way_costs_rows_and_no_failure(half_a_year: Lived, lived: Engine) -> None:
    """O2."""
    impatient = open_store(lived.url.render_as_string(False), timeout_seconds=0.3)
    with lived.connect() as reader:
        assert count(reader, "events_2026_01") == 86
        _, rows = drop(half_a_year, impatient, instant(2026, 2, 1))
    impatient.dispose()
    assert rows == {"tenant/acme", "tenant/beta"}
    with lived.connect() as connection:
        assert count(connection, "events_2026_01") == 2 and fsck(connection).ok


def test_the_command_makes_and_shows_months(lived: Engine) -> None:
    url = lived.url.render_as_string(False)
    first, again = (
        CliRunner().invoke(app, ["db", "partitions", "--ledger", url, "--months", "5", "--json"]) for _ in range(2)
    )
    assert first.exit_code == again.exit_code == 0, first.output
    found, later = json.loads(first.stdout), json.loads(again.stdout)
    sizes = {part["name"]: part["bytes"] for part in found["partitions"]}
    assert set(found["made"]) <= sizes.keys() and found["made"] and later["made"] == []
    assert sizes["2026_01"] > sizes[found["made"][-1]] > 0


def test_months_of_the_calendar() -> None:
    assert month_of(instant(2026, 12, 31)) == ("2026_12", instant(2026, 12, 1), instant(2027, 1, 1))
    names = [month.name for month in months_from(instant(2026, 11, 22), 4)]
    assert names == ["2026_11", "2026_12", "2027_01", "2027_02"]


def test_sqlite_is_one_table(store: Engine) -> None:
    with store.connect() as connection:
        assert partitions(connection) == () and create_partitions(connection, 1) == ()
    assert ensure_partitions(store, 1) == ()
