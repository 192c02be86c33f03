"""Check at the start of every writing transaction: is the schema still ours, and which tables have two forms.

    forms = forms_of(connection)          # or `forms_of(connection, *state)` with what `STATE` gave in another query
    inserts.add(table, rows)
    if table in forms:
        inserts.add(forms[table], rows)

1. Who asks has both tables of the answer locked against a change until its transaction ends: an online change begins
   and ends while no such transaction runs, so none of them misses it. A transaction of one moment locks them before its
   moment (`begin_reading`): rows that were copied after it would be missing in a table that took the old one's place.
2. A ledger of another revision is refused with `SchemaChangedError`: it is no fault of what is written, which waits in
   the spill until the program was upgraded.
3. The new form of a table has the same name in the schema `NEW_FORMS`; in a file its name ends with `NEW_ENDING`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from sqlalchemy import Connection, Engine, MetaData, Table, event, select

from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import SCHEMA_REVISION, VERSION_TABLE, WRITE, other_schema
from kvcustody.audit.store.schema.ledger import metadata
from kvcustody.audit.store.schema.schema_changes import schema_changes
from kvcustody.errors import LedgerError

NEW_FORMS, NEW_ENDING = "kvcustody_next", "_next"
STATE = (
    f"(SELECT max(version_num) FROM {VERSION_TABLE}) AS revision,"  # noqa: S608 - our own names
    " (SELECT count(*) FROM schema_changes) AS changes"
)
"""Columns of any query: the recorded revision, and how many tables have two forms."""
_ASK = f"SELECT {STATE}"
_COPYING = 7_215_413  # advisory lock: a copy's transaction, or one that drops leaves


class SchemaChangedError(LedgerError):
    """The ledger was upgraded under an open writer of an older version, or downgraded under a newer one."""

    code = "KVC614"


def forms_of(connection: Connection, revision: str | None = None, changes: int | None = None) -> Mapping[Table, Table]:
    """Return the new form of each table that has two, usually none (rule 1); raises `SchemaChangedError` (rule 2)."""
    if changes is None:
        revision, changes = connection.exec_driver_sql(_ASK).one()
    check_revision(revision)
    if not changes:
        return {}
    in_file = dialect_of(connection).in_file
    names = connection.scalars(select(schema_changes.c.of_table).order_by(schema_changes.c.of_table))
    return {metadata.tables[name]: new_form(name, in_file=in_file) for name in names}


def guard_writes(engine: Engine) -> None:
    """Begin each writing transaction of this engine by reading the revision (rule 2).

    Its commit may still follow an upgrade that began meanwhile: that one waits for the locks of what was written.
    """
    ask = f"SELECT max(version_num) FROM {VERSION_TABLE}"  # noqa: S608 - our own name

    @event.listens_for(engine, "begin")
    def _check(connection: Connection) -> None:
        if connection.get_execution_options().keys() & WRITE:
            check_revision(connection.exec_driver_sql(ask).scalar())


def check_revision(found: object) -> None:
    """Raise `SchemaChangedError` if a ledger's revision is not this program's."""
    if found != SCHEMA_REVISION:
        refused = other_schema(str(found))
        raise SchemaChangedError(refused.message, **refused.operands)


def forms_to_drop_from(connection: Connection) -> Mapping[Table, Table]:
    """Return the new forms for a transaction that drops leaves: none of them is copied until it ends."""
    forms = forms_of(connection)
    if forms:
        one_copy_at_a_time(connection)
    return forms


def one_copy_at_a_time(connection: Connection) -> None:
    """Exclude others from copying rows, or from dropping leaves during a copy, until this transaction ends."""
    dialect_of(connection).one_at_a_time(connection, _COPYING)


@cache
def new_form(name: str, *, in_file: bool) -> Table:
    """Return the table for the new form of a declared table, until it replaces it (rule 3)."""
    declared = metadata.tables[name]
    if in_file:
        return declared.to_metadata(MetaData(), name=f"{name}{NEW_ENDING}")
    return declared.to_metadata(MetaData(), schema=NEW_FORMS)
