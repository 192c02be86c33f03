"""Losses that writers recorded: the query, and the function through which a connection of one tenant asks it.

The leaves are in the system log, which such a connection does not see. The function tells it of processes alone.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, select

from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import outages
from kvcustody.audit.store.schema.ledger import incarnations

REFUSED = "refused"  # the act did not happen: nothing was lost
LOSING_FUNCTION = "kvcustody_losing"


def recorded_gaps() -> Select[Any]:
    """Return process, first and last sequence, and cause of each recorded gap or withdrawal."""
    column = outages.c
    return (
        select(incarnations.c.uuid, column.first_sequence, column.last_sequence, column.cause)
        .join(incarnations, incarnations.c.id == column.incarnation)
        .where(column.kind.in_(("gap", "withdrawn")), has_leaf(outages))
    )


def losing_processes() -> Select[Any]:
    """Return the processes whose writer recorded a loss."""
    lost = recorded_gaps().where(outages.c.cause != REFUSED)
    return lost.with_only_columns(incarnations.c.uuid).distinct()
