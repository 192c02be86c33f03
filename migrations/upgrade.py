"""Bring a ledger's schema to this program's revision, without losing a row.

    upgrade(engine)                                # what a worker does at its start
    upgrade(engine, leaves_max=None, actor="ada")   # what `kvcustody db upgrade` does

1. Every revision and the record of it commit together, on SQLite too; a failed upgrade leaves the earlier schema.
2. An empty database gets the newest schema at once (`create_schema`), and no revision runs. A ledger that was upgraded
   step by step has the same schema: `tests/migrations` compares both with the database's own catalog.
3. A newer schema is refused, never downgraded; so is one that is older than the first revision.
4. On PostgreSQL the months to come have their partitions afterwards, where nobody is in the way.
5. Upgrades of several ledgers by one process take turns: Alembic knows one connection a process. It is imported only
   where a revision has to run: most starts find the newest schema.

6. A revision that names tables in `ONLINE` changes them online (`online.change`): what is before it commits first; the
   opening commits with its number, and then rows are copied while others write and read. A start does that for a ledger
   of up to `LEAVES_AT_START` leaves, and refuses to begin it for a larger one.

To change the schema: change the tables in `audit.store.schema`, add a revision to `versions/`, and name it in
`SCHEMA_REVISION`. The revision imports nothing of kvcustody, grants the roles what a new table needs, and says each
database's words itself. `tests/migrations/test_first_schema.py` then shows whether both ways lead to one schema.

A table of leaves' rows that is large is better changed online: a column that is added, a type, a key, an index. Change
its kind's `row`, and add a revision that says `ONLINE = ("decisions",)` and whose `upgrade` passes: the new form is
made from the declared tables. A column is not taken away like that: a later revision does it, once nothing reads it.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, Select, column, func, inspect, select, table
from sqlalchemy.exc import SQLAlchemyError

from kvcustody.audit.store.database.create_schema import create_schema
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import VERSION_TABLE, WRITE, check_store, ledger_error, other_schema
from kvcustody.audit.store.database.monthly_partitions import ensure_partitions, owns_tables, partitioned
from kvcustody.audit.store.schema.ledger import logs
from kvcustody.errors import LedgerError
from kvcustody.migrations.online.change import (
    finish_change,
    open_change,
    opened_change,
    under_locks,
    undo_change,
)
from kvcustody.migrations.online.row_windows import Progress, Step

if TYPE_CHECKING:
    from alembic.config import Config
    from alembic.runtime.migration import MigrationContext
    from alembic.script import Script, ScriptDirectory

LEAVES_AT_START = 100_000
VERSIONS = Path(__file__).parent / "versions"
_TURN = threading.Lock()
_UPGRADING = 7_215_409  # the number of the lock


def upgrade(
    engine: Engine,
    *,
    progress: Progress | None = None,
    leaves_max: int | None = LEAVES_AT_START,
    actor: str = "upgrade",
    step: Step = lambda _: None,
) -> str:
    """Upgrade and return the revision reached; raises `LedgerError` if the ledger cannot be upgraded.

    `progress(what, done, total)` is called while a revision works through rows. `leaves_max`: an online change of a
    larger ledger is not begun, and one that is open is left to whoever copies it. `actor` stands in the leaf of an
    online change, and `step` is told of its steps (`online.change.STEPS`).
    """
    try:
        with engine.connect().execution_options(**WRITE) as connection, connection.begin():
            dialect_of(connection).as_long_as_it_takes(connection)
            dialect_of(connection).one_at_a_time(connection, _UPGRADING)
            reached, online = _upgrade(connection, progress)
        if online:
            reached = under_locks(engine, lambda connection: _open(connection, progress, leaves_max, step))
            step("opened")
        if _may_finish(engine, leaves_max):
            finish_change(engine, actor=actor, step=step, progress=progress)
        ensure_partitions(engine, time.time_ns() // 1000)
    except SQLAlchemyError as problem:
        raise ledger_error(engine, problem) from problem
    return reached


def ready_schema(engine: Engine, *, migrate: bool) -> None:
    """Upgrade the schema; with `migrate` false, refuse any schema but this program's and only make partitions.

    Raises:
        LedgerError: The ledger cannot be upgraded, or `migrate` is false and its schema is another.
    """
    if migrate:
        upgrade(engine)
        return
    check_store(engine)
    try:
        ensure_partitions(engine, time.time_ns() // 1000)
    except SQLAlchemyError as problem:
        raise ledger_error(engine, problem) from problem


def undo(engine: Engine) -> str:
    """Undo an unfinished online change; return the revision reached. Raises `LedgerError` if there is none."""
    try:
        return undo_change(engine)
    except SQLAlchemyError as problem:
        raise ledger_error(engine, problem) from problem


def _open(connection: Connection, progress: Progress | None, leaves_max: int | None, step: Step) -> str:
    """Rule 6: revisions from the first one that names tables on, and the opening of their change."""
    dialect_of(connection).as_long_as_it_takes(connection)
    dialect_of(connection).one_at_a_time(connection, _UPGRADING)
    from alembic import command
    from alembic.script import ScriptDirectory

    config, before = _config(connection, progress), current(connection)
    online = _online(ScriptDirectory.from_config(config), before)
    if not online:  # another process was first
        return str(before)
    tables = sorted({name for revision in online for name in _tables(revision)})
    leaves = _leaves(connection)
    if leaves_max is not None and leaves > leaves_max:
        raise LedgerError(
            f"the ledger has {leaves} leaves, and rows of `{', '.join(tables)}` have to be copied: run `kvcustody db "
            "upgrade` first",
            leaves=leaves,
            tables=tables,
        )
    with _TURN:
        command.upgrade(config, "head")
    reached = str(current(connection))
    is_undoable = all(map(_tables, online))
    open_change(connection, tables, reached, str(before) if is_undoable else "")
    step("opening")
    return reached


def _online(scripts: ScriptDirectory, found: str | None) -> list[Script]:
    """Return the revisions that a ledger lacks, from the first that names tables on; empty if none names any."""
    lacking = [] if found is None else list(scripts.iterate_revisions("head", found))[::-1]
    first = next((place for place, script in enumerate(lacking) if _tables(script)), len(lacking))
    return lacking[first:]


def _tables(script: Script) -> tuple[str, ...]:
    return tuple(getattr(script.module, "ONLINE", ()))


def _may_finish(engine: Engine, leaves_max: int | None) -> bool:
    """Return whether a change is open that this process may finish: it owns the tables, and the ledger is not too
    large.
    """
    with engine.connect() as connection:
        if opened_change(connection) is None or (partitioned(connection) and not owns_tables(connection)):
            return False
        return leaves_max is None or _leaves(connection) <= leaves_max


def _leaves(connection: Connection) -> int:
    return int(connection.scalar(select(func.coalesce(func.sum(logs.c.size), 0))) or 0)


def _config(connection: Connection, progress: Progress | None) -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("version_locations", str(VERSIONS).replace("%", "%%"))
    config.set_main_option("prepend_sys_path", "")
    config.set_main_option("path_separator", "newline")
    config.attributes["connection"] = connection
    config.attributes["progress"] = progress
    return config


def _upgrade(connection: Connection, progress: Progress | None) -> tuple[str, bool]:
    """Everything up to the first revision that names tables (rule 6): the one reached, and whether one does."""
    revision = current(connection)
    if revision is not None and revision == _newest():
        return revision, False
    from alembic import command
    from alembic.script import ScriptDirectory

    config = _config(connection, progress)
    scripts = ScriptDirectory.from_config(config)
    if revision is not None and revision not in {script.revision for script in scripts.walk_revisions()}:
        raise other_schema(revision)
    online = _online(scripts, revision)
    with _TURN:  # rule 5
        if revision is None:
            create_schema(connection)
            _context(connection).stamp(scripts, "head")
        else:
            command.upgrade(config, str(online[0].down_revision) if online else "head")
    reached = current(connection)
    assert reached is not None
    return reached, bool(online)


def _newest() -> str:
    """Return the newest revision, according to the file names."""
    return max(path.name.partition("_")[0] for path in VERSIONS.glob("[0-9]*.py"))


def current(connection: Connection) -> str | None:
    """Return a ledger's revision; None if it has no schema."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    version: Select[str] = select(column("version_num")).select_from(table(VERSION_TABLE))
    found = connection.scalars(version).all()
    return found[0] if len(found) == 1 else _context(connection).get_current_revision()


def _context(connection: Connection) -> MigrationContext:
    from alembic.runtime.migration import MigrationContext

    return MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
