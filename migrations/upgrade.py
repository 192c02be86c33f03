"""Bring a ledger's schema to this program's revision, without losing a row.

1. Every revision and the record of it commit together, on SQLite too; a failed upgrade leaves the earlier schema.
2. An empty database gets the newest schema at once (`create_schema`), and no revision runs. A ledger that was upgraded
   step by step has the same schema: `tests/migrations` compares both with the database's own catalog.
3. A newer schema is refused, never downgraded; so is one that is older than the first revision.
4. On PostgreSQL the months to come have their partitions afterwards, where nobody is in the way.
5. Upgrades of several ledgers by one process take turns: Alembic knows one connection a process.

To change the schema: change the tables in `audit.store.schema`, add a revision to `versions/`, and name it in
`SCHEMA_REVISION`. The revision imports nothing of kvcustody, grants the roles what a new table needs, and says each
database's words itself. `tests/migrations/test_first_schema.py` then shows whether both ways lead to one schema.
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

from kvcustody.audit.store.database.create_schema import create_schema
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import VERSION_TABLE, WRITE, ledger_error, other_schema
from kvcustody.audit.store.database.monthly_partitions import ensure_partitions

Progress = Callable[[str, int, int], None]
VERSIONS = Path(__file__).parent / "versions"
_TURN = threading.Lock()
_UPGRADING = 7_215_409  # the number of the lock


def upgrade(engine: Engine, *, progress: Progress | None = None) -> str:
    """Upgrade and return the revision reached; raises `LedgerError` where the ledger cannot be upgraded.

    `progress(what, done, total)` is called while a revision works through rows.
    """
    try:
        with engine.connect().execution_options(**WRITE) as connection, connection.begin():
            dialect_of(connection).as_long_as_it_takes(connection)
            dialect_of(connection).one_at_a_time(connection, _UPGRADING)
            reached = _upgrade(connection, progress)
        ensure_partitions(engine, time.time_ns() // 1000)
    except SQLAlchemyError as problem:
        raise ledger_error(engine, problem) from problem
    return reached


def _upgrade(connection: Connection, progress: Progress | None) -> str:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("version_locations", str(VERSIONS).replace("%", "%%"))
    config.set_main_option("prepend_sys_path", "")
    config.set_main_option("path_separator", "newline")
    config.attributes["connection"] = connection
    config.attributes["progress"] = progress
    found = current(connection)
    if found is not None and found not in {
        script.revision for script in ScriptDirectory.from_config(config).walk_revisions()
    }:
        raise other_schema(found)
    with _TURN:  # rule 5
        if found is None:
            create_schema(connection)
            _context(connection).stamp(ScriptDirectory.from_config(config), "head")
        else:
            command.upgrade(config, "head")
    reached = current(connection)
    assert reached is not None
    return reached


def current(connection: Connection) -> str | None:
    """The revision a ledger is at; None where it has no schema."""
    return _context(connection).get_current_revision()


def _context(connection: Connection) -> MigrationContext:
    return MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
