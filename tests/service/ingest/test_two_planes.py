"""Control planes that take the same tenants' leaves: none waits for another's commit, and every leaf is there once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, select

from kvcustody.audit.evidence.processes.sequence_gaps import gaps
from kvcustody.audit.kinds import DecisionRecorded, Event
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import WRITE, open_store
from kvcustody.audit.store.schema.ledger import events, incarnations, logs
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from kvcustody.audit.write.append_leaves import FreeLeaves, register
from kvcustody.governance.service.ingest import commit_turns
from kvcustody.governance.service.ingest.check_leaves import Sender, read_batch
from kvcustody.governance.service.ingest.commit_turns import TURN, CommitTurns
from kvcustody.governance.service.ingest.ingest import Ingest, WaitingBatch
from kvcustody.governance.service.problem_details import ProblemError
from standins.service.service_world import OFFSET_US, Worker

HOT = "tenant/hot"


class Plane:
    """One control plane's ingest, and workers that hand in to it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.ingest = Ingest(engine, lambda **_: None, clear_names=True, timeout_seconds=60)

    def worker(self, name: str, *tenants: str) -> Worker:
        """A worker that has handed in a request of each of these tenants."""
        made = Worker(name)
        with self.engine.connect().execution_options(**WRITE) as connection, connection.begin():
            register(connection, made.incarnation, name, OFFSET_US, OFFSET_US)
        self.put(made, [made.started(), *(event for tenant in tenants for event in made.request(tenant))])
        return made

    def begin(self, worker: Worker, some: list[Event]) -> tuple[WaitingBatch, threading.Event]:
        """Hand a batch in; it is decided when the event is set."""
        sender = Sender(worker.name, worker.incarnation, OFFSET_US)
        decided = threading.Event()
        batch = read_batch(worker.batch(some).body, sender)
        return self.ingest.begin(worker.name, worker.incarnation, batch, decided.set), decided

    def put(self, worker: Worker, some: list[Event]) -> tuple[int, int]:
        """The same, and what it came to."""
        waiting, decided = self.begin(worker, some)
        assert decided.wait(60)
        return self.ingest.end(waiting)[:2]


@pytest.fixture
def make_plane(postgres_store: Engine) -> Iterator[Any]:
    planes: list[Plane] = []

    def make() -> Plane:
        planes.append(Plane(open_store(postgres_store.url.render_as_string(False), timeout_seconds=60)))
        return planes[-1]

    yield make
    for plane in planes:
        plane.ingest.close()
        plane.engine.dispose()


@contextmanager
def holding(engine: Engine, log: str) -> Iterator[Connection]:
    """Another writer that has a log, until its transaction is ended."""
    with engine.connect() as connection:
        found = connection.execute(select(logs.c.id).where(logs.c.name == log).with_for_update()).one()
        assert found
        yield connection
        connection.rollback()


def there(engine: Engine, worker: Worker) -> list[int]:
    """The sequences of a worker's leaves that are in the ledger."""
    query = (
        select(events.c.sequence)
        .join(incarnations, incarnations.c.id == events.c.incarnation)
        .where(incarnations.c.uuid == worker.incarnation)
        .order_by(events.c.sequence)
    )
    with engine.connect() as connection:
        return list(connection.scalars(query))


def sound(engine: Engine) -> None:
    with engine.connect() as connection:
        assert fsck(connection).problems == [] and gaps(connection) == ()


def test_what_another_writer_has_is_left_and_the_rest_is_committed(make_plane: Any, postgres_store: Engine) -> None:
    plane = make_plane()
    worker, two = plane.worker("one", "hot", "cold"), plane.worker("two", "cold")
    had = worker.sequence
    mixed = [*worker.request("cold"), *worker.request("hot"), *worker.request("cold")]
    with holding(postgres_store, HOT):
        with plane.ingest._wake:  # both are there before either is taken
            first, decided = plane.begin(worker, mixed)
            second, other = plane.begin(two, two.request("cold"))
        assert other.wait(60) and plane.ingest.end(second)[:2] == (4, 0)
        assert not decided.is_set(), "it is acknowledged as a whole, or not"
        assert there(postgres_store, worker) == [*range(1, had + 5)], "up to the first leaf of that log"
        with postgres_store.connect() as connection:
            assert gaps(connection) == ()
    assert decided.wait(60) and plane.ingest.end(first)[:2] == (12, 0)
    assert there(postgres_store, worker) == [*range(1, had + 13)]
    sound(postgres_store)


def test_an_event_in_two_logs_is_not_divided(make_plane: Any, postgres_store: Engine) -> None:
    plane = make_plane()
    worker, two = plane.worker("one", "hot", "cold"), plane.worker("two", "cold")
    had = worker.sequence
    decisions = [
        DecisionRecorded(worker.now_us, "reuse", "permit", *who, "internal", ("rule",), 1, "grant")
        for who in (("cold", "hot"), ("hot", "cold"))
    ]
    waiting = []
    with holding(postgres_store, HOT):
        with plane.ingest._wake:
            for decision in decisions:
                waiting.append(plane.begin(worker, [*worker.request("cold"), decision]))
            _, other = plane.begin(two, two.request("cold"))
        assert other.wait(60)
        assert there(postgres_store, worker) == [*range(1, had + 5)]
    for batch, decided in waiting:
        assert decided.wait(60) and plane.ingest.end(batch)[:2] == (6, 0)
    sequences = there(postgres_store, worker)
    assert [sequences.count(had + at) for at in (5, 10)] == [2, 2], "control: each is in two logs"
    sound(postgres_store)


def test_a_log_that_is_always_locked_is_waited_for(make_plane: Any, postgres_store: Engine) -> None:
    """However much else there is to commit: after three commits that met it locked."""
    plane = make_plane()
    worker, others = plane.worker("one", "hot", "cold"), [plane.worker(f"w{at}", "cold") for at in range(20)]
    rounds: list[set[str]] = []
    write_free = plane.ingest._committer.write_free
    with holding(postgres_store, HOT) as writer:

        def watched(batches: Any, waits_for: Any, given: Any, *, turn: int | None) -> FreeLeaves:
            rounds.append(set(waits_for))
            if HOT in waits_for:
                writer.rollback()
            elif len(rounds) < len(others):  # somebody else always has something
                plane.begin(others[len(rounds)], others[len(rounds)].request("cold"))
            return write_free(batches, waits_for, given, turn=turn)

        plane.ingest._committer.write_free = watched
        with plane.ingest._wake:
            waiting, decided = plane.begin(worker, [*worker.request("cold"), *worker.request("hot")])
            plane.begin(others[0], others[0].request("cold"))
        assert decided.wait(60) and plane.ingest.end(waiting)[:2] == (8, 0)
    assert rounds[:4] == [set(), set(), set(), {HOT}]
    sound(postgres_store)


def test_a_batch_that_was_cut_by_a_failure_is_there_once_when_it_comes_again(
    make_plane: Any, postgres_store: Engine
) -> None:
    """Half is committed, the rest waits for a log, and the session is lost: sent again, each leaf is there once."""
    plane = make_plane()
    worker = plane.worker("one", "hot", "cold")
    had, mixed = worker.sequence, [*worker.request("cold"), *worker.request("hot")]
    with holding(postgres_store, HOT) as writer:
        waiting, decided = plane.begin(worker, mixed)
        ended: Any = None
        while not ended:
            ended = writer.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE wait_event_type = 'Lock' AND datname = current_database()"
            ).all()
        assert decided.wait(60)
        with pytest.raises(ProblemError):
            plane.ingest.end(waiting)
        assert there(postgres_store, worker) == [*range(1, had + 5)]
    worker.sequence = had
    assert sum(plane.put(worker, mixed)) == 8
    assert there(postgres_store, worker) == [*range(1, had + 9)]
    sound(postgres_store)


def test_new_logs_of_another_writer_are_not_waited_for(make_plane: Any, postgres_store: Engine) -> None:
    plane, other = make_plane(), make_plane()
    worker, two, three = (plane.worker("one"), plane.worker("two"), other.worker("three"))
    making, goes_on = threading.Event(), threading.Event()
    append = other.ingest._committer._appender._append

    def held(*what: Any) -> None:
        making.set()  # its logs are made, and not committed
        assert goes_on.wait(60)
        append(*what)

    other.ingest._committer._appender._append = held
    _, theirs = other.begin(three, three.request("new"))
    assert making.wait(60)
    with plane.ingest._wake:
        _, ours = plane.begin(worker, worker.request("new"))
        _, free = plane.begin(two, two.request("newer"))
    assert free.wait(60) and not ours.is_set() and not theirs.is_set()
    goes_on.set()
    assert ours.wait(60) and theirs.wait(60)
    sound(postgres_store)


def test_two_planes_of_the_same_tenants(make_plane: Any, postgres_store: Engine) -> None:
    planes = [make_plane(), make_plane()]
    tenants = [f"t{at}" for at in range(5)]
    workers = [planes[at % 2].worker(f"w{at}") for at in range(6)]

    def work(at: int) -> int:
        worker, added = workers[at], 0
        for turn in range(12):
            asked = [tenants[(at + turn + more * 2) % 5] for more in range(4)]
            found = planes[at % 2].put(worker, [e for tenant in asked for e in worker.request(tenant)])
            added += found[0]
            assert found == (16, 0)
        return added

    with ThreadPoolExecutor(len(workers)) as pool:
        assert list(pool.map(work, range(len(workers)))) == [12 * 16] * len(workers)
    for worker in workers:
        assert there(postgres_store, worker) == [*range(1, worker.sequence + 1)]
    with postgres_store.connect() as connection:  # a process's leaves are in a log in the order of their sequences
        rows = connection.execute(
            select(events.c.log, events.c.incarnation, events.c.sequence).order_by(events.c.log, events.c.idx)
        ).all()
    for log, life in {(row.log, row.incarnation) for row in rows}:
        own = [row.sequence for row in rows if (row.log, row.incarnation) == (log, life)]
        assert all(before < after for before, after in pairwise(own))
    sound(postgres_store)


def turns_of(plane: Any) -> CommitTurns:
    """A plane's turns, begun."""
    found: CommitTurns = plane.ingest._turns
    found.committed(0, 8, 0.0)
    return found


@contextmanager
def having_the_turn(engine: Engine) -> Iterator[Connection]:
    """Another plane that commits in turn, until its transaction is ended."""
    with engine.connect() as connection:
        assert dialect_of(connection).alone(connection, TURN)
        yield connection


def test_a_commit_in_turn_comes_after_the_others_with_all_that_waits_by_then(
    make_plane: Any, postgres_store: Engine
) -> None:
    plane = make_plane()
    worker, two = plane.worker("one", "hot"), plane.worker("two", "hot")
    turns, commits = turns_of(plane), list[int]()
    write_free = plane.ingest._committer.write_free

    def counted(batches: Any, *given: Any, **how: Any) -> FreeLeaves | None:
        found: FreeLeaves | None = write_free(batches, *given, **how)
        commits.extend([] if found is None else [len(batches)])
        return found

    plane.ingest._committer.write_free = counted
    with having_the_turn(postgres_store) as other:
        waiting, decided = plane.begin(worker, worker.request("hot"))
        again, decided_again = plane.begin(two, two.request("hot"))
        assert not decided.wait(0.5), "another has the turn"
        other.rollback()
        assert decided.wait(60) and decided_again.wait(60)
    assert plane.ingest.end(waiting)[:2] == plane.ingest.end(again)[:2] == (4, 0)
    assert commits == [2], "what came while it waited is committed with it"
    turns._left = 0
    with having_the_turn(postgres_store):
        assert plane.put(worker, worker.request("hot")) == (4, 0), "control: no turn is needed"
    sound(postgres_store)


def test_a_turn_is_not_waited_for_longer_than_its_patience(
    make_plane: Any, postgres_store: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_turns, "PATIENCE_SECONDS", 0.2)
    plane = make_plane()
    one = plane.worker("one", "hot")
    turns_of(plane)
    with having_the_turn(postgres_store):
        assert plane.put(one, one.request("hot")) == (4, 0)
    sound(postgres_store)


def test_turns_begin_where_others_leave_less_than_three_quarters_and_end_where_a_commit_without_finds_all() -> None:
    turns = CommitTurns()
    turns.committed(6, 8, 0.0)
    assert not turns.needed
    turns.committed(5, 8, 0.0)
    for _ in range(64):
        assert turns.needed
        turns.committed(8, 8, 0.0)
    assert not turns.needed, "one is tried without"
    turns.committed(1, 8, 0.0)
    for _ in range(128):
        assert turns.needed, "twice as many until the next trial"
        turns.committed(8, 8, 0.0)
    turns.committed(8, 8, 0.0)
    assert not turns.needed
    turns.committed(1, 8, 0.0)
    for _ in range(64):
        turns.committed(8, 8, 0.0)
    assert not turns.needed, "who found all begins with few again"


def test_who_had_a_turn_rests_longer_than_the_others_take_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """In proportion to its commit: where all is busy, looking is slow too."""
    slept = list[float]()
    monkeypatch.setattr(commit_turns.time, "sleep", slept.append)
    turns = CommitTurns()
    turns.rest()
    assert not slept, "no turns, no rest"
    turns.committed(0, 8, 0.0)
    turns.rest()
    turns.missed()
    turns.committed(8, 8, 4.0)
    turns.rest()
    assert slept[0] > slept[1] and slept[2] == 0.5
