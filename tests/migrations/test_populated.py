"""Trees are built over a ledger of many tenants and several processes, as its writers left it (0005)."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine, MetaData, Select, Table, delete, func, insert, select, text

from kvcustody.audit.copies.copy_coverage import copy_coverage
from kvcustody.audit.database.engine import SCHEMA_REVISION, VERSION_TABLE, WRITE, open_store
from kvcustody.audit.database.monthly_partitions import FIRST, MONTHS_AHEAD, REST, partitions, size_bytes
from kvcustody.audit.events import (
    CopiesDestroyed,
    CopiesEnded,
    CopiesStored,
    CustodyEnded,
    Event,
    KeyEvent,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
    TransferDecided,
    WorkerStarted,
    WorkerStopped,
)
from kvcustody.audit.events.block_runs import Run
from kvcustody.audit.processes.sequence_gaps import gaps, keep_spans
from kvcustody.audit.query.events import EventFilter, find_events
from kvcustody.audit.schema.all_tables import MONTHLY, every_table
from kvcustody.audit.schema.copies import copy_steps, transfer_decisions
from kvcustody.audit.schema.counters import (
    ALL_HOURS,
    ALL_LOGS,
    VERDICT_COLUMNS,
    counters,
    coverage_hours,
    coverage_pass,
)
from kvcustody.audit.schema.ledger import events, logs, releases
from kvcustody.audit.schema.traces import event_traces
from kvcustody.audit.schema.trees import ROOT, checkpoints, root_leaves, tree_nodes
from kvcustody.audit.subjects import pseudonym_directory
from kvcustody.audit.verify.fsck_ledger import fsck
from kvcustody.audit.writer import event_queue
from kvcustody.errors import CustodyError
from kvcustody.migrations.upgrade import current, upgrade
from standins import builders

pytestmark = pytest.mark.system

TENANTS = [f"tenant-{number}" for number in range(6)]


def life(seed: int, worker: str) -> Iterator[Event]:
    """One process: residencies of tenants of very different sizes, from the start of the process to its end."""
    chance, now = random.Random(seed), 1000
    yield WorkerStarted(now, worker, 4096, 1, 4096, "cpu", "test")
    for number in range(1, 500):
        now += 10
        tenant = TENANTS[min(chance.randrange(6), chance.randrange(6), chance.randrange(6))]
        run = Run(np.arange(3) + number, 10 * number)
        rest = (None, False, "internal", (), (), ("own",), 1, now + 10**6, (run,))
        yield ResidencyOpened(now, number, tenant, f"user-{number % 9}", *rest)
        yield ResidencyReleased(now + 1, number, tenant, "finish", (), 0)
        times = (now + 1, now + 2, now + 1, 1_000_000, now + 10**6)
        yield CustodyEnded(now + 2, tenant, "internal", (run,), "expired", *times)
        done = ("memset", "cpu", 12288, now + 3, now + 4, "full", 1.0, 3, "ok", (run,))
        yield ReceiptRecorded(now + 4, number, 0, tenant, *done)
        if number % 50 == 0:
            yield KeyEvent(now, tenant, "made", number, "operator")
    yield WorkerStopped(now, worker, "stopped", 0, (0,))


REPORTS = ("service_report_schedules", "service_reports", "service_report_deliveries")  # of 0031
SPANS = "sequence_spans"  # of 0041


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A ledger as this program's writers leave it, three processes of two workers."""
    folder = tmp_path_factory.mktemp("written")
    engine = open_store(folder / "ledger.db", timeout_seconds=5.0)
    upgrade(engine)
    with pytest.MonkeyPatch.context() as patch:  # pseudonyms and leaves as they were then
        patch.setattr(event_queue, "_MAY_SHARE", {})
        patch.setattr(pseudonym_directory, "committed_name", lambda *_: secrets.token_hex(12))
        patch.setattr(event_queue, "_BLOCKS_MAX", -1)  # and leaves of their own
        for seed, worker in enumerate(("a", "b", "a")):
            builders.record(engine, folder / "spill", list(life(seed, worker)), worker=worker)
    yield engine
    engine.dispose()


@pytest.fixture(params=["sqlite", "postgresql"])
def earlier(request: pytest.FixtureRequest, written: Engine, tmp_path: Path) -> Iterator[Engine]:
    """The same rows in a database of the revision before trees."""
    if request.param == "sqlite":
        engine = open_store(tmp_path / "earlier.db")
    else:
        engine = open_store(request.getfixturevalue("postgres"))
        with engine.begin() as connection:  # one test after the other, in one database
            connection.exec_driver_sql("DROP SCHEMA public CASCADE")
            connection.exec_driver_sql("CREATE SCHEMA public")
    assert upgrade(engine, "0004") == "0004"
    found, source = MetaData(), MetaData()
    found.reflect(engine)
    source.reflect(written)
    with engine.connect().execution_options(**WRITE) as connection, connection.begin():
        for name, table in found.tables.items():
            if name == VERSION_TABLE:
                continue
            columns = [source.tables[name].c[column.name] for column in table.columns]
            with written.connect() as reading:
                rows = [dict(row) for row in reading.execute(select(*columns)).mappings()]
            if rows:
                connection.execute(insert(table), rows)
    yield engine
    engine.dispose()


def test_trees_over_many_tenants_are_those_that_the_writers_grew(earlier: Engine, written: Engine) -> None:
    assert upgrade(earlier) == SCHEMA_REVISION
    with earlier.connect() as after, written.connect() as before:
        heads = select(logs.c.name, logs.c.size, logs.c.frontier).order_by(logs.c.name)
        assert after.execute(heads).all() == before.execute(heads).all()
        place = (tree_nodes.c.log, tree_nodes.c.level, tree_nodes.c.idx)
        nodes = select(tree_nodes).where(tree_nodes.c.log != ROOT).order_by(*place)
        assert after.execute(nodes).all() == before.execute(nodes).all()
        sizes = dict(after.execute(select(logs.c.name, logs.c.size)).all())
        assert len(sizes) == 7 and max(sizes.values()) > 1500 and sum(sizes.values()) > 6000
        assert after.scalar(select(func.count()).select_from(nodes.subquery())) > 15  # type: ignore[operator]
        # One root leaf a log, one checkpoint over them; and everything computed again agrees.
        assert after.scalar(select(func.count()).select_from(root_leaves)) == 7
        assert after.scalars(select(checkpoints.c.size)).all() == [7]
        assert fsck(after).problems == []


@pytest.mark.parametrize("where", ["first", "last"])
def test_a_ledger_with_a_hole_gets_no_tree(earlier: Engine, where: str) -> None:
    """A leaf that is lost anywhere: the upgrade refuses and leaves the earlier revision."""
    with earlier.connect().execution_options(**WRITE) as connection, connection.begin():
        log = connection.scalar(select(logs.c.id).where(logs.c.name == "tenant/tenant-1"))
        size = connection.scalar(select(logs.c.size).where(logs.c.id == log))
        idx = {"first": 0, "last": size - 1}[where]
        connection.execute(delete(events).where(events.c.log == log, events.c.idx == idx))
    with pytest.raises(CustodyError, match="tenant/tenant-1"):
        upgrade(earlier)
    with earlier.connect() as connection:
        assert current(connection) == "0004"


def test_months_of_leaves_change_no_root_and_no_right(earlier: Engine) -> None:
    """0012: leaves, trees and roots stay, and who had rights and policies on `events` has them on what it becomes."""
    upgrade(earlier, "0011")
    on_postgres = earlier.dialect.name == "postgresql"

    def state() -> list[object]:
        with earlier.connect() as connection:
            found: list[object] = [
                connection.execute(select(table).order_by(*table.primary_key.columns)).all()
                for table in (events, logs, tree_nodes, root_leaves, checkpoints)
            ]
            if on_postgres:
                rights = (
                    "SELECT grantee, privilege_type FROM information_schema.role_table_grants"
                    " WHERE table_name = 'events' ORDER BY 1, 2"
                )
                policies = "SELECT policyname, roles, cmd, qual FROM pg_policies WHERE tablename = 'events'"
                walls = "SELECT relrowsecurity FROM pg_class WHERE relname = 'events'"
                found += [connection.exec_driver_sql(query).all() for query in (rights, policies, walls)]
            return found

    if on_postgres:
        with earlier.begin() as connection:
            connection.exec_driver_sql("DO $$ BEGIN CREATE ROLE r NOLOGIN; EXCEPTION WHEN OTHERS THEN END $$")
            connection.exec_driver_sql("GRANT USAGE ON SCHEMA public TO r")
            connection.exec_driver_sql("GRANT SELECT, INSERT ON events TO r")
            connection.exec_driver_sql("ALTER TABLE events ENABLE ROW LEVEL SECURITY")
            connection.exec_driver_sql("CREATE POLICY p ON events FOR SELECT TO r USING (log = 2)")
    before = state()
    upgrade(earlier)
    assert state() == before
    with earlier.connect() as connection:
        assert fsck(connection).problems == []
        names = [part.name for part in partitions(connection)]
        if on_postgres:
            assert names[0] == FIRST and names[-1] == REST and len(names) == 2 + MONTHS_AHEAD
            connection.exec_driver_sql("SET ROLE r")
            seen = connection.scalar(select(func.count()).select_from(events))
            assert seen == len([row for row in before[0] if row.log == 2])  # type: ignore[attr-defined]
        else:
            assert names == []


def test_traces_come_to_a_ledger_that_had_none(earlier: Engine, tmp_path: Path) -> None:
    """0015: no row and no root changes, nothing has a trace, and the next writer's leaves are found by theirs."""
    upgrade(earlier, "0014")
    on_postgres = earlier.dialect.name == "postgresql"
    tables = (events, logs, tree_nodes, root_leaves, checkpoints)
    everything = [select(table).order_by(*table.primary_key.columns) for table in tables]
    with earlier.connect() as connection:
        before = [connection.execute(query).all() for query in everything]
    if on_postgres:
        rights = _roles_of_0014(earlier)
    assert upgrade(earlier) == SCHEMA_REVISION
    with earlier.connect() as connection:
        assert [connection.execute(query).all() for query in everything] == before
        assert connection.execute(select(event_traces)).all() == []
        if on_postgres:
            for name in ("event_traces", "cases", "case_steps"):
                assert connection.execute(_RIGHTS, {"table": name}).all() == rights, name
            walls = "SELECT tablename FROM pg_policies WHERE policyname = 'of_tenant' ORDER BY 1"
            walled = [
                "case_steps",
                "cases",
                "copy_steps",
                "counter_deltas",
                "counters",
                "coverage_hours",
                "event_traces",
                "events",
                "transfer_decisions",
            ]  # 0022 adds three, 0026 two, 0032 two
            assert connection.exec_driver_sql(walls).scalars().all() == walled
            for table in ("logs", "workers", "incarnations"):  # the rows came with their ids
                numbers = (
                    f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), (SELECT max(id) FROM {table}))"
                )
                connection.exec_driver_sql(numbers)
            connection.commit()
    told = [KeyEvent(1, "tenant-1", "made", 99, "operator", trace) for trace in ("", "ab" * 16)]
    builders.record(earlier, tmp_path / "spill", told, worker="c")
    with earlier.connect() as connection:
        found = find_events(connection, EventFilter(trace="ab" * 16))
        assert [(row.log, row.body["trace"]) for row in found.rows] == [("tenant/tenant-1", "ab" * 16)]
        assert connection.scalar(select(func.count()).select_from(event_traces)) == 1
        assert fsck(connection).problems == []


def test_rows_by_month_are_the_rows_that_were_there(earlier: Engine) -> None:
    """0023: no row, leaf, root or right is lost; each row has its leaf's time, and lies in its leaf's month."""
    upgrade(earlier, "0022")
    later = {"copy_steps", "transfer_decisions"}  # 0026
    names = MONTHLY.keys() - later - {"events"}
    derived = [table for table in every_table() if table.name in names]
    whole = (events, logs, tree_nodes, root_leaves, checkpoints)

    def rows(table: Table) -> list[Any]:
        kept = [column for column in table.c if column.name != "at_us"]
        key = [column for column in table.primary_key if column.name != "at_us"]
        with earlier.connect() as connection:
            return list(connection.execute(select(*kept).order_by(*key)))

    on_postgres = earlier.dialect.name == "postgresql"
    if on_postgres:
        _roles_of_0014(earlier)
        with earlier.begin() as connection:
            connection.exec_driver_sql("GRANT USAGE ON SCHEMA public TO kvcustody_reader")
            connection.exec_driver_sql("GRANT SELECT ON releases TO kvcustody_reader")
            connection.exec_driver_sql("ALTER TABLE releases ENABLE ROW LEVEL SECURITY")
            connection.exec_driver_sql(
                "CREATE POLICY of_tenant ON releases FOR SELECT TO kvcustody_reader USING (log = 2)"
            )

    def rights() -> list[Any]:
        if not on_postgres:
            return []
        walls = (
            "SELECT policyname, cmd, roles, qual, relrowsecurity FROM pg_policies"
            " JOIN pg_class ON relname = tablename AND relkind IN ('r', 'p') WHERE tablename = 'releases'"
        )
        with earlier.connect() as connection:
            granted = [connection.execute(_RIGHTS, {"table": table.name}).all() for table in derived]
            return [*granted, connection.exec_driver_sql(walls).all()]

    before = [rows(table) for table in (*whole, *derived)], rights()
    assert sum(map(len, before[0])) > 10_000
    assert upgrade(earlier) == SCHEMA_REVISION
    assert ([rows(table) for table in (*whole, *derived)], rights()) == before
    with earlier.connect() as connection:
        assert fsck(connection).problems == []  # which makes every row again, its time included
        if not on_postgres:
            return
        assert connection.scalar(select(func.count()).select_from(text("releases_first"))) == 3 * 499
        connection.exec_driver_sql("SET ROLE kvcustody_reader")
        seen = connection.scalars(select(releases.c.log.distinct())).all()
        assert seen == [2]


_RIGHTS = text(
    "SELECT grantee, string_agg(privilege_type, ' ' ORDER BY privilege_type) FROM"
    " information_schema.role_table_grants WHERE table_name = :table AND grantee LIKE 'kvcustody%'"
    " GROUP BY 1 ORDER BY 1"
)


def _roles_of_0014(engine: Engine) -> Any:
    """Roles as `kvcustody db roles` of that revision left them, and what they may do on a projection."""
    run = "DO $$ BEGIN CREATE ROLE {} NOLOGIN; EXCEPTION WHEN OTHERS THEN END $$"
    rights = {"writer": "SELECT, INSERT", "reader": "SELECT", "retention": "SELECT, DELETE"}
    rights |= {"auditor": "SELECT", "signer": "SELECT"}
    with engine.begin() as connection:
        for role, granted in rights.items():
            connection.exec_driver_sql(run.format(f"kvcustody_{role}"))
            connection.exec_driver_sql(f"GRANT {granted} ON decisions TO kvcustody_{role}")
        connection.exec_driver_sql(
            "CREATE FUNCTION kvcustody_log() RETURNS integer LANGUAGE sql AS 'SELECT 1'"
        )
        connection.exec_driver_sql("ALTER TABLE events ENABLE ROW LEVEL SECURITY")
        connection.exec_driver_sql(
            "CREATE POLICY of_tenant ON events FOR SELECT TO kvcustody_reader USING (log = (SELECT kvcustody_log()))"
        )
        return connection.execute(_RIGHTS, {"table": "decisions"}).all()


OF_CASES = ("cases", "case_steps", "legal_holds")  # made or changed by 0032


def rows_of(table: Table) -> Select[Any]:
    """Its rows in order, but those that 0036 adds."""
    query = select(table).order_by(*table.primary_key.columns)
    return query.where(table.c.log != ALL_LOGS) if table is counters else query


def test_sums_over_logs_come_to_a_ledger_that_had_none(earlier: Engine) -> None:
    """0036: of each hour, what its logs have together; nothing that is there changes, and `fsck` agrees."""
    upgrade(earlier, "0032")
    with earlier.connect() as connection:
        before = connection.execute(rows_of(counters)).all()
        assert len(before) > 10
    upgrade(earlier, "0036")
    with earlier.connect() as connection:
        assert connection.execute(rows_of(counters)).all() == before
        made = connection.execute(select(counters).where(counters.c.log == ALL_LOGS)).all()
        assert {(row.scraped, row.hour_us) for row in made} == {
            (row.scraped, row.hour_us) for row in before if row.hour_us != ALL_HOURS
        }
    upgrade(earlier)  # `fsck` reads with the schema of today
    with earlier.connect() as connection:
        assert fsck(connection).problems == []


def test_spans_come_to_a_ledger_that_had_none(earlier: Engine) -> None:
    """0041: nothing else changes, what is missing stays what it was, and the next look keeps what is whole."""
    upgrade(earlier, "0040")
    everything = [rows_of(table) for table in every_table() if table.name != SPANS]
    with earlier.connect() as connection:
        before = [connection.execute(query).all() for query in everything]
    if earlier.dialect.name == "postgresql":
        _roles_of_0014(earlier)  # the roles are there, and nothing of the new table is theirs yet
    assert upgrade(earlier) == SCHEMA_REVISION
    with earlier.connect() as connection:
        assert [connection.execute(query).all() for query in everything] == before
        missing = gaps(connection)
    assert keep_spans(earlier) > 0
    with earlier.connect() as connection:
        assert gaps(connection) == missing and fsck(connection).problems == []
        if earlier.dialect.name == "postgresql":
            every = "DELETE INSERT SELECT"
            granted = {"auditor": "SELECT", "retention": every, "signer": "SELECT", "writer": every}
            expected = [(f"kvcustody_{role}", rights) for role, rights in granted.items()]
            assert connection.execute(_RIGHTS, {"table": SPANS}).all() == expected


def test_copies_come_to_a_ledger_that_had_none(earlier: Engine, tmp_path: Path) -> None:
    """0026: nothing that is there changes; the tables have their months and rights, and the next writer fills them."""
    upgrade(earlier, "0025")
    on_postgres = earlier.dialect.name == "postgresql"
    later = {"copy_steps", "transfer_decisions", SPANS, *REPORTS, *OF_CASES}
    everything = [rows_of(table) for table in every_table() if table.name not in later]
    with earlier.connect() as connection:
        before = [connection.execute(query).all() for query in everything]
    assert sum(map(len, before)) > 10_000
    rights = _roles_of_0014(earlier) if on_postgres else []
    assert upgrade(earlier) == SCHEMA_REVISION
    with earlier.connect() as connection:
        assert [connection.execute(query).all() for query in everything] == before
        assert connection.scalar(select(func.count()).select_from(copy_steps)) == 0
        if on_postgres:
            for name in ("copy_steps", "transfer_decisions"):
                assert connection.execute(_RIGHTS, {"table": name}).all() == rights
                assert size_bytes(connection, partitions(connection)[0], (name,)) > 0
            for table in ("logs", "workers", "incarnations"):  # the rows came with their ids
                connection.exec_driver_sql(
                    f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), (SELECT max(id) FROM {table}))"
                )
            connection.commit()
    lists = (("0f",), (1,), (4,), (400,))
    told: list[Event] = [
        WorkerStarted(5, "d", 64, 1, 4096, "cpu", "test"),
        CopiesStored(5, "nvme", "tenant-1", "low", *lists, (9,), (5,), 1),
        CopiesEnded(9, "nvme", "tenant-1", "low", "ceiling", *lists, (9,), (9,), 1),
        CopiesDestroyed(9, "nvme", "tenant-1", "low", "unlinked", *lists, (9,)),
        TransferDecided(9, "store", "nvme", "tenant-1", 0, 4, 400, 5, 6, "transfer", "done", 5, "faster"),
    ]
    builders.record(earlier, tmp_path / "spill", told, worker="d")
    with earlier.connect() as connection:
        [row] = copy_coverage(connection).rows
        assert (row.tier, row.tenant, row.due, row.covered) == ("nvme", "tenant-1", 1, 1)
        assert connection.scalar(select(func.count()).select_from(transfer_decisions)) == 1
        assert fsck(connection).problems == []
        if on_postgres:  # a row lies in its leaf's month, which is no rest
            rest = connection.exec_driver_sql(f"SELECT count(*) FROM copy_steps_{REST}").scalar()
            assert rest == 0
            mine = [log for log in connection.scalars(select(copy_steps.c.log)) if log == 1]
            connection.exec_driver_sql("GRANT USAGE ON SCHEMA public TO kvcustody_reader")
            connection.exec_driver_sql("SET ROLE kvcustody_reader")
            assert connection.scalars(select(copy_steps.c.log)).all() == mine


def test_verdicts_by_hour_are_judged_anew(earlier: Engine) -> None:
    """0027: what was judged before is dropped, everything else stays, and the next pass judges every hour."""
    upgrade(earlier, "0026")
    later = {
        "coverage_hours",
        "coverage_pass",
        "transfer_decisions",
        SPANS,
        *REPORTS,
        *OF_CASES,
    }  # the third has a column of 0029
    everything = [rows_of(table) for table in every_table() if table.name not in later]
    row = dict.fromkeys(VERDICT_COLUMNS, 5) | {"hour_us": ALL_HOURS, "log": 1, "classification": "low"}
    with earlier.connect() as connection, connection.begin():
        before = [connection.execute(query).all() for query in everything]
        connection.execute(insert(coverage_hours).values(row))
        connection.execute(insert(coverage_pass).values(id=1, size=1, at_us=1))
    assert sum(map(len, before)) > 10_000
    assert upgrade(earlier) == SCHEMA_REVISION
    with earlier.connect() as connection:
        assert [connection.execute(query).all() for query in everything] == before
        assert connection.execute(select(coverage_hours)).all() == []
        assert connection.execute(select(coverage_pass)).all() == []
        assert fsck(connection).problems == []
