"""Migrations: a new ledger has the declared tables, and a revision is done whole or not at all."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Engine, insert, inspect, select

from kvcustody.audit.leaf.merkle import EMPTY
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import SCHEMA_REVISION, VERSION_TABLE, WRITE
from kvcustody.audit.store.schema.all_tables import MONTHLY, every_table
from kvcustody.audit.store.schema.ledger import events, metadata, tenants
from kvcustody.errors import LedgerError
from kvcustody.migrations import upgrade as upgrading
from kvcustody.migrations.upgrade import current, upgrade
from standins.migrations.catalog import catalog, differences

STEP = """
import sqlalchemy as sa
from alembic import context, op

revision = "0051"
down_revision = "0050"


def upgrade() -> None:
    op.add_column("tenants", sa.Column("region", sa.Text(), nullable=True))
    context.config.attributes["progress"]("tenants", 1, 1)
    {last}
"""


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Adds a revision after the newest one; `last` is its last line."""

    def add(last: str) -> None:
        shutil.copytree(upgrading.VERSIONS, tmp_path / "versions")
        (tmp_path / "versions" / "0051_step.py").write_text(STEP.format(last=last))
        monkeypatch.setattr(upgrading, "VERSIONS", tmp_path / "versions")

    return add


def partitions_of(engine: Engine) -> set[str]:
    """Tables whose rows are another's too."""
    if not dialect_of(engine).partitions:
        return set()
    with engine.connect() as connection:
        return set(connection.exec_driver_sql("SELECT relname FROM pg_class WHERE relispartition").scalars().all())


def every_row(engine: Engine) -> dict[str, list[Any]]:
    with engine.connect() as connection:
        return {table.name: sorted(map(tuple, connection.execute(select(table))), key=repr) for table in every_table()}


def test_a_new_ledger_has_the_declared_tables(empty: Engine) -> None:
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
        differences = compare_metadata(context, metadata)
        if dialect_of(empty).partitions:  # a partitioned table's keys contain what it is partitioned by
            keys = {(act, *(column.name for column in key.columns)) for act, key in differences if act != "add_fk"}
            assert {key.name for act, key in differences if act == "add_fk"} == {f"fk_{table}_log" for table in MONTHLY}
            leaf, opening = ("incarnation", "sequence", "part", "log"), ("incarnation", "residency", "part")
            assert keys == {
                *(("remove_constraint", *leaf, "at_us"), ("add_constraint", *leaf)),
                *(("remove_constraint", *opening, "opened_us"), ("add_constraint", *opening)),
            }
            assert {f"{table}_rest" for table in MONTHLY} < parts
        else:
            assert differences == []
        assert current(connection) == SCHEMA_REVISION


def test_a_new_ledger_is_empty_but_for_the_root_log(empty: Engine) -> None:
    upgrade(empty)
    rows = {name: rows for name, rows in every_row(empty).items() if rows}
    ((number, frontier, identity),) = rows.pop("root_log")
    assert (number, frontier, rows) == (1, EMPTY.to_bytes(), {}) and len(identity) == 16


def test_a_migration_runs_no_code_of_the_product() -> None:
    """It says itself what it does, for good: what it would import changes later."""
    imported = {
        node.module
        for path in upgrading.VERSIONS.glob("[0-9]*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvcustody")
    }
    assert imported == set()


def test_upgrading_again_changes_nothing(empty: Engine) -> None:
    upgrade(empty)
    with empty.connect().execution_options(**WRITE) as connection, connection.begin():
        connection.execute(insert(tenants), {"tenant": "acme", "log": 1, "first_seen_us": 5})
    before = every_row(empty), catalog(empty)
    assert upgrade(empty) == SCHEMA_REVISION
    assert (every_row(empty), catalog(empty)) == before


def test_a_ledger_that_is_there_takes_the_steps_that_it_lacks(empty: Engine, step: Callable[[str], None]) -> None:
    upgrade(empty)
    before, told = catalog(empty), []
    step("pass")
    assert upgrade(empty, progress=lambda *counts: told.append(counts)) == "0051"
    assert told == [("tenants", 1, 1)]
    changed = differences(before, catalog(empty))
    assert len(changed) == 1 and changed[0].startswith("column tenants.region: is missing")


def test_a_failed_upgrade_leaves_the_earlier_schema(empty: Engine, step: Callable[[str], None]) -> None:
    upgrade(empty)
    before = every_row(empty), catalog(empty)
    step('op.execute("INSERT INTO absent VALUES (1)")')
    with pytest.raises(LedgerError) as caught:
        upgrade(empty, progress=lambda *_: None)
    assert "\n" not in str(caught.value)
    assert (every_row(empty), catalog(empty)) == before
    with empty.connect() as connection:
        assert current(connection) == SCHEMA_REVISION


def test_a_schema_that_cannot_be_made_leaves_nothing(empty: Engine) -> None:
    with empty.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE receipts (id INTEGER)")  # somebody else's
    with pytest.raises(LedgerError, match="receipts"):
        upgrade(empty)
    assert inspect(empty).get_table_names() == ["receipts"]


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
    on_postgres = dialect_of(empty).partitions
    with empty.connect() as connection:
        if on_postgres:  # its planner prefers a scan while the table is empty
            connection.exec_driver_sql("SET enable_seqscan = off")
        explain = "EXPLAIN" if on_postgres else "EXPLAIN QUERY PLAN"
        plan = " ".join(str(row) for row in connection.exec_driver_sql(f"{explain} {statement}"))
    index = "events_rest_log_at_us_idx" if on_postgres else "ix_events_log_at"
    assert index in plan and "Append" not in plan  # one partition alone is read: 1970 lies in the rest
