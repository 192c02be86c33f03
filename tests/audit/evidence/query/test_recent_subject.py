"""A subject's page of its newest residencies has the figures of the full read, or says what it did not look for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, select

from kvcustody.audit.evidence.coverage import recorded_ends as ends_module
from kvcustody.audit.evidence.processes.work_periods import WorkPeriod
from kvcustody.audit.evidence.query.live_residencies import live_residencies
from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.audit.reports.subject_access import RecentSubject, SubjectPage, recent_subject, subject_page
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.leaf_tables import residencies
from kvcustody.audit.store.schema.ledger import incarnations
from kvcustody.audit.write.append_leaves import Appender
from standins.audit import falsified

NOW_US = 1 << 40
MANY = 30_000


@pytest.fixture
def filled(any_store: Engine, world: Any) -> Iterator[Connection]:
    """Two processes with residencies that run, are held, and ended; some were narrowed."""
    with any_store.connect().execution_options(**WRITE) as connection, connection.begin():
        appender = Appender()
        for seed in range(2):
            events = list(world(seed, blocks=24, narrows=True).run(60).events)
            appender.append(connection, read_leaves(falsified.leaf_bytes(events, f"{seed:032x}")))
    with any_store.connect() as connection:
        yield connection


def pages(connection: Connection, newest: int = MANY) -> list[tuple[RecentSubject, SubjectPage]]:
    """Every subject's page, of the newest residencies and of all."""
    column = residencies.c
    people = select(column.tenant, column.subject).where(column.subject.is_not(None)).distinct()
    return [
        (
            recent_subject(connection, tenant, [subject], now_us=NOW_US, newest=newest),
            subject_page(connection, tenant, [subject], now_us=NOW_US),
        )
        for tenant, subject in connection.execute(people).all()
    ]


def test_the_newest_residencies_have_the_figures_of_the_full_read(filled: Connection) -> None:
    states = set()
    for recent, whole in pages(filled):
        assert recent.page == whole._replace(evidence=recent.page.evidence)
        assert (recent.residencies, recent.unsearched) == (len(whole.holdings), 0)
        states |= {(item.state, item.in_custody > 0) for item in whole.holdings}
    assert {("running", True), ("ended", False)} <= states and {"held", "ending"} & {state for state, _ in states}


def test_only_the_newest_are_read_and_all_are_counted(filled: Connection) -> None:
    for recent, whole in pages(filled, newest=1):
        assert [item in whole.holdings for item in recent.page.holdings] == [True]
        assert recent.residencies == len(whole.holdings)


def test_a_block_that_was_not_looked_for_everywhere_is_counted_so(
    filled: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends_module, "_NEAR", 1)
    monkeypatch.setattr(ends_module, "_NEWEST", 2)
    unsearched = 0
    for recent, whole in pages(filled):
        of_page = {item[:2]: item for item in whole.holdings}
        more = [item.in_custody - of_page[item[:2]].in_custody for item in recent.page.holdings]
        assert min(more) >= 0
        assert recent.unsearched > 0 or not any(more)
        unsearched += recent.unsearched
    assert unsearched > 0


def test_a_server_looks_the_newest_requests_up_and_reads_no_whole_table(filled: Connection) -> None:
    if filled.dialect.name != "postgresql":
        pytest.skip("SQLite has one way to read these")
    filled.exec_driver_sql("ANALYZE")
    filled.commit()
    lives = {life: WorkPeriod("w", 0, None) for life in filled.scalars(select(incarnations.c.uuid))}
    asked: list[tuple[str, Any]] = []

    def hear(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        asked.append((statement, parameters))

    event.listen(filled, "before_cursor_execute", hear)
    live_residencies(filled, now_us=1, periods=lives, newest=5)
    event.remove(filled, "before_cursor_execute", hear)
    statement, parameters = next(one for one in asked if "released_us" in one[0])
    plan = [row[0] for row in filled.exec_driver_sql(f"EXPLAIN {statement}", parameters)]
    assert not any("Seq Scan on residencies" in line for line in plan), plan
