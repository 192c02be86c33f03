"""Leaves that retention drops count no more: deltas that take them off, in the transaction that drops them."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from kvcustody.audit.counters.count_events import count_events
from kvcustody.audit.counters.fold import write_deltas
from kvcustody.audit.counters.hourly_coverage import drop_verdicts
from kvcustody.audit.database.bulk_insert import Inserts
from kvcustody.audit.events.batch import read_leaves


def uncount(connection: Connection, log: int, first: int, leaves: Sequence[bytes]) -> None:
    """Take off what these leaves of a log counted, the first of them at `first`; verdicts over them go too."""
    drop_verdicts(connection)
    if not leaves:
        return
    found = count_events(read_leaves(leaves), [log] * len(leaves))
    inserts = Inserts(connection)
    # No other delta has this name: a size is above 0, and a leaf is dropped once.
    write_deltas(inserts, {key: -value for key, value in found.items()}, {log: -first - 1})
    inserts.finish()
