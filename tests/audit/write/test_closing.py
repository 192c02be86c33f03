"""Closing processes that do not come back: in steps, each once, as evidence; and those that come back after all."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import orjson
import pytest
from sqlalchemy import Engine, func, select

from kvcustody.audit.evidence.coverage.leaf_record import LeafRecord
from kvcustody.audit.evidence.coverage.recount_process import leaves_in_database
from kvcustody.audit.evidence.coverage.summary import coverage
from kvcustody.audit.evidence.processes.open_processes import open_processes
from kvcustody.audit.evidence.processes.work_periods import at_work, read_work_periods
from kvcustody.audit.kinds import (
    DECLARED,
    PROCESS_DEATH,
    SILENCE,
    CustodyEnded,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
    WorkerStarted,
    WorkerStopped,
)
from kvcustody.audit.kinds.block_runs import Run
from kvcustody.audit.store.schema.leaf_tables import custody_ends, releases
from kvcustody.audit.store.schema.ledger import events, incarnations
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.write import crash_recovery
from kvcustody.audit.write.committer import closing_committer
from kvcustody.audit.write.crash_recovery import Closing, close_process
from kvcustody.clock import SystemClock

DAY = 86_400
SILENT = Closing(SILENCE, 8 * DAY, 7 * DAY, "control-plane")
TWO_PEOPLE = Closing(DECLARED, 90, 0, "ops", "dpo", "host destroyed", spill_lost=True)


def opened(residency: int) -> ResidencyOpened:
    """A request that was handed two blocks; their generations follow from its number."""
    run = Run(np.array([2 * residency, 2 * residency + 1]), 2 * residency + 1)
    made = ResidencyOpened(1, residency, "acme", None, None, False, "internal", (), (), ("own",), 1, 9)
    return made._replace(written=(run,))


def begin(make_writer: Any, store: Engine, residencies: int, worker: str = "gone") -> Any:
    """A process with so many open residencies, that writes nothing any more for now."""
    writer = make_writer(store, worker=worker)
    writer.submit([WorkerStarted(1, worker, 1 << 20, 1, 4096, "cpu", "test")])
    writer.submit([opened(number) for number in range(residencies)])
    assert writer.flush()
    return writer


def close(store: Engine, incarnation: str, why: Closing = TWO_PEOPLE, **how: Any) -> bool:
    clock = SystemClock()
    with closing_committer(store, clock) as committer:
        return close_process(committer, store, clock, incarnation, why, "ops:closing", **how)


def leaves_of_kind(store: Engine, kind: str) -> list[dict[str, Any]]:
    with store.connect() as connection:
        query = select(events.c.leaf).where(events.c.kind == kind).order_by(events.c.idx)
        return [orjson.loads(bytes(leaf)) for leaf in connection.scalars(query)]


def counts(store: Engine) -> tuple[int, int]:
    """Residencies that a death released, and blocks of custody that it ended."""
    with store.connect() as connection:
        released = select(func.count()).select_from(releases).where(releases.c.cause == PROCESS_DEATH)
        ended = select(func.sum(custody_ends.c.blocks)).where(custody_ends.c.cause == PROCESS_DEATH)
        return int(connection.scalar(released) or 0), int(connection.scalar(ended) or 0)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_recovery, "_STEP_RESIDENCIES", 3)


@pytest.mark.parametrize("why", [SILENT, TWO_PEOPLE], ids=["silence", "declared"])
def test_a_process_that_does_not_come_back_is_closed_with_who_decided_it(
    any_store: Engine, make_writer: Any, small_steps: None, why: Closing
) -> None:
    dead = begin(make_writer, any_store, 10)
    with any_store.connect() as connection:
        assert coverage(connection).total.unproven == 0, "control: it may still end in order"
        assert at_work(read_work_periods(connection)) == [dead.incarnation]
    assert close(any_store, dead.incarnation, why)
    (died,) = leaves_of_kind(any_store, "worker-died")
    said = {key: died[key] for key in Closing._fields}
    assert said == why._asdict() and died["of_incarnation"] == dead.incarnation
    assert (died["worker"], died["residencies"], died["blocks"]) == ("gone", 10, 20)
    with any_store.connect() as connection:
        row = coverage(connection).total
        assert (row.due, row.unproven, row.in_time) == (20, 20, 0)
        assert at_work(read_work_periods(connection)) == []
        assert LeafRecord(leaves_in_database(connection)).unaccounted().is_empty
        # Who recorded it left nothing open either: were it killed at any moment, nothing would be.
        assert [one.uuid for one in open_processes(connection)] == []
        report = fsck(connection)
        assert report.ok, report.problems
    assert close(any_store, dead.incarnation, why)  # again: nothing more
    assert counts(any_store) == (10, 20) and len(leaves_of_kind(any_store, "worker-died")) == 1


def test_a_closing_that_is_interrupted_goes_on_where_it_was(store: Engine, make_writer: Any, small_steps: None) -> None:
    dead = begin(make_writer, store, 10)
    asked: list[bool] = []

    def after_two_steps() -> bool:
        asked.append(True)
        return len(asked) > 2

    assert not close(store, dead.incarnation, stop=after_two_steps)
    assert counts(store) == (6, 12) and leaves_of_kind(store, "worker-died") == []
    assert close(store, dead.incarnation)
    assert counts(store) == (10, 20)
    (died,) = leaves_of_kind(store, "worker-died")
    assert (died["residencies"], died["blocks"]) == (10, 20)  # of both


def test_many_close_one_process_once(any_store: Engine, make_writer: Any, small_steps: None) -> None:
    """As several control planes over one ledger would, at the same moment."""
    dead = begin(make_writer, any_store, 12)
    together = threading.Barrier(3)
    done: list[bool] = []

    def work() -> None:
        together.wait()
        done.append(close(any_store, dead.incarnation))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [True] * 3
    assert counts(any_store) == (12, 24) and len(leaves_of_kind(any_store, "worker-died")) == 1


def test_what_had_ended_is_not_ended_again(store: Engine, make_writer: Any, small_steps: None) -> None:
    dead = begin(make_writer, store, 6)
    whole = Run(np.array([2, 3]), 3)
    dead.submit(
        [
            ResidencyReleased(2, 1, "acme", "finish", (Run(np.array([40]), 40),), 0),  # with growth
            CustodyEnded(3, "acme", "internal", (whole,), "evicted", 3, 3, 3, 1000),
        ]
    )
    assert dead.flush()
    assert close(store, dead.incarnation)
    assert counts(store) == (5, 11)  # five open, their ten blocks and what the sixth had grown by
    with store.connect() as connection:
        row = coverage(connection).total
        assert (row.due, row.unproven, row.missing) == (13, 11, 2)


def test_one_that_lives_goes_on_and_its_own_evidence_counts(any_store: Engine, make_writer: Any) -> None:
    """Cut off for longer than the bound: nothing of what it hands in then is lost, and it has not ended."""
    cut_off = begin(make_writer, any_store, 2)
    other = begin(make_writer, any_store, 0, "other")
    assert close(any_store, cut_off.incarnation, SILENT)
    with any_store.connect() as connection:
        assert coverage(connection).total.unproven == 4
    wiped = Run(np.array([0, 1]), 1)
    cut_off.submit(
        [
            ResidencyReleased(5, 0, "acme", "finish", (), 0),
            CustodyEnded(5, "acme", "internal", (wiped,), "released", 5, 5, 5, 1000),
            ReceiptRecorded(5, 1, 0, "acme", "zero", "cpu", 8192, 6, 7, "full", 1.0, 8192, "ok", (wiped,)),
            opened(9),
        ]
    )
    assert cut_off.flush()
    (back,) = leaves_of_kind(any_store, "worker-returned")
    assert back["of_incarnation"] == cut_off.incarnation and back["worker"] == "gone"
    with any_store.connect() as connection:
        assert set(at_work(read_work_periods(connection))) == {cut_off.incarnation, other.incarnation}
        row = coverage(connection).total
        assert (row.in_time, row.unproven) == (
            2,
            2,
        )  # what it proves itself counts before what was said for it
        report = fsck(connection)
        assert report.ok, report.problems
    other.submit([opened(50)])
    assert other.flush()
    assert len(leaves_of_kind(any_store, "worker-returned")) == 1, "control: who was not closed does not return"
    # It is silent again: closed again, with what it opened since.
    assert close(any_store, cut_off.incarnation, SILENT)
    assert [died["blocks"] for died in leaves_of_kind(any_store, "worker-died")] == [4, 6]
    cut_off.submit([WorkerStopped(9, "gone", "shutdown", 0, (0,))])
    assert cut_off.flush()
    with any_store.connect() as connection:
        ends = dict(connection.execute(select(incarnations.c.uuid, incarnations.c.end)).all())
        assert ends[cut_off.incarnation] == "stopped"
        report = fsck(connection)
        assert report.ok, report.problems


def test_one_that_is_heard_while_it_is_closed_for_its_silence_is_not(
    store: Engine, make_writer: Any, small_steps: None
) -> None:
    alive = begin(make_writer, store, 4)

    def speaks() -> bool:
        alive.submit([opened(100 + alive.status().submitted_sequence)])
        assert alive.flush()
        return False

    assert not close(store, alive.incarnation, SILENT, stop=speaks)
    assert leaves_of_kind(store, "worker-died") == []
    with store.connect() as connection:
        assert [one.uuid for one in open_processes(connection)] == [alive.incarnation]
    assert close(store, alive.incarnation, SILENT), "control: it says nothing now"
