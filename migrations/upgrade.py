"""Bring a ledger's schema to this program's revision, from any earlier one, without losing a row.

1. Every revision and the record of it commit together, on SQLite too; a failed upgrade leaves the earlier schema.
2. The migrated schema equals the tables of `audit.schema`.
3. A newer schema is refused, never downgraded.
4. On PostgreSQL the months to come have their partitions afterwards, where nobody is in the way.
5. Upgrades of several ledgers by one process take turns: Alembic knows one connection a process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from kvcustody.audit.database.dialect import dialect_of
from kvcustody.audit.database.engine import VERSION_TABLE, WRITE, ledger_error
from kvcustody.audit.database.monthly_partitions import ensure_partitions
from kvcustody.errors import LedgerError

Progress = Callable[[str, int, int], None]
_TURN = threading.Lock()
_UPGRADING = 7_215_409  # the number of the lock


def upgrade(engine: Engine, revision: str = "head", *, progress: Progress | None = None) -> str:
    """Upgrade and return the revision reached; raises `LedgerError` where the ledger cannot be upgraded.

    `progress(what, done, total)` is called while rows are worked through.
    """
    try:
        with engine.connect().execution_options(**WRITE) as connection, connection.begin():
            dialect_of(connection).as_long_as_it_takes(connection)
            dialect_of(connection).one_at_a_time(connection, _UPGRADING)
            reached = _upgrade(connection, revision, progress)
        ensure_partitions(engine, time.time_ns() // 1000)
    except SQLAlchemyError as problem:
        raise ledger_error(engine, problem) from problem
    return reached


def _upgrade(connection: Connection, revision: str, progress: Progress | None) -> str:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("prepend_sys_path", "")
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    config.attributes["progress"] = progress
    script = ScriptDirectory.from_config(config)
    known = {item.revision for item in script.walk_revisions()}
    found = current(connection)
    if found is not None and found not in known:
        head = script.get_current_head()
        raise LedgerError(
            f"the ledger's schema `{found}` is newer than this program's `{head}`", found=found, expected=head
        )
    with _TURN:  # rule 5
        command.upgrade(config, revision)
    reached = current(connection)
    assert reached is not None
    return reached


def current(connection: Connection) -> str | None:
    """The revision a ledger is at; None where it has no schema."""
    return MigrationContext.configure(
        connection, opts={"version_table": VERSION_TABLE}
    ).get_current_revision()
