"""A state of the ledger: every log up to a size, so that what is asked of it repeats whatever is written later.

K1 A row is in the state when its leaf is: `idx` below the size that the log had. Logs that are not named are empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, case, select, true

from kvcustody.audit.schema import logs


class AsOf(NamedTuple):
    """The size of every log in this state, by log id. `None` in place of one means: as it is now."""

    sizes: Mapping[int, int]

    def has(self, table: Any) -> ColumnElement[bool]:
        """The condition that a row of `events` or of a projection is in the state."""
        if not self.sizes:
            return ~true()
        # Not one term a log: the depth of an expression is bounded, its width is not.
        held: ColumnElement[bool] = table.c.idx < case(dict(self.sizes), value=table.c.log, else_=0)
        return held


def is_in(as_of: AsOf | None, table: Any) -> ColumnElement[bool]:
    """Whether a row is in the state; always, where there is none."""
    return true() if as_of is None else as_of.has(table)


def as_of_sizes(connection: Connection, sizes: Mapping[str, int]) -> AsOf:
    """The state in which the named logs have these sizes, as `LedgerProofs.sizes` gives them."""
    ids = {row.name: row.id for row in connection.execute(select(logs.c.id, logs.c.name))}
    return AsOf({ids[name]: size for name, size in sizes.items() if name in ids})
