"""Dead processes, scans and bills follow from leaves about processes: a changed row changes no answer."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, select, update

from kvcustody.audit.evidence.query.orphans import dead_incarnations
from kvcustody.audit.evidence.query.scans import scan_of, scans
from kvcustody.audit.evidence.query.showback import lives_at_work
from kvcustody.audit.kinds import Event, OrphanScanned, WorkerStarted, WorkerStopped
from kvcustody.audit.leaf import Context, leaves
from kvcustody.audit.leaf.batch import read_leaves
from kvcustody.audit.store.schema.ledger import incarnations, workers
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.write.append_leaves import Appender

FIRST, SECOND, OTHER, COMMAND = "a" * 32, "b" * 32, "c" * 32, "d" * 32
SCAN = OrphanScanned(5, 1, "full", 2, 4, 0, 0, 0)


def started(worker: str) -> WorkerStarted:
    return WorkerStarted(1, worker, 1000, 1, 4096, "cpu", "test")


def record(store: Engine, incarnation: str, *events: Event) -> None:
    context = Context(incarnation, 1 << 50, lambda *_: "")
    made = [leaf.data for number, event in enumerate(events, 1) for leaf in leaves(event, context, number)]
    with store.begin() as connection:
        Appender().append(connection, read_leaves(made))


@pytest.fixture
def ledger(store: Engine) -> Engine:
    """A worker whose first process never ended, another worker, and a command that scanned."""
    record(store, FIRST, started("gpu-0"), SCAN)
    record(store, SECOND, started("gpu-0"))
    record(store, OTHER, started("gpu-1"), SCAN)
    record(store, COMMAND, SCAN, WorkerStopped(9, "scan-1", "closed", 0, ()))
    return store


def answers(store: Engine) -> dict[str, Any]:
    with store.connect() as connection:
        return {
            "dead": [(one.worker, one.incarnation) for one in dead_incarnations(connection)],
            "scans": {one.incarnation: one.worker for one in scans(connection).scans},
            "scan": [found[0].worker for life in (FIRST, OTHER) if (found := scan_of(connection, life, 1))],
            "lives": {life.uuid: (life.name, life.ended_us) for life in lives_at_work(connection, 0)},
        }


def test_what_leaves_say_is_answered(ledger: Engine) -> None:
    """The control: every answer names the workers."""
    found = answers(ledger)
    assert found["dead"] == [("gpu-0", FIRST)]
    assert found["scans"] == {FIRST: "gpu-0", OTHER: "gpu-1", COMMAND: "scan-1"}
    assert found["scan"] == ["gpu-0", "gpu-1"]
    names = {life: name for life, (name, _) in found["lives"].items()}
    assert names == {FIRST: "gpu-0", SECOND: "gpu-0", OTHER: "gpu-1", COMMAND: ""}


@pytest.mark.parametrize("life", [FIRST, SECOND, OTHER, COMMAND])
@pytest.mark.parametrize("column", ["worker", "ended_us", "started_us"])
def test_a_changed_row_changes_no_answer_and_fsck_names_it(ledger: Engine, life: str, column: str) -> None:
    before = answers(ledger)
    with ledger.begin() as connection:
        row = incarnations.c
        named = connection.scalar(
            select(workers.c.name).join(incarnations, row.worker == workers.c.id).where(row.uuid == life)
        )
        other = select(workers.c.id).where(workers.c.name == ("gpu-1" if named == "gpu-0" else "gpu-0"))
        value = other.scalar_subquery() if column == "worker" else 7
        assert connection.execute(update(incarnations).where(row.uuid == life).values({column: value})).rowcount == 1
    assert answers(ledger) == before
    with ledger.connect() as connection:
        found = [problem.what for problem in fsck(connection).problems]
    assert any("incarnations" in what for what in found) or (column == "started_us" and life == COMMAND)
