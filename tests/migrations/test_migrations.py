"""Migrations: forward without loss on both databases, and equal to the declared tables."""

from __future__ import annotations

import ast
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Engine, MetaData, insert, inspect, select

from kvcustody.audit.database.engine import SCHEMA_REVISION, VERSION_TABLE, WRITE, open_store
from kvcustody.audit.schema.ledger import custody_ends, events, incarnations, metadata, residencies
from kvcustody.errors import LedgerError
from kvcustody.migrations.upgrade import current, upgrade


@pytest.fixture(params=["sqlite", "postgresql"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    if request.param == "sqlite":
        engine = open_store(tmp_path / "ledger.db")
    else:
        import psycopg

        uri = request.getfixturevalue("postgres")
        name = f"migrate_{uuid.uuid4().hex[:12]}"
        with psycopg.connect(uri, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        engine = open_store(uri.replace("/postgres?", f"/{name}?"))
    yield engine
    engine.dispose()


def partitions_of(engine: Engine) -> set[str]:
    """Tables whose rows are another's too."""
    if engine.dialect.name == "sqlite":
        return set()
    with engine.connect() as connection:
        return set(
            connection.exec_driver_sql("SELECT relname FROM pg_class WHERE relispartition").scalars().all()
        )


def every_row(engine: Engine) -> dict[str, list[dict[str, Any]]]:
    found, parts = MetaData(), partitions_of(engine)
    found.reflect(engine)
    with engine.connect() as connection:
        return {
            name: sorted(
                (dict(row) for row in connection.execute(select(table)).mappings()),
                key=lambda row: str(list(row.values())),
            )
            for name, table in found.tables.items()
            if name != VERSION_TABLE and name not in parts
        }


def populate(engine: Engine, rows: int = 300) -> None:
    """Rows in every table of the first revision, as that revision declares them."""
    found, parts = MetaData(), partitions_of(engine)
    found.reflect(engine)
    makers: dict[str, Callable[[int], Any]] = {
        "INTEGER": lambda n: n,
        "BIGINT": lambda n: n * 1000,
        "TEXT": lambda n: f"text {n}",
        "VARCHAR": lambda n: f"{n:032x}"[-32:],
        "BOOLEAN": lambda n: n % 2 == 0,
        "BLOB": lambda n: b"leaf %d" % n,
        "BYTEA": lambda n: b"leaf %d" % n,
    }
    with engine.connect().execution_options(**WRITE) as connection, connection.begin():
        if engine.dialect.name == "postgresql":  # the rows are nobody's log
            connection.exec_driver_sql("SET LOCAL session_replication_role = replica")
        for name, table in found.tables.items():
            # The root log has its one row from the start, and partitions get theirs through their tables.
            if name in (VERSION_TABLE, "root_log") or name in parts:
                continue
            values = []
            for number in range(1, rows + 1):
                row = {}
                for column in table.columns:
                    kind = str(column.type)
                    made = makers[kind.split("(", maxsplit=1)[0]](number)
                    limit = getattr(column.type, "length", None)
                    row[column.name] = made[-limit:] if limit and isinstance(made, str) else made
                if name == "events":  # each log holds one leaf, in its place
                    row["idx"] = 0
                elif name == "logs":
                    row["size"] = 1
                values.append(row)
            connection.execute(insert(table), values)


def test_a_populated_ledger_moves_forward_without_loss(empty: Engine) -> None:
    assert upgrade(empty, "0001") == "0001"
    populate(empty)
    before = every_row(empty)
    assert upgrade(empty) == SCHEMA_REVISION
    after = every_row(empty)
    trees = {"tree_nodes", "root_log", "root_leaves", "checkpoints", "signed_checkpoints", "unsealed_heads"}
    erasures = {"erasure_effects", "erasure_remains", "erasure_rereads"}
    nouns = ["principals", "keys", "sessions", "answers", "jobs", "workers", "scan_orders"]
    nouns += ["report_schedules", "reports", "report_deliveries"]
    service = {f"service_{noun}" for noun in nouns}
    keeping = {"cosignatures", "timestamps", "retention_purges", "legal_holds"}
    figures = {"counters", "counter_deltas", "coverage_hours", "coverage_pass", "sequence_spans"}
    assert (
        after.keys() - before.keys()
        == {"attachments", "event_traces", "policy_release", "subject_unlinkings"}
        | {
            *trees,
            *erasures,
            *service,
            *keeping,
            *figures,
            "copy_steps",
            "transfer_decisions",
            "cases",
            "case_steps",
        }
        and len(before) > 15
    )
    assert after["attachments"] == [] and before.keys() <= after.keys()
    for name, rows in before.items():
        kept = [{key: row[key] for key in rows[0]} for row in after[name]]
        assert kept == rows, name
    with empty.connect() as connection:
        assert connection.scalars(select(residencies.c.written_blocks)).all() == 300 * [0]
        query = select(custody_ends.c.due_us, custody_ends.c.due_boot_us, incarnations.c.offset_us).join(
            incarnations, incarnations.c.id == custody_ends.c.incarnation
        )
        derived = connection.execute(query).all()
    assert len(derived) == 300 and all(row.due_us == row.due_boot_us + row.offset_us for row in derived)


def test_erasures_get_what_their_leaves_say(empty: Engine) -> None:
    upgrade(empty, "0005")
    found = MetaData()
    found.reflect(empty)
    event = {"log": 1, "incarnation": 7, "part": 1, "parts": 1, "outage": "B", "at_us": 5}
    request = {"log": 1, "idx": 0, "erasure": "e", "selector": "domain", "actor": "dpo", "incarnation": 7}
    result = {"log": 1, "idx": 1, "erasure": "e", "outcome": "complete", "reason": "", "at_us": 5}
    numbers = {"at_us": 5, "at_boot_us": 5, "deadline_boot_us": 9}
    rows: dict[str, list[dict[str, Any]]] = {
        "events": [
            {
                **event,
                "idx": 0,
                "sequence": 1,
                "kind": "erasure-requested",
                "leaf": b'{"detail":"all of it"}',
            },
            {**event, "idx": 1, "sequence": 2, "kind": "erasure-completed", "leaf": b"{}"},
        ],
        "erasures": [{**request, **numbers}],
        "erasure_results": [{**result, "residencies": 1, "blocks": 2, "remaining": 0}],
    }
    with empty.connect().execution_options(**WRITE) as connection, connection.begin():
        for name, values in rows.items():
            connection.execute(insert(found.tables[name]), values)
    upgrade(empty)
    after = every_row(empty)
    assert [row["detail"] for row in after["erasures"]] == ["all of it"]
    assert [row["incarnation"] for row in after["erasure_results"]] == [7]


def test_the_migrated_schema_is_the_declared_one(empty: Engine) -> None:
    upgrade(empty)
    parts = partitions_of(empty)
    with empty.connect() as connection:
        context = MigrationContext.configure(
            connection,
            opts={
                "version_table": VERSION_TABLE,
                "compare_server_default": True,
                "include_name": lambda name, kind, parents: kind != "table" or name not in parts,
            },
        )
        found = compare_metadata(context, metadata)
        if empty.dialect.name == "postgresql":  # a partitioned table's keys contain what it is partitioned by
            keys = {(act, *(column.name for column in key.columns)) for act, key in found}
            leaf, opening = ("incarnation", "sequence", "part", "log"), ("incarnation", "residency", "part")
            assert keys == {
                *(("remove_constraint", *leaf, "at_us"), ("add_constraint", *leaf)),
                *(("remove_constraint", *opening, "opened_us"), ("add_constraint", *opening)),
            }
        else:
            assert found == []
        assert current(connection) == SCHEMA_REVISION


def test_the_comparison_can_fail(empty: Engine) -> None:
    """Positive control: at the first revision the same comparison finds what later ones add."""
    upgrade(empty, "0001")
    with empty.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        found = {item[0] for item in compare_metadata(context, metadata)}
    assert found == {"add_column", "add_index", "add_table", "remove_index"}


def test_a_migration_runs_no_code_of_the_product() -> None:
    """It says itself what it does, for good. Only hashing as RFC 6962 has it, and its errors, come from elsewhere."""
    folder = Path(__file__).parents[2] / "migrations" / "versions"
    imported = {
        (path.name[:4], node.module)
        for path in folder.glob("[0-9]*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvcustody")
    }
    assert imported == {("0005", "kvcustody.audit.tlog.merkle"), ("0005", "kvcustody.audit.tlog.root_log")}


def test_upgrading_again_changes_nothing(empty: Engine) -> None:
    upgrade(empty)
    populate(empty, 3)
    before = every_row(empty)
    assert upgrade(empty) == SCHEMA_REVISION
    assert every_row(empty) == before


def test_a_failed_upgrade_leaves_the_earlier_schema(empty: Engine) -> None:
    upgrade(empty, "0001")
    populate(empty, 3)
    with empty.begin() as connection:  # a custody end whose incarnation is unknown has no due time in UTC
        connection.execute(incarnations.delete())
    before = every_row(empty)
    with pytest.raises(LedgerError) as caught:
        upgrade(empty)
    assert "\n" not in str(caught.value)
    with empty.connect() as connection:
        assert current(connection) == "0001"
        assert "due_us" not in {column["name"] for column in inspect(connection).get_columns("custody_ends")}
    assert every_row(empty) == before


def test_a_newer_schema_is_never_downgraded(empty: Engine) -> None:
    upgrade(empty)
    with empty.begin() as connection:
        connection.exec_driver_sql(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    with pytest.raises(LedgerError, match="schema `9999` is newer"):
        upgrade(empty)


def test_the_query_of_one_tenants_day_uses_the_index(empty: Engine) -> None:
    upgrade(empty)
    query = select(events.c.leaf).where(events.c.log == 1, events.c.at_us >= 5, events.c.at_us < 9)
    statement = str(query.compile(empty, compile_kwargs={"literal_binds": True}))
    explain = "EXPLAIN QUERY PLAN" if empty.dialect.name == "sqlite" else "EXPLAIN"
    with empty.connect() as connection:
        if empty.dialect.name == "postgresql":  # its planner prefers a scan while the table is empty
            connection.exec_driver_sql("SET enable_seqscan = off")
        plan = " ".join(str(row) for row in connection.exec_driver_sql(f"{explain} {statement}"))
    index = "events_rest_log_at_us_idx" if empty.dialect.name == "postgresql" else "ix_events_log_at"
    assert index in plan and "Append" not in plan  # one partition alone is read: 1970 lies in the rest
