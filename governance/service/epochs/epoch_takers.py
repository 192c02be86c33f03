"""Doors and workers that take erase epochs: the version each acts by, and since when it lags behind.

1. A question is the acknowledgement: who asks with a version acts by it.
2. Whoever was not heard for `LIVE_SECONDS` is silent, and not counted as behind: past its lease it reuses nothing.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from sqlalchemy import Connection, Engine, func, select, update

from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import WRITE
from kvcustody.audit.store.schema.service import erase_epochs, service_epoch_takers
from kvcustody.audit.store.schema.stored_rows import stored_rows
from kvcustody.clock import MICROSECONDS, Clock

LIVE_SECONDS: Final = 60
_HEARD_US = 5 * MICROSECONDS  # between two writes that somebody was heard, where nothing else changed
_table, _takers = erase_epochs.c, service_epoch_takers.c


class EpochTaker(NamedTuple):
    """A door or a worker, its version, and since when it lags behind the newest (UTC µs; None: it does not)."""

    name: str
    role: str
    version: int
    since_us: int
    newest: int
    heard_us: int
    behind_since_us: int | None
    state: str  # `current`, `behind`, or `silent`: not heard for a minute
    unread: str = ""  # what of its row cannot be read


def newest_and_floor(connection: Connection) -> tuple[int, int]:
    """Return the newest number, and the one before the oldest kept."""
    first, last = connection.execute(select(func.min(_table.number), func.max(_table.number))).one()
    return (0, 0) if last is None else (int(last), int(first) - 1)


def listed_takers(connection: Connection, now_us: int) -> list[EpochTaker]:
    """Return every door and worker that ever took epochs, by name; `now_us` is UTC."""
    newest, _ = newest_and_floor(connection)
    takers = []
    for row in stored_rows(connection, select(service_epoch_takers).order_by(_takers.name)):
        behind_us = None
        if row.version < newest:
            later = select(_table.raised_us).where(_table.number > row.version)
            behind_us = connection.scalar(later.order_by(_table.number).limit(1))
        silent = now_us - row.heard_us > LIVE_SECONDS * MICROSECONDS
        state = "silent" if silent else "current" if behind_us is None else "behind"
        said = row.name, row.role, row.version, row.since_us, newest, row.heard_us
        takers.append(EpochTaker(*said, behind_us, state, row.unread))
    return takers


class EpochTakers:
    """The takers of one ledger's erase epochs; thread-safe."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self._heard: dict[str, tuple[int, int]] = {}  # by name: what was written last, version and time

    def heard(self, name: str, role: str, version: int) -> None:
        """Note that a door or worker acts by this version."""
        now_us = self._clock.utc_us()
        last = self._heard.get(name)
        if last is not None and last[0] == version and now_us - last[1] < _HEARD_US:
            return
        values = {"role": role, "version": version, "heard_us": now_us}
        mine = update(service_epoch_takers).where(_takers.name == name)
        with self._engine.connect().execution_options(**WRITE) as connection, connection.begin():
            if not connection.execute(mine.where(_takers.version == version).values(**values)).rowcount:
                values["since_us"] = now_us
                if not connection.execute(mine.values(**values)).rowcount:
                    fresh = dialect_of(connection).insert_new(service_epoch_takers)
                    connection.execute(fresh.values(name=name, **values))
        self._heard[name] = version, now_us

    def listed(self) -> list[EpochTaker]:
        """Return `listed_takers` for now."""
        with self._engine.connect() as connection:
            return listed_takers(connection, self._clock.utc_us())
