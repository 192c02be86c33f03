"""A ledger of the first schema, as the commit that it comes from left it, is upgraded: nothing in it changes."""

from __future__ import annotations

from collections import Counter

import orjson
import pytest
from sqlalchemy import Engine, func, insert, select
from sqlalchemy.exc import IntegrityError
from structlog.testing import capture_logs

from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import SCHEMA_REVISION, VERSION_TABLE, check_store
from kvcustody.audit.store.database.postgres_roles import READER
from kvcustody.audit.store.schema.leaf_tables import erasures, residencies
from kvcustody.audit.store.schema.ledger import logs, subjects
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.errors import LedgerError
from kvcustody.migrations.upgrade import VERSIONS, upgrade
from kvcustody.times import moment_us
from standins.migrations import first_schema
from standins.migrations.catalog import catalog, differences, without_months
from standins.postgres import set_up_roles_in_turn

Recorded = tuple[Engine, str]


def test_leaves_proofs_checkpoints_and_answers_stay_as_they_were(recorded: Recorded) -> None:
    engine, url = recorded
    before = first_schema.recorded_answers()[engine.dialect.name]
    assert upgrade(engine) == SCHEMA_REVISION
    made_anew = {VERSION_TABLE, "coverage_hours", "coverage_pass"}  # the next pass of the judge fills the last two
    tables = {name: table for name, table in before["tables"].items() if name not in made_anew}
    assert first_schema.table_digests(engine, tables) == tables
    after = first_schema.answers(engine, url)
    assert after["proofs"] == before["proofs"] and len(before["proofs"]) > 10
    expected = before["commands"]
    reused = attached_at_opening(engine)
    for row in expected[f"showback {first_schema.PERIOD}"]["tenants"]:
        assert row["own_hit_blocks"] > reused[row["tenant"]] > 0
        row["own_hit_blocks"] = reused[row["tenant"]]
    bill = after["commands"][f"showback {first_schema.PERIOD}"]
    for row in bill["tenants"]:
        assert [row.pop(f"routed_{name}") for name in ("requests", "tokens", "found_tokens")] == [None] * 3
    assert bill.pop("since") == "2026-01-01T00:00:00Z" and bill.pop("until") == "2026-06-01T00:00:00Z"
    for command, answer in after["commands"].items():
        if command.startswith(("coverage show", "audit recompute")):
            assert [row.pop("deleted") for row in answer["copies"]["rows"]] == [0] * len(answer["copies"]["rows"])
    for hold in after["commands"]["audit hold list"]["holds"]:
        assert moment_us(hold.pop("at")) == hold["at_us"]
    assert after["commands"] == expected


def attached_at_opening(engine: Engine) -> Counter[str]:
    """Blocks that requests found, by tenant. That commit billed joins too, which save a request nothing."""
    found: Counter[str] = Counter()
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT leaf FROM events WHERE kind = 'residency-opened'")
        for body in (orjson.loads(bytes(leaf)) for (leaf,) in rows if leaf is not None):
            found[body["tenant"]] += int(body["blocks"])
    return found


def test_the_recorded_ledger_has_what_an_upgrade_could_break(recorded: Recorded) -> None:
    """A purge, an unlinked subject, a dead process, three months, hourly figures and verdicts, signed checkpoints."""
    rows = {
        name: table["rows"]
        for name, table in first_schema.recorded_answers()[recorded[0].dialect.name]["tables"].items()
    }
    assert rows["retention_purges"] == 2 and rows["subject_unlinkings"] == 1 and rows["signed_checkpoints"] == 2
    assert min(rows[name] for name in ("counters", "coverage_hours", "coverage_pass", "sequence_spans")) > 0
    assert min(rows[name] for name in ("erasures", "decisions", "outages", "copy_steps", "transfer_decisions")) > 0
    assert rows["legal_holds"] == 1 and rows["incarnations"] >= 3
    with recorded[0].connect() as connection:
        months = "SELECT DISTINCT kind FROM events WHERE kind IN ('worker-died', 'worker-stopped')"
        assert len(connection.exec_driver_sql(months).all()) == 2
        assert connection.scalar(select(func.count()).select_from(subjects)) == rows["subjects"] > 5


def test_an_upgrade_logs_each_revision_and_fsck_finds_nothing_after_it(recorded: Recorded) -> None:
    engine, _ = recorded
    with capture_logs() as logged:
        upgrade(engine)
    revisions = sorted(path.name[:4] for path in VERSIONS.glob("[0-9]*.py"))
    assert [line["revision"] for line in logged if line["event"] == "schema revision"] == revisions[1:]
    with engine.connect() as connection:
        assert fsck(connection).problems == []


def test_a_row_that_breaks_a_rule_stays_and_is_found(recorded: Recorded) -> None:
    """Nothing is lost by the upgrade, and no such row comes to it."""
    engine, _ = recorded
    with engine.begin() as connection:
        row = connection.execute(select(erasures)).first()
        assert row is not None
        connection.execute(insert(erasures), row._asdict() | {"idx": -1})
        connection.execute(insert(erasures), row._asdict() | {"log": 9999})
        rows = connection.scalar(select(func.count()).select_from(erasures))
    assert upgrade(engine) == SCHEMA_REVISION
    with engine.connect() as connection:
        assert connection.scalar(select(func.count()).select_from(erasures)) == rows
        found = [problem.what for problem in fsck(connection).problems]
        assert len(found) == 2 and all("`erasures`" in what for what in found), found
    for stray in ({"idx": -2}, {"log": 9998}):
        with pytest.raises(IntegrityError), engine.begin() as connection:
            connection.execute(insert(erasures), row._asdict() | stray)


def test_the_upgraded_schema_is_that_of_a_new_ledger(recorded: Recorded, empty: Engine) -> None:
    """Everything in the catalog: triggers, functions, partitions, row policies and grants included.

    Roles are no part of the schema: an operator has them brought up to date after an upgrade.
    """
    engine, _ = recorded
    for each in (engine, empty):
        upgrade(each)
        if dialect_of(each).roles:
            set_up_roles_in_turn(each)
    old, new = (without_months(catalog(each)) for each in (engine, empty))
    assert differences(old, new) == [] and len(new) > 800


SQLITE_CHANGES = (
    "DROP TRIGGER events_no_delete",
    "DROP INDEX ix_events_kind",
    "ALTER TABLE workers ADD COLUMN extra TEXT",
    "CREATE TABLE extra (id INTEGER CHECK (id > 0))",
)
POSTGRES_CHANGES = (
    "DROP TRIGGER no_truncate ON events_rest",
    "ALTER TABLE events DISABLE TRIGGER places",
    "CREATE OR REPLACE FUNCTION kvcustody_logs_grow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'",
    "ALTER TABLE receipts ALTER COLUMN item DROP DEFAULT",
    "ALTER TABLE receipts_rest DISABLE ROW LEVEL SECURITY",
    "ALTER TABLE receipts DETACH PARTITION receipts_rest",
    "ALTER POLICY of_tenant ON receipts USING (true)",
    "GRANT UPDATE ON receipts TO kvcustody_writer",
    "GRANT UPDATE (name) ON logs TO kvcustody_writer",
    "REVOKE EXECUTE ON FUNCTION kvcustody_log() FROM PUBLIC",
    "DROP INDEX ix_receipts_generation",
    "ALTER TABLE logs DROP CONSTRAINT uq_logs_name",
    "ALTER TABLE workers ALTER COLUMN name DROP NOT NULL",
    "ALTER TABLE workers ADD CHECK (id > 0) NOT VALID",
    "ALTER SEQUENCE logs_id_seq INCREMENT 7",
)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("change", SQLITE_CHANGES)
def test_the_catalog_shows_every_change_on_sqlite(recorded: Recorded, change: str) -> None:
    """The control of the comparison above."""
    _shows(recorded[0], (change,))


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_the_catalog_shows_every_change_on_postgresql(recorded: Recorded) -> None:
    _shows(recorded[0], POSTGRES_CHANGES)


def _shows(engine: Engine, changes: tuple[str, ...]) -> None:
    for change in changes:
        before = without_months(catalog(engine))
        with engine.begin() as connection:
            connection.exec_driver_sql(change)
        assert differences(before, without_months(catalog(engine))), change


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_reader_still_sees_one_tenant(recorded: Recorded) -> None:
    engine, _ = recorded
    upgrade(engine)
    with engine.connect() as connection:
        tenant = connection.scalar(select(logs.c.id).where(logs.c.name == "tenant/tenant-1"))
        connection.exec_driver_sql(f"SET ROLE {READER}")
        assert connection.scalars(select(residencies.c.log).distinct()).all() == []
        connection.exec_driver_sql("SET kvcustody.tenant = 'tenant-1'")
        assert connection.scalars(select(residencies.c.log).distinct()).all() == [tenant]


def test_an_older_ledger_is_refused_and_told_what_reads_it(recorded: Recorded) -> None:
    engine, _ = recorded
    with engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE {VERSION_TABLE} SET version_num = '0040'")
    for act in (upgrade, check_store):
        with pytest.raises(LedgerError) as caught:
            act(engine)
        assert str(caught.value) == (
            "KVC600: the ledger's schema `0040` is older than `0041`, the first that this program reads; "
            "upgrade the ledger with commit f6818e1f of kvcustody first"
        )
