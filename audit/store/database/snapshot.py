"""A state of the ledger: every log up to a size, so that answers about it do not change.

1. A row is in the state when its leaf is: `idx` below the size that the log had. Logs that are not named are empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson
from sqlalchemy import BigInteger, ColumnElement, Connection, Text, case, literal, select, true
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from kvcustody.audit.store.schema.ledger import logs

_CASES = 64  # of more logs a row's is looked up, where a case is compared with one after the other


class _SizeOf(FunctionElement[int]):
    """The size that a JSON object names for a log; 0 for one that it does not name."""

    inherit_cache = True
    type = BigInteger()
    name = "size_of"


@compiles(_SizeOf, "postgresql")
def _postgres_size_of(element: Any, compiler: Any, **how: Any) -> str:
    named, log = (compiler.process(each, **how) for each in element.clauses)
    return f"coalesce((CAST({named} AS jsonb) ->> CAST({log} AS text))::bigint, 0)"


@compiles(_SizeOf)
def _size_of(element: Any, compiler: Any, **how: Any) -> str:
    named, log = (compiler.process(each, **how) for each in element.clauses)
    return f"coalesce(json_extract({named}, '$.' || {log}), 0)"


class AsOf(NamedTuple):
    """The size of every log in this state, by log id. `None` instead of a state means the present.

    `whole`: nothing was written since, in the snapshot that is read, so no row need be asked.
    """

    sizes: Mapping[int, int]
    whole: bool = False

    def has(self, table: Any) -> ColumnElement[bool]:
        """Return the condition that a row of `events` or of a projection is in the state."""
        if self.whole:
            return true()
        if not self.sizes:
            return ~true()
        if len(self.sizes) > _CASES:
            named = orjson.dumps({str(log): size for log, size in self.sizes.items()}).decode()
            return table.c.idx < _SizeOf(literal(named, Text), table.c.log)  # type: ignore[no-any-return]
        # Not one term a log: the depth of an expression is bounded, its width is not.
        held: ColumnElement[bool] = table.c.idx < case(dict(self.sizes), value=table.c.log, else_=0)
        return held


def is_in(as_of: AsOf | None, table: Any) -> ColumnElement[bool]:
    """Return the condition that a row is in the state; always true without a state."""
    return true() if as_of is None else as_of.has(table)


def as_of_sizes(connection: Connection, sizes: Mapping[str, int]) -> AsOf:
    """Return the state in which the named logs have these sizes, from `LedgerProofs.sizes`.

    The connection has to read one snapshot throughout: a transaction of SQLite, or REPEATABLE READ.
    """
    rows = connection.execute(select(logs.c.id, logs.c.name, logs.c.size)).all()
    held = {row.id: sizes[row.name] for row in rows if row.name in sizes}
    return AsOf(held, all(held.get(row.id, 0) == row.size for row in rows))
