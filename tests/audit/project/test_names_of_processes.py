"""If the ledger first meets a process by a leaf without its worker's name, a later leaf supplies the name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from sqlalchemy import Connection, Engine, create_engine, select

from kvcustody.audit.kinds import (
    Event,
    KeyEvent,
    ObservationStarted,
    WorkerDied,
    WorkerReturned,
    WorkerStarted,
    WorkerStopped,
)
from kvcustody.audit.leaf import Context, leaves
from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.audit.store.schema.all_tables import projections
from kvcustody.audit.store.schema.ledger import events, incarnations, logs, workers
from kvcustody.audit.verify.ledger.life_rows import LifeRows
from kvcustody.audit.write import append_leaves
from kvcustody.audit.write.append_leaves import Appender
from kvcustody.audit.write.rebuild import LogLeaves, rebuild_ledger
from standins.audit.projection_oracle import Opinion, Stored

MET, OTHER = "a" * 32, "b" * 32
OFFSET_US = 1_700_000_000_000_000
STARTED = WorkerStarted(3, "gpu-0", 1000, 1, 4096, "cpu", "test")
STOPPED = WorkerStopped(4, "gpu-0", "closed", 0, ())
WATCHED = ObservationStarted(3, "gpu-0", "http://engine", "p", "d", "test")
DIED = WorkerDied(5, "gpu-0", MET, "", 0, 0)
RETURNED = WorkerReturned(6, "gpu-0", MET)
WRONG = WorkerDied(2, "another", MET, "", 0, 0)


class Case(NamedTuple):
    """Leaves that come after the first: of the process itself, and of another about it."""

    own: tuple[Event, ...]
    others: tuple[Event, ...] = ()
    others_first: bool = False


CASES = {
    "its start": Case((STARTED,)),
    "its end": Case((STOPPED,)),
    "its start and its end": Case((STARTED, STOPPED)),
    "a watcher's start": Case((WATCHED,)),
    "that it died": Case((), (DIED,)),
    "that it died and came back": Case((), (DIED, RETURNED)),
    "its start behind another name": Case((STARTED,), (WRONG,), others_first=True),
    "its start before another name": Case((STARTED,), (WRONG,)),
}


def put(connection: Connection, recorder: str, made: Sequence[Event], first: int) -> None:
    """The leaves of one process as a batch of their own, as a spill that is read back."""
    context = Context(recorder, OFFSET_US, lambda *_: "")
    every = [leaf.data for number, one in enumerate(made, first) for leaf in leaves(one, context, number)]
    if every:
        Appender().append(connection, read_leaves(every))


def name_of(connection: Connection) -> str:
    query = select(workers.c.name).join(incarnations, incarnations.c.worker == workers.c.id)
    return str(connection.scalar(query.where(incarnations.c.uuid == MET)))


def stored(connection: Connection) -> list[Stored]:
    query = select(logs.c.name, events.c.idx, events.c.leaf).join(logs, logs.c.id == events.c.log)
    rows = connection.execute(query.order_by(events.c.log, events.c.idx))
    return [Stored(row.name, row.idx, bytes(row.leaf)) for row in rows]


def wrong_rows(connection: Connection) -> list[str]:
    """What `fsck` says of the rows of processes."""
    check = LifeRows(connection)
    opinion = Opinion(stored(connection))
    check.take(body for leaf, body in opinion.leaves if leaf.log == "system")
    return list(check.wrong())


def fill(connection: Connection, case: Case) -> None:
    put(connection, MET, [KeyEvent(1, None, "made", 1, "a")], 1)
    assert name_of(connection) == "unknown"
    parts = [(MET, case.own, 2), (OTHER, case.others, 1)]
    for recorder, made, first in parts[::-1] if case.others_first else parts:
        put(connection, recorder, made, first)


@pytest.mark.parametrize("name", CASES)
def test_a_later_leaf_names_the_worker(any_store: Engine, tmp_path: Path, name: str) -> None:
    """Rows, `fsck`, the second opinion and a ledger that is rebuilt from the leaves say the same."""
    with any_store.begin() as connection:
        fill(connection, CASES[name])
        assert name_of(connection) == "gpu-0"
        assert wrong_rows(connection) == []
        every = stored(connection)
    assert Opinion(every).folds["incarnations"][MET]["worker"] == "gpu-0"
    again = create_engine(f"sqlite:///{tmp_path / 'again.db'}")
    with again.begin() as connection:
        projections()[0].metadata.create_all(connection)
        of_system = [one.leaf for one in every]
        rebuild_ledger(connection, [LogLeaves("system", 0, len(every), of_system)])
        assert name_of(connection) == "gpu-0"
        assert wrong_rows(connection) == []
    again.dispose()


def test_a_row_that_does_not_take_the_name_is_found(store: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: as it was before."""
    right = append_leaves.life_changes
    monkeypatch.setattr(
        append_leaves,
        "life_changes",
        lambda *given: [change._replace(worker="unknown", is_own=False) for change in right(*given)],
    )
    with store.begin() as connection:
        fill(connection, CASES["its start"])
        assert name_of(connection) == "unknown"
        [wrong] = wrong_rows(connection)
        assert "`unknown`" in wrong and "gpu-0" in wrong
