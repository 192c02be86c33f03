"""Residencies by tenant and by subject: the results, the index used, and the effect of an opening."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, insert, select

from kvcustody.audit.evidence.subjects import subject_filter as by_subject
from kvcustody.audit.evidence.subjects.subject_filter import of_subjects, of_tenant
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.leaf_tables import SPAN_LEAVES, residencies
from kvcustody.audit.store.schema.ledger import logs
from standins import builders

SIZE = 3 * SPAN_LEAVES + 5
PLACES = (0, 1, SPAN_LEAVES - 1, SPAN_LEAVES, 2 * SPAN_LEAVES + 7, 3 * SPAN_LEAVES, SIZE - 1)  # alice's


def row(log: int, idx: int, tenant: str, subject: str | None) -> dict[str, Any]:
    numbers = ("revision", "opened_us", "opened_boot_us", "absolute_boot_us", "attached_blocks")
    numbers += ("written_blocks", "low", "high")
    place = {"log": log, "idx": idx, "incarnation": log, "residency": idx, "part": 1}
    who = {"tenant": tenant, "subject": subject, "session": f"of {subject}", "asserted": False}
    return place | who | {"classification": "internal"} | dict.fromkeys(numbers, 0)


@pytest.fixture
def filled(any_store: Engine) -> Iterator[Connection]:
    """Alice of two tenants, among others, over four spans."""
    with any_store.connect().execution_options(**WRITE) as connection, connection.begin():
        if connection.dialect.name == "postgresql":  # these rows have no leaves
            connection.exec_driver_sql("SET LOCAL session_replication_role = replica")
        for log, tenant in ((50, "acme"), (51, "labs")):
            values = {"id": log, "name": f"tenant/{tenant}", "size": SIZE, "frontier": b""}
            connection.execute(insert(logs), [values])
            rows = [row(log, idx, tenant, "alice") for idx in PLACES]
            others = sorted({*range(0, SIZE, 3)} - {*PLACES})
            rows += [row(log, idx, tenant, None if idx % 2 else f"user-{idx % 40}") for idx in others]
            connection.execute(insert(residencies), rows)
    with any_store.connect() as connection:
        yield connection


def places(connection: Connection, *where: Any) -> list[tuple[int, int]]:
    query = select(residencies.c.log, residencies.c.idx).where(*where)
    return sorted((found.log, found.idx) for found in connection.execute(query))


def test_a_subject_is_found_in_every_span(filled: Connection) -> None:
    assert places(filled, *of_subjects(filled, "acme", ["alice"])) == [(50, idx) for idx in PLACES]
    both = places(filled, *of_subjects(filled, "labs", ["alice", "user-6", "nobody"]))
    plain = (residencies.c.tenant == "labs", residencies.c.subject.in_(["alice", "user-6"]))
    assert both == places(filled, *plain) and len(both) > len(PLACES)


def test_the_control_a_span_that_is_left_out_is_missed(filled: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    each = by_subject._each_span
    monkeypatch.setattr(by_subject, "_each_span", lambda connection, last: each(connection, last - 1))
    found = places(filled, *of_subjects(filled, "acme", ["alice"]))
    assert found == [(50, idx) for idx in PLACES if idx < 3 * SPAN_LEAVES]


def test_nobody_and_no_tenant_have_none(filled: Connection) -> None:
    assert places(filled, *of_subjects(filled, "acme", [])) == []
    assert places(filled, *of_subjects(filled, "absent", ["alice"])) == []
    assert places(filled, of_tenant("absent")) == []


def test_a_tenant_has_its_own(filled: Connection) -> None:
    assert places(filled, of_tenant("acme")) == places(filled, residencies.c.tenant == "acme") != []


def test_the_index_has_the_three_conditions(filled: Connection) -> None:
    query = select(residencies.c.session).where(*of_subjects(filled, "acme", ["alice", "user-6"]))
    text = str(query.compile(filled, compile_kwargs={"literal_binds": True}))
    if filled.dialect.name == "sqlite":
        plan = filled.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}").all()[0][-1]
        assert plan.endswith("USING INDEX ix_residencies_log_subject (log=? AND <expr>=? AND subject=?)")
    else:
        filled.exec_driver_sql("ANALYZE residencies")
        filled.exec_driver_sql("SET enable_seqscan = off")
        plan = " ".join(filled.exec_driver_sql(f"EXPLAIN {text}").scalars())
        condition = plan.partition("Index Cond:")[2]
        assert "_log_expr_subject_idx" in plan  # the index of each month
        assert "log = 50" in condition and "(idx / 1024)" in condition and "subject = ANY" in condition


def test_openings_of_many_subjects_change_the_last_spans_alone(store: Engine) -> None:
    """What the index is for: however large a ledger, a batch changes no page of spans that are full."""
    path = builders.ledger_file(store)
    old = [row(50, idx, "acme", f"{idx * 7919 % 10_007:024x}") for idx in range(20 * SPAN_LEAVES)]
    new = [row(50, 20 * SPAN_LEAVES + idx, "acme", f"{idx * 104_729 % 10_007:024x}") for idx in range(200)]
    statement = f"INSERT INTO residencies ({', '.join(old[0])}) VALUES ({', '.join('?' * len(old[0]))})"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_autocheckpoint = 0")

    def pages() -> int:
        """How many pages the write-ahead log has after the new rows, without those of the old."""
        connection.execute("DELETE FROM residencies")
        connection.executemany(statement, [tuple(each.values()) for each in old])
        connection.commit()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        connection.executemany(statement, [tuple(each.values()) for each in new])
        connection.commit()
        return Path(f"{path}-wal").stat().st_size // 4096

    spans = pages()
    connection.execute("DROP INDEX ix_residencies_log_subject")
    connection.execute("CREATE INDEX by_subject ON residencies (log, subject)")
    subjects = pages()
    connection.close()
    assert 2 * spans < subjects
